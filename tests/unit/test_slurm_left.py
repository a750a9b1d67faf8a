"""What a prolog and an epilog call left, unknown or nobody's business, from looks at a node."""

from __future__ import annotations

import pytest

from gpuwarden.expected.slurm.gres import GresDevice, GresLayout
from gpuwarden.harden import slurm_check
from gpuwarden.harden.slurm_check import Found, of_hint, settle, with_controllers_word
from gpuwarden.harden.slurm_left import Leftover, Look, OwnGpus, Phase, look
from gpuwarden.judge import judge
from gpuwarden.model import SourceState
from gpuwarden.policy import Policy
from tests.support.nodes import NodeBuilder

OWN = OwnGpus(("minor:0",))


def node(*, state: SourceState = "ok") -> NodeBuilder:
    """Two GPUs; jobs 12 and 13 of alice and bob run on the first and the second."""
    made = NodeBuilder()
    made.gpu(0)
    made.gpu(1)
    made.job("12", ["minor:0"])
    made.job("13", ["minor:1"], user="bob")
    if state != "ok":
        made.workloads.clear()
        made.source("slurm", state=state, reason="no controller answers")
    return made


def at(made: NodeBuilder, phase: Phase, job: str = "12", own: OwnGpus = OWN) -> Look:
    snapshot = made.snapshot()
    return look(snapshot, judge(snapshot, Policy()).rows, phase=phase, job=job, own=own)


def pids(found: Look) -> set[int | None]:
    return {one.key[0] for one in found.left}


def in_job(made: NodeBuilder, pid: int, job: str, gpu: int, user: str = "alice") -> None:
    made.process(pid, cgroup=made.job_path(job), user=user)
    made.client(pid, gpu)


def test_an_empty_gpu_is_empty() -> None:
    assert at(node(), "prolog") == Look()
    assert at(node(), "epilog") == Look()


def test_a_job_s_own_processes_are_left_after_it_and_not_before_it() -> None:
    made = node()
    in_job(made, 400, "12", 0)
    assert at(made, "prolog") == Look()
    assert pids(at(made, "epilog")) == {400}


def test_a_miner_in_the_job_s_own_name_is_told_before_it_too() -> None:
    made = node()
    made.process(
        666,
        exe="/tmp/.x/xmrig",
        argv=("xmrig", "-o", "pool.example.net:3333", "-u", "x", "-a", "kawpow"),
        cgroup=made.job_path("12"),
    )
    made.client(666, 0, sm_percent=99)
    (left,) = at(made, "prolog").left
    assert left.verdict == "cryptominer"


def test_its_own_processes_are_left_wherever_they_are() -> None:
    made = node()
    in_job(made, 400, "12", 1)
    assert pids(at(made, "epilog")) == {400}


def test_a_neighbour_on_its_own_gpu_is_not_looked_at_and_on_ours_is_left() -> None:
    made = node()
    in_job(made, 500, "13", 1, "bob")
    assert at(made, "epilog") == Look()
    in_job(made, 501, "13", 0, "bob")
    (left,) = at(made, "epilog").left
    assert left.key[0] == 501
    assert left.verdict == "wrong-gpu"


def test_a_job_that_shares_the_gpu_belongs_there() -> None:
    made = node()
    made.job("14", ["minor:0"], user="bob", shared=True)
    in_job(made, 600, "14", 0, "bob")
    assert at(made, "epilog") == Look()
    assert at(made, "prolog") == Look()


def test_the_job_before_is_left_at_the_prolog() -> None:
    made = node()
    made.source("slurm", ended=("11",))
    in_job(made, 700, "11", 0)
    (left,) = at(made, "prolog").left
    assert left.verdict == "orphaned-job"


def test_a_silent_controller_makes_others_unknown_and_never_left() -> None:
    made = node(state="failed")
    in_job(made, 500, "13", 0, "bob")
    made.process(501, user="carol")
    made.client(501, 0)
    for phase in ("prolog", "epilog"):
        found = at(made, phase)
        assert found.left == ()
        assert len(found.unknown) == 3


def test_without_a_controller_slurmd_s_own_word_counts_and_so_do_signs() -> None:
    made = node(state="failed")
    in_job(made, 400, "12", 0)
    made.process(
        666,
        exe="/tmp/.x/xmrig",
        argv=("xmrig", "-o", "pool.example.net:3333", "-u", "x", "-a", "kawpow"),
    )
    made.client(666, 0, sm_percent=99)
    assert pids(at(made, "epilog")) == {400, 666}
    assert pids(at(made, "prolog")) == {666}


