"""The whole scan of one real machine as a Kubernetes node: real pods, one verdict each.

containerd, its pods and their cgroups are real; no kubelet runs without a cluster, so pods are made
over CRI as a kubelet would, and pod-resources is answered by our own server on the real wire.
NVML is the stand-in library behind the real binding.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuwarden.expected import kubernetes
from gpuwarden.finding import Report, Row
from gpuwarden.judge import judge
from gpuwarden.model import Snapshot
from gpuwarden.policy import Policy
from gpuwarden.policy_file import parse_policy
from gpuwarden.snapshot import open_recording
from tests.support.containers import (
    busybox_root,
    cgroup_directories,
    fake_node,
    no_new_cgroups,
    wait_until,
)
from tests.support.cri import PodSpec, containerd
from tests.support.fakenvml import FakeNvml
from tests.support.packages import require, require_root
from tests.support.pod_resources import pod_resources

pytestmark = pytest.mark.real

GIB = 1 << 30
IMAGE = "localhost/gpuwarden-test:1"
UIDS = {
    name: f"0f6e8a0a-1111-2222-3333-44445555000{number}"
    for number, name in enumerate(("train", "taker", "exporter"))
}
GPUS = [f"GPU-00000000-0000-0000-0000-00000000000{number}" for number in range(2)]


class Node:
    """The pids by part, and the snapshot that was taken of them."""

    snapshot: Snapshot

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}

    def judge(self, policy: str = "") -> Report:
        return judge(self.snapshot, parse_policy(policy.encode(), "p") if policy else Policy())

    def row(self, part: str, gpu: str | None = None, policy: str = "") -> Row:
        rows = [
            r for r in self.judge(policy).rows if r.pid == self.pids[part] and gpu in (None, r.gpu)
        ]
        assert len(rows) == 1, rows
        return rows[0]


def wait_for_program(pid: int) -> None:
    """Until then the runtime's own one runs in its place."""
    exe = Path(f"/proc/{pid}/exe")
    wait_until(lambda: exe.readlink().name == "busybox", f"the program of pid {pid}")


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    require_root()
    require("runc", "containerd", "busybox-static")
    told = Node()
    stranger: subprocess.Popen[bytes] | None = None
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gw-pods-")))
        stack.enter_context(no_new_cgroups())
        # This machine's /proc, with only the sockets that this test puts under it.
        machine = scratch / "host"
        (machine / "run").mkdir(parents=True)
        (machine / "proc").symlink_to("/proc")
        kubelet = stack.enter_context(pod_resources(machine / kubernetes.SOCKET[1:]))
        engine = stack.enter_context(
            containerd(scratch / "ctd", machine / "run/containerd/containerd.sock")
        )
        engine.load_image(busybox_root(scratch / "root"), scratch / "ctd", IMAGE)
        device = fake_node(scratch / "dev/nvidia0")
        try:
            for name, more in (
                ("train", {}),
                ("taker", {"environment": {"NVIDIA_VISIBLE_DEVICES": "all"}}),
                ("exporter", {"privileged": True}),
            ):
                spec = PodSpec(name=name, uid=UIDS[name], devices=[(str(device), "/dev/nvidia0")])
                for field, value in more.items():
                    setattr(spec, field, value)
                told.pids[name] = engine.start_pod(spec, IMAGE).pid
                wait_for_program(told.pids[name])
            kubelet.pods = [
                {
                    "name": "train",
                    "namespace": "team-a",
                    "containers": [
                        {
                            "name": "main",
                            "devices": [
                                {"resource_name": "nvidia.com/gpu", "device_ids": [GPUS[0]]}
                            ],
                        }
                    ],
                }
            ]
            # Somebody with root moves a process of the host into the pod that was given the GPU.
            stranger = subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL)
            told.pids["stranger"] = stranger.pid
            for directory in cgroup_directories(told.pids["train"]):
                (directory / "cgroup.procs").write_text(str(stranger.pid))
            nvml = FakeNvml()
            for number, uuid in enumerate(GPUS):
                nvml.gpu(uuid=uuid, minor=number, total=80 * GIB, used=20 * GIB)
                for part in ("train", "taker", "exporter", "stranger"):
                    if number == 0 or part == "train":
                        nvml.process(told.pids[part], memory=GIB, kinds="C")
            library = stack.enter_context(nvml.in_place())
            recording = scratch / "node.json.gz"
            # The command, in a process of its own: this one has the threads of our server.
            done = subprocess.run(
                [sys.executable, "-m", "gpuwarden", "snapshot", str(recording),
                 "--root", str(machine), "--nvml-library", library],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr
            snapshot = open_recording(str(recording))
            # The stand-in driver counts pids as this namespace does, whichever it is.
            told.snapshot = replace(snapshot, node=replace(snapshot.node, host_pid_namespace=True))
            yield told
        finally:
            if stranger is not None:
                stranger.kill()
                stranger.wait()


def test_runtime_and_kubelet_answered(node: Node) -> None:
    sources = {s.name: (s.state, s.scheduled, s.reason) for s in node.snapshot.sources}
    assert sources["kubernetes"][:2] == ("ok", True), sources
    sensors = {s.name: (s.state, s.reason) for s in node.snapshot.sensors}
    assert sensors["containers"][0] == "ok", sensors
    assert sensors["nvml"][0] == "ok", sensors


def test_the_pod_that_was_given_the_gpu_is_expected_on_it_alone(node: Node) -> None:
    row = node.row("train", "0")
    assert (row.verdict, row.proof, row.place) == ("expected", "proven", "team-a/train"), row.path
    # On the GPU that it was not given, a shell as a GPU client weighs more than a wrong number.
    other = node.row("train", "1")
    assert other.verdict == "rogue-container"
    assert "given this GPU? no, not by the kubelet" in other.path


def test_a_pod_that_was_given_nothing_is_rogue_whatever_it_asks_for(node: Node) -> None:
    row = node.row("taker")
    assert row.verdict == "rogue-container", row.path
    assert row.owner is not None
    assert "team-a" in row.owner
    assert any("NVIDIA_VISIBLE_DEVICES=all" in e.text for e in row.evidence)


def test_an_exporter_is_rogue_until_the_policy_excepts_it_by_name(node: Node) -> None:
    assert node.row("exporter").verdict == "rogue-container"
    policy = (
        "exceptions:\n"
        "  - rule: gpu_container_without_allocation\n"
        "    reason: sees every GPU by design\n"
        "    match: {pod_namespace: team-a, pod_name: exporter}\n"
    )
    assert node.row("exporter", policy=policy).silenced_by is not None
    assert node.row("taker", policy=policy).silenced_by is None


def test_a_process_moved_into_the_pods_cgroup_is_not_the_pod(node: Node) -> None:
    row = node.row("stranger")
    assert row.verdict not in ("expected", "system"), row.path
    assert any("but in the host's namespaces" in e.text for e in row.evidence)
