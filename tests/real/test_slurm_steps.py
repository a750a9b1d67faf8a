"""Slurm's steps of a plan against a real controller: hold, drain, their undoing, and no answer."""

from __future__ import annotations

import pwd
import shlex
import subprocess
from collections.abc import Iterator

import pytest

from gpuwarden.errors import Unavailable
from gpuwarden.finding import Verdict
from gpuwarden.model import Process
from gpuwarden.policy import Policy
from gpuwarden.respond import slurm_jobs, slurm_node
from gpuwarden.respond.slurm import DrainNode, HoldJobs
from gpuwarden.respond.step import Target
from tests.support.nodes import NodeBuilder
from tests.support.slurm import NODE_NAME, SlurmNode, running_slurm

pytestmark = pytest.mark.real

NOBODY = pwd.getpwnam("nobody").pw_uid


@pytest.fixture(scope="module")
def node() -> Iterator[SlurmNode]:
    with running_slurm() as running:
        yield running


@pytest.fixture(autouse=True)
def _patience(node: SlurmNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded test machine is no dead controller, and another Slurm on it is not this one."""
    monkeypatch.setenv("SLURM_CONF", str(node.configuration))
    for module in (slurm_jobs, slurm_node):
        monkeypatch.setattr(module, "COMMAND_SECONDS", 60.0)
        monkeypatch.setattr(module, "LOOK_SECONDS", 120.0)
        monkeypatch.setattr(module, "ACT_SECONDS", 240.0)


@pytest.fixture(autouse=True)
def _as_it_was(node: SlurmNode) -> Iterator[None]:
    yield
    node.cancel_all()
    if "DRAIN" in state(node):
        node.run("scontrol", "update", f"nodename={NODE_NAME}", "state=resume")
        node.wait_for(node._is_idle, "the node to be idle")


def target(uid: int = NOBODY, verdict: Verdict = "cryptominer") -> Target:
    """A process of that owner, in no job that the snapshot knows."""
    process = Process(pid=4242, start_time_ticks=7, uid=uid, user="nobody" if uid else "root")
    return Target(
        verdict=verdict,
        identity=None,
        process=process,
        rows=(),
        container=None,
        workload=None,
        gpus=(),
        snapshot=NodeBuilder().snapshot(),
        policy=Policy(),
        finding_id="00c0ffee00c0ffee",
    )


def holds(node: SlurmNode) -> dict[str, str]:
    """Job → why it waits, or that it runs."""
    rows = node.run("squeue", "-h", "-o", "%A|%T|%r").splitlines()
    found = {}
    for row in rows:
        job, state_, reason = row.split("|")
        found[job] = reason if state_ == "PENDING" and reason.startswith("JobHeld") else state_
    return found


def state(node: SlurmNode) -> str:
    return node.run("scontrol", "-o", "show", "node", NODE_NAME).split(" State=")[1].split()[0]


def reason(node: SlurmNode) -> str:
    text = node.run("scontrol", "show", "node", NODE_NAME)
    return text.split("Reason=")[1].splitlines()[0] if "Reason=" in text else ""


def by_hand(node: SlurmNode, line: str) -> None:
    """Runs a printed command as a person would: in a shell."""
    subprocess.run(["/bin/sh", "-c", line], env=node.environment, check=True, cwd="/", timeout=60)


def full(node: SlurmNode) -> str:
    job = node.submit("exec sleep 600", gpus=2, user="nobody")
    node.wait_for_state(job, "RUNNING")
    return job


def test_pending_jobs_are_held_and_released_as_they_were(node: SlurmNode) -> None:
    running = full(node)
    forged = "x|PENDING|0\nJOBID|STATE"
    free = node.submit("true", gpus=1, user="nobody", job_name=forged)
    array = node.submit("true", gpus=1, user="nobody", array="0-3")
    own_hold = node.submit("true", gpus=1, user="nobody")
    node.run("scontrol", "uhold", own_hold)
    theirs = node.submit("true", gpus=1, user="nobody")
    node.run("scontrol", "hold", theirs)
    others = node.submit("true", gpus=1, user="root")
    before = holds(node)

    step = HoldJobs().step(target())
    assert step is not None
    assert step.automatic
    assert not step.refused
    assert step.title.startswith("hold 3 pending jobs of nobody")
    assert f"running on untouched: job {running};" in step.changes
    assert f"held by somebody else already: job {theirs};" in step.changes
    assert len(step.commands) == 3
    assert holds(node) == before

    outcome = HoldJobs().do(target(), print)
    assert outcome.done, outcome
    assert outcome.complete, outcome
    assert holds(node) == {
        running: "RUNNING",
        free: "JobHeldAdmin",
        array: "JobHeldAdmin",
        own_hold: "JobHeldAdmin",
        theirs: "JobHeldAdmin",
        others: "PENDING",
    }
    by_hand(node, outcome.undo)
    assert holds(node) == before


def test_a_user_without_pending_jobs_and_a_process_of_root_have_nothing_to_hold(
    node: SlurmNode,
) -> None:
    running = full(node)
    step = HoldJobs().step(target())
    assert step is not None
    assert "no pending jobs" in step.refused
    outcome = HoldJobs().do(target(), print)
    assert not outcome.done
    assert holds(node) == {running: "RUNNING"}
    roots = HoldJobs().step(target(uid=0))
    assert roots is not None
    assert "root" in roots.refused


def test_the_printed_commands_hold_too(node: SlurmNode) -> None:
    full(node)
    job = node.submit("true", gpus=1, user="nobody")
    step = HoldJobs().step(target())
    assert step is not None
    assert step.commands == (f"env SLURM_CONF={node.configuration} scontrol hold {job}",)
    by_hand(node, step.commands[0])
    assert holds(node)[job] == "JobHeldAdmin"


def test_the_node_is_drained_and_resumed_while_its_jobs_run_on(node: SlurmNode) -> None:
    running = full(node)
    step = DrainNode().step(target())
    assert step is not None
    assert step.automatic
    assert any(running in one and one.startswith("nobody") for one in step.hurts)
    outcome = DrainNode().do(target(), print)
    assert outcome.done
    assert outcome.complete
    assert "DRAIN" in state(node)
    assert reason(node).startswith(
        "gpuwarden: cryptominer, pid 4242, finding 00c0ffee00c0ffee [root@"
    )
    assert holds(node) == {running: "RUNNING"}
    by_hand(node, outcome.undo)
    assert "DRAIN" not in state(node)


def test_a_drain_of_somebody_else_keeps_its_reason_and_is_not_undone(node: SlurmNode) -> None:
    theirs = "fan 3; call 5567's owner"
    node.run("scontrol", "update", f"nodename={NODE_NAME}", "state=drain", f"reason={theirs}")
    step = DrainNode().step(target())
    assert step is not None
    assert theirs in step.refused
    assert "scontrol" not in step.undo
    outcome = DrainNode().do(target(), print)
    assert outcome.done
    assert theirs in outcome.lines[0]
    assert "scontrol" not in outcome.undo
    assert reason(node).startswith(theirs)


def test_without_a_controller_the_commands_are_printed_and_no_job_is_denied(
    node: SlurmNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    full(node)
    job = node.submit("true", gpus=1, user="nobody")
    node.stop("slurmctld")
    try:
        for module in (slurm_jobs, slurm_node):
            monkeypatch.setattr(module, "COMMAND_SECONDS", 3.0)
            monkeypatch.setattr(module, "LOOK_SECONDS", 6.0)
            monkeypatch.setattr(module, "ACT_SECONDS", 6.0)
        order = ""
        for step in (HoldJobs().step(target()), DrainNode().step(target())):
            assert step is not None
            order = step.commands[0]
            assert not step.automatic
            assert step.commands
            assert "unknown" in step.changes
            assert "no pending" not in step.changes + step.refused
        for actor in (HoldJobs(), DrainNode()):
            with pytest.raises(Unavailable) as told:
                actor.do(target(), print)
            assert "scontrol" in told.value.remedy
    finally:
        node.start("slurmctld")
    assert not holds(node)[job].startswith("JobHeld")
    assert shlex.split(order)[-1].startswith("reason=gpuwarden: ")
    by_hand(node, order)
    assert "DRAIN" in state(node)
