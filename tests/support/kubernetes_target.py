"""A process in a pod, as this machine and as the API server know it, and the steps done to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.cluster import Cluster
from gpuwarden.model import CgroupPlacement, Container, NodeFacts, Process, Snapshot, SourceRun
from gpuwarden.policy import Policy
from gpuwarden.respond.kubernetes import Cordon, DeletePod
from gpuwarden.respond.step import Outcome, Step, Target
from tests.support.kubernetes_api import Api, api_server

BOOT = "b00710b0-0000-4000-8000-000000000001"
UID = "0f0f0f0f-1111-4222-8333-444455556666"
ID = "a" * 64
POD = "/api/v1/namespaces/training/pods/job-7-abcde"
NODE = "/api/v1/nodes/gpu-node-1"


def add_pod(api: Api, **more: Any) -> None:
    """The target's pod, of a job, with a second container."""
    spec = {
        "nodeName": "gpu-node-1",
        "terminationGracePeriodSeconds": 3,
        "containers": [{"name": "train", "image": "i"}, {"name": "mesh", "image": "i"}],
    }
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "job-7", "uid": "j"}
    metadata = {"uid": UID, "ownerReferences": [{**owner, "controller": True}]}
    status = {
        "name": "train",
        "ready": True,
        "restartCount": 0,
        "image": "i",
        "imageID": "i",
        "containerID": f"containerd://{ID}",
    }
    metadata |= more.pop("metadata", {})
    spec |= more.pop("spec", {})
    api.add_pod(
        "training",
        "job-7-abcde",
        metadata=metadata,
        spec=spec,
        **({"status": {"containerStatuses": [status]}} | more),
    )


def target(**container: Any) -> Target:
    """A miner in the container train of that pod; fields of its container may be others."""
    fields: dict[str, Any] = {
        "id": ID,
        "runtime": "cri-containerd",
        "confirmed": True,
        "pod_uid": UID,
        "pod_name": "job-7-abcde",
        "pod_namespace": "training",
        "pod_container": "train",
        "pod_owner": "Job/job-7",
    }
    own = Container(**(fields | container))
    process = Process(
        pid=4242,
        start_time_ticks=7,
        cgroup=CgroupPlacement(pod_uid=UID.replace("-", "_"), container_id=own.id),
    )
    snapshot = Snapshot(
        taken_at_ns=1,
        node=NodeFacts(hostname="GPU-node-1", boot_id=BOOT),
        sources=(SourceRun(name="kubernetes", state="ok"),),
        containers=(own, Container(id="b" * 64, runtime="x", pod_uid=UID, pod_container="mesh")),
        processes=(process,),
    )
    return Target(
        verdict="cryptominer",
        identity=None,
        process=process,
        rows=(),
        container=own,
        workload=None,
        gpus=(),
        snapshot=snapshot,
        policy=Policy(),
    )


def impatient() -> Cluster:
    """Waits half a second for an answer."""
    return Cluster(answer_seconds=0.5)


def deleting(within_seconds: float = 5.0) -> DeletePod:
    """The step, with this much time for the pod to go after its grace."""
    return DeletePod(within_seconds)


def planned(step: Step | None) -> Step:
    """A step that applies."""
    assert step is not None
    return step


def done(actor: Cordon | DeletePod, one: Target) -> Outcome:
    """What came of doing it."""
    return actor.do(one, lambda line: None)


def asked(api: Api, method: str) -> list[Any]:
    """The bodies of all requests of that method."""
    return [request.body for request in api.asked if request.method == method]


@contextmanager
def known_target(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    """An API that has the target's node and pod, and this machine configured for it."""
    monkeypatch.delenv("NODE_NAME", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with api_server(directory, monkeypatch) as found:
        found.add_node("gpu-node-1", boot_id=BOOT)
        add_pod(found)
        yield found
