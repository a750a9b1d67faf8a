"""Which sampled launches a profile does not explain: by what came before them, and by their shape.

Asked of kernels that are known by name alone; what is known by its digest computes what it did,
wherever it is launched.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gpuwarden.cuda.launches.kernels import Placed, Standing
from gpuwarden.cuda.launches.profile import KERNELS_LIMIT, WITHOUT_END, LaunchProfile
from gpuwarden.cuda.launches.sequences import (
    NONE,
    Array,
    Mask,
    Stretch,
    among,
    before_in_lane,
    pair,
    runs,
    stretch,
)
from gpuwarden.model import LaunchWindow

RUN_FACTOR, RUN_MARGIN = 2, 8
"""How much longer than learned a run of one kernel may be."""
NAMES = 1 << 16
PASSES = 4

_STRANGE = (Standing.STRAY, Standing.NEW_JIT, Standing.OUTSIDE)


class Seen(NamedTuple):
    """The samples of a window, told apart."""

    samples: Stretch
    """``kernel`` is a number that stays the same from window to window."""
    place: Array
    """The launch's place in the window's kernels."""
    strange: Mask
    """Of kernels that the profile does not have, code that is known aside."""
    claimed: Mask
    """Of kernels that are known by name alone."""
    unplaced: Mask
    """Of those, the ones after what they were never after, or more in a row than ever."""
    novel: Mask
    """Those, and the ones of another grid or block."""
    ordinary: Mask
    """All launches that are neither strange nor novel."""


class LearnedOrder:
    """What follows what, how often in a row, and in which shapes, as learned."""

    def __init__(self, profile: LaunchProfile) -> None:
        pairs = np.array(
            [(first, second) for first, second, _ in profile.transitions], np.int64
        ).reshape(-1, 2)
        self._known = np.sort(pair(pairs[:, 0], pairs[:, 1]))
        self._shapes = [frozenset(kernel.shapes) for kernel in profile.kernels]
        longest = [kernel.longest_run or WITHOUT_END for kernel in profile.kernels]
        self._longest = RUN_FACTOR * np.array([*longest, WITHOUT_END], np.int64) + RUN_MARGIN

    def look(self, window: LaunchWindow, places: Sequence[Placed]) -> Seen:
        """The samples of a window whose kernels have these places in the profile."""
        samples = stretch(window, range(len(places)))
        standing = np.array([*(one.standing for one in places), Standing.UNNAMED], np.int64)
        numbers = np.array([*(one.number for one in places), NONE], np.int64)
        lasting = np.array(
            [
                placed.number if placed.number >= 0 else _by_name(use.name)
                for use, placed in zip(window.kernels, places, strict=True)
            ]
            + [NONE],
            np.int64,
        )
        index = samples.kernel
        stands, number = standing[index], numbers[index]
        strange = np.isin(stands, _STRANGE)
        claimed = stands == Standing.CLAIMED
        unplaced = shaped = np.zeros(len(index), bool)
        if claimed.any():
            shaped = self._new_shape(window, samples, number, claimed)
            unplaced = self._unplaced(samples.lane, number, claimed, strange, shaped)
        return Seen(
            samples._replace(kernel=lasting[index]),
            index,
            strange,
            claimed,
            unplaced,
            unplaced | shaped,
            (index != NONE) & ~strange & ~unplaced & ~shaped,
        )

    def _new_shape(
        self, window: LaunchWindow, samples: Stretch, number: Array, claimed: Mask
    ) -> Mask:
        found = np.zeros(len(number), bool)
        for at in np.flatnonzero(claimed).tolist():
            shapes = self._shapes[number[at]]
            sample = window.samples[samples.of_window[at]]
            found[at] = bool(shapes) and (sample.grid, sample.block) not in shapes
        return found

    def _unplaced(
        self, lane: Array, number: Array, claimed: Mask, strange: Mask, shaped: Mask
    ) -> Mask:
        """Claimed launches after what they were never after, or in too long a run.

        What comes after one that is not the workload's is not new itself: it is asked again
        with the doubtful ones left out, and those after it with it back in its place.
        """
        doubtful = shaped | (claimed & self._is_new(lane, number, ~strange))
        in_runs = claimed & self._is_long(lane, number, strange)
        for _ in range(PASSES):
            still = doubtful & self._is_new(lane, number, ~strange & ~doubtful & ~in_runs)
            if (still == doubtful).all():
                break
            doubtful = still
        return in_runs | doubtful

    def _is_long(self, lane: Array, number: Array, strange: Mask) -> Mask:
        own = np.flatnonzero(~strange)
        found = np.zeros(len(lane), bool)
        those = runs(lane[own], number[own])
        found[own] = (those.length > self._longest[those.kernel])[those.of]
        return found

    def _is_new(self, lane: Array, number: Array, counts: Mask) -> Mask:
        before = before_in_lane(lane, counts)
        # Of what comes after a kernel that has no number nothing was learned.
        there = (before != NONE) & (number != NONE)
        there[there] = number[before[there]] != NONE
        found = np.zeros(len(number), bool)
        found[there] = ~among(pair(number[before[there]], number[there]), self._known)
        return found


def _by_name(name: str) -> int:
    """A number for a kernel that the profile does not have; two may share one."""
    return KERNELS_LIMIT + zlib.crc32(name.encode("utf-8", "replace")) % NAMES
