"""The command line of `gpuwarden baseline`; `code` shares how baselines are named."""

from __future__ import annotations

import argparse

from gpuwarden.errors import UsageError

SOURCES = ("library", "driver")


def trust_flags(parser: argparse.ArgumentParser) -> None:
    """Adds whose signatures hold."""
    parser.add_argument(
        "--key",
        action="append",
        default=[],
        metavar="FILE",
        help="also trust this public key (PEM); /etc/gpuwarden/keys/*.pem are trusted anyway",
    )
    parser.add_argument(
        "--allow-unsigned",
        action="store_true",
        help="use baselines that no trusted key signed; the output says so",
    )


def baseline_flags(parser: argparse.ArgumentParser) -> None:
    """Adds which baselines are asked, and whose signatures on them hold."""
    parser.add_argument(
        "--baseline",
        action="append",
        default=[],
        metavar="FILE",
        help="compare with this baseline; again for more, asked in order",
    )
    parser.add_argument(
        "--no-starter",
        action="store_true",
        help="leave out the baseline that is installed with gpuwarden",
    )
    trust_flags(parser)


def _output_flags(parser: argparse.ArgumentParser, *, named: bool = True) -> None:
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the new baseline")
    parser.add_argument("--sign", metavar="KEY", help="sign with this private key (see keygen)")
    if named:
        parser.add_argument("--name", default="", help="what the baseline calls itself")
        parser.add_argument("--version", default="", help="its version")
    parser.add_argument(
        "--digest-bytes",
        type=int,
        default=32,
        metavar="N",
        help="keep so many bytes of each digest, 16 to 32 (default: 32)",
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the commands of `baseline`."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    build = commands.add_parser("build", help="a baseline of all GPU code in known-good targets")
    build.add_argument("target", nargs="+", metavar="TARGET", help="as for code scan")
    _output_flags(build)
    build.add_argument(
        "--source",
        choices=SOURCES,
        default="library",
        help="driver: the targets are a GPU driver's own files (default: library)",
    )

    merge = commands.add_parser("merge", help="one baseline of several")
    merge.add_argument("file", nargs="+", metavar="FILE")
    _output_flags(merge)
    trust_flags(merge)

    diff = commands.add_parser("diff", help="what one baseline knows that another does not")
    diff.add_argument("before", metavar="A")
    diff.add_argument("after", metavar="B")
    diff.add_argument("--format", choices=("table", "json"), default="table")
    trust_flags(diff)

    show = commands.add_parser("show", help="who signed it, and what it knows, by package")
    show.add_argument("file", metavar="FILE", help="a baseline, or the word starter")
    show.add_argument(
        "--digest", action="append", default=[], metavar="HEX", help="where this digest is from"
    )
    show.add_argument("--format", choices=("table", "json"), default="table")
    trust_flags(show)

    verify = commands.add_parser("verify", help="check the signature and every byte")
    verify.add_argument("file", nargs="+", metavar="FILE", help="a baseline, or the word starter")
    trust_flags(verify)

    keygen = commands.add_parser("keygen", help="a new key pair, for --sign and for the readers")
    keygen.add_argument("file", metavar="NAME", help="makes NAME.key (secret) and NAME.pem")

    learn = commands.add_parser(
        "learn", help="a baseline of code that a known-good run compiles while it runs"
    )
    learn.add_argument("target", nargs="*", metavar="TARGET", help="a JIT cache, as for code scan")
    learn.add_argument("--pid", action="append", default=[], type=int, metavar="N")
    learn.add_argument(
        "--accept-flagged",
        action="store_true",
        help="take in what cannot be judged; never what is hash-like or unreadable",
    )
    learn.add_argument("--dry-run", action="store_true", help="say what would be learnt")
    _output_flags(learn)
    baseline_flags(learn)


def check_flags(arguments: argparse.Namespace) -> None:
    """Errors: UsageError for flags that make no sense together."""
    if arguments.action == "learn" and not (arguments.target or arguments.pid):
        raise UsageError("learn: name a process with --pid, or a JIT cache")
    digest_bytes = getattr(arguments, "digest_bytes", 32)
    if not 16 <= digest_bytes <= 32:
        raise UsageError(f"--digest-bytes {digest_bytes}: expected 16 to 32")
