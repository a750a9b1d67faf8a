"""One descriptor that stands for many, some of them paused, closed or opened anew."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator

import pytest

from gpuwarden.cuda.readiness import Readiness


@pytest.fixture
def readiness() -> Iterator[Readiness]:
    made = Readiness()
    yield made
    made.close()


def is_ready(readiness: Readiness, seconds: float = 0.0) -> bool:
    return bool(select.select([readiness.fileno()], [], [], seconds)[0])


def test_it_is_readable_when_one_is(readiness: Readiness) -> None:
    first, second = os.eventfd(0), os.eventfd(0)
    readiness.watch({first, second})
    assert not is_ready(readiness)
    os.eventfd_write(second, 1)
    assert is_ready(readiness)
    readiness.watch({first})
    assert not is_ready(readiness)
    os.close(first)
    os.close(second)


def test_one_that_is_paused_is_ready_when_its_time_is_over(readiness: Readiness) -> None:
    noisy, other = os.eventfd(1), os.eventfd(0)
    readiness.watch({noisy, other})
    readiness.pause(noisy, 0.05)
    readiness.watch({noisy, other})
    assert not is_ready(readiness)
    os.eventfd_write(other, 1)
    assert is_ready(readiness)
    os.eventfd_read(other)
    assert is_ready(readiness, 10.0), "the time is over"
    readiness.resume()
    assert is_ready(readiness), "for what is still there"
    os.eventfd_read(noisy)
    assert not is_ready(readiness, 0.06)
    os.close(noisy)
    os.close(other)


def test_a_number_that_is_another_descriptor_by_now(readiness: Readiness) -> None:
    old = os.eventfd(0)
    readiness.watch({old})
    os.close(old)
    new = os.eventfd(1)
    assert new == old
    assert not is_ready(readiness)
    readiness.watch({new})
    assert is_ready(readiness)
    os.close(new)
    readiness.watch(set())
    assert not is_ready(readiness)
