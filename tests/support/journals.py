"""Journals of a few entries for tests, and what somebody does to their files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from gpuwarden.journal.book import Journal
from gpuwarden.journal.entry import FIRST_PREVIOUS, Entry, parse, sealed
from gpuwarden.journal.verification import Verification, verify
from gpuwarden.keys import fingerprint, make_key, read_private

PID = {"pid": 4711, "start_time_ticks": 12, "exe": "/tmp/a \x1b[31m\x7f\udcff„b“"}


def private_key() -> Any:
    """A new ed25519 key."""
    return read_private(make_key()[0], "a new key")


def raw_public(key: Any) -> bytes:
    raw: bytes = key.public_key().public_bytes_raw()
    return raw


def written(path: Path, key: Any = None, *, count: int = 4) -> Path:
    """A journal of that many entries: intents, outcomes, facts."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    journal = Journal(str(path), key=key)
    intent = None
    for number in range(count):
        if intent is not None:
            journal.conclude(intent, f"{number} processes frozen", done=number != 4)
            intent = None
        elif number % 3 == 0 and number + 1 < count:
            intent = journal.intend("freeze", PID)
        else:
            journal.append("refused", {"finding": "c0ffee"}, "the verdict does not allow it")
    return path


def entries(path: Path) -> list[Entry]:
    """Of the lines that are entries."""
    found: list[Entry] = []
    verify(str(path), show=found.append)
    return found


def rewrite(path: Path, lines: Iterable[bytes]) -> None:
    path.write_bytes(b"".join(line + b"\n" for line in lines))


def forged(lines: Iterable[bytes], key: Any = None) -> list[bytes]:
    """The same entries chained anew from the first on: what root can do to a whole file.

    ``key`` signs them; without one they are not signed.
    """
    previous, made = FIRST_PREVIOUS, []
    signed_by = "" if key is None else fingerprint(raw_public(key))
    for number, line in enumerate(lines, 1):
        entry = msgspec.structs.replace(
            parse(line),
            number=number,
            previous=previous,
            signed_by=signed_by,
            signature="",
            hash="",
        )
        entry, text = sealed(entry, key)
        previous = entry.hash
        made.append(text)
    return made


def resealed(line: bytes, **changes: Any) -> bytes:
    """One entry changed, its own hash right again."""
    return sealed(msgspec.structs.replace(parse(line), **changes))[1]


def unsynced(monkeypatch: Any) -> None:
    """Appends that wait for no disk, for tests of thousands."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)


def told(verification: Verification) -> str:
    """Problems and notes as one text."""
    return "\n".join([*map(str, verification.problems), *verification.notes])
