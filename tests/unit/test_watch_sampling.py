"""Rounds of the driver: who came and went, what is recorded, and when it is called blind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest

from gpuwarden.errors import Denied, TimedOut, Unavailable
from gpuwarden.host import Host
from gpuwarden.model import Gpu, GpuClient
from gpuwarden.policy import Thresholds
from gpuwarden.sensors import logins
from gpuwarden.sensors.nvml.round import Round
from gpuwarden.sensors.nvml.sampler import Sampler
from gpuwarden.store import Sample
from gpuwarden.watch.judgement import Kin
from gpuwarden.watch.sampling import CHECKED_SECONDS, LOGINS_SECONDS, RECORDED_NS, Sampling
from tests.support.nodes import BOOT_ID, gpu_id
from tests.support.open_watching import Clock, write_process
from tests.support.opening import identity

S = 10**9
NOW = 1_700_000_000 * S
GPU = Gpu(id=gpu_id(0), uuid=gpu_id(0), index=0, sm_percent=60, memory_used_bytes=5 << 30)


def client(pid: int = 100, **fields: Any) -> GpuClient:
    values: dict[str, Any] = {"gpu_id": GPU.id, "pid": pid, "sm_percent": 50, "memory_bytes": 1}
    return GpuClient(**{**values, **fields})


class StandInSampler:
    """Gives the rounds that the test has laid ready."""

    def __init__(self) -> None:
        self.ready: list[Round] = []

    def take(self) -> Round | None:
        return self.ready.pop(0) if self.ready else None


class Node:
    """A sampling with a clock that is turned by hand."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (root / "proc").mkdir()
        self.clock, self.sampler, self.root = Clock(), StandInSampler(), root
        self.at_ns = NOW
        monkeypatch.setattr("gpuwarden.watch.sampling.time", self.clock.module)
        self.sampling = Sampling(
            Host(str(root)), cast(Sampler, self.sampler), BOOT_ID, Thresholds()
        )

    def round(
        self, *clients: GpuClient, seconds: float = 1.0, **fields: Any
    ) -> tuple[bool, list[Sample]]:
        """A round, some time after the one before."""
        self.clock.now += seconds
        self.at_ns += int(seconds * S)
        values: dict[str, Any] = {"at_ns": self.at_ns, "gpus": (GPU,), "clients": clients}
        self.sampler.ready.append(Round(**{**values, **fields}))
        return self.sampling.take()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


def test_without_a_round_there_is_nothing(node: Node) -> None:
    assert node.sampling.take() == (False, [])
    assert node.sampling.at_ns == 0


def test_it_says_when_who_is_there_has_changed(node: Node) -> None:
    changes = [
        node.round(*clients)[0]
        for clients in (
            [],
            [client(100)],
            [client(100, sm_percent=1)],
            [client(100), client(101)],
            [client(101), client(100)],
            [client(101)],
            [],
        )
    ]
    assert changes == [False, True, False, True, False, True, True]


def test_the_newest_round_is_what_is_known(node: Node) -> None:
    node.round(client(100))
    node.round(client(101))
    assert [one.pid for one in node.sampling.clients] == [101]
    assert (node.sampling.gpus, node.sampling.at_ns) == ((GPU,), node.at_ns)
    assert node.sampling.rounds == 2


def test_a_mean_of_ten_seconds_is_recorded(node: Node) -> None:
    write_process(node.root, identity(100))
    _, first = node.round(client(sm_percent=10))
    assert {(one.pid, one.sm_percent) for one in first} == {(None, 60), (100, 10)}
    recorded = [node.round(client(sm_percent=n * 10))[1] for n in range(1, 11)]
    assert [len(one) for one in recorded] == [0] * 9 + [2]
    whole, mine = recorded[-1]
    assert (whole.gpu_id, whole.pid, whole.sm_percent) == (GPU.id, None, 60)
    assert whole.memory_bytes == 5 << 30
    assert mine.sm_percent == 55
    assert (mine.pid, mine.boot_id, mine.at_ns) == (100, BOOT_ID, node.at_ns)
    assert mine.start_time_ticks == identity(100).start_time_ticks
    assert RECORDED_NS == 10 * S


def test_what_was_not_measured_is_not_idle(node: Node) -> None:
    _, recorded = node.round(client(sm_percent=None), gpus=(Gpu(id=GPU.id),))
    assert [(one.sm_percent, one.memory_bytes) for one in recorded] == [(None, None), (None, 1)]


def test_a_clock_that_is_set_back_stops_no_recording(node: Node) -> None:
    node.round(client())
    node.at_ns -= 3600 * S
    assert node.round(client())[1]
    assert not node.round(client())[1]
    assert node.round(client(), seconds=10)[1]


