"""Slurm's steps of a plan: refused, without an answer, without a Slurm; and whose jobs they are."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from gpuwarden.errors import TimedOut, Unavailable
from gpuwarden.expected.slurm.controller import Controller, Reached
from gpuwarden.expected.slurm.site import Site
from gpuwarden.host import CommandOutput, Host
from gpuwarden.model import Process
from gpuwarden.policy import Policy
from gpuwarden.respond import slurm_jobs, slurm_node
from gpuwarden.respond.slurm import DrainNode, HoldJobs
from gpuwarden.respond.slurm_jobs import user_of
from gpuwarden.respond.step import Target
from tests.support.nodes import NodeBuilder

QUEUE = b"JOBID|STATE|UID|PRIORITY|REASON\n"
STATE = "NodeName=gpu-007 Arch=x86_64\n   State={} ThreadsPerCore=1\n{}"
Answer = Callable[[list[str]], CommandOutput]


class Commands(Host):
    """A host whose Slurm commands are answered by a function."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer
        self.asked: list[list[str]] = []

    def command(
        self, argv: list[str], *, deadline_seconds: float, environment: dict[str, str] | None = None
    ) -> CommandOutput:
        self.asked.append(argv)
        return self.answer(argv)


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], Commands]:
    """Puts a Slurm in place whose controller answers, with these commands."""

    def place(answer: Answer) -> Commands:
        host = Commands(answer)

        def reach(_host: Host, *, command_seconds: float, total_seconds: float) -> Reached:
            site = Site(configuration="/etc/slurm/slurm.conf", node="gpu-007")
            controller = Controller(host, site, time.monotonic() + 60, command_seconds)
            return Reached(controller, "gpu-007", answers=True)

        for module in (slurm_jobs, slurm_node):
            monkeypatch.setattr(module, "reach", reach)
        return host

    return place


def out(text: bytes | str = b"", *, code: int = 0, error: bytes = b"") -> CommandOutput:
    return CommandOutput(code, text.encode() if isinstance(text, str) else text, error)


def target(made: NodeBuilder, pid: int = 400) -> Target:
    snapshot = made.snapshot()
    return Target(
        verdict="cryptominer",
        identity=None,
        process=next((p for p in snapshot.processes if p.pid == pid), None),
        rows=(),
        container=None,
        workload=None,
        gpus=(),
        snapshot=snapshot,
        policy=Policy(),
    )


def of_alice() -> Target:
    made = NodeBuilder()
    made.process(400, user="alice")
    return target(made)


def test_the_user_is_the_job_s_or_the_process_s_owner_and_never_a_container_s() -> None:
    made = NodeBuilder()
    made.job("12", ["minor:0"], user="bob")
    made.process(400, user="bob", cgroup=made.job_path("12"))
    made.process(401, user="root", cgroup=made.job_path("12"))
    made.process(402, user="carol")
    made.container("box")
    made.process(403, user="alice", container="box")
    made.process(404, user="root")
    made.process(405, user="carol", environment={"SLURM_JOB_ID": "12"})
    uids = {pid: user_of(target(made, pid)).uid for pid in range(400, 406)}
    assert uids == {400: 1001, 401: 1001, 402: 1002, 403: None, 404: None, 405: 1002}
    step = HoldJobs(Commands(lambda _: out())).step(target(made, 999))
    assert step is None


def test_where_there_is_no_slurm_there_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (slurm_jobs, slurm_node):
        monkeypatch.setattr(module, "reach", lambda *_, **__: None)
    assert HoldJobs().step(of_alice()) is None
    assert DrainNode().step(of_alice()) is None
    for actor in (HoldJobs(), DrainNode()):
        with pytest.raises(Unavailable):
            actor.do(of_alice(), print)


def test_orders_that_are_refused_are_told_and_nothing_is_called_done(
    slurm: Callable[[Answer], Commands],
) -> None:
    def refusing(argv: list[str]) -> CommandOutput:
        if argv[0] == "squeue":
            return out(QUEUE + b"7|PENDING|1000|5|Priority\n")
        if argv[1] == "show":
            return out(STATE.format("IDLE", ""))
        return out(code=1, error=b"slurm_update error: Invalid user id\n")

    host = slurm(refusing)
    held = HoldJobs(host).do(of_alice(), print)
    assert not held.done
    assert not held.complete
    assert held.undo == ""
    assert "Invalid user id" in held.lines[0]
    drained = DrainNode(host).do(of_alice(), print)
    assert not drained.done
    assert "Invalid user id" in drained.lines[0]
    assert drained.lines[1].startswith("by hand: scontrol update nodename=gpu-007 state=drain ")


