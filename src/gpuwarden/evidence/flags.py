"""The command line of `gpuwarden evidence`."""

from __future__ import annotations

import argparse

from gpuwarden.errors import UsageError

VERIFY, SHOW = "verify", "show"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds what the command takes beside the host and the policy."""
    parser.add_argument(
        "what",
        nargs="*",
        metavar="PID",
        help="a process to look at; or: verify FILE, show FILE",
    )
    parser.add_argument("--container", metavar="ID", help="all processes of a container")
    parser.add_argument("--gpu", metavar="N", help="all processes on a GPU: its number or UUID")
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="where the archive goes (default: evidence.directory of the policy)",
    )
    parser.add_argument(
        "--max-mib",
        type=_positive,
        metavar="N",
        help="the most that the archive holds (default: evidence.archive_mib of the policy)",
    )
    parser.add_argument(
        "--no-memory",
        action="store_true",
        help="do not look for GPU modules in the processes' memory",
    )
    parser.add_argument(
        "--state",
        metavar="DIR",
        help="watch's memory: samples, findings, journal (default: /var/lib/gpuwarden)",
    )
    parser.add_argument("--finding", metavar="ID", help="the finding that this is written for")
    parser.add_argument(
        "--start-time",
        type=_positive,
        metavar="TICKS",
        help="only if the process began at this clock tick: its pid may be another's by now",
    )
    parser.add_argument("--boot-id", metavar="ID", help="only in this run of the machine")
    parser.add_argument(
        "--deadline", type=_positive, metavar="SECONDS", help="seal what is there after that time"
    )
    parser.add_argument(
        "--key",
        metavar="PUBLIC.pem",
        help="verify: the archive must be signed by this key",
    )
    parser.add_argument("--format", choices=("table", "json"), default="table")
    # Of watch, for the archives that it has written by itself.
    parser.add_argument("--by-watch", action="store_true", help=argparse.SUPPRESS)


def check_flags(arguments: argparse.Namespace) -> None:
    """Refuses a command line that does not say one thing. Errors: UsageError."""
    what = arguments.what
    if what and what[0] in (VERIFY, SHOW):
        if len(what) != 2:
            raise UsageError(f"evidence {what[0]}: one FILE is expected")
        if arguments.container is not None or arguments.gpu is not None:
            raise UsageError(f"evidence {what[0]}: takes a FILE alone")
        return
    if arguments.by_watch and arguments.finding is None:
        raise UsageError("--by-watch: goes with --finding")
    if len(what) > 1:
        raise UsageError("evidence: one process, one container or one GPU")
    named = [one for one in (*what, arguments.container, arguments.gpu) if one is not None]
    if len(named) != 1:
        raise UsageError(
            "evidence: a PID, --container ID or --gpu N is expected",
            remedy="gpuwarden evidence 4711 -o DIR; gpuwarden evidence verify FILE",
        )
    if what and not (what[0].isascii() and what[0].isdigit() and 0 < int(what[0][:11]) < 1 << 31):
        raise UsageError(f"evidence: '{what[0][:40]}' is no pid")
    if not what and (arguments.start_time is not None):
        raise UsageError("--start-time: goes with a PID")
    if arguments.key is not None:
        raise UsageError("--key: goes with evidence verify")


def _positive(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 15 else 0
    if number <= 0:
        raise argparse.ArgumentTypeError("expected a whole number above 0")
    return number
