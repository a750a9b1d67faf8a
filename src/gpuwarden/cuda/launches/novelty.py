"""Which sampled launches a profile does not explain by what came before them and their shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gpuwarden.cuda.launches.kernels import Placed, Standing
from gpuwarden.cuda.launches.profile import LaunchProfile
from gpuwarden.cuda.launches.sequences import (
    NONE,
    Array,
    Mask,
    Stretch,
    among,
    before_in_lane,
    pair,
    stretch,
)
from gpuwarden.model import LaunchWindow

_STRANGE = (Standing.STRAY, Standing.NEW_JIT, Standing.OUTSIDE)


class Seen(NamedTuple):
    """The samples of a window, told apart."""

    samples: Stretch
    """``kernel`` is the place in the window's kernels."""
    novel: Mask
    """Launches of kernels that are known by name alone, unlike what was learned of that name."""
    strange: Mask
    """Launches of kernels that the profile does not have, code that is known aside."""
    claimed: Mask
    """Launches of kernels that are known by name alone."""
    ordinary: Mask
    """All others: what the process does besides."""


class Transitions:
    """What follows what, and in which block shapes, as learned."""

    def __init__(self, profile: LaunchProfile) -> None:
        pairs = np.array(
            [(first, second) for first, second, _ in profile.transitions], np.int64
        ).reshape(-1, 2)
        self._known = np.sort(pair(pairs[:, 0], pairs[:, 1]))
        self._blocks = [frozenset(kernel.blocks) for kernel in profile.kernels]

    def look(self, window: LaunchWindow, places: Sequence[Placed]) -> Seen:
        """The samples of a window whose kernels have these places in the profile."""
        samples = stretch(window, range(len(places)))
        standing = np.array([*(one.standing for one in places), Standing.UNNAMED], np.int64)
        numbers = np.array([*(one.number for one in places), NONE], np.int64)
        stands, number = standing[samples.kernel], numbers[samples.kernel]
        strange = np.isin(stands, _STRANGE)
        claimed = stands == Standing.CLAIMED
        novel = np.zeros(len(stands), bool)
        if claimed.any():
            shaped = self._new_shape(window, samples, number, claimed)
            novel = self._unseen(samples.lane, number, claimed, strange, shaped)
        ordinary = (samples.kernel != NONE) & ~strange & ~novel
        return Seen(samples, novel, strange, claimed, ordinary)

    def _new_shape(
        self, window: LaunchWindow, samples: Stretch, number: Array, claimed: Mask
    ) -> Mask:
        found = np.zeros(len(number), bool)
        for at in np.flatnonzero(claimed).tolist():
            blocks = self._blocks[number[at]]
            found[at] = bool(blocks) and (window.samples[samples.of_window[at]].block not in blocks)
        return found

    def _unseen(
        self, lane: Array, number: Array, claimed: Mask, strange: Mask, shaped: Mask
    ) -> Mask:
        """Claimed launches in a new shape, or after what they were never after.

        What comes after one that is not the workload's is not new itself: it is asked again
        with the doubtful ones left out.
        """
        doubtful = shaped | (claimed & self._is_new(lane, number, ~strange))
        return shaped | (doubtful & self._is_new(lane, number, ~strange & ~doubtful))

    def _is_new(self, lane: Array, number: Array, counts: Mask) -> Mask:
        before = before_in_lane(lane, counts)
        # Of what comes after a kernel that has no number nothing was learned.
        there = (before != NONE) & (number != NONE)
        there[there] = number[before[there]] != NONE
        found = np.zeros(len(number), bool)
        found[there] = ~among(pair(number[before[there]], number[there]), self._known)
        return found
