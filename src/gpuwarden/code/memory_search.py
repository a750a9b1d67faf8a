"""The next place of some bytes in a large buffer, by the C library's search.

``bytes.find`` is half as fast, holds the interpreter's lock and is not there for a memoryview.
"""

from __future__ import annotations

import ctypes
import functools
from bisect import bisect_left
from collections.abc import Callable

import numpy as np


@functools.cache
def _memmem() -> Callable[[int, int, bytes, int], int | None]:
    function = ctypes.CDLL(None).memmem
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    return function


class Haystack:
    """A buffer to search; it is kept alive, and must not be resized meanwhile."""

    def __init__(self, data: memoryview) -> None:
        self.size = len(data)
        self._bytes = np.frombuffer(data, np.uint8) if self.size else np.zeros(1, np.uint8)
        self._address: int = self._bytes.ctypes.data
        self._memmem = _memmem()
        self._known: dict[bytes, list[int]] = {}

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
