"""Pod-resources over a real unix socket, joined with real sandboxes of a real containerd.

The wire, the deadline and the errors are real; the server's side is ours, since no kubelet runs
without a cluster.
"""

from __future__ import annotations

import os
import secrets
import socket as sockets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import grpc
import pytest

from gpuwarden.expected import kubernetes
from gpuwarden.host import Host
from gpuwarden.model import Container
from gpuwarden.sensors.seen import Seen
from tests.support.containers import busybox_root, no_new_cgroups
from tests.support.cri import PodSpec, containerd
from tests.support.packages import require, require_root
from tests.support.pod_resources import PodResources, pod_resources

pytestmark = pytest.mark.real

IMAGE = "localhost/gpuwarden-test:1"
GPU = "GPU-aaaa0000-1111-2222-3333-444455556666"


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded test machine is no kubelet that hangs."""
    monkeypatch.setattr(kubernetes, "DEADLINE_SECONDS", 60.0)


@pytest.fixture
def host() -> Iterator[Host]:
    with tempfile.TemporaryDirectory(prefix="gw-") as directory:
        yield Host(directory)


@pytest.fixture
def kubelet(host: Host) -> Iterator[PodResources]:
    require_root()
    with pod_resources(Path(host.root) / kubernetes.SOCKET[1:]) as service:
        yield service


def pod(name: str, *ids: str, resource: str = "nvidia.com/gpu") -> dict[str, object]:
    return {
        "name": name,
        "namespace": "team-a",
        "containers": [
            {"name": "main", "devices": [{"resource_name": resource, "device_ids": list(ids)}]}
        ],
    }


def test_pods_with_gpus_become_workloads(host: Host, kubelet: PodResources) -> None:
    kubelet.pods = [pod("train-0", GPU), pod("web", "eth0", resource="rdma/hca")]
    run, workloads = kubernetes.read(host, Seen())
    assert (run.state, run.scheduled, run.workloads) == ("ok", True, 1)
    assert [(w.name, w.gpus, w.containers) for w in workloads] == [
        ("team-a/train-0", (f"uuid:{GPU}",), ("main",))
    ]
    assert "ended pods" in run.reason


def test_claims_of_dynamic_resource_allocation_count(host: Host, kubelet: PodResources) -> None:
    kubelet.pods = [
        {
            "name": "claimer",
            "namespace": "team-a",
            "containers": [
                {
                    "name": "main",
                    "dynamic_resources": [
                        {
                            "claim_name": "one-gpu",
                            "claim_resources": [
                                {
                                    "driver_name": "gpu.nvidia.com",
                                    "device_name": "gpu-2",
                                    "cdi_devices": [{"name": "k8s.gpu.nvidia.com/claim=u-gpu-2"}],
                                }
                            ],
                        }
                    ],
                }
            ],
        }
    ]
    _, workloads = kubernetes.read(host, Seen())
    assert workloads[0].gpus == ("minor:2",)


def test_no_kubelet_is_absent(host: Host) -> None:
    run, workloads = kubernetes.read(host, Seen())
    assert (run.state, run.scheduled, workloads) == ("absent", False, [])


def test_pods_without_a_visible_kubelet_are_a_failure_and_not_an_absence(host: Host) -> None:
    seen = Seen()
    seen.add(
        Container(
            id="a" * 64, runtime="containerd", confirmed=True, pod_uid="u-1", pod_name="train-0"
        )
    )
    run, _ = kubernetes.read(host, seen)
    assert run.state == "failed"
    assert "mount" in run.remedy


def test_a_kubelet_that_does_not_listen_is_a_failure(host: Host) -> None:
    os.makedirs(host.root + "/var/lib/kubelet/pod-resources")
    run, _ = kubernetes.read(host, Seen())
    assert (run.state, run.scheduled) == ("failed", True)
    assert run.remedy


def test_a_socket_that_nobody_serves_is_a_failure(host: Host) -> None:
    path = host.root + kubernetes.SOCKET
    os.makedirs(path.rpartition("/")[0])
    with sockets.socket(sockets.AF_UNIX) as dead:
        dead.bind(path)
    run, _ = kubernetes.read(host, Seen())
    assert run.state == "failed"


def test_a_refusal_is_a_failure(host: Host, kubelet: PodResources) -> None:
    kubelet.refuse = grpc.StatusCode.PERMISSION_DENIED
    run, workloads = kubernetes.read(host, Seen())
    assert (run.state, workloads) == ("failed", [])
    assert "refused" in run.reason


def test_a_kubelet_that_hangs_is_given_up(
    host: Host, kubelet: PodResources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "DEADLINE_SECONDS", 0.2)
    kubelet.hang = Event()
    run, _ = kubernetes.read(host, Seen())
    assert run.state == "failed"
    assert "no answer" in run.reason


def test_bytes_that_are_no_answer_are_a_failure(host: Host, kubelet: PodResources) -> None:
    kubelet.raw = b"\xff\xff\xff\xff"
    run, _ = kubernetes.read(host, Seen())
    assert run.state == "failed"
    assert "not the message" in run.reason


def test_a_service_that_is_not_roots_is_not_believed(host: Host, kubelet: PodResources) -> None:
    kubelet.pods = [pod("train-0", GPU)]
    os.chown(host.root + kubernetes.SOCKET, 65534, -1)
    run, workloads = kubernetes.read(host, Seen())
    assert (run.state, workloads) == ("failed", [])
    assert "65534" in run.reason


def test_uids_come_from_the_runtime_and_ended_pods_are_dropped(
    host: Host, kubelet: PodResources
) -> None:
    require("containerd", "runc", "busybox-static")
    root = Path(host.root)
    uid, ended_uid = (f"11111111-2222-3333-4444-{secrets.token_hex(6)}" for _ in range(2))
    socket = root / "run/containerd/containerd.sock"
    with no_new_cgroups(), containerd(root / "containerd", socket) as engine:
        engine.load_image(busybox_root(root / "busybox"), root / "containerd", IMAGE)
        engine.start_pod(PodSpec(name="train-0", uid=uid), IMAGE)
        engine.stop_pod(engine.start_pod(PodSpec(name="done-0", uid=ended_uid), IMAGE))
        kubelet.pods = [pod("train-0", GPU), pod("done-0", GPU)]
        run, workloads = kubernetes.read(host, Seen())
    assert [(w.pod_name, w.pod_uid, w.state) for w in workloads] == [("train-0", uid, "running")]
    assert (run.running, run.ended, run.reason) == ((uid,), (ended_uid,), "")
