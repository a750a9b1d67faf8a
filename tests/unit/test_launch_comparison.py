"""Runs beside a learned profile: the workload's own accuse nobody, a miner among them is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.cuda.launches.candidates import CANDIDATES_LIMIT
from gpuwarden.cuda.launches.comparison import OUTSIDE_LIMIT, Comparison
from gpuwarden.cuda.launches.profile import LaunchProfile
from gpuwarden.model import KernelUse, LaunchFit, LaunchSample
from tests.support.launch_learning import accused, fits, learning_of, profile, training, window_of
from tests.support.launch_runs import (
    Launched,
    Miner,
    MinerName,
    Workload,
    beside,
    digest_of,
    merged,
    windows,
)

SECONDS = 90.0
KNOWN = "ab" * 32
OTHER = "cd" * 32


def first(found: list[LaunchFit | None], what: str) -> int:
    """The first window after which a process is accused of it."""
    return next(n for n, fit in enumerate(found) if what in accused(fit))


def last(found: list[LaunchFit | None]) -> LaunchFit:
    assert found[-1] is not None
    return found[-1]


# ------------------------------------------------------------------ the workload's own

Change = Callable[[Workload], Workload]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: one, ()),
        (lambda one: one.of_run(8), ()),
        (lambda one: one.with_missed(8), ()),
        (lambda one: one.with_shapes(8), ("of modules that are known",)),
        (
            lambda one: replace(Workload(seed=77, kernels=60, launches=150), table=one.table),
            ("known kernels come in other shares than in any phase that was learned",),
        ),
        (lambda one: one.with_new_code(8, 0.6), ()),
    ],
    ids=["same", "another run", "modules missed", "other shapes", "another program", "new code"],
)
def test_the_workloads_own_launches_accuse_nobody(change: Change, words: tuple[str, ...]) -> None:
    live = change(training())
    found = fits(live.run(SECONDS, 21), live, live.table)
    assert not [n for n, fit in enumerate(found) if list(accused(fit))]
    for text in words:
        assert any(text in line for line in last(found).words)


def test_a_run_as_learned_is_explained_without_a_word() -> None:
    live = training().of_run(4)
    fit = last(fits(live.run(SECONDS, 21), live, live.table))
    assert (fit.explained_share, fit.words, fit.since_ns) == (1.0, (), None)
    assert (fit.pid, fit.start_time_ticks, fit.profile) == (4242, 100, "train")


def test_a_phase_that_was_not_learned_is_told_and_accuses_nobody() -> None:
    quiet = replace(training(), evaluation_every=0, table=training().table)
    learned = learning_of(quiet, 1).profile(name="no evaluation")
    comparison = Comparison(learned)
    live = training()
    seen: set[str] = set()
    for window in windows(live.run(SECONDS, 5), live.table):
        fit = comparison.add(window, live.digests, jit_digests=live.jit_digests)
        assert not list(accused(fit))
        seen.update(fit.words if fit is not None else ())
    assert any(line.startswith("known kernels come in other shares") for line in seen)


def test_a_thread_that_was_learned_with_its_own_rhythm_is_known() -> None:
    def with_thread(workload: Workload, every: float, seed: int) -> Launched:
        number = next(n for n, one in reversed(list(enumerate(workload.table))) if one.jit)
        extra = beside(every, 150, np.array([number]), seed)
        return merged(workload.run(150, seed), extra)

    workload = training()
    learning = learning_of(workload, 1)
    for window in windows(with_thread(workload, 0.05, 1), workload.table):
        learning.add(window, workload.digests, jit_digests=workload.jit_digests)
    learned = learning.profile(name="with a thread")
    again = workload.of_run(9)
    comparison = Comparison(learned)
    for window in windows(with_thread(again, 0.04, 2), again.table):
        fit = comparison.add(window, again.digests, jit_digests=again.jit_digests)
        assert not list(accused(fit))


# ------------------------------------------------------------------ a miner among them


def mined(miner: Miner, seed: int = 5) -> list[LaunchFit | None]:
    live = training().of_run(seed)
    table = [*live.table, miner.kernel(live)]
    return fits(miner.mixed(live.run(SECONDS, seed), len(live.table), seed), live, table)


@pytest.mark.parametrize("share", [0.02, 0.2, 0.5])
def test_a_foreign_module_is_named_at_once_with_its_share_and_rhythm(share: float) -> None:
    found = mined(Miner(share))
    assert first(found, "outside") == 0
    fit = last(found)
    assert [use.name for use in fit.outside] == ["_Z12sha256d_scanPKjPjj"]
    assert fit.explained_share == pytest.approx(1 - share, abs=0.01)
    assert first(found, "second") <= 40
    assert fit.second_stream[0].digest == digest_of("miner")
    period = fit.second_period_seconds
    assert period == pytest.approx(1 / (1100 * share / (1 - share)), rel=0.3)
    (line, *_) = fit.words
    assert line.startswith(
        "kernel _Z12sha256d_scanPKjPjj (from module 6d696e657200…, in no baseline of profile torch)"
        f" is {share:.0%} of launches, every "
    )
    assert "on a thread or stream of its own, out of step with the workload's step of 1" in line
    assert line.endswith(", since 1970-01-01 00:16:40Z")
    assert fit.since_ns == 1_000_000_000_000


@pytest.mark.parametrize("name", ["missed", "jit", "jit-known"])
@pytest.mark.parametrize("share", [0.05, 0.3])
def test_names_do_not_hide_a_rhythm_of_its_own(name: MinerName, share: float) -> None:
    found = mined(Miner(share, name))
    fit = last(found)
    assert first(found, "second") <= 60
    assert len(fit.second_stream) == 1
    assert fit.outside == ()
    assert any("out of step with the workload's step of 1" in line for line in fit.words)
    known = "a name that the profile has, here in other places or shapes than learned"
    assert any(known in line for line in fit.words) is (name != "jit")


def test_in_step_with_the_workload_it_is_unexplained_at_a_share() -> None:
    live = training().of_run(5)
    run = live.run(SECONDS, 5)
    # After every launch of one kernel: no clock of its own.
    place = np.flatnonzero(run.kernel == np.bincount(run.kernel).argmax())
    miner = Miner(0.2, "jit").kernel(live)
    extra = Launched(
        run.at[place] + 1e-6, np.full(len(place), 60), run.thread[place], run.stream[place]
    )
    found = fits(merged(run, extra), live, [*live.table, miner])
    fit = last(found)
    assert list(accused(fit)) == ["unexplained"]
    assert [use.name for use in fit.unexplained] == [miner.name]
    assert any(
        line.endswith(f"while all others are as learned: {miner.name}, since 1970-01-01 00:16:54Z")
        for line in fit.words
    ), fit.words
    assert fit.explained_share < 0.95


def test_a_miner_of_its_own_shape_is_told_from_the_kernel_whose_name_it_has() -> None:
    miner = Miner(0.1, "missed", own_thread=True)
    live = training().of_run(5)
    kernel = replace(miner.kernel(live), block=(1024, 1, 1))
    run = miner.mixed(live.run(SECONDS, 5), len(live.table), 5)
    # On the main thread's stream: neither the thread nor the stream tells.
    mine = run.kernel == len(live.table)
    run = replace(run, thread=np.where(mine, 100, run.thread), stream=np.where(mine, 7, run.stream))
    fit = last(fits(run, live, [*live.table, kernel]))
    assert [use.name for use in fit.second_stream] == [kernel.name]


# ------------------------------------------------------------------ few windows, odd windows


def use(name: str, digest: str = "", launches: int = 1) -> KernelUse:
    return KernelUse(name=name, digest=digest, launches=launches)


def test_nothing_is_said_of_a_few_launches_but_of_a_foreign_one() -> None:
    comparison = Comparison(profile())
    assert comparison.add(window_of([use("new", KNOWN, 5)]), {KNOWN}) is None
    fit = comparison.add(window_of([use("scan", OTHER)], 1), {KNOWN})
    assert fit is not None
    assert fit.outside == (use("scan", OTHER),)
    assert fit.since_ns is None, "no clock was given"


def test_a_module_that_was_examined_late_is_forgiven() -> None:
    comparison = Comparison(profile())
    before = comparison.add(window_of([use("fine", OTHER, 500)]), {KNOWN})
    after = comparison.add(window_of([use("fine", OTHER, 500)], 1), {KNOWN, OTHER})
    assert before is not None and after is not None
    assert (len(before.outside), len(after.outside)) == (1, 0)
    assert (before.explained_share, after.explained_share) == (0.0, 1.0)


def test_a_kernel_whose_module_is_known_by_now_is_no_candidate_any_more() -> None:
    """Nor one that has the name of a learned kernel: its module is known."""
    comparison = Comparison(profile())
    kernel = next(one for one in profile().kernels if not one.jit)
    early = [use("new", "", 50), use(kernel.name, "", 50)]
    samples = tuple(LaunchSample(n, n % 2, 1, 1, (7, 7, 7)) for n in range(100))
    comparison.add(window_of(early, samples=samples), {KNOWN})
    assert len(comparison._candidates._found) == 2
    both = [*early, use("new", KNOWN, 50), use(kernel.name, kernel.digests[0], 50)]
    comparison.add(window_of(both, 1), {KNOWN})
    assert len(comparison._candidates._found) == 2, "another one of that name is still not known"
    comparison.add(window_of(both[2:], 2), {KNOWN})
    assert not comparison._candidates._found


def test_launches_without_a_name_accuse_nobody_and_are_told() -> None:
    comparison = Comparison(profile())
    fit = None
    for second in range(30):
        fit = comparison.add(window_of([use("", "", 900), use("", KNOWN, 100)], second), {KNOWN})
    assert fit is not None
    assert not list(accused(fit))
    assert fit.explained_share == 1.0
    assert fit.words == (
        "of 100% of launches the kernel is not known: it was asked for before this process was "
        "watched",
    )


def test_graphs_are_told_where_the_learned_run_had_none() -> None:
    comparison = Comparison(profile())
    fit = comparison.add(window_of([use("new", KNOWN, 500)], graph_launches=3), {KNOWN})
    assert fit is not None
    assert any("it launches graphs" in line for line in fit.words)
    assert not list(accused(fit))


def test_what_is_kept_is_bounded_whatever_is_launched() -> None:
    comparison = Comparison(profile())
    fit = None
    for second in range(40):
        kernels = [use(f"kernel {second} {n}", OTHER, n + 1) for n in range(200)]
        samples = tuple(
            LaunchSample(second * 10**9 + n * 10**6, n % 200, n % 7, n) for n in range(1000)
        )
        fit = comparison.add(window_of(kernels, second, samples=samples), frozenset())
    assert fit is not None
    assert len(comparison._outside) == OUTSIDE_LIMIT
    assert len(comparison._candidates._found) <= CANDIDATES_LIMIT
    assert len(fit.outside) <= 8
    assert any("more kernels of such modules" in line for line in fit.words)
    assert len(fit.words) < 20


def test_a_hostile_name_is_cut() -> None:
    comparison = Comparison(profile())
    fit = comparison.add(window_of([use("\ud800" + "x" * 300, OTHER, 500)]), frozenset())
    assert fit is not None
    assert "x" * 79 + "…" in fit.words[0]
    assert "x" * 81 not in fit.words[0]


def test_a_profile_of_nothing_explains_nothing() -> None:
    comparison = Comparison(LaunchProfile())
    fit = None
    for second in range(20):
        kernels = [use("a", KNOWN, 500), use("b", "", 500)]
        samples = tuple(LaunchSample(second * 10**9 + n, n % 2, 1, 1) for n in range(50))
        fit = comparison.add(window_of(kernels, second, samples=samples), {KNOWN})
    assert fit is not None
    assert not list(accused(fit))


USES = st.builds(
    KernelUse,
    name=st.sampled_from(["", "a", "b", "triton_x_1", "triton_x_2"])
    | st.sampled_from([one.name for one in profile().kernels]),
    digest=st.sampled_from(["", KNOWN, OTHER, profile().kernels[0].digests[0]]),
    launches=st.integers(0, 1 << 40),
)
SAMPLES = st.builds(
    LaunchSample,
    st.integers(0, 1 << 62),
    st.integers(-2, 12),
    st.integers(0, 3),
    st.integers(0, 1 << 64),
    st.just((1, 1, 1)),
    st.sampled_from([(32, 1, 1), (1 << 31, 0, 0)]),
)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.lists(USES, max_size=8), st.lists(SAMPLES, max_size=30), st.integers(0, 20 * 10**9)
        ),
        max_size=12,
    )
)
def test_any_windows_give_a_fit_or_none(
    made: list[tuple[list[KernelUse], list[LaunchSample], int]],
) -> None:
    comparison = Comparison(profile(), wall_offset_ns=5)
    for second, (kernels, samples, length) in enumerate(made):
        window = window_of(
            kernels,
            samples=tuple(samples),
            from_ns=second * 10**9,
            until_ns=second * 10**9 + length - 10**9,
            graph_launches=second,
        )
        fit = comparison.add(window, {KNOWN}, jit_digests={OTHER} if second % 2 else set())
        assert fit is None or 0.0 <= fit.explained_share <= 1.0
