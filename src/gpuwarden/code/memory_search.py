"""The next place of some bytes in a large buffer, by the C library's search.

``bytes.find`` is half as fast, holds the interpreter's lock and is not there for a memoryview.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_BLOCK_BYTES = 1 << 18
"""What stays in a cache while it is compared with each beginning."""
_HITS_SHARE = 64
_HITS_FLOOR = 4096
_COMMON = frozenset(b"\0\1\x7f_ .") | frozenset(range(ord("a"), ord("z") + 1))


@functools.cache
def _memmem() -> Callable[[int, int, bytes, int], int | None]:
    function = ctypes.CDLL(None).memmem
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    return function


def _rarest(needle: bytes) -> int:
    """Where in it three bytes are that text and zeros have little of."""
    return min(
        range(len(needle) - 2), key=lambda k: sum(byte in _COMMON for byte in needle[k : k + 3])
    )


class Haystack:
    """A buffer to search; it is kept alive, and must not be resized meanwhile."""

    def __init__(self, data: memoryview) -> None:
        self.size = len(data)
        self._bytes = np.frombuffer(data, np.uint8) if self.size else np.zeros(1, np.uint8)
        self._address: int = self._bytes.ctypes.data
        self._memmem = _memmem()
        self._known: dict[bytes, list[int]] = {}

    def learn(self, needles: Sequence[bytes]) -> None:
        """Looks for several needles, of four bytes or more, at once: half the time of one by one.

        Afterwards ``find`` knows them. Where the data is full of their beginnings nothing is
        learned, and each is searched for as before.
        """
        even = self.size & ~1
        where = {needle: _rarest(needle) for needle in needles}
        pairs = sorted(
            {
                int.from_bytes(needle[k : k + 2], sys.byteorder)
                for needle, first in where.items()
                for k in (first, first + 1)
            }
        )
        marks, one = np.empty(_BLOCK_BYTES // 2, bool), np.empty(_BLOCK_BYTES // 2, bool)
        hits: list[np.ndarray[Any, Any]] = []
        left = self.size // _HITS_SHARE + _HITS_FLOOR
        for at in range(0, even, _BLOCK_BYTES):
            block = self._bytes[at : min(at + _BLOCK_BYTES, even)].view(np.uint16)
            some, other = marks[: len(block)], one[: len(block)]
            np.equal(block, pairs[0], out=some)
            for pair in pairs[1:]:
                np.equal(block, pair, out=other)
                np.bitwise_or(some, other, out=some)
            found = np.flatnonzero(some)
            left -= len(found)
            if left < 0:
                return
            if len(found):
                hits.append(found * 2 + at)
        starts = np.concatenate(hits) if hits else np.empty(0, np.int64)
        starts = np.concatenate((starts - 1, starts))
        starts.sort()
        for needle in needles:
            places = starts - where[needle]
            places = places[(places >= 0) & (places <= self.size - len(needle))]
            for k, byte in enumerate(needle):
                places = places[self._bytes[places + k] == byte]
            self._known[needle] = places.tolist()

    def find_all(self, needle: bytes, limit: int) -> list[int]:
        """The first ``limit`` places of ``needle``; if these are all, ``find`` knows them then."""
        found: list[int] = []
        at = self.find(needle, 0, self.size)
        while at >= 0 and len(found) < limit:
            found.append(at)
            at = self.find(needle, at + 1, self.size)
        if at < 0:
            self._known[needle] = found
        return found

    def find(self, needle: bytes, start: int, end: int) -> int:
        """The first offset in [start, end) where ``needle`` is whole, -1 for none."""
        known = self._known.get(needle)
        if known is not None:
            index = bisect_left(known, start)
            fits = index < len(known) and known[index] + len(needle) <= min(end, self.size)
            return known[index] if fits else -1
        start, end = max(0, start), min(end, self.size)
        if end - start < len(needle):
            return -1
        found = self._memmem(self._address + start, end - start, needle, len(needle))
        return -1 if found is None else found - self._address
