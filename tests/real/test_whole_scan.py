"""The whole scan of one real machine: Slurm jobs, containers and left-overs, one verdict each.

Slurm, podman and every process are real. Only the GPUs are not: NVML is the stand-in library behind
the real binding, and the container's device node is a copy of /dev/null that reads as /dev/nvidia2.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuwarden.finding import Report, Row
from gpuwarden.judge import exit_code, judge
from gpuwarden.model import Snapshot
from gpuwarden.policy import Policy
from gpuwarden.policy_file import parse_policy
from gpuwarden.scan import ScanOptions, take_snapshot
from gpuwarden.snapshot import decode, encode
from tests.support.containers import busybox_root, fake_node, no_new_cgroups, podman, wait_until
from tests.support.fakenvml import FakeNvml
from tests.support.packages import require, require_root
from tests.support.slurm import SlurmNode, running_slurm
from tests.support.stand_in import StandInHost

pytestmark = pytest.mark.real

GIB = 1 << 30
IMAGE = "localhost/gpuwarden-scan:1"
STRANGER_UID = 4242
WAIT = "import time; time.sleep(600)"
PYTHON = "/usr/bin/python3"


@dataclass
class Story:
    """What runs, by the part it plays, and what the scan made of it."""

    pids: dict[str, int] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    report: Report | None = None

    def row(self, part: str, gpu: str | None = None) -> Row:
        assert self.report is not None
        rows = [r for r in self.report.rows if r.pid == self.pids[part] and gpu in (None, r.gpu)]
        assert len(rows) == 1, rows
        return rows[0]


def job_python(node: SlurmNode, job: str) -> int:
    """The job's waiting Python."""

    def found() -> list[int]:
        result = []
        for pid in node.pids(job):
            try:
                if WAIT in Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8"):
                    result.append(pid)
            except OSError:
                continue
        return [p for p in result if "bash" not in os.readlink(f"/proc/{p}/exe")]

    wait_until(lambda: len(found()) == 1, "the job's process")
    return found()[0]


def start_job(node: SlurmNode, **options: str) -> tuple[str, int]:
    job = node.submit(f'exec {PYTHON} -c "{WAIT}"', gpus=1, **options)
    node.wait_for_state(job, "RUNNING")
    return job, job_python(node, job)


