"""How the launches of one process fit a launch profile, window by window.

Three things are said of it. Kernels of modules that the profile does not have: exact. A second
stream: kernels the profile does not explain that come steadily and out of step with all others.
And launches that it does not explain, where everything else is as it was learned; where that is
not so either, the workload does something new, and code that is known by its digest accuses
nobody. Code is known, or only claimed to be: where a module's bytes were not seen, or it is of a
class that anyone can imitate, a name explains a launch only together with its place and shape.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container

from msgspec import Struct

from gpuwarden.cuda.launches.candidates import Candidates
from gpuwarden.cuda.launches.explanation import Facts, Told, explain
from gpuwarden.cuda.launches.kernels import KernelIndex, Standing
from gpuwarden.cuda.launches.novelty import LearnedOrder
from gpuwarden.cuda.launches.profile import LaunchProfile
from gpuwarden.cuda.launches.spans import AT_LEAST, OF_SPANS, SpanFit, Spans
from gpuwarden.model import KernelUse, LaunchFit, LaunchWindow

OUTSIDE_LIMIT = 64
"""Kernels of other modules that are kept apart; how often more were launched is said."""
SPANS_KEPT = 12
TOLD = 8
SMALL = 0.02
"""Share of the launches that are not explained, below which a kernel is not named for them."""
LAUNCHES = 100
"""Of a process before anything but a foreign module is said."""


class _Outside(Struct):
    use: KernelUse
    first_ns: int
    launches: int = 0


class Comparison:
    """The launches of one process so far, beside the profile of its workload."""

    def __init__(self, profile: LaunchProfile, *, wall_offset_ns: int | None = None) -> None:
        """``wall_offset_ns`` is the wall clock's time minus the boot clock's; without it no time
        is told."""
        self._profile = profile
        self._offset_ns = wall_offset_ns
        self._index = KernelIndex(profile)
        self._order = LearnedOrder(profile)
        self._spans = Spans(profile)
        self._candidates = Candidates(profile)
        self._last: deque[SpanFit] = deque(maxlen=SPANS_KEPT)
        self._outside: dict[tuple[str, str], _Outside] = {}
        self._more_outside = 0
        self._launches = self._named = self._outside_launches = self._graphs = 0
        self._unexplained_since_ns: int | None = None

    def add(
        self,
        window: LaunchWindow,
        allowed_digests: Container[str],
        *,
        jit_digests: Container[str] = frozenset(),
    ) -> LaunchFit | None:
        """One more window; how the process fits now, None while too little was launched.

        ``allowed_digests`` are those of loaded modules that the workload's baselines know or its
        policy allows, ``jit_digests`` those of them that are only of an allowed class.
        """
        places = [self._index.place(use, allowed_digests, jit_digests) for use in window.kernels]
        self._graphs += window.graph_launches
        for use, placed in zip(window.kernels, places, strict=True):
            self._launches += use.launches
            self._named += use.launches if placed.standing != Standing.UNNAMED else 0
            if placed.standing == Standing.OUTSIDE:
                self._is_outside(use, window)
        self._forgive(allowed_digests)
        self._candidates.forgive(allowed_digests)
        seen = self._order.look(window, places) if window.samples else None
        self._candidates.add(window, places, seen)
        span = self._spans.add(window, places, seen)
        if span is not None:
            self._last.append(span)
            self._unexplained_since_ns = self._since(
                self._is_unexplained(), self._unexplained_since_ns, window
            )
        return self._fit(window)

    def _is_outside(self, use: KernelUse, window: LaunchWindow) -> None:
        self._outside_launches += use.launches
        key = (use.name, use.digest)
        known = self._outside.get(key)
        if known is None:
            if len(self._outside) >= OUTSIDE_LIMIT:
                self._more_outside += use.launches
                return
            known = self._outside[key] = _Outside(use, window.from_ns)
        known.launches += use.launches

    def _forgive(self, allowed: Container[str]) -> None:
        """A module that is known by now was launched from before it was examined."""
        for key in [key for key in self._outside if key[1] in allowed]:
            self._outside_launches -= self._outside.pop(key).launches

    def _since(self, true: bool, since_ns: int | None, window: LaunchWindow) -> int | None:
        if not true:
            return None
        return window.from_ns if since_ns is None else since_ns

    def _is_usual(self) -> bool:
        return sum(span.is_usual for span in list(self._last)[-OF_SPANS:]) >= AT_LEAST

    def _is_unexplained(self) -> bool:
        recent = list(self._last)[-OF_SPANS:]
        return (
            len(recent) >= AT_LEAST
            and self._exceeds(recent[-1])
            and (sum(self._exceeds(span) for span in recent) >= AT_LEAST)
        )

    def _exceeds(self, span: SpanFit) -> bool:
        own = span.launches - span.outside
        return span.is_usual and span.unexplained > self._spans.unexplained_limit * own

    # ---------------------------------------------------------------- what is said

    def _fit(self, window: LaunchWindow) -> LaunchFit | None:
        second = list(self._candidates.second_stream(usual=self._is_usual()))
        if self._launches < LAUNCHES and not self._outside:
            return None
        outside = sorted(self._outside.values(), key=lambda one: -one.launches)
        unexplained = self._strangers() if self._unexplained_since_ns is not None else ()
        began = [one.first_ns for one in outside]
        began += [one.candidate.first_ns for one in second]
        began += [self._unexplained_since_ns] if self._unexplained_since_ns is not None else []
        lines = explain(
            Facts(
                profile=self._profile,
                outside=tuple(Told(one.use, one.launches, one.first_ns) for one in outside),
                more_outside=self._more_outside,
                second=tuple(second),
                unexplained=unexplained,
                unexplained_since_ns=self._unexplained_since_ns,
                spans=tuple(self._last),
                launches=self._launches,
                named=self._named,
                graph_launches=self._graphs,
                offset_ns=self._offset_ns,
            )
        )
        return LaunchFit(
            pid=window.pid,
            start_time_ticks=window.start_time_ticks,
            profile=self._profile.name,
            launches=self._launches,
            explained_share=round(self._explained_share(), 4),
            outside=tuple(
                KernelUse(name=one.use.name, digest=one.use.digest, launches=one.launches)
                for one in outside[:TOLD]
            ),
            second_stream=tuple(
                KernelUse(
                    name=one.candidate.use.name,
                    digest=one.candidate.use.digest,
                    launches=one.candidate.launches,
                )
                for one in second[:TOLD]
            ),
            second_period_seconds=second[0].period_seconds if second else None,
            unexplained=unexplained,
            words=lines,
            since_ns=min(began) + self._offset_ns
            if began and self._offset_ns is not None
            else None,
        )

    def _strangers(self) -> tuple[KernelUse, ...]:
        counts: Counter[tuple[str, str]] = Counter()
        for span in list(self._last)[-OF_SPANS:]:
            counts.update(span.strangers)
        return tuple(
            KernelUse(name=name, digest=digest, launches=launches)
            for (name, digest), launches in counts.most_common(TOLD)
            if launches >= counts.total() * SMALL
        )

    def _explained_share(self) -> float:
        launches = sum(span.launches for span in self._last)
        if launches:
            missing = sum(span.outside + span.unexplained for span in self._last)
        else:
            launches, missing = self._named, self._outside_launches
        return max(0.0, 1 - missing / launches) if launches else 1.0
