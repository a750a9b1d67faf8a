"""One launch profile of several runs of a workload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from gpuwarden.cuda.launches.phases import Floats, representatives, unlike
from gpuwarden.cuda.launches.profile import (
    DIGESTS_LIMIT,
    KERNELS_LIMIT,
    ORIGINS_LIMIT,
    PERIODS_LIMIT,
    PHASES_LIMIT,
    SHAPES_LIMIT,
    TRANSITIONS_LIMIT,
    LaunchProfile,
    Period,
    Phase,
    ProfiledKernel,
    rounded,
)
from gpuwarden.errors import UsageError

Key = tuple[str, bool]
SAME_PERIOD = 0.1


def merge(profiles: Sequence[LaunchProfile]) -> LaunchProfile:
    """A profile that has what any of them has. Errors: UsageError for none, or several workloads.

    The name is the first one's, and it was created when the last one was.
    """
    if not profiles:
        raise UsageError("no launch profile to merge")
    workloads = sorted({one.workload for one in profiles})
    if len(workloads) > 1:
        raise UsageError(f"launch profiles of different workloads: {', '.join(workloads)[:200]}")
    if len(profiles) == 1:
        return profiles[0]
    together: Counter[Key] = Counter()
    those: dict[Key, list[tuple[LaunchProfile, ProfiledKernel]]] = {}
    for one in profiles:
        for kernel in one.kernels:
            together[kernel.name, kernel.jit] += kernel.launches
            those.setdefault((kernel.name, kernel.jit), []).append((one, kernel))
    keys = [key for key, _ in together.most_common(KERNELS_LIMIT)]
    number = {key: place for place, key in enumerate(keys)}
    maps = [[number.get((k.name, k.jit), -1) for k in one.kernels] for one in profiles]
    phases = np.array(
        [
            _mix(phase, renumbered, len(keys))
            for one, renumbered in zip(profiles, maps, strict=True)
            for phase in one.phases
        ]
    ).reshape(-1, len(keys))
    chosen = representatives(phases, PHASES_LIMIT)
    dropped = 0.0
    if len(chosen) < len(phases):
        dropped = float(
            unlike(phases, chosen)[[r for r in range(len(phases)) if r not in chosen]].max()
        )
    return LaunchProfile(
        name=profiles[0].name,
        workload=profiles[0].workload,
        created=max(one.created for one in profiles),
        tool=profiles[0].tool,
        origins=tuple(origin for one in profiles for origin in one.origins)[:ORIGINS_LIMIT],
        runs=sum(one.runs for one in profiles),
        windows=sum(one.windows for one in profiles),
        launches=sum(one.launches for one in profiles),
        graph_launches=sum(one.graph_launches for one in profiles),
        seconds=rounded(sum(one.seconds for one in profiles)),
        kernels=tuple(_kernel(key, those[key], profiles) for key in keys),
        transitions=_transitions(profiles, maps),
        periods=_periods([period for one in profiles for period in one.periods]),
        phases=tuple(_phase(phases[row]) for row in chosen),
        span_seconds=max(one.span_seconds for one in profiles),
        phase_distance=rounded(max(dropped, *(one.phase_distance for one in profiles))),
        unexplained=max(one.unexplained for one in profiles),
    )


def _mix(phase: Phase, renumbered: Sequence[int], count: int) -> Floats:
    mix = np.zeros(count)
    for number, share in phase.shares:
        if renumbered[number] >= 0:
            mix[renumbered[number]] += share
    return mix


def _phase(mix: Floats) -> Phase:
    there = np.flatnonzero(mix > 0)
    return Phase(shares=tuple((int(n), rounded(min(1.0, mix[n]))) for n in there))


def _kernel(
    key: Key,
    found: Sequence[tuple[LaunchProfile, ProfiledKernel]],
    profiles: Sequence[LaunchProfile],
) -> ProfiledKernel:
    launches = sum(kernel.launches for _, kernel in found)
    weight = sum(one.launches for one in profiles) or 1
    usual = sum(kernel.usual * one.launches for one, kernel in found) / weight
    least = min(kernel.least for _, kernel in found) if len(found) == len(profiles) else 0.0
    most = max(kernel.most for _, kernel in found)
    shapes = {shape for _, kernel in found for shape in kernel.shapes}
    all_told = all(kernel.shapes for _, kernel in found) and len(shapes) <= SHAPES_LIMIT
    digests = sorted({digest for _, kernel in found for digest in kernel.digests})
    return ProfiledKernel(
        name=key[0],
        jit=key[1],
        digests=tuple(digests[:DIGESTS_LIMIT]),
        launches=launches,
        least=least,
        usual=rounded(min(max(usual, least), most)),
        most=most,
        shapes=tuple(sorted(shapes)) if all_told else (),
        longest_run=max(kernel.longest_run for _, kernel in found),
        own_rhythm_hz=max(kernel.own_rhythm_hz for _, kernel in found),
    )


def _transitions(
    profiles: Sequence[LaunchProfile], maps: Sequence[Sequence[int]]
) -> tuple[tuple[int, int, int], ...]:
    counts: Counter[tuple[int, int]] = Counter()
    for one, renumbered in zip(profiles, maps, strict=True):
        for first, second, count in one.transitions:
            if renumbered[first] >= 0 and renumbered[second] >= 0:
                counts[renumbered[first], renumbered[second]] += count
    kept = counts.most_common(TRANSITIONS_LIMIT)
    return tuple(sorted((first, second, count) for (first, second), count in kept))


def _periods(periods: Sequence[Period]) -> tuple[Period, ...]:
    """One of those that are about the same, in their order."""
    kept: list[Period] = []
    for period in periods:
        if all(abs(one.seconds - period.seconds) > SAME_PERIOD * one.seconds for one in kept):
            kept.append(period)
    return tuple(kept[:PERIODS_LIMIT])
