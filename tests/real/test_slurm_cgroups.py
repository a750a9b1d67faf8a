"""A Slurm that keeps its jobs in cgroups: a process is tied to its job by the cgroup alone.

A file of its own, because one host's second slurmd is not asked.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuwarden.expected import slurm
from gpuwarden.host import Host
from gpuwarden.model import CgroupPlacement, Process
from gpuwarden.sensors import cgroup
from gpuwarden.sensors.process import stat_lines
from gpuwarden.sensors.seen import Seen
from tests.support.slurm import running_slurm

pytestmark = pytest.mark.real


def is_sleep(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text() == "sleep\n"
    except OSError:
        return False


def test_a_job_is_known_by_its_cgroup_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "COMMAND_SECONDS", 60.0)
    monkeypatch.setattr(slurm, "TOTAL_SECONDS", 120.0)
    with running_slurm("cgroup") as node:
        job = node.submit("exec sleep 600", gpus=1, user="nobody")
        node.wait_for_state(job, "RUNNING")
        node.wait_for(lambda: any(is_sleep(pid) for pid in node.pids(job)), "the job's process")
        process = next(pid for pid in node.pids(job) if is_sleep(pid))
        lines = Path(f"/proc/{process}/cgroup").read_text().splitlines()
        placement = cgroup.place(lines)
        assert placement.slurm_job == job
        host = Host()
        seen = Seen(table=stat_lines.read(host))
        seen.add(Process(pid=process, start_time_ticks=1, cgroup=placement))
        stale = CgroupPlacement(slurm_job="4000000")
        seen.add(Process(pid=1, start_time_ticks=1, cgroup=stale))
        run, workloads = slurm.read(host, seen)
        assert (run.state, run.reason) == ("ok", "")
        assert (run.running, run.ended) == ((job,), ("4000000",))
        assert process in workloads[0].pids
