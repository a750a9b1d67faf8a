"""A launch profile from a run that is known to be good: of one with signs nothing is learned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence

import numpy as np
from msgspec.structs import replace

from gpuwarden.cuda.launches.phases import Floats, representatives, shares, unlike
from gpuwarden.cuda.launches.profile import (
    KERNELS_LIMIT,
    PHASES_LIMIT,
    SHAPES_LIMIT,
    TRANSITIONS_LIMIT,
    LaunchProfile,
    Origin,
    Phase,
    ProfiledKernel,
    rounded,
)
from gpuwarden.cuda.launches.runs import Run, RunSpan
from gpuwarden.cuda.launches.sequences import unpaired
from gpuwarden.cuda.launches.spans import AT_LEAST, OF_SPANS
from gpuwarden.errors import UsageError
from gpuwarden.model import LaunchWindow

SPAN_SECONDS = 5.0
PERIODS_OF_A_SPAN = 3
LONGEST_SPAN_SECONDS = 60.0
SPANS = 24
UNNAMED_SHARE = 0.02
UNKNOWN_SHARE = 0.05
KEPT_SHARE = 0.02
SETTLED_SHARE = 0.02
NAMED = 4
"""Kernels that an objection names."""
QUANTILE = 0.95
LEAST_SHARE = 5e-7
"""Smaller shares of a phase are not written down."""


class Learning:
    """Takes up the windows of one process, then says whether and what they teach."""

    def __init__(self) -> None:
        self.run = Run()

    def add(
        self,
        window: LaunchWindow,
        allowed_digests: Container[str],
        *,
        jit_digests: Container[str] = frozenset(),
    ) -> None:
        """One more window; ``allowed_digests`` are those of loaded modules that the workload's
        baselines know or its policy allows, ``jit_digests`` those only allowed by their class."""
        self.run.add(window, allowed_digests, jit_digests)

    def enough_seconds(self) -> float:
        """How long a run has to be seen: as many spans as its steps are long."""
        return SPANS * self._span_seconds()

    def _span_seconds(self) -> float:
        step = self._step() or 0.0
        return min(LONGEST_SPAN_SECONDS, max(SPAN_SECONDS, PERIODS_OF_A_SPAN * step))

    def _step(self) -> float | None:
        return next((one.seconds for one in self.run.periods()), None)

    def objections(self, signs: Iterable[str] = ()) -> list[str]:
        """Why nothing may be learned of the run; ``signs`` are those that others saw of it."""
        run = self.run
        found = list(signs)
        if run.refused:
            names = ", ".join(
                f"{name[:80]} of module {digest[:16]}"
                for (name, digest), _ in run.refused.most_common(NAMED)
            )
            more = len(run.refused) - NAMED
            also = f" and {more} more" if more > 0 else ""
            found.append(f"kernels of modules that no baseline of the profile knows: {names}{also}")
        if not run.launches:
            return [*found, "no launch of a kernel was seen"]
        for count, limit, what in (
            (run.unnamed, UNNAMED_SHARE, "kernels whose names were not seen"),
            (run.unknown, UNKNOWN_SHARE, "kernels whose modules' bytes were not seen"),
        ):
            if count > limit * run.launches:
                share = count / run.launches
                found.append(f"{share:.0%} of the launches are of {what}; at most {limit:.0%}")
        if run.crowded:
            found.append(f"it launches more than {KERNELS_LIMIT} different kernels")
        if not run.sampled:
            found.append("no launches were sampled in order")
        elif run.sampled < KEPT_SHARE * (run.sampled + run.dropped):
            found.append("most launches of the sampled windows found no room")
        found.extend(self._too_early())
        return found

    def _too_early(self) -> Iterable[str]:
        enough = self.enough_seconds()
        if self.run.seconds < enough:
            step = self._step()
            steps = f", {enough / step:.0f} steps of {step * 1e3:.0f} ms" if step else ""
            seen = f"{self.run.seconds:.0f} s of launches were seen"
            yield f"{seen}; {enough:.0f} s are enough{steps}"
        elif (late := self.run.late_share()) > SETTLED_SHARE:
            yield (
                f"{late:.0%} of the launches in its last quarter are of kernels that came only "
                "then: it has not settled"
            )
        elif len(self.run.spans(self._span_seconds())) < SPANS // 2:
            yield "it launched next to nothing most of the time"

    def profile(
        self, *, name: str, origin: Origin | None = None, tool: str = "", signs: Iterable[str] = ()
    ) -> LaunchProfile:
        """The profile of the run. Errors: UsageError with every objection."""
        objections = self.objections(signs)
        if objections:
            raise UsageError(f"nothing is learned of this run: {'; '.join(objections)}")
        return _profile(self.run, self._span_seconds(), name, origin or Origin(), tool)


def _profile(run: Run, span_seconds: float, name: str, origin: Origin, tool: str) -> LaunchProfile:
    spans = run.spans(span_seconds)
    mixes = shares(np.array([span.counts for span in spans]))
    chosen = representatives(mixes, PHASES_LIMIT)
    windows, seconds = len(run.windows), rounded(run.seconds)
    return LaunchProfile(
        name=name,
        workload=origin.workload,
        created=origin.learned,
        tool=tool,
        origins=(replace(origin, windows=windows, launches=run.launches, seconds=seconds),),
        windows=windows,
        launches=run.launches,
        seconds=seconds,
        graph_launches=run.graph_launches,
        kernels=_kernels(run, mixes),
        transitions=tuple(
            sorted(
                (*unpaired(code), count)
                for code, count in run.transitions.most_common(TRANSITIONS_LIMIT)
            )
        ),
        periods=run.periods(),
        phases=tuple(_phase(mixes[row]) for row in chosen),
        span_seconds=rounded(span_seconds),
        phase_distance=rounded(min(1.0, float(np.quantile(unlike(mixes, chosen), QUANTILE)))),
        unexplained=_lasting(_left_out(run, spans)),
    )


def _lasting(values: Sequence[float]) -> float:
    """The most that so many of so many spans in a row reach as a comparison asks for."""
    rows = [sorted(values[at : at + OF_SPANS]) for at in range(max(1, len(values) - OF_SPANS + 1))]
    return rounded(min(1.0, max(row[-AT_LEAST] for row in rows if len(row) >= AT_LEAST)))


def _phase(mix: Floats) -> Phase:
    there = np.flatnonzero(mix >= LEAST_SHARE)
    return Phase(shares=tuple((int(number), rounded(mix[number])) for number in there))


def _kernels(run: Run, mixes: Floats) -> tuple[ProfiledKernel, ...]:
    launches = np.zeros(len(run.kernels), np.int64)
    for window in run.windows:
        launches[window.numbers] += window.counts
    least, usual, most = np.quantile(mixes, (0.05, 0.5, 1.0), axis=0)
    fastest = run.fastest()
    return tuple(
        ProfiledKernel(
            name=kernel.name,
            jit=kernel.jit,
            digests=tuple(sorted(kernel.digests)),
            launches=int(launches[number]),
            least=rounded(least[number]),
            usual=rounded(usual[number]),
            most=rounded(most[number]),
            shapes=tuple(sorted(kernel.shapes)) if len(kernel.shapes) <= SHAPES_LIMIT else (),
            longest_run=kernel.longest_run,
            own_rhythm_hz=rounded(fastest[number]) if kernel.own_rhythm else 0.0,
        )
        for number, kernel in enumerate(run.kernels)
    )


def _left_out(run: Run, spans: Sequence[RunSpan]) -> list[float]:
    """Which share of each span the other ones would not explain: JIT kernels and transitions to
    them that only it has. Other kernels are known by their code."""
    had = np.sum([span.counts > 0 for span in spans], axis=0)
    seen: Counter[int] = Counter()
    for span in spans:
        seen.update(span.pairs.keys())
    jit = np.array([kernel.jit for kernel in run.kernels], bool)
    found = []
    for span in spans:
        launches = span.counts * jit
        alone = float(launches[had == 1].sum())
        sampled = span.pairs.total()
        new = sum(count for code, count in span.pairs.items() if seen[code] == 1)
        ordered = float(launches[had > 1].sum()) * (new / sampled if sampled else 0.0)
        found.append((alone + ordered) / float(span.counts.sum()))
    return found
