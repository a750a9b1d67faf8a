"""Numbers written into instructions: which look random, and by how much code rotates."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpuwarden.code.sass import groups
from gpuwarden.code.sass.decode import Integers, Stream

Words = npt.NDArray[np.uint32]

SMALL = 1 << 20
AMOUNTS = 64
BITS_SET = np.array([number.bit_count() for number in range(256)], np.uint8)
LEAST_BITS, MOST_BITS = 8, 24


def looks_random(words: Words) -> npt.NDArray[np.bool_]:
    """Whether each is far from 0, has four unlike bytes, 8 to 24 bits set and no round end."""
    small = words + np.uint32(SMALL - 1) < 2 * SMALL - 1
    found = np.flatnonzero(~small & (words & np.uint32(0xFFF) != 0))
    octets = np.ascontiguousarray(words[found]).view(np.uint8).reshape(-1, 4)
    first, second, third, fourth = (octets[:, place] for place in range(4))
    unlike = (first != second) & (first != third) & (first != fourth)
    unlike &= (second != third) & (second != fourth) & (third != fourth)
    bits = BITS_SET[octets].sum(axis=1)
    random = np.zeros(len(words), np.bool_)
    random[found[unlike & (bits >= LEAST_BITS) & (bits <= MOST_BITS)]] = True
    return random


def numbers_in(stream: Stream) -> tuple[Integers, Words]:
    """For each integer instruction with a number: its kernel's place in the stream, the number."""
    found = np.flatnonzero(stream.has_number & groups.IS_ALU.take(stream.codes))
    parts = np.searchsorted(found, stream.starts)
    counts = parts[1:] - parts[:-1]
    return np.repeat(np.arange(len(counts)), counts), stream.words[stream.places[found], 1]


def distinct(kernels: Integers, words: Words) -> tuple[Integers, Words]:
    """The pairs without repeats, in order."""
    pairs = np.unique(kernels.astype(np.uint64) << np.uint64(32) | words)
    return (pairs >> np.uint64(32)).astype(np.int64), pairs.astype(np.uint32)


def random_numbers(stream: Stream) -> Integers:
    """For each kernel, how many different numbers in integer instructions look random."""
    kernels, words = numbers_in(stream)
    random = looks_random(words)
    kernels, _ = distinct(kernels[random], words[random])
    return np.bincount(kernels, minlength=len(stream.kernels))


class Amounts:
    """The constant amounts by which a stream's funnel shifts and rotations move."""

    def __init__(self, stream: Stream) -> None:
        self._where = np.flatnonzero(stream.has_number & groups.IS_FUNNEL.take(stream.codes))
        parts = np.searchsorted(self._where, stream.starts)
        counts = parts[1:] - parts[:-1]
        self._kernel = np.repeat(np.arange(len(counts)), counts)
        self._amount = stream.words[stream.places[self._where], 1] & np.uint32(AMOUNTS - 1)
        self._kernels = len(counts)

    def different(self, first: Integers, last: Integers) -> Integers:
        """How many each kernel has from index ``first`` to ``last`` of the stream."""
        inside = (self._where >= first[self._kernel]) & (self._where <= last[self._kernel])
        seen = np.zeros((self._kernels, AMOUNTS), np.bool_)
        seen[self._kernel[inside], self._amount[inside]] = True
        return np.asarray(seen.sum(axis=1))
