"""What each command of `gpuwarden baseline` does; it returns what is to be printed."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpuwarden import __version__
from gpuwarden.code.baseline.difference import difference
from gpuwarden.code.baseline.entries import Entries
from gpuwarden.code.baseline.file_writer import write_baseline, write_new
from gpuwarden.code.baseline.reader import Baseline
from gpuwarden.code.module import Problem
from gpuwarden.code.report import CodeReport
from gpuwarden.codescan import baseline_text as text
from gpuwarden.codescan.baseline_build import Built, entries_of
from gpuwarden.codescan.command import Tell
from gpuwarden.codescan.known_code import (
    KEY_DIRECTORY,
    described,
    open_named,
    trust,
    warnings_of,
)
from gpuwarden.codescan.origins import Label
from gpuwarden.codescan.scan import Options, scan_code
from gpuwarden.codescan.targets import Targets
from gpuwarden.errors import Denied, GpuwardenError, UsageError
from gpuwarden.keys import fingerprint, make_key, read_private, read_public
from gpuwarden.outputs.told import Told
from gpuwarden.outputs.words import json_text

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

CLEAR, DIFFERENT, UNREAD = 0, 1, 2
PROBLEMS_SHOWN = 20
TOOL = f"gpuwarden {__version__}"
SECRET_LIMIT_BYTES = 16 << 10


def moment_of_building() -> int:
    """Seconds since 1970: SOURCE_DATE_EPOCH where it is set, so that a build can be repeated.

    Source: reproducible-builds.org/specs/source-date-epoch. Errors: UsageError.
    """
    said = os.environ.get("SOURCE_DATE_EPOCH", "")
    if not said:
        return int(time.time())
    if not said.isascii() or not said.isdecimal() or len(said) > 12:
        raise UsageError(f"SOURCE_DATE_EPOCH={said[:20]}: expected seconds since 1970")
    return int(said)


def private_key(path: str | None) -> Ed25519PrivateKey | None:
    """The key to sign with. Errors: UsageError."""
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            return read_private(file.read(SECRET_LIMIT_BYTES), path)
    except OSError as error:
        raise UsageError(f"--sign {path}: {error.strerror}") from error


def build(arguments: argparse.Namespace, tell: Tell) -> Told:
    """A baseline of everything in the targets."""
    key = private_key(arguments.sign)
    when = moment_of_building()
    report = look(arguments.target, tell)
    label = Label(source=arguments.source, when=when, tool=TOOL)
    built = entries_of(report, label, digest_bytes=arguments.digest_bytes)
    return _written(arguments, built, when, key, report.problems)


def look(names: Sequence[str], tell: Tell) -> CodeReport:
    """What is in these targets, not judged. Errors: UsageError."""
    options = Options(kernels=False)
    targets = Targets(options.workers)
    return scan_code(
        [targets.target(name) for name in names], targets.numbers, options=options, tell=tell
    )


def _written(
    arguments: argparse.Namespace,
    built: Built,
    when: int,
    key: Ed25519PrivateKey | None,
    problems: Sequence[Problem] = (),
) -> Told:
    write(arguments, built.entries, when, key)
    lines = [written_line(arguments.output, built.entries, key)]
    lines += [f"  {count} left out, {reason}" for reason, count in sorted(built.left_out.items())]
    lines += problem_lines(problems)
    unread = bool(problems) or any(reason.startswith("cannot") for reason in built.left_out)
    return Told(text.text_of(lines), UNREAD if unread else CLEAR)


def write(
    arguments: argparse.Namespace, entries: Entries, when: int, key: Ed25519PrivateKey | None
) -> None:
    """Writes what ``-o`` names. Errors: UsageError, Denied."""
    write_baseline(
        arguments.output,
        entries,
        name=arguments.name,
        version=arguments.version,
        tool=TOOL,
        created=when,
        key=key,
    )


def written_line(path: str, entries: Entries, key: Ed25519PrivateKey | None) -> str:
    """What was written, in one line."""
    sealed = "not signed: readers need --allow-unsigned"
    if key is not None:
        sealed = f"signed by key {fingerprint(key.public_key().public_bytes_raw())}"
    return (
        f"{path}: {len(entries)} digests, {entries.codes} code digests, "
        f"{os.path.getsize(path)} bytes; {sealed}"
    )


def problem_lines(problems: Sequence[Problem]) -> list[str]:
    """What could not be read, the first ones with their places."""
    lines = [
        f"  not read: {'!'.join((p.place.target, *p.place.members))}: {p.what}: {p.reason}"
        for p in problems[:PROBLEMS_SHOWN]
    ]
    if len(problems) > PROBLEMS_SHOWN:
        lines.append(f"  and {len(problems) - PROBLEMS_SHOWN} more")
    return lines


def merge(arguments: argparse.Namespace, tell: Tell) -> Told:
    """One baseline of several; of two origins of a digest the lower in order stays."""
    key = private_key(arguments.sign)
    entries = Entries(arguments.digest_bytes)
    baselines = _opened(arguments, arguments.file)
    for baseline in baselines:
        if baseline.head.digest_bytes < arguments.digest_bytes:
            raise UsageError(
                f"{baseline.path}: keeps {baseline.head.digest_bytes} bytes of each digest",
                remedy=f"add --digest-bytes {baseline.head.digest_bytes}",
            )
        entries.merge(baseline.entries())
    write(arguments, entries, moment_of_building(), key)
    return Told(
        text.text_of([written_line(arguments.output, entries, key)]),
        complaint=warnings_of(baselines),
    )


def diff(arguments: argparse.Namespace, tell: Tell) -> Told:
    """What the second knows and the first does not, and the other way round; 1 if they differ."""
    before, after = _opened(arguments, [arguments.before, arguments.after])
    found = difference(before, after)
    code = CLEAR if found.is_empty else DIFFERENT
    if arguments.format == "json":
        return Told(json_text(found), code, warnings_of([before, after]))
    return Told(text.difference_text(found), code, warnings_of([before, after]))


def show(arguments: argparse.Namespace, tell: Tell) -> Told:
    """Who signed a baseline and what it knows."""
    (baseline,) = _opened(arguments, [arguments.file])
    summary = text.summarise(baseline, arguments.digest)
    if arguments.format == "json":
        return Told(json_text(summary))
    return Told(text.summary_text(baseline, summary))


def verify(arguments: argparse.Namespace, tell: Tell) -> Told:
    """The signature and every byte of each; 1 for one that is not trusted, 2 for a damaged one."""
    trusted = trust(arguments.key, allow_unsigned=arguments.allow_unsigned)
    lines, worst = [], CLEAR
    for path in arguments.file:
        try:
            (baseline,) = open_named([path], trusted)
            baseline.verify()
        except GpuwardenError as error:
            lines.append(f"{error}" + (f"\n  {error.remedy}" if error.remedy else ""))
            worst = max(worst, DIFFERENT if isinstance(error, Denied) else UNREAD)
        else:
            lines.append(f"{path}: sound; {described(baseline)}")
    return Told(text.text_of(lines), worst)


def keygen(arguments: argparse.Namespace, tell: Tell) -> Told:
    """A key pair in two new files."""
    secret, public = f"{arguments.file}.key", f"{arguments.file}.pem"
    private_pem, public_pem = make_key()
    write_new(secret, private_pem, mode=0o600)
    write_new(public, public_pem, mode=0o644)
    name = fingerprint(read_public(public_pem, public))
    return Told(
        text.text_of(
            [
                f"{secret}: the secret key, to sign with: --sign {secret}",
                f"{public}: the public key, fingerprint {name}",
                f"  where baselines are read: install -m 644 {public} {KEY_DIRECTORY}/",
            ]
        )
    )


def _opened(arguments: argparse.Namespace, paths: Sequence[str]) -> list[Baseline]:
    return open_named(paths, trust(arguments.key, allow_unsigned=arguments.allow_unsigned))


def run(arguments: argparse.Namespace, tell: Tell) -> Told:
    """The command that the command line names. Errors: GpuwardenError."""
    from gpuwarden.codescan.learn_command import learn

    return {
        "build": build,
        "merge": merge,
        "diff": diff,
        "show": show,
        "verify": verify,
        "keygen": keygen,
        "learn": learn,
    }[arguments.action](arguments, tell)
