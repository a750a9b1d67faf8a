"""How the launches of some seconds fit: which share is explained, and whether the rest is usual."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct, field

from gpuwarden.cuda.launches.kernels import Placed, Standing
from gpuwarden.cuda.launches.novelty import Seen
from gpuwarden.cuda.launches.phases import Floats, nearest
from gpuwarden.cuda.launches.profile import LaunchProfile
from gpuwarden.cuda.launches.sequences import NONE
from gpuwarden.model import KernelUse, LaunchWindow

SAMPLES = 8
"""Of a kernel in a span, for its share of launches out of place to be told."""
MIXED_IN = 0.2
"""Kernels with such a share of launches out of place are left out when the rest is compared."""
REST_LAUNCHES = 100
DISTANCE_FACTOR, DISTANCE_MARGIN = 1.5, 0.05
UNEXPLAINED_FACTOR, UNEXPLAINED_MARGIN = 2.0, 0.03
UNEXPLAINED_LEAST = 0.05
OF_SPANS, AT_LEAST = 6, 3
"""So many of the last spans must have launches that are not explained."""
STRANGERS_LIMIT = 64

Stranger = tuple[str, str]
"""(name, digest)."""


class SpanFit(Struct, frozen=True):
    """How the launches of one span fit."""

    launches: int
    outside: int
    unexplained: int
    """Those outside aside."""
    distance: float
    """Of the other launches from the phases that were learned."""
    is_usual: bool
    """So near as the learned ones were to each other."""
    new_known: int
    """Launches of kernels that the learned runs did not have, from modules that are known."""
    more_than_learned: tuple[tuple[int, float], ...]
    """(kernel, share) where the share is far above the highest learned one."""
    strangers: dict[Stranger, int]
    """Who the unexplained ones are."""


class Span(Struct):
    """The sums of the span under way."""

    counts: Floats
    sampled: Floats
    unplaced: Floats
    claimed: Floats
    seconds: float = 0.0
    launches: int = 0
    outside: int = 0
    new_known: int = 0
    strange: int = 0
    strangers: dict[Stranger, int] = field(default_factory=dict)
    names: dict[int, Stranger] = field(default_factory=dict)


class Spans:
    """Sums up windows into spans and compares each with the profile."""

    def __init__(self, profile: LaunchProfile) -> None:
        self._profile = profile
        self._kernels = len(profile.kernels)
        self._phases = np.zeros((len(profile.phases), self._kernels))
        for row, phase in enumerate(profile.phases):
            for number, share in phase.shares:
                self._phases[row, number] = share
        self._most = np.array([kernel.most for kernel in profile.kernels])
        self.distance_limit = DISTANCE_FACTOR * profile.phase_distance + DISTANCE_MARGIN
        self.unexplained_limit = max(
            UNEXPLAINED_LEAST, UNEXPLAINED_FACTOR * profile.unexplained + UNEXPLAINED_MARGIN
        )
        self._span = self._new()

    def _new(self) -> Span:
        zeros = np.zeros((4, self._kernels))
        return Span(*zeros)

    def add(
        self, window: LaunchWindow, places: Sequence[Placed], seen: Seen | None
    ) -> SpanFit | None:
        """One more window; how the span fits that it completed, if it did."""
        span = self._span
        for use, placed in zip(window.kernels, places, strict=True):
            self._count(use, placed)
        if seen is not None:
            numbers = np.array([*(one.number for one in places), NONE], np.int64)
            number = numbers[seen.place]
            span.sampled += np.bincount(number[seen.claimed], minlength=self._kernels)
            span.unplaced += np.bincount(number[seen.unplaced], minlength=self._kernels)
        span.seconds += max(0.0, (window.until_ns - window.from_ns) / 1e9)
        if span.seconds < self._profile.span_seconds:
            return None
        self._span = self._new()
        return self._fit(span)

    def _count(self, use: KernelUse, placed: Placed) -> None:
        span, standing, count = self._span, placed.standing, use.launches
        if standing == Standing.UNNAMED:
            return
        span.launches += count
        if placed.number >= 0:
            span.counts[placed.number] += count
            if standing == Standing.CLAIMED:
                span.claimed[placed.number] += count
                span.names.setdefault(placed.number, (use.name, use.digest))
        elif standing == Standing.NEW:
            span.new_known += count
        elif standing == Standing.OUTSIDE:
            span.outside += count
        else:
            span.strange += count
            stranger = (use.name, use.digest)
            if stranger in span.strangers or len(span.strangers) < STRANGERS_LIMIT:
                span.strangers[stranger] = span.strangers.get(stranger, 0) + count

    def _fit(self, span: Span) -> SpanFit:
        share = np.divide(
            span.unplaced, span.sampled, out=np.zeros(self._kernels), where=span.sampled >= SAMPLES
        )
        unplaced = share * span.claimed
        strangers = dict(span.strangers)
        for number in np.flatnonzero(unplaced >= 1).tolist():
            stranger = span.names[number]
            strangers[stranger] = strangers.get(stranger, 0) + int(unplaced[number])
        distance = self._distance(span, share > MIXED_IN)
        return SpanFit(
            launches=span.launches,
            outside=span.outside,
            unexplained=span.strange + int(unplaced.sum()),
            distance=distance,
            is_usual=distance <= self.distance_limit,
            new_known=span.new_known,
            more_than_learned=self._more(span),
            strangers=strangers,
        )

    def _distance(self, span: Span, mixed_in: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> float:
        """How far the launches are from the learned phases, kernels out of place aside."""
        rest = np.where(mixed_in, 0.0, span.counts)
        total = float(rest.sum()) + span.new_known
        if total < REST_LAUNCHES or not len(self._phases):
            return 1.0
        phases = np.where(mixed_in, 0.0, self._phases)
        left = phases.sum(axis=1, keepdims=True)
        phases = (phases / np.where(left > 0, left, 1.0))[left[:, 0] > 0]
        return min(1.0, nearest(rest / total, phases) + span.new_known / total / 2)

    def _more(self, span: Span) -> tuple[tuple[int, float], ...]:
        if not span.launches:
            return ()
        share = span.counts / span.launches
        found = np.flatnonzero(share > DISTANCE_FACTOR * self._most + DISTANCE_MARGIN)
        order = sorted(found.tolist(), key=lambda number: -share[number])
        return tuple((number, float(share[number])) for number in order[:4])
