"""The journal as those use it who act: an entry is on disk before ``append`` returns.

The file only grows, so it may have the file system's append-only attribute. Whoever is killed while
writing leaves a line that is cut off: the next writer says which bytes that are, in an entry.
"""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gpuwarden import __version__
from gpuwarden.errors import Unavailable
from gpuwarden.journal.asker import asker, boot_id
from gpuwarden.journal.entry import (
    FIRST_PREVIOUS,
    OUTCOME_LIMIT,
    SET_ASIDE,
    Entry,
    Head,
    Stage,
    Who,
    bounded,
    bounded_text,
    checked_word,
    is_cut_off,
    sealed,
)
from gpuwarden.journal.place import JOURNAL, for_reading, for_writing
from gpuwarden.journal.tail import Tail, read_tail
from gpuwarden.keys import fingerprint

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

__all__ = ["JOURNAL", "Journal"]

NAME_LIMIT = 256


class Journal:
    """One file of entries; any number of processes may write to it at once."""

    def __init__(
        self,
        path: str = JOURNAL,
        *,
        key: Ed25519PrivateKey | None = None,
        who: Who | None = None,
        node: str | None = None,
    ) -> None:
        """``key`` signs (``signing.signing_key``); ``who`` asks, this process unless told."""
        self.path = path
        self._key = key
        self._who = who or asker()
        self._node = bounded_text(node or os.uname().nodename, NAME_LIMIT)
        self._boot_id = boot_id()
        self._signed_by = ""
        if key is not None:
            self._signed_by = fingerprint(key.public_key().public_bytes_raw())

    def append(
        self,
        action: str,
        subject: dict[str, Any],
        outcome: str = "",
        *,
        stage: Stage = "fact",
        of: int | None = None,
    ) -> Entry:
        """Writes one entry and syncs it; it is there when this returns.

        ``action`` is a short word (a-z, 0-9, dashes), ``subject`` any JSON, shortened when long.
        Errors: Denied (somebody else could change the file), Unavailable (a full disk: nothing is
        written), TimedOut (another process keeps the lock), Malformed (the end is damaged).
        """
        checked_word(action)
        with for_writing(self.path) as descriptor:
            size = os.fstat(descriptor).st_size
            tail = read_tail(descriptor, size, self.path)
            last = tail.last
            text = b"" if tail.is_ended else b"\n"
            if tail.astray:
                last, line = self._aside(tail, len(text))
                text += line + b"\n"
            entry, line = self._sealed(
                last,
                action,
                bounded(subject),
                bounded_text(outcome, OUTCOME_LIMIT),
                stage=stage,
                of=of,
            )
            self._write(descriptor, size, text + line + b"\n")
        return entry

    def intend(self, action: str, subject: dict[str, Any], outcome: str = "") -> Entry:
        """Says what will be tried, before it is; ``outcome`` tells what is expected."""
        return self.append(action, subject, outcome, stage="intent")

    def conclude(self, intent: Entry, outcome: str, *, done: bool = True) -> Entry:
        """Says what came of it."""
        stage: Stage = "done" if done else "failed"
        return self.append(intent.action, intent.subject, outcome, stage=stage, of=intent.number)

    def head(self) -> Head | None:
        """The last entry; None while there is none. Errors: as ``append``'s."""
        return head_of(self.path)

    def _aside(self, tail: Tail, newline: int) -> tuple[Entry, bytes]:
        """An entry about the bytes after the last one, with the newline that ends them."""
        number, previous = _after(tail.last)
        *pieces, final = tail.astray.split(b"\n")
        pieces += [final] if final else []
        cut = all(is_cut_off(piece, number, previous) for piece in pieces)
        region = tail.astray + b"\n" * newline
        return self._sealed(
            tail.last,
            SET_ASIDE,
            {"bytes": len(region), "sha256": hashlib.sha256(region).hexdigest()},
            "a line that was cut off while it was written" if cut else "bytes that are no entry",
        )

    def _sealed(
        self,
        last: Entry | None,
        action: str,
        subject: dict[str, Any],
        outcome: str,
        *,
        stage: Stage = "fact",
        of: int | None = None,
    ) -> tuple[Entry, bytes]:
        number, previous = _after(last)
        entry = Entry(
            number=number,
            previous=previous,
            time_ns=time.time_ns(),
            boot_id=self._boot_id,
            node=self._node,
            tool=f"gpuwarden {__version__}",
            action=action,
            stage=stage,
            of=of,
            subject=subject,
            outcome=outcome,
            who=self._who,
            signed_by=self._signed_by,
        )
        return sealed(entry, self._key)

    def _write(self, descriptor: int, size: int, text: bytes) -> None:
        rest = memoryview(text)
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        except OSError as error:
            with suppress(OSError):
                # Refused where the file is append-only; then the next writer sets it aside.
                os.ftruncate(descriptor, size)
                os.fsync(descriptor)
            raise Unavailable(
                f"{self.path}: the entry was not written: {error.strerror}",
                remedy="nothing is done that cannot be written down: make room, then again",
            ) from error


def head_of(path: str = JOURNAL) -> Head | None:
    """The last entry of a journal, read from its end. Errors: Unavailable, Denied, Malformed."""
    with for_reading(path) as (descriptor, size):
        last = read_tail(descriptor, size, path).last
    if last is None:
        return None
    return Head(number=last.number, hash=last.hash, signed_by=last.signed_by)


def _after(last: Entry | None) -> tuple[int, str]:
    return (1, FIRST_PREVIOUS) if last is None else (last.number + 1, last.hash)
