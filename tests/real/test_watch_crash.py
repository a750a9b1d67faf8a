"""A real `gpuwarden watch` killed at any moment: nothing reported is lost, no alarm comes twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.killing import check, children_of_the_dead, killed, told_processes
from tests.support.packages import require_root
from tests.support.probes import build
from tests.support.receivers import Receiver, wait_until

pytestmark = pytest.mark.real

KILLS = 50
SEED = 20_261_130


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    require_root()
    build()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as up:
        yield up


def test_killed_at_random_it_loses_nothing_and_repeats_no_alarm(
    tmp_path: Path, opener: Path, receiver: Receiver
) -> None:
    print(f"seed {SEED}")
    seen = killed(tmp_path, opener, receiver, kills=KILLS, seed=SEED)
    print(
        f"{seen.last_sequence} transitions, {told_processes(seen)} processes told of, "
        f"{seen.repeated} deliveries repeated"
    )
    check(seen)
    # Few uses fit into one life on a slow machine, and a quick one tells of a crowd together.
    assert told_processes(seen) > KILLS // 5, "there was something to lose"
    wait_until(lambda: not children_of_the_dead(tmp_path))