def kin(pid: int = 100, ticks: int | None = None) -> Kin:
    return Kin(
        pid=pid,
        start_time_ticks=identity(pid).start_time_ticks if ticks is None else ticks,
        path="/usr/bin/python3.11",
        uid=1000,
        parents=("/usr/sbin/sshd",),
        peers=("203.0.113.9:3333",),
        verdicts={GPU.id: "suspicious"},
    )


def test_what_a_judgement_knows_is_recorded_with_it(node: Node) -> None:
    write_process(node.root, identity(100))
    node.sampling.judged({100: kin()})
    mine = node.round(client())[1][-1]
    assert (mine.verdict, mine.binary) == ("suspicious", "/usr/bin/python3.11")
    assert (mine.parents, mine.peers) == (("/usr/sbin/sshd",), ("203.0.113.9:3333",))


def test_another_process_of_that_number_is_not_taken_for_it(node: Node) -> None:
    write_process(node.root, identity(100))
    node.sampling.judged({100: kin(ticks=5)})
    mine = node.round(client())[1][-1]
    assert (mine.verdict, mine.binary, mine.parents) == (None, None, ())


def test_a_pid_that_came_again_is_noticed_at_its_end_or_after_a_while(node: Node) -> None:
    write_process(node.root, identity(100))
    node.sampling.judged({100: kin()})
    node.round(client())
    later = identity(100, start_time_ns=99 * S)
    write_process(node.root, later)
    node.sampling.ended(100)
    mine = node.round(client(), at_ns=node.at_ns + RECORDED_NS)[1][-1]
    assert (mine.start_time_ticks, mine.verdict) == (later.start_time_ticks, None)
    again = identity(100, start_time_ns=199 * S)
    write_process(node.root, again)  # nobody tells of an end where no probe could be loaded
    mine = node.round(client(), seconds=CHECKED_SECONDS, at_ns=node.at_ns + 3 * RECORDED_NS)[1][-1]
    assert mine.start_time_ticks == again.start_time_ticks


def test_one_that_proc_does_not_show_has_no_start(node: Node) -> None:
    mine = node.round(client(4_000_000))[1][-1]
    assert (mine.pid, mine.start_time_ticks) == (4_000_000, None)


@pytest.mark.parametrize("error", [TimedOut("no answer in 5 s"), Denied("not allowed")])
def test_a_driver_that_fails_is_failing_since_then_and_what_is_known_stays(
    node: Node, error: Any
) -> None:
    node.round(client())
    assert node.round(gpus=(), error=error) == (False, [])
    since = node.at_ns
    node.round(gpus=(), error=error)
    assert node.sampling.failing_since_ns == since
    assert node.sampling.error == error
    assert node.sampling.has_driver
    assert [one.pid for one in node.sampling.clients] == [100]
    node.round(client())
    assert node.sampling.error is None
    assert node.sampling.failing_since_ns is None


def test_a_node_without_a_driver_is_not_blind(node: Node) -> None:
    node.round(gpus=(), error=Unavailable("no NVIDIA driver"))
    assert not node.sampling.has_driver
    assert node.sampling.failing_since_ns is None


def test_what_could_be_had_before_an_error_is_taken(node: Node) -> None:
    changed, _ = node.round(client(), error=TimedOut("GPU 1 hangs"))
    assert changed
    assert [one.pid for one in node.sampling.clients] == [100]
    assert node.sampling.failing_since_ns == node.at_ns


def test_logins_are_looked_at_now_and_then(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[None] = []
    monkeypatch.setattr(logins, "somebody_logged_in", lambda host: looks.append(None))
    for _ in range(20):
        node.round(client())
    assert 20 / LOGINS_SECONDS <= len(looks) <= 20 / LOGINS_SECONDS + 1


def test_what_rounds_add_up_to_goes_with_the_next_judgement_and_survives_a_restart(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_process(node.root, identity(100))
    for _ in range(30):
        node.round(client())
    path = str(tmp_path / "usage")
    node.sampling.keep(path)
    memory = node.sampling.memory(node.at_ns)
    assert {(one.gpu_id, one.pid) for one in memory.usage} == {(GPU.id, 100), (GPU.id, None)}
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert not os.path.exists(f"{path}.new")
    (tmp_path / "again").mkdir()
    again = Node(tmp_path / "again", monkeypatch)
    assert again.sampling.resume(path) is None
    assert again.sampling.memory(node.at_ns) == memory


def test_what_an_earlier_run_kept_may_be_missing_or_damaged(node: Node, tmp_path: Path) -> None:
    assert node.sampling.resume(str(tmp_path / "none")) is None
    (tmp_path / "bad").write_bytes(b"\xff" * 100)
    gap = node.sampling.resume(str(tmp_path / "bad"))
    assert gap is not None
    assert gap.sensor == "store"
    assert node.sampling.resume(str(tmp_path)) is not None
    assert node.round(client())[0]
