"""`gpuwarden history --module DIGEST`: when and by whom a GPU module was first loaded here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from gpuwarden.errors import UsageError
from gpuwarden.history import STATE_DIRECTORY, Told, remembered
from gpuwarden.outputs.sheet import Sheet
from gpuwarden.outputs.words import escape, json_text, moment
from gpuwarden.store_modules import Sighting

MOST = 100
LEAST_DIGITS = 8
NARROWEST = 60


def asked(arguments: Mapping[str, object], *, width: int) -> Told:
    """What the flags ask for. Errors: UsageError."""
    if any(arguments[name] is not None for name in ("pid", "gpu", "recording", "since")):
        raise UsageError("--module is asked for alone, or with --state")
    return tell(
        str(arguments["module"]),
        state=None if arguments["state"] is None else str(arguments["state"]),
        as_json=arguments["format"] == "json",
        width=width,
    )


def tell(digest: str, *, state: str | None, as_json: bool, width: int) -> Told:
    """The modules whose digest begins so. Errors: UsageError."""
    if not re.fullmatch(rf"[0-9a-f]{{{LEAST_DIGITS},64}}", digest):
        raise UsageError(
            f"--module {digest[:80]}: expected {LEAST_DIGITS} to 64 hexadecimal digits of a digest"
        )
    found = remembered.sightings(state or STATE_DIRECTORY, digest, MOST)
    complaint = "".join(
        escape(f"gpuwarden: {gap.what}: {gap.reason}") + "\n" for gap in found.troubles
    )
    if as_json:
        return Told(json_text(found), bool(found.sightings), complaint)
    sheet = Sheet(max(width, NARROWEST), colour=False)
    for one in found.sightings:
        _add(sheet, one)
    if not found.sightings:
        where = found.directory if found.state == "ok" else f"{found.directory} ({found.state})"
        sheet.add(f"No module {digest} is remembered in {where}.")
    return Told(sheet.text(), bool(found.sightings), complaint)


def _add(sheet: Sheet, one: Sighting) -> None:
    kind = " ".join(filter(None, (one.kind, one.arch)))
    kernels = ", ".join(one.kernels[:4]) or "no kernel named"
    more = one.kernel_count - min(len(one.kernels), 4)
    sheet.add(f"{kind} {one.digest}", hang=2)
    rows = (
        ("first", f"{moment(one.first_ns)} by {one.function}{_of(one.path)}"),
        ("process", f"pid {one.pid} {one.exe}, user {one.user or one.uid}"),
        ("container", _joined((one.container_id[:12], one.image)) or "none"),
        ("workload", _joined((one.workload, one.profile and f"profile {one.profile}")) or "none"),
        ("standing", _joined((one.standing, one.known_as, one.answer))),
        ("kernels", kernels + (f" and {more} more" if more > 0 else "")),
        ("loads", f"{one.loads}, the last {moment(one.last_ns)}"),
    )
    for name, text in rows:
        sheet.add(f"{name:<10} {text}", indent=2, hang=11)


def _of(path: str) -> str:
    return f" of {path}" if path else ""


def _joined(parts: Iterable[str]) -> str:
    return ", ".join(part for part in parts if part)