def test_an_environment_alone_makes_nobody_one_of_ours() -> None:
    made = node()
    made.process(800, user="carol", environment={"SLURM_JOB_ID": "12"})
    made.client(800, 0)
    assert pids(at(made, "prolog")) == {800}


def test_a_failed_sensor_is_unknown_and_not_empty() -> None:
    made = node()
    made.sensor("holders", "failed", "no answer")
    found = at(made, "epilog")
    assert found.left == ()
    assert found.unknown == ("who is on the GPUs: holders: no answer",)


def test_a_container_that_is_left_over_is_told_also_without_a_controller() -> None:
    for state, phase in (("ok", "prolog"), ("ok", "epilog"), ("failed", "epilog")):
        made = node(state=state)  # type: ignore[arg-type]
        made.container("box")
        made.process(900, container="box", user="root")
        made.client(900, 0)
        (left,) = at(made, phase).left  # type: ignore[arg-type]
        assert left.verdict == "rogue-container"


def test_the_system_s_own_processes_belong_there() -> None:
    made = node()
    made.process(950, exe="/usr/bin/nvidia-cuda-mps-server", user="root", loginuid=-1)
    made.client(950, 0)
    assert judge(made.snapshot(), Policy()).rows[0].verdict == "system"
    assert at(made, "epilog") == Look()
    assert at(made, "prolog") == Look()


def test_memory_that_nobody_holds_is_left() -> None:
    made = NodeBuilder()
    made.gpu(0, memory_used_bytes=40 << 30)
    made.job("12", ["minor:0"])
    (left,) = at(made, "epilog").left
    assert left.verdict == "leaked-memory"


def test_hints_are_places_in_gres_conf() -> None:
    layout = GresLayout(devices=(GresDevice("h100", 4), GresDevice("h100", 5)))
    assert of_hint("0,1", layout, ()).references == ("minor:4", "minor:5")
    assert of_hint("", layout, ()) == OwnGpus()
    for bad in ("GPU-0f;reboot", "0-99999999999", "-1", "0," * 9999):
        assert of_hint(bad, layout, ()).references == ("all",)


def test_the_controller_adds_what_the_hint_does_not_say() -> None:
    snapshot = node().snapshot()
    assert with_controllers_word(OwnGpus(("minor:0",)), snapshot, "12") == OwnGpus(("minor:0",))
    assert with_controllers_word(OwnGpus(), snapshot, "12").references == ("minor:0",)
    both = with_controllers_word(OwnGpus(("minor:1",)), snapshot, "12")
    assert both.references == ("minor:1", "minor:0")
    assert "controller" in both.unsure
    assert with_controllers_word(OwnGpus(("minor:1",)), snapshot, "99").references == ("minor:1",)


def looks(monkeypatch: pytest.MonkeyPatch, *some: Look) -> tuple[Found, int]:
    """What looks, one after the other, come to, the last one again and again; and how many."""
    monkeypatch.setattr(slurm_check, "PAUSE_SECONDS", 0.0)
    left = list(some)
    taken = 0

    def once() -> Look:
        nonlocal taken
        taken += 1
        return left.pop(0) if len(left) > 1 else left[0]

    found = Found()
    settle(once, found, settle_seconds=0.0, ends_at=float("inf"))
    return found, taken


def one(pid: int) -> Look:
    return Look((Leftover((pid, pid, "0"), f"pid {pid}", "unattributed"),))


def test_what_is_seen_twice_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    found, taken = looks(monkeypatch, one(400))
    assert [left.key[0] for left in found.left] == [400]
    assert found.unknown == []
    assert taken == 2


def test_what_ends_meanwhile_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    found, taken = looks(monkeypatch, one(400), Look())
    assert (found.left, found.unknown, taken) == ([], [], 2)


def test_what_comes_and_goes_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    found, taken = looks(monkeypatch, *(one(pid) for pid in range(400, 420)))
    assert found.left == []
    assert found.unknown == ["seen once: pid 403"]
    assert taken == slurm_check.ENOUGH_LOOKS


def test_with_time_for_one_look_nothing_is_called_left() -> None:
    found = Found()
    settle(lambda: one(400), found, settle_seconds=5.0, ends_at=0.0)
    assert found.left == []
    assert found.unknown == ["seen once: pid 400"]
