"""The end of the journal: its last entry, and what stands after it that is none."""

from __future__ import annotations

import os

from msgspec import Struct

from gpuwarden.errors import Malformed
from gpuwarden.journal.entry import BEGIN, LINE_LIMIT_BYTES, Entry, whole

WINDOWS_BYTES = (LINE_LIMIT_BYTES + 1, 1 << 20)
"""How much is read from the end: for a sound journal, and for one whose end is damaged."""


class Tail(Struct, frozen=True):
    """``last`` is None while there is no entry; ``astray`` are the bytes after its line."""

    last: Entry | None
    astray: bytes
    is_ended: bool
    """The file is empty or ends in a newline."""


def read_tail(descriptor: int, size: int, path: str) -> Tail:
    """Reads at most a MiB from the end. Errors: Malformed when no entry is in it, OSError."""
    for window in WINDOWS_BYTES:
        start = max(size - window, 0)
        data = _read(descriptor, start, size)
        # Unless it is the first, the line that the window begins in is not all there.
        begin = data.find(b"\n") + 1 if start else 0
        found = None if start and not begin else _last(data, begin)
        if found is not None:
            return found
        if not start:
            return Tail(None, data, not data or data.endswith(b"\n"))
    raise Malformed(
        f"{path}: there is no entry in its last {WINDOWS_BYTES[-1] >> 20} MiB",
        remedy=f"keep it as evidence and begin another: mv {path} {path}.damaged",
    )


def _last(data: bytes, begin: int) -> Tail | None:
    end = len(data)
    while end > begin:
        is_ended = data[end - 1 : end] == b"\n"
        stop = end - is_ended
        at = max(data.rfind(b"\n", begin, stop) + 1, begin)
        may_be = data.startswith(BEGIN, at, stop) and stop - at <= LINE_LIMIT_BYTES
        entry = whole(data[at:stop]) if may_be else None
        if entry is not None:
            return Tail(entry, data[end:], data.endswith(b"\n"))
        end = at
    return None


def _read(descriptor: int, start: int, end: int) -> bytes:
    pieces = []
    while start < end:
        piece = os.pread(descriptor, end - start, start)
        if not piece:
            break
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)
