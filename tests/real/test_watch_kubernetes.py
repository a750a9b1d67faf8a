"""Pods that open a GPU's node under a running `gpuwarden watch`, on a node that has a kubelet.

containerd, its pods and their cgroups are real; pod-resources is answered by our own server on the
real wire, since no kubelet runs without a cluster.
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.expected import kubernetes
from tests.support.containers import busybox_root, no_new_cgroups
from tests.support.cri import Containerd, PodSpec, RunningPod, containerd
from tests.support.fakenvml import FakeNvml
from tests.support.packages import require, require_root
from tests.support.pod_resources import PodResources, pod_resources
from tests.support.probes import build, node
from tests.support.watching import GPU, PATIENT, Watching, stopped, watching

pytestmark = pytest.mark.real

IMAGE = "localhost/gpuwarden-test:1"
RULE = "container_opens_accelerator"
RENAMED = "device_node_renamed"
UUID = "GPU-00000000-0000-0000-0000-000000000000"
HOLDS = ("/bin/sh", "-c", "exec 3</dev/nvidia0; exec sleep 1000")


class Cluster:
    """One node: its runtime, its kubelet, and the agent that watches it."""

    def __init__(self, engine: Containerd, kubelet: PodResources, gpu: Path) -> None:
        self.engine = engine
        self.kubelet = kubelet
        self.gpu = gpu
        self.agent: Watching
        self.arguments: tuple[str, ...] = ()

    def give(self, *pods: str) -> None:
        """The kubelet gives the GPU to these pods, and to no others."""
        devices = [{"resource_name": "nvidia.com/gpu", "device_ids": [UUID]}]
        self.kubelet.pods = [
            {
                "name": name,
                "namespace": "team-a",
                "containers": [{"name": "main", "devices": devices}],
            }
            for name in pods
        ]

    def start(self, name: str, **more: Any) -> RunningPod:
        """A pod that opens the GPU and keeps it."""
        spec = PodSpec(
            name=name,
            uid=f"0f6e8a0a-1111-2222-3333-{secrets.token_hex(6)}",
            devices=[(str(self.gpu), "/dev/nvidia0")],
            command=HOLDS,
        )
        for field, value in more.items():
            setattr(spec, field, value)
        return self.engine.start_pod(spec, IMAGE)

    def opens(self, pod: RunningPod) -> list[dict[str, Any]]:
        return [one for one in self.agent.events(pod.pid) if one["how"] == "open"]

    def wait_for_open(self, pod: RunningPod) -> dict[str, Any]:
        self.agent.wait(lambda: self.opens(pod), "the pod's open")
        return self.opens(pod)[0]

    def told(self, pod: RunningPod, severity: str | None = None) -> dict[str, Any]:
        def wanted() -> list[dict[str, Any]]:
            found = self.agent.findings(RULE, pod.pid)
            return [one for one in found if severity in (None, one["severity"])]

        self.agent.wait(wanted, f"{RULE} of {pod.pid}, {severity}")
        return wanted()[-1]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    require_root()
    require("runc", "containerd", "busybox-static")
    build()
    with ExitStack() as stack:
        stack.enter_context(no_new_cgroups())
        scratch = Path("/tmp") / f"gw-watched-{secrets.token_hex(4)}"
        scratch.mkdir()
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        # This machine's /proc, with only the sockets that this test puts under it.
        machine = scratch / "host"
        (machine / "run").mkdir(parents=True)
        (machine / "proc").symlink_to("/proc")
        (machine / "sys").symlink_to("/sys")
        (machine / "usr").symlink_to("/usr")
        kubelet = stack.enter_context(pod_resources(machine / kubernetes.SOCKET[1:]))
        socket = machine / "run/containerd/containerd.sock"
        engine = stack.enter_context(containerd(scratch / "ctd", socket))
        engine.load_image(busybox_root(scratch / "root"), scratch / "ctd", IMAGE)
        (scratch / "dev").mkdir()
        cluster = Cluster(engine, kubelet, node(scratch / "dev/nvidia0", GPU))
        nvml = FakeNvml()
        nvml.gpu(uuid=UUID, minor=0, total=80 << 30, used=1 << 30)
        library = stack.enter_context(nvml.in_place())
        (scratch / "state").mkdir()
        cluster.arguments = ("--events", "--root", str(machine), "--nvml-library", library)
        cluster.agent = stack.enter_context(watching(scratch, *cluster.arguments, program=PATIENT))
        yield cluster


def test_a_pod_that_was_given_nothing_is_critical_and_told_in_full(
    cluster: Cluster, record_property: Callable[[str, object], None]
) -> None:
    for number in range(3):
        pod = cluster.start(f"taker-{number}", labels={"app": "miner"})
        finding = cluster.told(pod, "critical")
        seconds = time.time() - cluster.wait_for_open(pod)["at_ns"] / 1e9
        record_property(f"seconds until critical, pod {number}", round(seconds, 3))
        print(f"critical: {seconds:.3f} s after the open")
    text = json.dumps(finding["evidence"])
    for expected in (
        "pod team-a/taker-2", f"image {IMAGE}", "digest sha256:", "app=miner",
        "/dev/nvidia0 (203:0)", "given this GPU? no, not by the kubelet",
    ):  # fmt: skip
        assert expected in text, (expected, text)
    assert finding["verdict"] == "rogue-container"
    assert finding["owner"] is not None
    assert "team-a" in finding["owner"]
    container = cluster.wait_for_open(pod)["container"]
    assert (container["id"], container["state"]) == (pod.container_id, "known")
    assert (container["pod"], container["namespace"]) == ("taker-2", "team-a")
    assert container["pod_labels"]["app"] == "miner"


def test_a_pod_that_was_given_the_gpu_is_no_finding(cluster: Cluster) -> None:
    # The allocation is newer than whatever the agent asked before.
    cluster.give("train")
    trained = cluster.start("train")
    other = cluster.start("not-given")
    cluster.told(other, "critical")
    assert cluster.wait_for_open(trained)["container"]["pod"] == "train"
    # Their node lies under /tmp, which a judgement of the whole node takes for a node renamed.
    assert {one["rule"] for one in cluster.agent.findings(pid=trained.pid)} <= {RENAMED}


def test_a_runtime_that_does_not_answer_is_told_as_unknown_and_again_when_it_does(
    cluster: Cluster, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    cluster.give()
    script = "while [ ! -e /go/on ]; do sleep 0.05; done; exec 3</dev/nvidia0; exec sleep 1000"
    go = cluster.gpu.parent.parent / "go"
    go.mkdir()
    pod = cluster.start("hung", command=("/bin/sh", "-c", script), mounts=[(str(go), "/go")])
    # An agent of its own: the other one asked about the pod when its runtime made its nodes.
    with watching(tmp_path, *cluster.arguments) as agent:
        with stopped(cluster.engine.pid):
            (go / "on").touch()
            agent.wait(lambda: agent.findings(RULE, pod.pid), "the finding")
            finding = agent.findings(RULE, pod.pid)[0]
            seconds = time.time() - finding["since_ns"] / 1e9
            record_property("seconds until unknown", round(seconds, 3))
            print(f"unknown: {seconds:.3f} s after the open")
            assert finding["severity"] in ("warning", "error")
            agent.wait(lambda: agent.events(pod.pid), "the event")
            container = agent.events(pod.pid)[0]["container"]
            assert (container["state"], container["id"]) == ("unknown", pod.container_id)

        def graver() -> list[dict[str, Any]]:
            return [f for f in agent.findings(RULE, pod.pid) if f["severity"] == "critical"]

        agent.wait(graver, "what the runtime then says")
        assert graver()[0]["id"] == finding["id"]
        assert "pod team-a/hung" in json.dumps(graver()[0]["evidence"])


def test_the_hosts_devices_in_a_privileged_pod_are_critical(cluster: Cluster) -> None:
    pod = cluster.start(
        "privileged",
        devices=(),
        privileged=True,
        mounts=[(str(cluster.gpu.parent), "/hostdev")],
        command=("/bin/sh", "-c", "exec 3</hostdev/nvidia0; exec sleep 1000"),
    )
    text = json.dumps(cluster.told(pod, "critical")["evidence"])
    assert "/hostdev/nvidia0 (203:0)" in text
    assert "it is privileged" in text
    cluster.agent.wait(
        lambda: cluster.agent.findings("accelerator_opened_by_other_name", pod.pid), "its name"
    )


def test_a_node_made_in_a_pod_and_refused_is_a_warning(cluster: Cluster) -> None:
    script = f"busybox mknod /tmp/x c {GPU[0]} {GPU[1]}; cat /tmp/x; exec sleep 1000"
    pod = cluster.start("maker", devices=(), command=("/bin/sh", "-c", script))

    def of_pod(rule: str) -> list[dict[str, Any]]:
        told = cluster.agent.findings(rule)
        return [one for one in told if "team-a/maker" in json.dumps(one["evidence"])]

    cluster.agent.wait(lambda: of_pod(RULE), "the refused open")
    cluster.agent.wait(lambda: of_pod("accelerator_node_made"), "the node")
    assert {one["severity"] for one in of_pod(RULE)} == {"warning"}
    assert cluster.opens(pod) == []
