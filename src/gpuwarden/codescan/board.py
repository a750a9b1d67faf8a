"""A page that parent and child share: where the child is, without a call each time it moves on.

When the child ends by itself, is killed or hangs, the board says what it was reading.
"""

from __future__ import annotations

import mmap
import struct

import msgspec

from gpuwarden.code.module import Place

BOARD_BYTES = 16 << 10
# Bytes read of this task, files looked into, moves, size of the place that follows as msgpack.
_HEADER = struct.Struct("=QQQI")
_NAME_LIMIT = 1024
_MEMBERS_LIMIT = 8


class Board:
    """Made before the fork; the child writes, the parent reads and believes nothing."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, BOARD_BYTES)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Place)
        self.read_bytes = 0
        self.files = 0
        self._moves = 0
        self._place_bytes = 0

    # ------------------------------------------------------------------------------ the child

    def start(self, place: Place) -> None:
        """A new task."""
        self.read_bytes = self.files = 0
        self._write(place)

    def begin(self, place: Place) -> None:
        """One file more is looked into."""
        self.files += 1
        self._write(place)

    def count(self, size: int) -> None:
        """So many bytes more were read."""
        self.read_bytes += size
        self._header()

    def _write(self, place: Place) -> None:
        shown = Place(
            target=place.target[:_NAME_LIMIT],
            members=tuple(one[:_NAME_LIMIT] for one in place.members[:_MEMBERS_LIMIT]),
        )
        raw = self._encoder.encode(shown)
        self._place_bytes = len(raw) if _HEADER.size + len(raw) <= BOARD_BYTES else 0
        self._page[_HEADER.size : _HEADER.size + self._place_bytes] = raw[: self._place_bytes]
        self._header()

    def _header(self) -> None:
        self._moves += 1
        _HEADER.pack_into(
            self._page, 0, self.read_bytes, self.files, self._moves, self._place_bytes
        )

    # ------------------------------------------------------------------------------ the parent

    def look(self) -> tuple[int, int, int]:
        """(bytes read, files, moves) of the child."""
        return _HEADER.unpack_from(self._page)[:3]

    def place(self) -> Place | None:
        """Where the child is, None when what is there is no place."""
        size = _HEADER.unpack_from(self._page)[3]
        if size > BOARD_BYTES - _HEADER.size:
            return None
        try:
            return self._decoder.decode(self._page[_HEADER.size : _HEADER.size + size])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    def close(self) -> None:
        self._page.close()
