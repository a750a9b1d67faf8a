"""What is kept of the windows of one run while a launch profile is learned from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence

import numpy as np
from msgspec import Struct, field

from gpuwarden.cuda.launches.kernels import normalised, spelled
from gpuwarden.cuda.launches.period import Periods
from gpuwarden.cuda.launches.phases import Floats
from gpuwarden.cuda.launches.profile import (
    DIGESTS_LIMIT,
    KERNELS_LIMIT,
    PERIODS_LIMIT,
    SHAPES_LIMIT,
    TRANSITIONS_LIMIT,
    WITHOUT_END,
    Period,
    Shape,
)
from gpuwarden.cuda.launches.rhythm import Rhythm
from gpuwarden.cuda.launches.sequences import (
    NONE,
    Array,
    Stretch,
    before_in_lane,
    pair,
    runs,
    stretch,
    unpaired,
)
from gpuwarden.model import KernelUse, LaunchWindow

WINDOWS_LIMIT = 14_400
"""Later windows of a run are not taken up: profiles are merged for more."""
COUNTED_SECONDS = 300
"""The last ones, for periods of seconds."""
SPAN_LAUNCHES = 100
ALONE = 8
"""So many launches in a thread and stream, all of one kernel, are a stream of its own."""


class RunKernel(Struct):
    """One kernel of a run."""

    name: str
    jit: bool
    digests: dict[str, None] = field(default_factory=dict)
    shapes: set[Shape] = field(default_factory=set)
    longest_run: int = 0
    rhythm: Rhythm | None = field(default_factory=Rhythm)
    """None when it was judged."""
    apart: bool = True
    """On threads and streams of its own, while it was not judged."""
    own_rhythm: bool = False


class RunWindow(Struct, frozen=True):
    """The launches of a window by kernel, and its sampled transitions to JIT kernels."""

    from_seconds: float
    seconds: float
    numbers: Array
    counts: Array
    pairs: dict[int, int]


class RunSpan(Struct):
    """Some windows in a row."""

    counts: Floats
    pairs: Counter[int]
    seconds: float = 0.0


class Run:
    """The windows of one process; kernels get numbers as they come."""

    def __init__(self) -> None:
        self.kernels: list[RunKernel] = []
        self.windows: list[RunWindow] = []
        self.transitions: Counter[int] = Counter()
        self.refused: Counter[tuple[str, str]] = Counter()
        """(kernel, digest) of modules that are not known."""
        self.launches = self.graph_launches = 0
        self.unnamed = self.unknown = 0
        self.sampled = self.dropped = 0
        self.crowded = False
        self.seconds = 0.0
        self._numbers: dict[tuple[str, bool], int] = {}
        self._periods = Periods()

    def add(self, window: LaunchWindow, allowed: Container[str], jit: Container[str]) -> None:
        """One more window; ``allowed`` are digests that are known or allowed, ``jit`` those of
        them that are only of an allowed class."""
        if len(self.windows) >= WINDOWS_LIMIT:
            return
        self.graph_launches += window.graph_launches
        numbers = [self._number(use, allowed, jit) for use in window.kernels]
        counts: Counter[int] = Counter()
        for use, number in zip(window.kernels, numbers, strict=True):
            self.launches += use.launches
            if number != NONE:
                counts[number] += use.launches
        seconds = max(0.0, (window.until_ns - window.from_ns) / 1e9)
        self.seconds += seconds
        pairs = self._sample(window, numbers) if window.samples else {}
        self.windows.append(
            RunWindow(
                window.from_ns / 1e9,
                seconds,
                np.array(list(counts), np.int64),
                np.array(list(counts.values()), np.int64),
                pairs,
            )
        )

    def _number(self, use: KernelUse, allowed: Container[str], jit: Container[str]) -> int:
        if not use.name:
            self.unnamed += use.launches
            return NONE
        made = bool(use.digest) and use.digest in jit
        if not use.digest:
            self.unknown += use.launches
        elif not made and use.digest not in allowed:
            if len(self.refused) < KERNELS_LIMIT:
                self.refused[use.name, use.digest] += use.launches
            return NONE
        key = (normalised(use.name) if made else spelled(use.name), made)
        number = self._numbers.get(key)
        if number is None:
            if len(self.kernels) >= KERNELS_LIMIT:
                self.crowded = True
                return NONE
            number = self._numbers[key] = len(self.kernels)
            self.kernels.append(RunKernel(*key))
        digests = self.kernels[number].digests
        if use.digest and len(digests) < DIGESTS_LIMIT:
            digests[use.digest] = None
        return number

    # ---------------------------------------------------------------- samples

    def _sample(self, window: LaunchWindow, numbers: Sequence[int]) -> dict[int, int]:
        """Takes up the samples; the transitions to kernels of JIT classes."""
        taken = stretch(window, numbers)
        self.sampled += len(taken.at_ns)
        self.dropped += window.dropped
        self._periods.add(taken.at_ns, taken.kernel)
        before = before_in_lane(taken.lane, taken.kernel >= 0)
        there = (before >= 0) & (taken.kernel >= 0)
        codes, counts = np.unique(
            pair(taken.kernel[before[there]], taken.kernel[there]), return_counts=True
        )
        made: dict[int, int] = {}
        for code, count in zip(codes.tolist(), counts.tolist(), strict=True):
            if code in self.transitions or len(self.transitions) < 4 * TRANSITIONS_LIMIT:
                self.transitions[code] += count
            if self.kernels[unpaired(code)[1]].jit:
                made[code] = count
        for place, number in zip(taken.of_window.tolist(), taken.kernel.tolist(), strict=True):
            if number != NONE:
                shapes = self.kernels[number].shapes
                if len(shapes) <= SHAPES_LIMIT:
                    shapes.add((window.samples[place].grid, window.samples[place].block))
        self._measure_runs(taken)
        self._judge_rhythms(taken)
        return made

    def _measure_runs(self, taken: Stretch) -> None:
        found = runs(taken.lane, taken.kernel)
        lanes, whole = np.unique(taken.lane, return_counts=True)
        filling = found.length == whole[np.searchsorted(lanes, found.lane)]
        for number, length, fills in zip(
            found.kernel.tolist(), found.length.tolist(), filling.tolist(), strict=True
        ):
            if number != NONE:
                kernel = self.kernels[number]
                long = WITHOUT_END if fills and length >= ALONE else length
                kernel.longest_run = max(kernel.longest_run, long)

    def _judge_rhythms(self, taken: Stretch) -> None:
        for number in np.unique(taken.kernel).tolist():
            kernel = self.kernels[number] if number != NONE else None
            if kernel is None or kernel.rhythm is None:
                continue
            others = (taken.kernel != number) & (taken.kernel != NONE)
            mine = taken.kernel == number
            kernel.apart &= not np.isin(taken.lane[mine], taken.lane[others]).any()
            if kernel.rhythm.add(taken, mine, others):
                verdict = kernel.rhythm.verdict
                kernel.own_rhythm = kernel.apart and verdict is not None and verdict.out_of_step
                kernel.rhythm = None

    # ---------------------------------------------------------------- as a whole

    def periods(self) -> tuple[Period, ...]:
        """The times after which its launches repeat, its step first."""
        rows: list[Floats] = []
        if self.windows:
            # A second in which nothing was launched has no window.
            first = max(
                self.windows[0].from_seconds, self.windows[-1].from_seconds - COUNTED_SECONDS
            )
            last = min(COUNTED_SECONDS, int(self.windows[-1].from_seconds - first))
            rows = [np.zeros(len(self.kernels)) for _ in range(last + 1)]
            for window in self.windows:
                at = int(window.from_seconds - first)
                if window.from_seconds >= first and at <= last:
                    rows[at][window.numbers] += window.counts
        return self._periods.found(rows)[:PERIODS_LIMIT]

    def spans(self, seconds: float) -> list[RunSpan]:
        """Its windows in spans of that length; those with next to no launches are left out."""
        found: list[RunSpan] = []
        span = RunSpan(np.zeros(len(self.kernels)), Counter())
        for window in self.windows:
            span.counts[window.numbers] += window.counts
            span.pairs.update(window.pairs)
            span.seconds += window.seconds
            if span.seconds >= seconds:
                if span.counts.sum() >= SPAN_LAUNCHES:
                    found.append(span)
                span = RunSpan(np.zeros(len(self.kernels)), Counter())
        return found

    def late_share(self) -> float:
        """Which share of the launches in the last quarter is of kernels that came only then."""
        split = len(self.windows) * 3 // 4
        early = {n for window in self.windows[:split] for n in window.numbers.tolist()}
        total = late = 0
        for window in self.windows[split:]:
            for number, count in zip(window.numbers.tolist(), window.counts.tolist(), strict=True):
                total += count
                late += count if number not in early else 0
        return late / total if total else 0.0

    def fastest(self) -> Floats:
        """The most launches a second of each kernel in any window."""
        found = np.zeros(len(self.kernels))
        for window in self.windows:
            if window.seconds > 0:
                rate = window.counts / window.seconds
                found[window.numbers] = np.maximum(found[window.numbers], rate)
        return found
