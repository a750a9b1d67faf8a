"""Jobs and others that open GPUs' nodes under a running `gpuwarden watch`, on a node of Slurm."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.fakenvml import FakeNvml
from tests.support.packages import require_root
from tests.support.probes import build
from tests.support.slurm import SlurmNode, running_slurm
from tests.support.watching import GPU, Watching, watching

pytestmark = pytest.mark.real

RULE = "accelerator_opened_outside_jobs"
UUIDS = [f"GPU-00000000-0000-0000-0000-00000000000{number}" for number in range(2)]


class Cluster:
    """One node of Slurm with two GPUs, and the agent that watches it."""

    def __init__(self, slurm: SlurmNode, agent: Watching) -> None:
        self.slurm = slurm
        self.agent = agent

    def start(self, script: str, **options: str) -> tuple[str, int]:
        """A job with one GPU whose script ends in a sleep; its id and that process."""
        job = self.slurm.submit(f"{script}; exec sleep 600", gpus=1, **options)
        self.slurm.wait_for(lambda: self._sleeper(job) is not None, "the job's process")
        pid = self._sleeper(job)
        assert pid is not None
        return job, pid

    def _sleeper(self, job: str) -> int | None:
        for pid in self.slurm.pids(job):
            try:
                if Path(f"/proc/{pid}/comm").read_text() == "sleep\n":
                    return pid
            except OSError:
                continue
        return None

    def wait_for_open(self, pid: int) -> dict[str, Any]:
        def opens() -> list[dict[str, Any]]:
            return [one for one in self.agent.events(pid) if one["how"] == "open"]

        self.agent.wait(opens, f"an open of {pid}")
        return opens()[0]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require_root()
    build()
    nvml = FakeNvml()
    for number, uuid in enumerate(UUIDS):
        nvml.gpu(uuid=uuid, minor=number, total=80 << 30, used=1 << 30)
    with ExitStack() as stack:
        slurm = stack.enter_context(running_slurm(gpu_major=GPU[0]))
        library = stack.enter_context(nvml.in_place())
        directory = tmp_path_factory.mktemp("w")
        agent = stack.enter_context(watching(directory, "--events", "--nvml-library", library))
        yield Cluster(slurm, agent)


def accusations(agent: Watching, pid: int) -> set[str]:
    """The rules that a process was told by."""
    # The nodes of this Slurm lie under /tmp: a judgement takes that for a node renamed. One that
    # comes late finds a process that has held a GPU for long without a driver's library.
    of_this_bed = {"device_node_renamed", "gpu_process_without_driver_library"}
    return {one["rule"] for one in agent.findings(pid=pid)} - of_this_bed


@contextmanager
def outside(path: Path) -> Iterator[int]:
    """A process of no job that opens a node and keeps it; its pid."""
    program = f"import os, sys; os.open({str(path)!r}, os.O_RDONLY); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    try:
        yield process.pid
    finally:
        process.communicate()


OWN = "exec 3</$(dirname $SLURM_CONF)/../dev/nvidia$SLURM_JOB_GPUS"
"""Opens the GPU that Slurm gave the job."""


def test_a_process_of_no_job_is_told_and_a_job_that_is_newer_than_the_last_answer_is_not(
    cluster: Cluster, record_property: Callable[[str, object], None]
) -> None:
    _, pid = cluster.start(OWN)
    cluster.wait_for_open(pid)
    with outside(cluster.slurm.device(0)) as stranger:
        cluster.agent.wait(
            lambda: [f for f in cluster.agent.findings(RULE, stranger) if f["severity"] == "error"],
            "the finding",
        )
        (*_, finding) = cluster.agent.findings(RULE, stranger)
        seconds = time.time() - finding["since_ns"] / 1e9
        record_property("seconds until told", round(seconds, 3))
        print(f"{RULE}: {seconds:.3f} s after the open")
        assert "slurm hands out the accelerators" in json.dumps(finding["evidence"])
    assert accusations(cluster.agent, pid) == set()


def test_a_job_on_anothers_gpu_is_told_by_the_judgement(
    cluster: Cluster, record_property: Callable[[str, object], None]
) -> None:
    cluster.slurm.cancel_all()
    _, owner = cluster.start(OWN)
    given = cluster.wait_for_open(owner)["device"]["minor"]
    _, thief = cluster.start(f"exec 3<{cluster.slurm.device(given)}", user="nobody")
    opened_at = cluster.wait_for_open(thief)["at_ns"] / 1e9

    def told() -> list[dict[str, Any]]:
        return cluster.agent.findings("gpu_process_on_wrong_gpu", thief)

    # A judgement rests twenty times as long as it takes: some seconds, more on a busy machine.
    cluster.agent.wait(told, "the verdict", 120)
    seconds = time.time() - opened_at
    record_property("seconds until the judgement", round(seconds, 3))
    print(f"wrong GPU: {seconds:.3f} s after the open")
    assert (told()[0]["severity"], told()[0]["verdict"]) == ("warning", "wrong-gpu")
    assert accusations(cluster.agent, owner) == set()