def test_an_order_whose_answer_is_lost_is_undone_with_the_others(
    slurm: Callable[[Answer], Commands],
) -> None:
    def dying(argv: list[str]) -> CommandOutput:
        if argv[0] == "squeue" and not any(one[1:2] == ["hold"] for one in host.asked):
            return out(QUEUE + b"7|PENDING|1000|5|Priority\n8|PENDING|1000|5|None\n")
        raise TimedOut(f"{argv[0]}: no answer within 5 s")

    host = slurm(dying)
    outcome = HoldJobs(host).do(of_alice(), print)
    assert not outcome.complete
    assert outcome.undo == "scontrol release 7"
    assert any(line == "not held: job 8" for line in outcome.lines)
    assert any("not seen, whether it is held: job 7: " in line for line in outcome.lines)


def test_a_job_that_starts_meanwhile_runs_on_and_is_released_with_the_others(
    slurm: Callable[[Answer], Commands],
) -> None:
    def starting(argv: list[str]) -> CommandOutput:
        if argv[0] != "squeue":
            return out()
        first = not any(one[1:2] == ["hold"] for one in host.asked)
        rows = b"7|PENDING|1000|5|Priority\n8|PENDING|1000|5|None\n"
        later = b"7|RUNNING|1000|0|JobHeldAdmin\n8|PENDING|1000|0|JobHeldAdmin\n"
        return out(QUEUE + (rows if first else later))

    host = slurm(starting)
    outcome = HoldJobs(host).do(of_alice(), print)
    assert outcome.done
    assert outcome.lines[0].startswith("held: job 8 of ")
    assert "started before the order came, and running on: job 7" in outcome.lines
    assert outcome.undo == "scontrol release 7,8"


def test_another_user_s_jobs_are_never_held_whatever_the_queue_prints(
    slurm: Callable[[Answer], Commands],
) -> None:
    host = slurm(lambda argv: out(QUEUE + b"7|PENDING|1001|5|None\n") if argv[0] == "squeue"
                 else out())  # fmt: skip
    assert not HoldJobs(host).do(of_alice(), print).done
    assert all(one[0] == "squeue" for one in host.asked)


def test_what_narrows_a_person_s_own_listing_does_not_narrow_ours(
    slurm: Callable[[Answer], Commands], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQUEUE_PARTITION", "debug")
    monkeypatch.setenv("SLURM_CLUSTERS", "other")
    host = slurm(lambda _: out(QUEUE))
    HoldJobs(host).step(of_alice())
    (asked,) = host.asked
    assert asked[:4] == ["env", "--unset=SLURM_CLUSTERS", "--unset=SQUEUE_PARTITION", "squeue"]


def test_a_drain_that_does_not_show_is_not_called_complete(
    slurm: Callable[[Answer], Commands],
) -> None:
    host = slurm(lambda argv: out(STATE.format("IDLE", "")) if argv[1] == "show" else out())
    outcome = DrainNode(host).do(of_alice(), print)
    assert not outcome.complete
    assert "could not be seen" in outcome.lines[0]


def test_a_node_that_was_down_is_undrained_and_not_brought_back(
    slurm: Callable[[Answer], Commands],
) -> None:
    def down(argv: list[str]) -> CommandOutput:
        if argv[1] != "show":
            return out()
        ordered = any(one[1] == "update" for one in host.asked)
        return out(STATE.format("DOWN+DRAIN" if ordered else "DOWN*", ""))

    host = slurm(down)
    outcome = DrainNode(host).do(of_alice(), print)
    assert outcome.complete
    assert outcome.undo == "scontrol update nodename=gpu-007 state=undrain"


def test_the_reason_holds_nothing_that_a_process_says_of_itself(
    slurm: Callable[[Answer], Commands],
) -> None:
    host = slurm(lambda argv: out(STATE.format("IDLE", "")) if argv[1] == "show" else out())
    made = NodeBuilder()
    made.process(400, user="alice", argv=("x; state=resume",), comm="reason=x")
    process = target(made).process
    assert isinstance(process, Process)
    DrainNode(host).do(target(made), print)
    (order,) = [one for one in host.asked if one[1] == "update"]
    assert order[2:] == [
        "nodename=gpu-007",
        "state=drain",
        "reason=gpuwarden: cryptominer, pid 400",
    ]
