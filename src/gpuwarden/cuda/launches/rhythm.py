"""Whether launches of a kernel come in step with the other ones of the process.

What belongs to a program's loop is launched between the same neighbours again and again; what has
a clock of its own falls between any two of them, as chance has it. So the neighbours of its
launches are compared with those of moments picked by chance: no period has to be known, and
neither jitter nor a changing step matters.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from gpuwarden.cuda.launches.sequences import Array, pair

LAUNCHES = 60
"""So many are judged together."""
WINDOWS = 3
OF_WINDOW = 64
"""Launches of one window that are looked at."""
NEIGHBOURS = 8
"""Other launches that a window needs."""
DISTINCT = 0.1
"""A loop of so few different neighbours that two moments share them more often than this can hide
a step: then the number of launches in between is asked too."""
LOCKED = 0.85
STEADY = 0.7
"""Share of the intervals between half and twice the usual one. Of launches that come by chance it
is 0.46."""
INTERVALS = 20
EVEN_COUNTS = 0.4
"""Variance of the launches in a window, over their mean: 1 for those that come by chance."""
COUNTED_WINDOWS = 12


class Verdict(NamedTuple):
    """What some launches of one kernel were like."""

    out_of_step: bool
    steady: bool
    launches: int
    interval_seconds: float
    """The usual one; 0 when none was seen."""


class Rhythm:
    """The launches of one kernel, judged whenever enough came together; small and bounded."""

    def __init__(self) -> None:
        self.verdict: Verdict | None = None
        """Of the last ones that were enough."""
        self._counted: list[int] = []
        self._start()

    def _start(self) -> None:
        self._launches = 0
        self._windows = 0
        self._contexts: Counter[int] = Counter()
        self._by_time: dict[int, float] = {}
        self._by_count: dict[int, float] = {}
        self._between: Counter[int] = Counter()
        self._gaps = 0
        self._intervals: list[float] = []

    def counted(self, launches: int) -> None:
        """Every launch of a window, sampled or not, of the windows since the first."""
        self._counted.append(launches)
        if len(self._counted) > 2 * COUNTED_WINDOWS:
            del self._counted[0]

    def add(self, at_ns: Array, lane: Array, others_at_ns: Array, others: Array) -> bool:
        """Launches in a sampled stretch beside the other ones there, both in order of time;
        whether that made up a new verdict."""
        inside = np.searchsorted(others_at_ns, at_ns, side="right")
        keep = (inside > 0) & (inside < len(others))
        if len(others) < NEIGHBOURS or not keep.any():
            return False
        inside, at_ns, lane = inside[keep], at_ns[keep], lane[keep]
        inside, at_ns, lane = inside[:OF_WINDOW], at_ns[:OF_WINDOW], lane[:OF_WINDOW]
        count = len(inside)
        self._contexts.update(pair(others[inside - 1], others[inside]).tolist())
        self._expect(others_at_ns, others, count)
        between = np.diff(inside)
        self._between.update(between[between > 0].tolist())
        self._gaps += len(between)
        for number in np.unique(lane):
            self._intervals.extend((np.diff(at_ns[lane == number]) / 1e9).tolist())
        self._launches += count
        self._windows += 1
        if self._launches < LAUNCHES or self._windows < WINDOWS:
            return False
        self.verdict = self._judge()
        self._start()
        return True

    def _expect(self, at_ns: Array, others: Array, count: int) -> None:
        """What the neighbours would be of moments by chance, and of launches by chance."""
        pairs, place = np.unique(pair(others[:-1], others[1:]), return_inverse=True)
        gaps = np.diff(at_ns).astype(float)
        span = float(gaps.sum()) or 1.0
        by_time = np.bincount(place, gaps, len(pairs)) * (count / span)
        by_count = np.bincount(place, minlength=len(pairs)) * (count / len(place))
        for code, time_share, count_share in zip(
            pairs.tolist(), by_time.tolist(), by_count.tolist(), strict=True
        ):
            self._by_time[code] = self._by_time.get(code, 0.0) + time_share
            self._by_count[code] = self._by_count.get(code, 0.0) + count_share

    def _judge(self) -> Verdict:
        count = self._launches
        pairs = count * (count - 1) / 2
        alike = sum(n * (n - 1) / 2 for n in self._contexts.values())
        by_chance = max(
            sum(share * share for share in shares.values()) / count**2
            for shares in (self._by_time, self._by_count)
        )
        expected = by_chance * pairs
        in_step = alike > 2 * expected + 3 * expected**0.5
        step, often = max(self._between.items(), key=lambda one: one[1], default=(0, 0))
        locked = self._gaps > 0 and often >= LOCKED * self._gaps
        if by_chance > DISTINCT or step <= 3:
            in_step = in_step or locked or not self._gaps
        usual = float(np.median(self._intervals)) if self._intervals else 0.0
        return Verdict(not in_step, self._steady(usual), count, usual)

    def _steady(self, usual: float) -> bool:
        if len(self._intervals) >= INTERVALS:
            near = sum(usual / 2 <= one <= usual * 2 for one in self._intervals)
            return near >= STEADY * len(self._intervals)
        if len(self._counted) < COUNTED_WINDOWS:
            return False
        mean = float(np.mean(self._counted))
        return mean >= 0.5 and float(np.var(self._counted)) <= EVEN_COUNTS * mean
