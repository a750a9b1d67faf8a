"""Launch profiles: false alarms of benign runs, what is found of miners, delay and cost.

    python bench/launch_profiles.py [--seeds 3] [--seconds 120] [--case TEXT]

Runs are made up (tests/support/launch_runs.py): no GPU is needed, and none is proof for one. Each
seed makes another workload; a profile is learned from one run of it and compared with others.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpuwarden.cuda.launches.comparison import Comparison
from gpuwarden.cuda.launches.learning import Learning
from gpuwarden.cuda.launches.profile import LaunchProfile, encode_profile
from gpuwarden.errors import UsageError
from tests.support.launch_runs import (
    Launched,
    MadeKernel,
    Miner,
    MinerName,
    Workload,
    beside,
    digest_of,
    merged,
    served,
    windows,
)

LEARN_SECONDS = 240
SHARES = (0.01, 0.05, 0.2, 0.5)
NAMES: tuple[MinerName, ...] = ("own", "renamed", "missed", "jit", "jit-known")
MINER_JIT = digest_of("jit miner")


class Live(NamedTuple):
    """A run to compare: its launches and what its modules are."""

    workload: Workload
    launched: Launched
    table: list[MadeKernel]
    grids: int = 1
    digests: frozenset[str] = frozenset()
    """Known besides those of the workload."""


class Outcome(NamedTuple):
    """What was said of a run."""

    first: dict[str, int]
    """outside, second, unexplained: the first window in which each was said."""
    mild: bool
    costs_ms: list[float]


def learn(live: Live) -> LaunchProfile:
    learning = Learning()
    for window in windows(live.launched, live.table, grids=live.grids):
        learning.add(window, live.workload.digests, jit_digests=live.workload.jit_digests)
    return learning.profile(name="bench")


def compare(profile: LaunchProfile, live: Live) -> Outcome:
    comparison = Comparison(profile, wall_offset_ns=0)
    jit = live.workload.jit_digests | {MINER_JIT}
    allowed = live.workload.digests | live.digests | jit
    first: dict[str, int] = {}
    mild, costs = False, []
    for number, window in enumerate(windows(live.launched, live.table, grids=live.grids)):
        began = time.thread_time()
        fit = comparison.add(window, allowed, jit_digests=jit)
        costs.append((time.thread_time() - began) * 1e3)
        if fit is None:
            continue
        for kind, uses in (
            ("outside", fit.outside),
            ("second", fit.second_stream),
            ("unexplained", fit.unexplained),
        ):
            if uses:
                first.setdefault(kind, number)
        mild = mild or bool(fit.words)
    return Outcome(first, mild, costs)


# ------------------------------------------------------------------ benign runs


def trained(workload: Workload, seconds: float, seed: int, *, grids: int = 1) -> Live:
    return Live(workload, workload.run(seconds, seed), workload.table, grids)


def with_thread(workload: Workload, seconds: float, seed: int, every: float) -> Live:
    """With a thread that prepares data by kernels of its own, made by a JIT compiler."""
    jit = [n for n, one in enumerate(workload.table) if one.jit][-3:]
    extra = beside(every, seconds, np.array(jit), seed)
    return Live(workload, merged(workload.run(seconds, seed), extra), workload.table)


def sized(seed: int, **fields: float) -> Workload:
    """A workload of some size; each seed has another one."""
    rng = np.random.default_rng(seed)
    kernels, launches = ((40, 100), (100, 400), (300, 600), (300, 1500))[int(rng.integers(4))]
    sizes = {
        "kernels": kernels,
        "launches": launches,
        "step_seconds": float(rng.choice([0.06, 0.13, 0.4])),
        "jit_share": float(rng.choice([0.1, 0.3, 0.6])),
        **fields,
    }
    return Workload(seed=seed, **sizes)  # type: ignore[arg-type]


Case = Callable[[int, float], tuple[Live, Live]]
"""From a seed and seconds: the run to learn from, and the one to compare."""


def benign() -> Iterator[tuple[str, Case]]:
    def made(seed: int, **fields: float) -> Workload:
        return sized(seed, **fields)

    def same(change: Callable[[Workload, int], Workload], **fields: float) -> Case:
        def case(seed: int, seconds: float) -> tuple[Live, Live]:
            workload = made(seed, **fields)
            return (
                trained(workload, LEARN_SECONDS, seed + 1),
                trained(change(workload, seed + 2), seconds, seed + 3),
            )

        return case

    def halves(seed: int, seconds: float) -> tuple[Live, Live]:
        workload = made(seed)
        run = workload.run(LEARN_SECONDS + seconds, seed)
        split = run.at < LEARN_SECONDS
        first, second = (
            Launched(*(getattr(run, name)[chosen] for name in ("at", "kernel", "thread", "stream")))
            for chosen in (split, ~split)
        )
        second = replace(second, at=second.at - LEARN_SECONDS)
        return Live(workload, first, workload.table), Live(workload, second, workload.table)

    def grids(seed: int, seconds: float) -> tuple[Live, Live]:
        workload = made(seed)
        return (
            trained(workload, LEARN_SECONDS, seed + 1, grids=8),
            trained(workload.of_run(seed), seconds, seed + 3, grids=500),
        )

    def new_evaluation(seed: int, seconds: float) -> tuple[Live, Live]:
        workload = made(seed)
        learned = replace(workload, evaluation_every=0, table=workload.table)
        return trained(learned, LEARN_SECONDS, seed), trained(workload, seconds, seed + 3)

    def another(seed: int, seconds: float) -> tuple[Live, Live]:
        workload = made(seed)
        other = replace(workload, seed=seed + 1000, table=workload.table)
        return trained(workload, LEARN_SECONDS, seed), trained(other, seconds, seed + 3)

    def server(seed: int, seconds: float) -> tuple[Live, Live]:
        workload = made(seed)
        run = served(workload, 4, 20, LEARN_SECONDS, seed)
        again = workload.of_run(seed)
        live = served(again, 4, 35, seconds, seed + 1)
        return Live(workload, run, workload.table), Live(again, live, again.table)

    def thread(seed: int, seconds: float) -> tuple[Live, Live]:
        workload = made(seed)
        again = workload.of_run(seed)
        return (
            with_thread(workload, LEARN_SECONDS, seed, 0.05),
            with_thread(again, seconds, seed + 1, 0.04),
        )

    def loop(seed: int, seconds: float) -> tuple[Live, Live]:
        workload = made(seed, kernels=2, launches=4, step_seconds=0.01, jit_share=0.5)
        return trained(workload, LEARN_SECONDS, seed), trained(workload.of_run(seed), seconds, 7)

    yield "the same run's other half", halves
    yield "another run", same(lambda workload, seed: workload.of_run(seed))
    yield "other shapes, other library kernels", same(lambda w, seed: w.with_shapes(seed))
    yield "other grids (dynamic shapes)", grids
    yield "30% of library modules missed", same(lambda w, seed: w.with_missed(seed))
    yield "80% JIT, another run", same(lambda w, seed: w.of_run(seed), jit_share=0.8)
    yield "10% of the JIT kernels changed", same(lambda w, seed: w.with_new_code(seed))
    yield "50% of the JIT kernels changed", same(lambda w, seed: w.with_new_code(seed, 0.5))
    yield "an evaluation that was not learned", new_evaluation
    yield "another program of the same kernels", another
    yield "a thread that prepares data, learned", thread
    yield "an inference server of 4 threads", server
    yield "a loop of two kernels", loop
    yield "steps of 2 s", same(lambda w, seed: w.of_run(seed), step_seconds=2.0, launches=5000)
    yield "20,000 launches a second", same(lambda w, seed: w.of_run(seed), launches=2600)


def false_alarms(seeds: int, seconds: float, wanted: str) -> list[float]:
    costs: list[float] = []
    print(f"benign runs of {seconds:.0f} s, {seeds} seeds each: runs with")
    print(f"{'':40}outside  second  unexplained  only mild words  not learned")
    for name, case in benign():
        if wanted not in name:
            continue
        outcomes, refused = [], 0
        for seed in range(seeds):
            learned, live = case(100 * seed, seconds)
            try:
                profile = learn(learned)
            except UsageError:
                refused += 1
                continue
            outcomes.append(compare(profile, live))
        counts = [
            sum(kind in one.first for one in outcomes)
            for kind in ("outside", "second", "unexplained")
        ]
        mild = sum(one.mild and not one.first for one in outcomes)
        print(f"{name:40}{counts[0]:7}{counts[1]:8}{counts[2]:13}{mild:17}{refused:13}", flush=True)
        costs += [cost for one in outcomes for cost in one.costs_ms]
    return costs


# ------------------------------------------------------------------ miners


def miners(seeds: int, seconds: float) -> None:
    print(f"\na miner beside training, {seeds} seeds each: found (median delay in windows)")
    print(f"{'share, where, name':32}{'outside':>14}{'second':>14}{'unexplained':>14}{'any':>8}")
    profiles = []
    for seed in range(seeds):
        workload = sized(100 * seed)
        profiles.append((workload, learn(trained(workload, LEARN_SECONDS, seed))))
    for share in SHARES:
        for own_thread in (True, False):
            for name in NAMES:
                outcomes = []
                for seed, (workload, profile) in enumerate(profiles):
                    again = workload.of_run(seed)
                    miner = Miner(share, name, own_thread)
                    table = [*again.table, miner.kernel(again)]
                    run = miner.mixed(again.run(seconds, seed + 50), len(again.table), seed)
                    outcomes.append(compare(profile, Live(again, run, table)))
                where = "own thread" if own_thread else "main thread"
                cells = [_found(outcomes, kind) for kind in ("outside", "second", "unexplained")]
                found = sum(bool(one.first) for one in outcomes)
                line = "".join(f"{cell:>14}" for cell in cells)
                print(f"{share:4.0%}, {where:11}, {name:12}{line}{found:5}/{seeds}", flush=True)


def _found(outcomes: list[Outcome], kind: str) -> str:
    delays = [one.first[kind] for one in outcomes if kind in one.first]
    if not delays:
        return "-"
    return f"{len(delays)}/{len(outcomes)} ({statistics.median(delays):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--case", default="", help="benign runs of that name only, no miners")
    options = parser.parse_args()
    costs = sorted(false_alarms(options.seeds, options.seconds, options.case))
    middle, high = costs[len(costs) // 2], costs[len(costs) * 95 // 100]
    print(f"cost of a window: median {middle:.1f} ms, 95% under {high:.1f} ms")
    if options.case:
        return
    miners(options.seeds, options.seconds)
    workload = Workload(seed=0)
    profile = learn(trained(workload, LEARN_SECONDS, 1))
    size = len(encode_profile(profile))
    print(f"\na profile of {len(profile.kernels)} kernels: {size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
