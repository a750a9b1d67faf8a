"""Which pod and which node of a cluster a process belongs to, as far as it is proven.

What a runtime says of a container's pod is a label, which whoever starts a container by hand can
write. It is believed where the kubelet's own control group says the same pod, and acted on where
the API server says that this pod has this very container, on a node with this machine's boot id.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from gpuwarden.cluster import Cluster
from gpuwarden.errors import Denied, Unavailable
from gpuwarden.model import Container, Snapshot
from gpuwarden.respond.step import Target

_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)
_UID: Final = re.compile(r"[0-9a-f-]{32,36}", re.ASCII)
_STATUSES: Final = ("containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses")
_KINDS: Final = ("containers", "initContainers", "ephemeralContainers")
MIRROR: Final = "kubernetes.io/config.mirror"
NODE_NAME: Final = "NODE_NAME"
"""The variable by which the chart tells the agent its node's name."""


class NotProven(Denied):
    """The pod is not the one that the process is in, or deleting it would not end the process."""


class Pod(Struct, frozen=True):
    """A target's pod as this machine knows it."""

    namespace: str
    name: str
    uid: str
    container_id: str
    container: str | None
    """Its name in the pod."""
    owner: str | None
    beside: tuple[str, ...]
    """Names of the pod's other containers that run here."""


def is_name(text: str | None) -> bool:
    """Whether a text can be the name of a pod, namespace or node."""
    return text is not None and _NAME.fullmatch(text) is not None


def pod_of(target: Target) -> tuple[Pod | None, str]:
    """(the target's pod, why it is not believed); (None, "") for what is in no pod."""
    container = target.container
    if container is None or container.pod_uid is None:
        return None, ""
    names_fit = is_name(container.pod_namespace) and is_name(container.pod_name)
    if not names_fit or not _UID.fullmatch(container.pod_uid):
        return None, "its runtime gives no usable name and uid of its pod"
    pod = Pod(
        container.pod_namespace or "",
        container.pod_name or "",
        container.pod_uid,
        container.id,
        container.pod_container,
        container.pod_owner,
        tuple(sorted(_beside(target.snapshot.containers, container))),
    )
    if not container.confirmed:
        return pod, "its runtime could not be asked: only a control group's name tells the pod"
    placement = target.process.cgroup if target.process is not None else None
    if placement is None or _plain(placement.pod_uid) != _plain(container.pod_uid):
        return pod, "the kubelet's control group does not say the pod that the runtime says"
    return pod, ""


def _plain(uid: str | None) -> str | None:
    return None if uid is None else uid.replace("-", "").replace("_", "").lower()


def _beside(containers: Sequence[Container], own: Container) -> Iterator[str]:
    for one in containers:
        if one.id != own.id and one.pod_uid == own.pod_uid:
            yield one.pod_container or one.name or one.id[:12]


def read_pod(cluster: Cluster, pod: Pod) -> dict[str, Any] | None:
    """The pod as the API server has it; None when it is gone.

    Errors: NotProven; those of Cluster.
    """
    found = cluster.pod(pod.namespace, pod.name)
    if found is None:
        return None
    metadata = found.get("metadata") or {}
    if MIRROR in (metadata.get("annotations") or {}):
        raise NotProven(
            "it is a static pod: the kubelet runs it from a file on the node, and deleting it at "
            "the API server ends nothing",
            remedy="remove its manifest from the kubelet's staticPodPath",
        )
    if metadata.get("uid") != pod.uid:
        return None
    if pod.container_id not in set(_container_ids(found)):
        raise NotProven("the API server does not know the process's container as one of this pod")
    return found


def _container_ids(pod: Mapping[str, Any]) -> Iterator[str]:
    status = pod.get("status") or {}
    for kind in _STATUSES:
        for one in status.get(kind) or ():
            yield str(one.get("containerID") or "").rpartition("://")[2]


def container_names(pod: Mapping[str, Any]) -> list[str]:
    """All containers that the pod's specification names."""
    spec = pod.get("spec") or {}
    return [str(one.get("name")) for kind in _KINDS for one in spec.get(kind) or ()]


def controller(pod: Mapping[str, Any]) -> str | None:
    """What makes the pod anew, ``ReplicaSet/name``; None when nothing does."""
    for owner in (pod.get("metadata") or {}).get("ownerReferences") or ():
        if owner.get("controller"):
            return f"{owner.get('kind')}/{owner.get('name')}"
    return None


def node_names(target: Target, cluster: Cluster | None) -> Iterator[str]:
    """What this node may be called in its cluster, the surest first; none of it is proven."""
    told = os.environ.get(NODE_NAME)
    if told is not None and is_name(told):
        yield told
    pod, why = pod_of(target)
    if cluster is not None and pod is not None and not why:
        found = cluster.pod(pod.namespace, pod.name) or {}
        named = (found.get("spec") or {}).get("nodeName")
        if is_name(named):
            yield str(named)
    hostname = target.snapshot.node.hostname.lower()
    if is_name(hostname):
        yield hostname


def read_node(cluster: Cluster, target: Target) -> dict[str, Any]:
    """This machine's node, proven by its boot id.

    Errors: Unavailable when no node of those names is this machine; those of Cluster.
    """
    boot_id = target.snapshot.node.boot_id
    if boot_id is None:
        raise Unavailable("this machine's boot id is not known, which proves its node")
    tried: list[str] = []
    for name in node_names(target, cluster):
        if name in tried:
            continue
        tried.append(name)
        found = cluster.node(name)
        if found is None:
            continue
        info = (found.get("status") or {}).get("nodeInfo") or {}
        if info.get("bootID") == boot_id:
            return found
    raise Unavailable(
        f"no node called {' or '.join(tried) or 'as this machine'} has this machine's boot id",
        remedy=f"set {NODE_NAME} to the node's name",
    )


def in_a_cluster(snapshot: Snapshot) -> bool:
    """Whether this machine is a node of a cluster at all."""
    return any(
        s.name == "kubernetes" and s.state in ("ok", "failed") for s in snapshot.sources
    ) or any(c.confirmed and c.pod_uid is not None for c in snapshot.containers)