@pytest.fixture(scope="module")
def story() -> Iterator[Story]:
    require_root()
    require("podman", "runc", "busybox-static", "python3")
    told = Story()
    started: list[subprocess.Popen[bytes]] = []

    def start(part: str, argv: list[str], **options: object) -> None:
        process = subprocess.Popen(argv, **options)  # type: ignore[call-overload]
        started.append(process)
        told.pids[part] = process.pid

    orphan: int | None = None
    with ExitStack() as stack:
        # podman refuses a run directory of more than 50 characters, which pytest's own can have.
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gw-scan-")))
        stack.enter_context(no_new_cgroups())
        slurm = stack.enter_context(running_slurm())
        engine = stack.enter_context(podman(scratch / "podman"))
        try:
            # An ended job that left its process behind.
            left = scratch / "left"
            leaves = f"""(setsid sh -c ': >{left}; exec {PYTHON} -c "{WAIT}"' &)"""
            job = slurm.submit(f"{leaves}; until [ -e {left} ]; do sleep 0.1; done", gpus=1)
            slurm.wait_for_state(job, "COMPLETED")
            orphan = job_python(slurm, job)
            told.pids["orphan"] = orphan
            # Two jobs, each with one of the two GPUs.
            _, told.pids["first"] = start_job(slurm)
            _, told.pids["second"] = start_job(slurm, user="nobody")
            # A program that calls itself python3, deleted, with a miner's words and a local bridge.
            hidden = scratch / ".fontd"
            hidden.mkdir()
            shutil.copy("/bin/bash", hidden / "python3")
            bridge = socket.create_server(("127.0.0.1", 0))
            port = bridge.getsockname()[1]
            stack.callback(bridge.close)
            start(
                "miner",
                [
                    "python3", "-c", f"exec 9<>/dev/tcp/127.0.0.1/{port}; read -r -u 9 word",
                    "-a", "kawpow", "-o", "stratum+tcp://pool.example.net:3333",
                    "-u", "WALLET_PLACEHOLDER.w1",
                ],
                executable=str(hidden / "python3"),
            )  # fmt: skip
            accepted, _ = bridge.accept()
            stack.callback(accepted.close)
            (hidden / "python3").unlink()
            # Somebody's work outside Slurm.
            start("stranger", [PYTHON, "-c", WAIT], user=STRANGER_UID, group=STRANGER_UID)
            # A container that Slurm knows nothing of.
            node_path = fake_node(scratch / "dev/nvidia2")
            engine.import_image(busybox_root(scratch / "root"), IMAGE)
            identity = engine.start(
                IMAGE,
                "--device",
                f"{node_path}:/dev/nvidia2",
                command=("sh", "-c", "exec 9</dev/nvidia2; while :; do sleep 1; done"),
            )
            told.pids["container"] = engine.pid(identity)
            opened = Path(f"/proc/{told.pids['container']}/fd/9")
            wait_until(opened.is_symlink, "the container's open device")
            gone = subprocess.Popen(["true"])
            gone.wait()
            told.pids["dead"] = gone.pid
            uuid = {n: f"GPU-00000000-0000-0000-0000-00000000000{n}" for n in range(4)}
            slurm_gpu = {
                part: int(_environment(told.pids[part])["SLURM_JOB_GPUS"])
                for part in ("first", "second")
            }
            nvml = FakeNvml(driver="550.54.15")
            for n in range(4):
                nvml.gpu(uuid=uuid[n], minor=n, total=80 * GIB, used=20 * GIB, util=60)
                for part in ("first", "second"):
                    if slurm_gpu[part] == n:
                        nvml.process(told.pids[part], memory=10 * GIB, kinds="C")
                if n == slurm_gpu["second"]:
                    nvml.process(told.pids["miner"], memory=4 * GIB, kinds="C")
                    nvml.sample(told.pids["miner"], sm=98, age_us=1000)
                if n == 3:
                    # The first job spreads to a GPU that is not its own; the others are just there.
                    for part in ("first", "stranger", "orphan", "dead"):
                        nvml.process(told.pids[part], memory=1 * GIB, kinds="C")
            host = StandInHost(link_paths={"/dev/nvidia2": (195, 2)})
            library = stack.enter_context(nvml.in_place())
            told.snapshot = take_snapshot(host, ScanOptions(nvml_library=library))
            # The stand-in driver counts pids as this namespace does, whichever it is.
            seen_from = replace(told.snapshot.node, host_pid_namespace=True)
            told.snapshot = replace(told.snapshot, node=seen_from)
            told.report = judge(told.snapshot, Policy())
            told.pids["gpu of second"] = slurm_gpu["second"]
            told.pids["gpu of first"] = slurm_gpu["first"]
            yield told
        finally:
            for process in started:
                process.kill()
                process.wait()
            if orphan is not None:
                os.kill(orphan, signal.SIGKILL)
            slurm.cancel_all()


