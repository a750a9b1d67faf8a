"""Sampled launches in the order of their thread and stream, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuwarden.model import LaunchWindow

Array = NDArray[np.int64]
Mask = NDArray[np.bool_]
NONE = -1
"""In place of a kernel: there is none, or it has no number."""
PAIR_BITS = 21


class Stretch(NamedTuple):
    """The samples of one window, in order of time."""

    at_ns: Array
    kernel: Array
    """Numbers that the caller gave the window's kernels; ``NONE`` where it gave none."""
    lane: Array
    """One number for each thread with each stream."""
    of_window: Array
    """The sample's place in the window."""

    @property
    def seconds(self) -> float:
        """From the first launch to the last."""
        return float(self.at_ns[-1] - self.at_ns[0]) / 1e9 if len(self.at_ns) else 0.0


def stretch(window: LaunchWindow, numbers: Sequence[int]) -> Stretch:
    """The samples of a window; ``numbers[i]`` is the number for its kernel ``i``."""
    samples = window.samples
    count = len(samples)
    at_ns = np.fromiter((one.at_ns for one in samples), np.int64, count)
    index = np.fromiter((one.kernel for one in samples), np.int64, count)
    known = np.array([*numbers, NONE], np.int64)
    index[(index < 0) | (index >= len(numbers))] = len(numbers)
    lanes: dict[tuple[int, int], int] = {}
    lane = np.fromiter(
        (lanes.setdefault((one.thread_id, one.stream), len(lanes)) for one in samples),
        np.int64,
        count,
    )
    order = np.arange(count)
    if count > 1 and bool((at_ns[1:] < at_ns[:-1]).any()):
        order = np.argsort(at_ns, kind="stable")
    return Stretch(at_ns[order], known[index[order]], lane[order], order)


def before_in_lane(lane: Array, counts: Mask) -> Array:
    """For each launch the place of the last one before it in its lane of those that count, or
    ``NONE``."""
    count = len(lane)
    order = np.lexsort((np.arange(count), lane))
    ordered = lane[order]
    places = np.where(counts[order], np.arange(count), NONE)
    # The last that counts strictly before: shifted by one, so that none precedes itself.
    last = np.maximum.accumulate(np.concatenate(([NONE], places)))[:-1] if count else places
    found = np.full(count, NONE, np.int64)
    valid = last >= 0
    same = np.zeros(count, bool)
    same[valid] = ordered[last[valid]] == ordered[valid]
    found[order[same]] = order[last[same]]
    return found


class Runs(NamedTuple):
    """Launches of one kernel in a row in their lane."""

    lane: Array
    kernel: Array
    length: Array
    of: Array
    """For each launch, which run it is in."""


def runs(lane: Array, kernel: Array) -> Runs:
    """The runs of launches in order of time."""
    count = len(lane)
    order = np.lexsort((np.arange(count), lane))
    lanes, kernels = lane[order], kernel[order]
    first = np.ones(count, bool)
    first[1:] = (lanes[1:] != lanes[:-1]) | (kernels[1:] != kernels[:-1])
    number = np.cumsum(first) - 1
    of = np.empty(count, np.int64)
    of[order] = number
    return Runs(lanes[first], kernels[first], np.bincount(number, minlength=int(first.sum())), of)


def pair(first: Array, second: Array) -> Array:
    """One number for two kernels in order; neither may be ``NONE``."""
    return (first << PAIR_BITS) | second


def unpaired(code: int) -> tuple[int, int]:
    """The two kernels of a pair's number."""
    return code >> PAIR_BITS, code & ((1 << PAIR_BITS) - 1)


def among(codes: Array, known: Array) -> Mask:
    """Which of the codes are in a sorted array of known ones."""
    if not len(known):
        return np.zeros(len(codes), bool)
    place = np.minimum(np.searchsorted(known, codes), len(known) - 1)
    found: Mask = known[place] == codes
    return found
