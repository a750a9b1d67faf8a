"""Sampled launches in order of their lanes: the arrays against plain loops."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.cuda.launches.sequences import (
    NONE,
    among,
    before_in_lane,
    pair,
    runs,
    stretch,
    unpaired,
)
from gpuwarden.model import KernelUse, LaunchSample
from tests.support.launch_learning import window_of

LAUNCHES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.booleans()), max_size=40)


@given(LAUNCHES)
def test_the_one_before_in_its_lane(launches: list[tuple[int, int, bool]]) -> None:
    lane = np.array([one[0] for one in launches], np.int64)
    counts = np.array([one[2] for one in launches], bool)
    last: dict[int, int] = {}
    expected = []
    for place, (own, _, counted) in enumerate(launches):
        expected.append(last.get(own, NONE))
        if counted:
            last[own] = place
    assert before_in_lane(lane, counts).tolist() == expected


@given(LAUNCHES)
def test_runs_of_one_kernel_in_its_lane(launches: list[tuple[int, int, bool]]) -> None:
    lane = np.array([one[0] for one in launches], np.int64)
    kernel = np.array([one[1] for one in launches], np.int64)
    expected: list[tuple[int, int, int]] = []
    for own in sorted(set(lane.tolist())):
        for place, number in enumerate(k for at, k, _ in launches if at == own):
            if place and expected[-1][1] == number:
                expected[-1] = (own, number, expected[-1][2] + 1)
            else:
                expected.append((own, number, 1))
    found = runs(lane, kernel)
    assert (
        list(zip(found.lane.tolist(), found.kernel.tolist(), found.length.tolist(), strict=True))
        == expected
    )
    assert found.kernel[found.of].tolist() == kernel.tolist()


@given(st.integers(0, 1 << 20), st.integers(0, 1 << 20))
def test_a_pair_and_back(first: int, second: int) -> None:
    code = pair(np.array([first]), np.array([second]))
    assert unpaired(int(code[0])) == (first, second)


def test_among_known_ones() -> None:
    assert among(np.array([1, 5, 9]), np.array([1, 9])).tolist() == [True, False, True]
    assert among(np.array([1, 5]), np.array([], np.int64)).tolist() == [False, False]


def test_samples_out_of_order_or_of_no_kernel_are_taken_as_they_should_be() -> None:
    samples = (
        LaunchSample(30, 0, 7, 1),
        LaunchSample(10, 1, 7, 1),
        LaunchSample(20, 99, 8, 1),
        LaunchSample(25, -1, 8, 1 << 63),
    )
    window = window_of([KernelUse(name="a"), KernelUse(name="b")], samples=samples)
    taken = stretch(window, [4, 5])
    assert taken.at_ns.tolist() == [10, 20, 25, 30]
    assert taken.kernel.tolist() == [5, NONE, NONE, 4]
    assert taken.of_window.tolist() == [1, 2, 3, 0]
    assert taken.lane[0] == taken.lane[3] != taken.lane[1] != taken.lane[2]
