"""Whether launches of a kernel come in step with the other ones of the process.

What belongs to a program's loop is launched between the same neighbours again and again; what has
a clock of its own falls between any two of them, as chance has it. So the neighbours of its
launches are compared with those of moments picked by chance: no period has to be known, and
neither jitter nor a changing step matters. Neighbours are asked for in the process as a whole and
in its own thread and stream: several threads that each do their step in order know only the latter.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from gpuwarden.cuda.launches.phases import Floats
from gpuwarden.cuda.launches.sequences import Array, Mask, Stretch

LAUNCHES = 60
"""So many, or bursts of them, are judged together."""
WINDOWS = 3
OF_WINDOW, INTERVALS_OF_WINDOW = 64, 256
"""Launches and intervals of one window that are looked at."""
NEIGHBOURS = 8
"""Other launches that a window needs."""
DISTINCT = 0.1
"""A loop of so few different neighbours that two moments share them more often than this can hide
a step: then the number of launches in between is asked too."""
BOUND = 1.5
"""Launches that nothing binds reach 1, and those at one place as much as there are places."""
LOCKED = 0.85
STEADY = 0.7
"""Share of the intervals between half and twice the usual one. Of launches that come by chance it
is 0.46."""
INTERVALS = 20
EVEN_COUNTS = 0.4
"""Variance of the launches in a window, over their mean: 1 for those that come by chance."""
COUNTED_WINDOWS = 12
WINDOWS_LIMIT = 240
"""A kernel that is so seldom seen is not judged."""
PAIRS_LIMIT = 16384
ANYWHERE, IN_LANE = 1, 2
"""Neighbours to each side. In its lane a kernel has exact ones, and a common kernel many places."""
PRIME = 1_000_003


class Verdict(NamedTuple):
    """What some launches of one kernel were like."""

    out_of_step: bool
    steady: bool
    interval_seconds: float
    """The usual one; 0 when none was seen."""


class _Neighbours:
    """Between which other launches those of one kernel come, and what chance would give."""

    def __init__(self, reach: int) -> None:
        """``reach``: how many to each side are looked at."""
        self._reach = reach
        self.bursts = 0
        """Launches in a row, with no other between them, are one."""
        self._contexts: Counter[int] = Counter()
        self._by_time: dict[int, float] = {}
        self._by_count: dict[int, float] = {}
        self._between: Counter[int] = Counter()
        self._sizes: Counter[int] = Counter()
        """Of the bursts: what follows every other launch does so as often each time."""

    def add(self, at_ns: Array, others_at_ns: Array, others: Array) -> None:
        """Launches in order of time beside the other ones there."""
        if len(others) < NEIGHBOURS:
            return
        inside, sizes = np.unique(
            np.searchsorted(others_at_ns, at_ns, side="right"), return_counts=True
        )
        reach = self._reach
        kept = (inside >= reach) & (inside <= len(others) - reach)
        inside = inside[kept] - reach
        if len(inside):
            self._sizes.update(sizes[kept].tolist())
            self._between.update(np.diff(inside).tolist())
            # All over the stretch, not only the first ones: these may be a part of one step.
            chosen = np.linspace(0, len(inside) - 1, min(len(inside), OF_WINDOW))
            inside = inside[chosen.astype(np.int64)]
            contexts = self._all_contexts(others)
            self._contexts.update(contexts[inside].tolist())
            self.bursts += len(inside)
            gaps = np.diff(others_at_ns)[reach - 1 : len(contexts) + reach - 1]
            self._expect(contexts, gaps.astype(float), len(inside))

    def _all_contexts(self, others: Array) -> Array:
        """A number for the neighbours of each gap between two others."""
        count = len(others) - 2 * self._reach + 1
        contexts = others[:count].copy()
        for step in range(1, 2 * self._reach):
            contexts = contexts * PRIME + others[step : step + count]
        return contexts

    def _expect(self, contexts: Array, gaps: Floats, count: int) -> None:
        """What the neighbours would be of moments by chance, and of launches by chance."""
        pairs, place = np.unique(contexts, return_inverse=True)
        by_time = np.bincount(place, gaps, len(pairs)) * (count / (float(gaps.sum()) or 1.0))
        by_count = np.bincount(place, minlength=len(pairs)) * (count / len(place))
        for code, time_share, count_share in zip(
            pairs.tolist(), by_time.tolist(), by_count.tolist(), strict=True
        ):
            if len(self._by_time) >= PAIRS_LIMIT and code not in self._by_time:
                continue
            self._by_time[code] = self._by_time.get(code, 0.0) + time_share
            self._by_count[code] = self._by_count.get(code, 0.0) + count_share

    def are_the_same(self) -> bool:
        """Whether the launches come between the same others more often than by chance.

        Chance is what is likelier, by time or by count: the mean of how often two launches share
        their neighbours over how often they should, which is 1 at most where nothing binds them.
        """
        count = self.bursts
        pairs = count * (count - 1)
        chances = {
            code: max(share, self._by_count[code]) / count for code, share in self._by_time.items()
        }
        shared = sum(
            often * (often - 1) / (pairs * chances[code])
            for code, often in self._contexts.items()
            if often > 1 and code in chances
        )
        noise = (2 * len(chances)) ** 0.5 / count
        step, often = max(self._between.items(), key=lambda one: one[1], default=(0, 0))
        total = self._between.total()
        alike = max(self._sizes.values(), default=0) >= LOCKED * self._sizes.total()
        locked = not total or (often >= LOCKED * total and alike)
        may_hide = 0 < step <= 3 or sum(share * share for share in chances.values()) > DISTINCT
        return shared > BOUND + 3 * noise or (may_hide and locked)


class Rhythm:
    """The launches of one kernel, judged whenever enough came together; small and bounded."""

    def __init__(self) -> None:
        self.verdict: Verdict | None = None
        """Of the last ones that were enough."""
        self._counted: list[int] = []
        self._start()

    def _start(self) -> None:
        self._windows = 0
        self._anywhere = _Neighbours(ANYWHERE)
        self._in_lane = _Neighbours(IN_LANE)
        self._intervals: list[float] = []

    def counted(self, launches: int) -> None:
        """Every launch of a window, sampled or not, of the windows since the first."""
        self._counted.append(launches)
        if len(self._counted) > 2 * COUNTED_WINDOWS:
            del self._counted[0]

    def add(self, samples: Stretch, mine: Mask, others: Mask) -> bool:
        """One window's launches of the kernel, and the other ones to compare them with; whether
        that made up a new verdict."""
        at = np.flatnonzero(mine)
        if not len(at):
            return False
        self._windows += 1
        self._anywhere.add(samples.at_ns[at], samples.at_ns[others], samples.kernel[others])
        for lane in np.unique(samples.lane[at]):
            own = at[samples.lane[at] == lane]
            beside = others & (samples.lane == lane)
            self._in_lane.add(samples.at_ns[own], samples.at_ns[beside], samples.kernel[beside])
            between = np.diff(samples.at_ns[own])[:INTERVALS_OF_WINDOW]
            self._intervals.extend((between / 1e9).tolist())
        if self._anywhere.bursts < LAUNCHES or self._windows < WINDOWS:
            if self._windows >= WINDOWS_LIMIT:
                self._start()
            return False
        in_step = self._anywhere.are_the_same()
        if self._in_lane.bursts >= LAUNCHES // 2:
            in_step = in_step or self._in_lane.are_the_same()
        usual = float(np.median(self._intervals)) if self._intervals else 0.0
        self.verdict = Verdict(not in_step, self._steady(usual), usual)
        self._start()
        return True

    def _steady(self, usual: float) -> bool:
        if len(self._intervals) >= INTERVALS:
            near = sum(usual / 2 <= one <= usual * 2 for one in self._intervals)
            return near >= STEADY * len(self._intervals)
        if len(self._counted) < COUNTED_WINDOWS:
            return False
        mean = float(np.mean(self._counted))
        return mean >= 0.5 and float(np.var(self._counted)) <= EVEN_COUNTS * mean