def _environment(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


def test_sensors_and_sources_worked(story: Story) -> None:
    assert story.snapshot is not None
    states = {run.name: (run.state, run.reason) for run in story.snapshot.sensors}
    for name in ("nvml", "holders", "processes", "containers", "sockets", "persistence"):
        assert states[name][0] in ("ok", "partial"), (name, states[name])
    slurm = next(s for s in story.snapshot.sources if s.name == "slurm")
    assert (slurm.state, slurm.scheduled) == ("ok", True), slurm.reason


def test_a_job_on_its_own_gpu_is_expected(story: Story) -> None:
    for part in ("first", "second"):
        row = story.row(part, str(story.pids[f"gpu of {part}"]))
        assert row.verdict == "expected", row.path
        assert row.proof == "proven"
        assert row.workload is not None


def test_a_job_on_another_gpu_is_on_the_wrong_one(story: Story) -> None:
    row = story.row("first", "3")
    assert row.verdict == "wrong-gpu", row.path


def test_a_miner_beside_a_job_is_a_miner(story: Story) -> None:
    row = story.row("miner")
    assert row.verdict == "cryptominer", row.path
    kinds = {e.kind for e in row.evidence if e.strength in ("strong", "complete")}
    assert {"signature", "masquerade"} <= kinds
    assert row.binary is not None
    assert row.binary.endswith("/.fontd/python3 (deleted)")
    assert row.sm_percent == 98


def test_the_miners_local_peer_is_known(story: Story) -> None:
    assert story.snapshot is not None
    mine = [
        c
        for c in story.snapshot.connections
        if c.pid == story.pids["miner"] and c.state == "ESTABLISHED"
    ]
    # Our own process is the peer; a scan leaves itself out of what it reports as holders only.
    assert [c.remote_address for c in mine] == ["127.0.0.1"]


def test_a_container_that_slurm_did_not_give_the_gpu_is_rogue(story: Story) -> None:
    row = story.row("container")
    assert row.verdict == "rogue-container", row.path
    assert row.gpu == "2"
    assert row.listed is False


def test_what_an_ended_job_left_is_orphaned(story: Story) -> None:
    row = story.row("orphan")
    assert row.verdict == "orphaned-job", row.path


def test_a_known_person_outside_slurm_is_asked_not_stopped(story: Story) -> None:
    row = story.row("stranger")
    assert row.verdict == "other-team", row.path
    assert story.report is not None
    finding = next(f for f in story.report.findings if f.subject.pid == story.pids["stranger"])
    assert not any("kill" in step for step in finding.advice)


def test_a_dead_pid_that_holds_memory_is_a_zombie_context(story: Story) -> None:
    assert story.row("dead").verdict == "zombie-context"


def test_the_scan_fails_and_replays_the_same(story: Story) -> None:
    assert story.snapshot is not None
    assert story.report is not None
    assert exit_code(story.report, "error") == 1
    again = judge(decode(encode(story.snapshot)), Policy())
    assert again == story.report


def test_a_policy_takes_the_stranger_in(story: Story) -> None:
    assert story.snapshot is not None
    text = (
        "workloads:\n"
        f"  - {{name: bench, owner: the lab, match: {{user: '{STRANGER_UID}', "
        f"binary: '{os.path.realpath(PYTHON)}'}}, gpus: [3]}}\n"
    )
    policy = parse_policy(text.encode(), "policy.yaml")
    report = judge(story.snapshot, policy)
    row = next(r for r in report.rows if r.pid == story.pids["stranger"])
    assert (row.verdict, row.owner) == ("expected", "the lab"), row.path


def snapshot_as_nobody(host: StandInHost) -> Snapshot:
    """The snapshot that a process without any right takes; in a child, as rights do not return."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(encode(take_snapshot(host)))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    return decode(data)


def test_an_unprivileged_scan_works_and_says_what_it_could_not_see(story: Story) -> None:
    snapshot = snapshot_as_nobody(StandInHost(link_paths={"/dev/nvidia2": (195, 2)}))
    assert snapshot.node.observer_uid == 65534
    states = {run.name: run.state for run in snapshot.sensors}
    assert states["holders"] == "partial"
    # The kernel's ring may be root's alone; that is a sensor that failed, not one that saw nothing.
    assert {name for name, state in states.items() if state == "failed"} <= {"kernel_log"}
    gap = next(g for g in snapshot.gaps if g.sensor == "holders")
    assert "permission" in gap.reason
    assert gap.remedy
    assert story.pids["container"] not in {h.pid for h in snapshot.holders}
    report = judge(snapshot, Policy())
    assert all(row.verdict != "expected" for row in report.rows)
