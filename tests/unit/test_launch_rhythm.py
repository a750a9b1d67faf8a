"""Kernels in step with others and out of it: neighbours, not periods, tell them apart."""

from __future__ import annotations

import numpy as np
import pytest

from gpuwarden.cuda.launches.rhythm import Rhythm, Verdict
from gpuwarden.cuda.launches.sequences import Array, Stretch

STEP = 60
"""Launches of a step."""
MINE = 1000


def others(
    rng: np.random.Generator, seconds: float, step_seconds: float, kinds: int = STEP
) -> tuple[Array, Array]:
    """Launches of a loop with jitter: when and of which kernel."""
    steps = int(seconds / step_seconds)
    gap = rng.lognormal(0, 0.6, STEP)
    gaps = np.tile(gap / gap.sum(), steps) * rng.lognormal(0, 0.3, STEP * steps)
    at = np.cumsum(gaps * step_seconds * 1e9).astype(np.int64)
    return at, np.tile(np.arange(STEP) % kinds, steps)


def stretch(at: Array, kernel: Array, lane: Array) -> Stretch:
    order = np.argsort(at, kind="stable")
    return Stretch(at[order], kernel[order], lane[order], order)


def beside(at: Array, kernel: Array, mine: Array, lane: int) -> Stretch:
    """The loop in lane 0 and the launches of the kernel in another, or in the same one."""
    lanes = (np.zeros(len(at), np.int64), np.full(len(mine), lane))
    kernels = np.concatenate([kernel, np.full(len(mine), MINE)])
    return stretch(np.concatenate([at, mine]), kernels, np.concatenate(lanes))


def judged(windows: list[Stretch]) -> Verdict:
    rhythm = Rhythm()
    for window in windows:
        mine = window.kernel == MINE
        rhythm.counted(int(mine.sum()))
        if rhythm.add(window, mine, ~mine):
            break
    assert rhythm.verdict is not None
    return rhythm.verdict


def in_step(places: list[int], *, lane: int, kinds: int = STEP, seed: int = 1) -> Verdict:
    """Of a kernel that is launched after these ones of every step."""
    rng, windows = np.random.default_rng(seed), []
    for _ in range(40):
        at, kernel = others(rng, 1.0, 0.05, kinds)
        after = np.flatnonzero(np.isin(np.arange(len(at)) % STEP, places))
        mine = at[after] + rng.integers(1, 2000, len(after))
        windows.append(beside(at, kernel, mine, lane))
    return judged(windows)


def timed(gaps: str, *, lane: int, hz: float = 50.0, kinds: int = STEP, seed: int = 1) -> Verdict:
    """Of a kernel with a clock of its own, or that comes by chance."""
    rng, windows = np.random.default_rng(seed), []
    for _ in range(40):
        at, kernel = others(rng, 1.0, 0.05, kinds)
        made = (
            rng.normal(1, 0.05, int(hz)) if gaps == "steady" else rng.exponential(1, int(hz))
        ) / hz
        mine = (np.cumsum(made) * 1e9).astype(np.int64)
        windows.append(beside(at, kernel, mine, lane))
    return judged(windows)


@pytest.mark.parametrize("lane", [0, 1])
@pytest.mark.parametrize(
    "places",
    [[7], [3, 23, 43], list(range(0, STEP, 6)), list(range(STEP)), [0, 1, 2, 3, 4]],
    ids=["once a step", "three times", "every sixth", "after every one", "in a row"],
)
def test_what_belongs_to_the_loop_is_in_step(places: list[int], lane: int) -> None:
    for seed in range(5):
        assert not in_step(places, lane=lane, seed=seed).out_of_step


@pytest.mark.parametrize("lane", [0, 1])
@pytest.mark.parametrize("hz", [30.0, 200.0, 3000.0])
def test_a_clock_of_its_own_is_out_of_step_and_steady(hz: float, lane: int) -> None:
    for seed in range(5):
        verdict = timed("steady", lane=lane, hz=hz, seed=seed)
        assert (verdict.out_of_step, verdict.steady) == (True, True)
        assert verdict.interval_seconds == pytest.approx(1 / hz, rel=0.05)


def test_what_comes_by_chance_is_not_steady() -> None:
    for seed in range(5):
        verdict = timed("chance", lane=1, seed=seed)
        assert (verdict.out_of_step, verdict.steady) == (True, False)


@pytest.mark.parametrize("kinds", [1, 2])
def test_in_a_loop_of_one_or_two_kernels_the_launches_in_between_tell(kinds: int) -> None:
    assert not in_step([5], lane=1, kinds=kinds).out_of_step
    assert not in_step([5, 35], lane=0, kinds=kinds).out_of_step
    assert timed("steady", lane=1, kinds=kinds, hz=37).out_of_step


def test_among_several_threads_a_thread_is_in_step_with_itself() -> None:
    """Seen over all threads its launches fall anywhere; in their own they are in their place."""
    rng, windows = np.random.default_rng(3), []
    for _ in range(20):
        parts = []
        for lane in range(4):
            at, kernel = others(rng, 1.0, 0.03 + 0.007 * lane)
            kernel = np.where((kernel == 11) & (lane == 2), MINE, kernel)
            parts.append((at, kernel, np.full(len(at), lane)))
        windows.append(stretch(*(np.concatenate(column) for column in zip(*parts, strict=True))))
    assert not judged(windows).out_of_step


def test_a_slow_one_is_steady_by_its_counts() -> None:
    rng = np.random.default_rng(2)
    rhythm, verdict = Rhythm(), None
    for _ in range(90):
        at, kernel = others(rng, 1.0, 0.05)
        mine = np.array([int(rng.integers(1, 10**9))])
        rhythm.counted(1)
        window = beside(at, kernel, mine, 1)
        if rhythm.add(window, window.kernel == MINE, window.kernel != MINE):
            verdict = rhythm.verdict
    assert verdict is not None
    assert (verdict.out_of_step, verdict.steady, verdict.interval_seconds) == (True, True, 0.0)
