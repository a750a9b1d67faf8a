"""Slurm as a source of the expected set, against a real munge, slurmctld and slurmd.

The two GPUs are device nodes that no driver stands behind; Slurm only asks whether they exist.
"""

from __future__ import annotations

import os
import pwd
import signal
import socket
from collections.abc import Iterator

import pytest

from gpuwarden.expected import slurm
from gpuwarden.host import Host
from gpuwarden.model import Process, SourceRun, Workload
from gpuwarden.sensors.process import stat_lines
from gpuwarden.sensors.seen import Seen
from tests.support.slurm import NODE_NAME, SlurmNode, running_slurm

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def node() -> Iterator[SlurmNode]:
    with running_slurm() as running:
        yield running


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded test machine is no dead controller."""
    monkeypatch.setattr(slurm, "COMMAND_SECONDS", 60.0)
    monkeypatch.setattr(slurm, "TOTAL_SECONDS", 120.0)


@pytest.fixture(autouse=True)
def _no_jobs_left(node: SlurmNode) -> Iterator[None]:
    yield
    node.cancel_all()


def environment_of(pid: int) -> dict[str, str]:
    with open(f"/proc/{pid}/environ", encoding="utf-8", errors="replace") as file:
        words = file.read().split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


def ask(*claimants: int) -> tuple[SourceRun, dict[str, Workload]]:
    """Reads the source as a scan does; ``claimants`` are the processes that it has seen."""
    host = Host()
    seen = Seen(table=stat_lines.read(host))
    for pid in claimants:
        environment = environment_of(pid)
        seen.add(
            Process(
                pid=pid,
                start_time_ticks=seen.table[pid].start_time_ticks,
                environment={"SLURM_JOB_ID": environment["SLURM_JOB_ID"]},
            )
        )
    run, workloads = slurm.read(host, seen)
    return run, {workload.job_id or "": workload for workload in workloads}


def start(node: SlurmNode, **options: str) -> str:
    job = node.submit("exec sleep 600", gpus=1, **options)
    node.wait_for_state(job, "RUNNING")
    node.wait_for(lambda: any(_is_sleep(pid) for pid in node.pids(job)), "the job's process")
    return job


def _is_sleep(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8") as file:
            return file.read() == "sleep\n"
    except OSError:
        return False


def test_each_job_has_its_own_gpu_owner_and_processes(node: SlurmNode) -> None:
    first = start(node, account="vision", job_name="train")
    second = start(node, user="nobody")
    run, workloads = ask()
    assert run.state == "ok", run.reason
    assert run.scheduled
    assert set(run.running) == {first, second}
    assert run.ended == ()
    assert socket.gethostname() != NODE_NAME
    for job in (first, second):
        process = next(pid for pid in node.pids(job) if _is_sleep(pid))
        # The batch step's own environment says which device Slurm handed it: a second witness.
        given = environment_of(process)["SLURM_JOB_GPUS"]
        assert workloads[job].gpus == (f"minor:{given}",)
        assert process in workloads[job].pids
        assert workloads[job].state == "RUNNING"
        assert workloads[job].partition == "gpu"
        assert workloads[job].started_at_ns is not None
    assert workloads[first].gpus != workloads[second].gpus
    assert (workloads[first].user, workloads[first].uid) == ("root", 0)
    assert workloads[first].account == "vision"
    nobody = pwd.getpwnam("nobody")
    assert (workloads[second].user, workloads[second].uid) == ("nobody", nobody.pw_uid)


def test_a_job_without_gpus_is_given_none(node: SlurmNode) -> None:
    job = node.submit("exec sleep 600")
    node.wait_for_state(job, "RUNNING")
    run, workloads = ask()
    assert job in run.running
    assert workloads[job].gpus == ()


def test_a_job_cannot_name_itself_more_gpus(node: SlurmNode) -> None:
    forged = (
        f"x\n   UserId=root(0) GroupId=root(0)\n   JobState=RUNNING\n   Socks/Node=*\n"
        f"     Nodes={NODE_NAME} CPU_IDs=0-3 Mem=0 GRES=gpu:h100:2(IDX:0-1)\n   MinCPUsNode=1"
    )
    job = start(node, user="nobody", job_name=forged)
    run, workloads = ask()
    assert run.state == "ok", run.reason
    assert len(workloads[job].gpus) == 1
    assert workloads[job].user == "nobody"


def test_a_process_that_its_finished_job_left_behind_is_of_an_ended_job(node: SlurmNode) -> None:
    # With proctrack/linuxproc Slurm loses a process whose parents have gone.
    # It says that it is in a session of its own: before that Slurm would end it with its group.
    orphan = "setsid sh -c 'echo; exec sleep 600 >/dev/null'"
    job = node.submit(f"({orphan} &) | read said", gpus=1)
    node.wait_for_state(job, "COMPLETED")
    node.wait_for(lambda: any(_is_sleep(pid) for pid in node.pids(job)), "what it left")
    orphans = [pid for pid in node.pids(job) if _is_sleep(pid)]
    assert len(orphans) == 1
    try:
        other = start(node)
        run, workloads = ask(*orphans)
        assert run.state == "ok"
        assert run.ended == (job,)
        assert set(run.running) == {other}
        assert job not in workloads
        assert "incomplete" in run.reason
    finally:
        os.kill(orphans[0], signal.SIGKILL)


def test_a_job_that_the_controller_never_heard_of_is_ended(node: SlurmNode) -> None:
    job = start(node)
    process = next(pid for pid in node.pids(job) if _is_sleep(pid))
    host = Host()
    seen = Seen(table=stat_lines.read(host))
    seen.add(Process(pid=process, start_time_ticks=1, environment={"SLURM_JOB_ID": "4000000"}))
    run, _ = slurm.read(host, seen)
    assert run.state == "ok", run.reason
    assert run.ended == ("4000000",)


def test_a_dead_controller_means_failed_and_nothing_else(node: SlurmNode) -> None:
    job = start(node)
    process = next(pid for pid in node.pids(job) if _is_sleep(pid))
    node.stop("slurmctld")
    try:
        run, workloads = ask(process)
    finally:
        node.start("slurmctld")
    assert run.state == "failed"
    assert run.reason
    assert run.remedy
    assert (run.running, run.ended, workloads) == ((), (), {})
    run, workloads = ask(process)
    assert run.state == "ok"
    assert job in workloads
