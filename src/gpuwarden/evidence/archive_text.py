"""An archive, its verification and what is in it, as text for a person and as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from gpuwarden.evidence.archive import Sealed
from gpuwarden.evidence.manifest import Clock, Manifest, Omission
from gpuwarden.evidence.verify import Verification
from gpuwarden.outputs.sheet import Sheet, cut, pad
from gpuwarden.outputs.words import json_text, moment

NARROWEST = 60
PROBLEMS_SHOWN = 64
OMISSIONS_SHOWN = 200
_SIZE, _NAME = 12, 36
_HEADLINES = {
    "intact": "every byte is as it was written",
    "damaged": "NOT AS IT WAS WRITTEN",
    "incomplete": "INCOMPLETE: it was never sealed, or was cut off",
}
_SIGNATURES = {
    "trusted": "signed by the key {}, which you named or which this node has",
    "unchecked": "signed by the key {}; nobody said whose that is (--key PUBLIC.pem)",
    "another": "signed by ANOTHER key, {}",
    "broken": "its signature DOES NOT FIT",
    "unsigned": "unsigned: it shows damage, not a forgery; anyone could have written it anew",
    "none": "no seal",
}


class Page(Struct, frozen=True, kw_only=True):
    """What `evidence verify` and `show` print as JSON."""

    schema: str = "gpuwarden.evidence"
    version: int = 1
    path: str
    holds: bool
    state: str
    signature: str
    fingerprint: str
    manifest_sha256: str
    size_bytes: int
    problems: Sequence[str]
    whole: Sequence[str]
    """Members whose content is what was written."""
    manifest: Manifest | None


class SealedPage(Struct, frozen=True, kw_only=True):
    """What `evidence PID` prints as JSON."""

    schema: str = "gpuwarden.evidence.sealed"
    version: int = 1
    path: str
    size_bytes: int
    manifest_sha256: str
    fingerprint: str
    members: int
    left_out: int
    unread: int


def sealed_json(sealed: Sealed) -> str:
    """One archive that was written, as JSON."""
    manifest = sealed.manifest
    return json_text(
        SealedPage(
            path=sealed.path,
            size_bytes=sealed.size_bytes,
            manifest_sha256=sealed.manifest_sha256,
            fingerprint=sealed.fingerprint,
            members=len(manifest.members),
            left_out=len(manifest.left_out) + manifest.left_out_more,
            unread=len(manifest.unread) + manifest.unread_more,
        )
    )


def sealed(sealed: Sealed, *, width: int, colour: bool) -> str:
    """One archive that was written: where, how much, and what is not in it."""
    manifest = sealed.manifest
    sheet = Sheet(max(width, NARROWEST), colour=colour)
    count = len(manifest.members)
    sheet.add(
        f"{sealed.path}: {count} files, {_size(sealed.size_bytes)}, about "
        f"{manifest.account.subject.text}"
    )
    by = f"signed by {sealed.fingerprint}" if sealed.fingerprint else "unsigned"
    sheet.add(f"manifest sha256 {sealed.manifest_sha256}, {by}", indent=2)
    _notes(sheet, manifest)
    return sheet.text()


def verification_json(path: str, told: Verification, *, holds: bool) -> str:
    """A verification with the manifest, as JSON."""
    return json_text(
        Page(
            path=path.encode(errors="backslashreplace").decode(),
            holds=holds,
            state=told.state,
            signature=told.signature,
            fingerprint=told.fingerprint,
            manifest_sha256=told.manifest_sha256,
            size_bytes=told.size_bytes,
            problems=told.problems,
            whole=[one.name for one in told.whole],
            manifest=told.manifest,
        )
    )


def verification(path: str, told: Verification, *, holds: bool, width: int, colour: bool) -> str:
    """Whether it holds, and every place where it does not."""
    sheet = Sheet(max(width, NARROWEST), colour=colour)
    _verdict(sheet, path, told, holds=holds)
    if told.state != "intact":
        names = [one.name for one in told.whole]
        sheet.add(f"{len(names)} members are whole:" if names else "no member is whole", indent=2)
        for name in names[:OMISSIONS_SHOWN]:
            sheet.add(name, indent=4)
        _more(sheet, len(names) - OMISSIONS_SHOWN)
    return sheet.text()


def contents(path: str, told: Verification, *, holds: bool, width: int, colour: bool) -> str:
    """What is in an archive: about what, its files, what is not in it."""
    sheet = Sheet(max(width, NARROWEST), colour=colour)
    _verdict(sheet, path, told, holds=holds)
    sheet.blank()
    if told.manifest is None:
        for one in told.whole:
            _row(sheet, str(one.header.size), one.name, "")
        return sheet.text()
    manifest, account = told.manifest, told.manifest.account
    machine, tool = account.machine, manifest.tool
    for name, text in (
        ("about", account.subject.text),
        ("why", account.why),
        ("finding", account.finding or "none"),
        ("host", f"{machine.hostname}, {machine.kernel or 'unknown kernel'}"),
        ("written by", f"{tool.name} {tool.version}"),
        ("begun", _clock(manifest.begun)),
        ("ended", _clock(manifest.ended)),
    ):
        sheet.add(f"{pad(name, 12)}{text}", hang=12)
    _list(sheet, "findings", account.findings)
    _list(sheet, "ended or changed while it was read", account.ended)
    sheet.blank()
    _row(sheet, "BYTES", "NAME", "WHAT", style="dim")
    for member in manifest.members:
        note = f"; {member.cut}" if member.cut else ""
        _row(sheet, str(member.size_bytes), member.name, member.what + note)
    _notes(sheet, manifest)
    return sheet.text()


def _verdict(sheet: Sheet, path: str, told: Verification, *, holds: bool) -> None:
    style = "green" if holds else "bold red"
    sheet.add(f"{path}: {_HEADLINES[told.state]}", style=style)
    key = told.fingerprint or "?"
    sheet.add(_SIGNATURES[told.signature].format(key), indent=2)
    if told.manifest_sha256:
        sheet.add(f"manifest sha256 {told.manifest_sha256}", indent=2)
    for problem in told.problems[:PROBLEMS_SHOWN]:
        sheet.add(problem, indent=2, hang=2)
    _more(sheet, len(told.problems) - PROBLEMS_SHOWN)


def _notes(sheet: Sheet, manifest: Manifest) -> None:
    """What is not in it."""
    _omissions(sheet, "left out", manifest.left_out, manifest.left_out_more)
    _omissions(sheet, "could not be read", manifest.unread, manifest.unread_more)


def _omissions(sheet: Sheet, title: str, omissions: Sequence[Omission], more: int) -> None:
    if not omissions and not more:
        return
    sheet.add(f"{title}:", indent=2)
    for one in omissions[:OMISSIONS_SHOWN]:
        size = "" if one.size_bytes is None else f" ({_size(one.size_bytes)})"
        sheet.add(f"{one.what}{size}: {one.why}", indent=4, hang=2)
    _more(
        sheet, len(omissions) - OMISSIONS_SHOWN + more if len(omissions) > OMISSIONS_SHOWN else more
    )


def _list(sheet: Sheet, title: str, lines: Sequence[str]) -> None:
    if lines:
        sheet.add(f"{title}:")
    for line in lines:
        sheet.add(line, indent=2, hang=2)


def _more(sheet: Sheet, count: int) -> None:
    if count > 0:
        sheet.add(f"and {count} more", indent=4)


def _row(sheet: Sheet, size: str, name: str, what: str, style: str = "") -> None:
    lead = f"{pad(cut(name, 100), _NAME)} {pad(size, _SIZE, right=True)}"
    sheet.add(f"{lead}  {what}".rstrip(), hang=_NAME + _SIZE + 3, style=style)


def _clock(clock: Clock) -> str:
    kept = {True: "synchronised", False: "not synchronised", None: "unknown whether synchronised"}
    return (
        f"{moment(clock.realtime_ns)} (clock {kept[clock.synchronised]}; "
        f"{clock.boottime_ns // 10**9} s after boot {clock.boot_id or 'unknown'})"
    )


def _size(size: int) -> str:
    return f"{size} bytes" if size < 10 << 10 else f"{size / (1 << 20):.1f} MiB"
