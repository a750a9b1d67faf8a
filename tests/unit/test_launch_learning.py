"""What may be learned of a run: nothing of one with signs, and what a good one teaches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as with_fields

from gpuwarden.cuda.launches.learning import Learning
from gpuwarden.cuda.launches.profile import WITHOUT_END
from gpuwarden.errors import UsageError
from gpuwarden.model import KernelUse, LaunchWindow
from tests.support.launch_learning import LEARN_SECONDS, ORIGIN, learning_of, profile, training
from tests.support.launch_runs import Miner, Workload, beside, merged, windows


def test_a_good_run_teaches_its_kernels_order_and_step() -> None:
    learned = profile()
    table = {(one.name, one.digest) for one in training().table if not one.jit}
    fixed = [kernel for kernel in learned.kernels if not kernel.jit]
    assert all((kernel.name, kernel.digests[0]) in table for kernel in fixed)
    assert any(kernel.jit and kernel.name.endswith("_#") for kernel in learned.kernels)
    assert sum(kernel.launches for kernel in learned.kernels) == learned.launches
    assert learned.periods[0].seconds == pytest.approx(0.13, rel=0.1)
    assert 2 <= len(learned.phases) <= 16
    assert learned.span_seconds == 5.0
    assert learned.unexplained < 0.02
    assert learned.phase_distance < 0.1
    alone = [kernel for kernel in learned.kernels if kernel.longest_run == WITHOUT_END]
    assert len(alone) == 1, "the copies have a stream of their own"
    assert all(kernel.own_rhythm_hz == 0 for kernel in learned.kernels)
    origin = learned.origins[0]
    assert (origin.node, origin.policy_profile) == ("node1", "torch")
    assert origin.launches == learned.launches
    assert (learned.workload, learned.created) == ("training", ORIGIN.learned)


def test_the_same_run_teaches_the_same() -> None:
    again = learning_of(training(), 1).profile(name="train", origin=ORIGIN, tool="test")
    assert again == profile()


@pytest.mark.parametrize("step", [0.02, 0.13, 0.3])
def test_the_step_is_found_through_jitter(step: float) -> None:
    workload = Workload(seed=5, kernels=60, launches=int(step * 1500), step_seconds=step)
    periods = learning_of(workload, 2, 60.0).run.periods()
    assert periods[0].seconds == pytest.approx(step, rel=0.15)


def test_a_step_of_seconds_is_found_in_the_counts() -> None:
    workload = Workload(seed=5, kernels=60, launches=3000, step_seconds=7.0, evaluation_every=0)
    learning = learning_of(workload, 2, 240.0)
    assert any(one.seconds == pytest.approx(7.2, rel=0.15) for one in learning.run.periods())


def test_a_run_that_is_too_short_says_how_long_is_enough() -> None:
    learning = learning_of(training(), 1, 40.0)
    (why,) = learning.objections()
    assert "0 s of launches were seen; 120 s are enough" in why
    assert "steps of 1" in why
    with pytest.raises(UsageError, match="nothing is learned of this run: 40 s"):
        learning.profile(name="short")


Change = Callable[[LaunchWindow], LaunchWindow]


def changed_names(share: float, change: Callable[[KernelUse], KernelUse]) -> Change:
    """A window in which the first kernels, up to that share of launches, are changed."""

    def changed(window: LaunchWindow) -> LaunchWindow:
        left = share * sum(use.launches for use in window.kernels)
        uses = []
        for use in window.kernels:
            left -= use.launches
            uses.append(change(use) if left > 0 else use)
        return with_fields(window, kernels=tuple(uses))

    return changed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed_names(0.3, lambda use: with_fields(use, name="")), "names were not seen"),
        (changed_names(0.5, lambda use: with_fields(use, digest="")), "bytes were not seen"),
        (
            changed_names(0.5, lambda use: with_fields(use, digest="ee" * 32)),
            "modules that no baseline of the profile knows",
        ),
        (lambda window: with_fields(window, samples=()), "no launches were sampled"),
        (lambda window: with_fields(window, kernels=()), "no launch of a kernel"),
        (
            lambda window: with_fields(window, dropped=10**9 if window.samples else 0),
            "found no room",
        ),
    ],
)
def test_what_a_run_is_refused_for(change: Change, words: str) -> None:
    workload, learning = training(), Learning()
    for window in windows(workload.run(LEARN_SECONDS, 1), workload.table):
        learning.add(change(window), workload.digests, jit_digests=workload.jit_digests)
    assert any(words in why for why in learning.objections())
    with pytest.raises(UsageError):
        learning.profile(name="x")


def test_a_run_with_a_miner_or_a_finding_is_refused() -> None:
    workload, miner = training(), Miner(0.01)
    table = [*workload.table, miner.kernel(workload)]
    run = miner.mixed(workload.run(LEARN_SECONDS, 1), len(workload.table), 1)
    learning = Learning()
    for window in windows(run, table):
        learning.add(window, workload.digests, jit_digests=workload.jit_digests)
    (why,) = learning.objections()
    assert "_Z12sha256d_scanPKjPjj of module" in why
    sign = "critical gpu_cryptominer: a miner"
    with pytest.raises(UsageError, match="a miner"):
        learning_of(workload, 1).profile(name="x", signs=[sign])


def test_a_run_that_has_not_settled_is_refused() -> None:
    workload = training()
    late = workload.with_new_code(1, 1.0)
    learning = Learning()
    for second, window in enumerate(windows(workload.run(LEARN_SECONDS, 1), workload.table)):
        if second < 120:
            learning.add(window, workload.digests, jit_digests=workload.jit_digests)
    for window in windows(late.run(30, 2), late.table):
        learning.add(window, late.digests, jit_digests=late.jit_digests)
    assert any("has not settled" in why for why in learning.objections())


def test_kernels_of_a_thread_of_their_own_are_learned_with_their_rate() -> None:
    workload = training()
    jit = next(n for n, one in enumerate(workload.table) if one.jit)
    name = "triton_poi_fused_prefetch_5"
    table = [*workload.table, replace(workload.table[jit], name=name)]
    extra = beside(0.05, LEARN_SECONDS, np.array([len(table) - 1]), 3)
    learning = Learning()
    for window in windows(merged(workload.run(LEARN_SECONDS, 1), extra), table):
        learning.add(window, workload.digests, jit_digests=workload.jit_digests)
    learned = learning.profile(name="x")
    kernel = next(k for k in learned.kernels if k.name == "triton_poi_fused_prefetch_#")
    assert kernel.own_rhythm_hz == pytest.approx(20, rel=0.3)
    assert kernel.longest_run == WITHOUT_END
