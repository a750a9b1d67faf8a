"""What goes into a member, piece by piece: bounded, compressed, cut short where its source is."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator

from gpuwarden.errors import GpuwardenError

CHUNK_BYTES = 1 << 20
ZSTD_LEVEL = 1

Data = bytes | int | Iterable[bytes]
"""The bytes, a descriptor that is read to its end, or what gives the bytes piece by piece."""


class Intake:
    """Takes at most ``limit_bytes`` of a source; what came of it stands in the attributes."""

    def __init__(self, data: Data, limit_bytes: int, *, is_late: Callable[[], bool]) -> None:
        self.size = 0
        self.is_over = False
        """Whether the source had more."""
        self.error = ""
        """Why it ended early."""
        self._data = data
        self._limit = limit_bytes
        self._is_late = is_late
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Of what was taken."""
        return self._digest.hexdigest()

    def pieces(self) -> Iterator[bytes]:
        """The source's bytes; an error of the source ends them, and is kept."""
        source = _pieces(self._data)
        while not self.is_over:
            try:
                piece = next(source, None)
            except (GpuwardenError, OSError) as error:
                self.error = getattr(error, "strerror", None) or str(error)
                return
            if piece is None:
                return
            if self._is_late():
                self.error = "no time left"
                return
            room = self._limit - self.size
            if len(piece) > room:
                self.is_over, piece = True, piece[:room]
            self._digest.update(piece)
            self.size += len(piece)
            yield piece

    def compressed(self) -> Iterator[bytes]:
        """``pieces`` as one zstd frame."""
        import zstandard

        # One thread: the other cores belong to the workload that is looked at.
        machine = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compressobj()
        for piece in self.pieces():
            yield machine.compress(piece)
        yield machine.flush()


def _pieces(data: Data) -> Iterator[bytes]:
    if isinstance(data, int):
        while piece := os.read(data, CHUNK_BYTES):
            yield piece
        return
    for whole in (data,) if isinstance(data, bytes) else data:
        view = memoryview(whole)
        for begin in range(0, len(view), CHUNK_BYTES):
            yield bytes(view[begin : begin + CHUNK_BYTES])
