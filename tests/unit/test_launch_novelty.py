"""Launches out of place, in runs and in shapes that were not learned; mixes of two phases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpuwarden.cuda.launches.comparison import Comparison
from gpuwarden.cuda.launches.kernels import KernelIndex, Placed, Standing, normalised
from gpuwarden.cuda.launches.learning import Learning
from gpuwarden.cuda.launches.novelty import LearnedOrder, Seen
from gpuwarden.cuda.launches.phases import nearest, representatives
from gpuwarden.cuda.launches.profile import LaunchProfile, ProfiledKernel
from gpuwarden.model import KernelUse, LaunchSample
from tests.support.launch_learning import accused, training, window_of
from tests.support.launch_runs import MadeKernel, beside, digest_of, merged, windows

NAMES = "abcm"
KERNELS = tuple(
    ProfiledKernel(name=name, digests=(f"{n}{n}",), longest_run=1) for n, name in enumerate(NAMES)
)
LEARNED = LaunchProfile(
    kernels=KERNELS,
    # a b c a b c …, and m after c only.
    transitions=((0, 1, 9), (1, 2, 9), (2, 0, 8), (2, 3, 1), (3, 0, 1)),
)
SHAPE = ((8, 1, 1), (32, 1, 1))


def look(launches: str, profile: LaunchProfile = LEARNED, **shapes: object) -> Seen:
    """Launches by letter in one lane, of modules that were not seen; ``x`` is a foreign one."""
    letters = sorted(set(launches))
    uses = [KernelUse(name=one, digest="ee" if one == "x" else "") for one in letters]
    places = [KernelIndex(profile).place(use, frozenset(), frozenset()) for use in uses]
    samples = tuple(
        LaunchSample(n, letters.index(one), 1, 1, *SHAPE) for n, one in enumerate(launches)
    )
    return LearnedOrder(profile).look(window_of(uses, samples=samples), places)


@pytest.mark.parametrize(
    ("launches", "unplaced"),
    [
        ("abcabcabc", ""),
        ("abcmabc", ""),
        ("abmcabc", "m"),
        ("ambmcmambm", "mmmm"),
        ("abcaxbxcabc", ""),
        ("abbc", "b"),
        ("a" * 11, "a" * 11),
        ("a" * 10, "a" * 9),
        ("x" * 40, ""),
    ],
)
def test_what_is_out_of_place(launches: str, unplaced: str) -> None:
    """Not what comes after it: without it that is where it was learned."""
    seen = look(launches)
    assert "".join(np.array(list(launches))[seen.unplaced]) == unplaced
    assert seen.strange.tolist() == [one == "x" for one in launches]
    assert (seen.ordinary == ~(seen.strange | seen.novel)).all()


def test_another_shape_is_new_and_not_out_of_place() -> None:
    shaped = (ProfiledKernel(name="a", shapes=(((1, 1, 1), (1, 1, 1)),)), *KERNELS[1:])
    seen = look("abcabc", LaunchProfile(kernels=shaped, transitions=LEARNED.transitions))
    assert seen.novel.tolist() == [True, False, False] * 2
    assert not seen.unplaced.any()


def test_the_place_of_a_kernel() -> None:
    profile = LaunchProfile(
        kernels=(
            ProfiledKernel(name="gemm", digests=("aa",)),
            ProfiledKernel(name="triton_add_#", jit=True, digests=("bb",)),
        )
    )
    index, allowed, jit = KernelIndex(profile), {"cc", "dd"}, {"dd"}
    for name, digest, standing, number in (
        ("gemm", "aa", Standing.KNOWN, 0),
        ("gemm", "cc", Standing.KNOWN, 0),
        ("gemm", "ee", Standing.OUTSIDE, -1),
        ("gemm", "", Standing.CLAIMED, 0),
        ("gemm", "dd", Standing.NEW_JIT, -1),
        ("other", "aa", Standing.NEW, -1),
        ("other", "", Standing.STRAY, -1),
        ("triton_add_7", "dd", Standing.CLAIMED, 1),
        ("triton_add_7", "bb", Standing.KNOWN, 1),
        ("triton_add_7", "", Standing.CLAIMED, 1),
        ("triton_add_7", "ee", Standing.OUTSIDE, -1),
        ("triton_mul_7", "dd", Standing.NEW_JIT, -1),
        ("", "aa", Standing.UNNAMED, -1),
    ):
        use = KernelUse(name=name, digest=digest)
        assert index.place(use, allowed, jit) == Placed(standing, number), (name, digest)


def test_names_without_what_differs_by_run() -> None:
    assert normalised("triton_poi_fused_add_12") == "triton_poi_fused_add_#"
    assert normalised("fused_0d1d_c3a9f0b17e") == "fused_#d#d_#"
    assert normalised("feedback_added") == "feedback_added"


@pytest.mark.parametrize(("every", "found"), [(0.04, False), (0.005, True)])
def test_a_learned_rhythm_is_one_up_to_a_few_times_its_rate(every: float, found: bool) -> None:
    workload = training()
    number = len(workload.table)
    thread = MadeKernel("triton_poi_prefetch_1", digest_of("prefetch"), True, (64, 1, 1))
    jit = workload.jit_digests | {thread.digest}
    learning = Learning()
    run = merged(workload.run(130, 1), beside(0.05, 130, np.array([number]), 1))
    for window in windows(run, [*workload.table, thread]):
        learning.add(window, workload.digests | jit, jit_digests=jit)
    comparison = Comparison(learning.profile(name="with a thread"))
    # In another shape and of another module: its name and place alone do not explain it.
    other = replace(thread, block=(96, 1, 1), digest=digest_of("prefetch 2"))
    run = merged(workload.run(60, 2), beside(every, 60, np.array([number]), 2))
    last = None
    for window in windows(run, [*workload.table, other]):
        last = comparison.add(window, workload.digests | jit, jit_digests=jit | {other.digest})
    assert ("second" in list(accused(last))) is found


def test_a_mix_of_two_phases_is_near() -> None:
    phases = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    assert nearest(np.array([0.4, 0.6, 0.0]), phases) == pytest.approx(0.0, abs=1e-9)
    assert nearest(np.array([0.4, 0.4, 0.2]), phases) == pytest.approx(0.2)
    assert nearest(np.array([1.0, 0.0, 0.0]), phases[:0]) == 1.0


def test_a_few_mixes_stand_for_all() -> None:
    mixes = np.array([[0.9, 0.1], [0.91, 0.09], [0.5, 0.5], [0.1, 0.9]])
    assert sorted(representatives(mixes, 16)) in ([0, 2, 3], [1, 2, 3])
    assert len(representatives(mixes, 2)) == 2
    assert representatives(mixes[:0], 4) == []
