"""The accelerators that the kubelet gave to pods, from its pod-resources service.

The service names pods by namespace and name only; the CRI runtime's sandboxes give the uid, and
tell which listed pods have ended: a kubelet may go on listing them (kubernetes/kubernetes#119423).
Source: package v1 of the kubelet's pod-resources API; CRI v1.
"""

from __future__ import annotations

import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from gpuwarden.errors import Denied, GpuwardenError, Malformed, Unavailable
from gpuwarden.host import Host
from gpuwarden.model import Container, SourceRun, Workload
from gpuwarden.pattern import pattern
from gpuwarden.wire.unix_grpc import CRI_SOCKETS, UnixChannel, load

SOURCE: Final = "kubernetes"
SOCKET: Final = "/var/lib/kubelet/pod-resources/kubelet.sock"
DEADLINE_SECONDS: Final = 2.0
POD_LIMIT: Final = 4096
ITEM_LIMIT: Final = 4096
TEXT_LIMIT: Final = 512

_LIST: Final = "/v1.PodResourcesLister/List"
_LIST_SANDBOXES: Final = "/runtime.v1.RuntimeService/ListPodSandbox"
_SANDBOX_READY: Final = 0

_ACCELERATOR_RESOURCE = pattern(
    r"(?:nvidia\.com/.*(?:gpu|mig)|amd\.com/.*gpu|gpu\.intel\.com/|habana\.ai/)", re.IGNORECASE
)
_OTHER_RESOURCE = pattern(r"rdma|hugepages|hostdev|sriov|infiniband|nic\b", re.IGNORECASE)
_REPLICA = pattern(r"(?P<id>.+?)::\d{1,9}\Z", re.ASCII)
# Sharing plugins that number their slices write a sixth group behind the UUID.
_SLICE = pattern(r"(?P<id>(?:GPU|MIG)-\w{8}(?:-\w{4}){3}-\w{12})-\d{1,6}\Z", re.ASCII)
_UUID = pattern(r"(?:GPU|MIG)-[\w-]+\Z", re.ASCII)
_OLD_MIG = pattern(r"MIG-(?P<parent>GPU-[\w-]+)/(?P<gi>\d{1,4})/(?P<ci>\d{1,4})\Z", re.ASCII)
_NODE_NAME = pattern(r"nvidia(?P<minor>\d{1,4})(?:/gi(?P<gi>\d{1,4}))?\Z", re.ASCII)
_PCI = pattern(
    r"(?:(?P<domain>[0-9a-f]{4,8}):)?(?P<rest>[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\Z", re.IGNORECASE
)
_XCP = pattern(r"amdgpu_xcp[._](?P<number>\d{1,6})\Z", re.ASCII)
_INTEL_CARD = pattern(r"card(?P<number>\d{1,4})-\d{1,6}\Z", re.ASCII)
_CDI = pattern(r"(?P<vendor>[^/=]+)/(?P<kind>[^/=]+)=(?P<name>.+)\Z")
_DRA_GPU = pattern(r"gpu-(?P<minor>\d{1,4})\Z", re.ASCII)


class Sandbox(msgspec.Struct, frozen=True, kw_only=True):
    """What the runtime knows of a pod: its uid, and whether it still runs."""

    uid: str
    ready: bool
    created_at_ns: int = 0


class SeenContainers(Protocol):
    """What the sensors found, of which only the containers matter here."""

    @property
    def containers(self) -> Sequence[Container]: ...


def read(
    host: Host, seen: SeenContainers, *, socket: str = SOCKET
) -> tuple[SourceRun, list[Workload]]:
    """(how it went, one workload per pod that holds accelerators).

    State ``absent`` means no kubelet here; ``failed`` that there is one, or that pods run here,
    and it was not read. ``running`` and ``ended`` hold the pod uids that the runtime vouched for.
    """
    known = list(seen.containers)
    try:
        answer = _list(host, socket)
        if answer is None:
            if not any(c.confirmed and c.pod_uid and c.pod_name for c in known):
                return SourceRun(name=SOURCE, state="absent", reason="no kubelet here"), []
            raise Unavailable(
                f"pods run here, and {socket} is not to be seen",
                remedy=f"mount the host's {socket.rpartition('/')[0]} directory",
            )
        workloads = parse_pod_resources(answer)
    except GpuwardenError as error:
        run = SourceRun(
            name=SOURCE, state="failed", reason=str(error), remedy=error.remedy, scheduled=True
        )
        return run, []
    sandboxes, doubt = _sandboxes(host)
    return _joined(workloads, sandboxes, known, doubt)


def _list(host: Host, socket: str) -> Any:
    """The kubelet's answer, or None if there is no kubelet. Errors: GpuwardenError."""
    directory = socket.rpartition("/")[0]
    try:
        status = host.status(socket)
    except Unavailable:
        try:
            host.status(directory)
        except Unavailable:
            return None
        raise Unavailable(
            f"{socket}: the kubelet does not listen there",
            remedy=f"start the kubelet; in a container mount the directory {directory}, "
            "since the socket is made anew at each start",
        ) from None
    if not stat.S_ISSOCK(status.mode):
        raise Malformed(f"{socket}: not a socket")
    with UnixChannel(host.path(socket), deadline_seconds=DEADLINE_SECONDS) as channel:
        if channel.uid != 0 or status.uid != 0:
            raise Denied(f"{socket}: uid {channel.uid or status.uid} listens there, not root")
        messages = load("gpuwarden.wire.podresources_pb2")
        return channel.call(
            _LIST, messages.ListPodResourcesRequest(), messages.ListPodResourcesResponse
        )


def _sandboxes(host: Host) -> tuple[dict[tuple[str, str], list[Sandbox]] | None, str]:
    """((namespace, name) → its sandboxes, or None if no runtime answered; why not)."""
    reason = "no CRI socket here"
    for _, path in CRI_SOCKETS:
        try:
            status = host.status(path)
        except GpuwardenError:
            continue
        if not stat.S_ISSOCK(status.mode):
            continue
        try:
            with UnixChannel(host.path(path), deadline_seconds=DEADLINE_SECONDS) as channel:
                if channel.uid != 0 or status.uid != 0:
                    reason = f"{path}: not root's"
                    continue
                messages = load("gpuwarden.wire.cri_pb2")
                answer = channel.call(
                    _LIST_SANDBOXES,
                    messages.ListPodSandboxRequest(),
                    messages.ListPodSandboxResponse,
                )
        except GpuwardenError as error:
            reason = str(error)
            continue
        found: dict[tuple[str, str], list[Sandbox]] = {}
        for item in answer.items[:POD_LIMIT]:
            key = (item.metadata.namespace[:TEXT_LIMIT], item.metadata.name[:TEXT_LIMIT])
            found.setdefault(key, []).append(
                Sandbox(
                    uid=item.metadata.uid[:TEXT_LIMIT],
                    ready=item.state == _SANDBOX_READY,
                    created_at_ns=item.created_at,
                )
            )
        return found, ""
    return None, reason


def _joined(
    workloads: list[Workload],
    sandboxes: dict[tuple[str, str], list[Sandbox]] | None,
    containers: list[Container],
    doubt: str,
) -> tuple[SourceRun, list[Workload]]:
    """Uids put in, pods that the runtime says have ended taken out."""
    uids: dict[tuple[str, str], str] = {}
    owners: dict[str, str] = {}
    for container in containers:
        if container.confirmed and container.pod_uid and container.pod_name:
            uids[container.pod_namespace or "", container.pod_name] = container.pod_uid
            if container.pod_owner:
                owners[container.pod_uid] = container.pod_owner
    running: list[str] = []
    ended: list[str] = []
    kept: list[Workload] = []
    for workload in workloads:
        key = (workload.pod_namespace or "", workload.pod_name or "")
        attempts = (sandboxes or {}).get(key, [])
        current = max(attempts, key=lambda s: (s.ready, s.created_at_ns), default=None)
        if current is not None and not current.ready:
            ended.append(current.uid)
            continue
        uid = current.uid if current is not None else uids.get(key)
        if current is not None:
            running.append(current.uid)
        kept.append(
            msgspec.structs.replace(
                workload,
                pod_uid=uid or None,
                owner=owners.get(uid or ""),
                state="running" if current is not None else None,
            )
        )
    return (
        SourceRun(
            name=SOURCE,
            state="ok",
            reason="" if sandboxes is not None else f"ended pods may be among them: {doubt}",
            workloads=len(kept),
            running=tuple(running),
            ended=tuple(ended),
            scheduled=True,
        ),
        kept,
    )


# ---------------------------------------------------------------- the answer


def parse_pod_resources(answer: Any) -> list[Workload]:
    """Workloads of a ListPodResourcesResponse: the message, or its JSON in either spelling.

    Pods without accelerators are left out. ``shared`` is set when an id is a replica, or several
    pods hold the same one. Errors: Malformed, for a value that is no such answer.
    """
    if isinstance(answer, Mapping):
        if "pod_resources" not in answer and "podResources" not in answer and answer:
            raise Malformed("pod-resources: no pod_resources in the answer")
    elif not hasattr(answer, "pod_resources"):
        raise Malformed("pod-resources: not an answer of its List call")
    found: list[tuple[Workload, bool]] = []
    holders: Counter[str] = Counter()
    for pod in _items(answer, "pod_resources", POD_LIMIT):
        name, namespace = _text(pod, "name"), _text(pod, "namespace")
        if not name:
            continue
        gpus: dict[str, bool] = {}
        containers: list[str] = []
        for container in _items(pod, "containers"):
            mine = list(_accelerators(container))
            if mine:
                containers.append(_text(container, "name"))
            for reference, is_slice in mine:
                gpus[reference] = gpus.get(reference, False) or is_slice
        if not gpus:
            continue
        holders.update(gpus.keys())
        workload = Workload(
            source=SOURCE,
            name=f"{namespace}/{name}",
            gpus=tuple(gpus),
            pod_name=name,
            pod_namespace=namespace,
            containers=tuple(containers),
        )
        found.append((workload, any(gpus.values())))
    return [
        msgspec.structs.replace(
            workload, shared=sliced or any(holders[gpu] > 1 for gpu in workload.gpus)
        )
        for workload, sliced in found
    ]


def _accelerators(container: Any) -> Iterator[tuple[str, bool]]:
    """(reference, whether it is one of several shares) of what a container was given."""
    for devices in _items(container, "devices"):
        resource = _text(devices, "resource_name")
        for identity in _items(devices, "device_ids"):
            if isinstance(identity, str) and identity:
                found = _reference(resource, identity[:TEXT_LIMIT])
                if found is not None:
                    yield found
    for claim in _items(container, "dynamic_resources"):
        for resource in _items(claim, "claim_resources"):
            yield from _claimed(resource)


def _reference(resource: str, identity: str) -> tuple[str, bool] | None:
    """The reference for a device plugin's id; None for what is no accelerator."""
    plain, is_slice = identity, False
    for shape in (_REPLICA, _SLICE):
        share = shape.match(plain)
        if share is not None:
            plain, is_slice = share["id"], True
            break
    old_mig = _OLD_MIG.match(plain)
    if old_mig is not None:
        return f"mig:{old_mig['parent']}/{old_mig['gi']}/{old_mig['ci']}", is_slice
    if _UUID.match(plain):
        return f"uuid:{plain}", is_slice
    node = _NODE_NAME.match(plain)
    if node is not None:
        if node["gi"] is not None:
            return f"mig:{node['minor']}/{node['gi']}", is_slice
        return f"minor:{node['minor']}", is_slice
    xcp = _XCP.match(plain)
    if xcp is not None:
        return f"xcp:{xcp['number']}", is_slice
    if not _ACCELERATOR_RESOURCE.match(resource) or _OTHER_RESOURCE.search(resource):
        return None
    pci = _PCI.match(plain)
    if pci is not None:
        return f"pci:{(pci['domain'] or '0').lower().zfill(8)}:{pci['rest'].lower()}", is_slice
    card = _INTEL_CARD.match(plain)
    if card is not None:
        return f"card:{card['number']}", is_slice
    if plain == "all":
        return "all", is_slice
    if plain.isascii() and plain.isdigit():
        return f"index:{int(plain)}" if len(plain) <= 4 else f"id:{plain}", is_slice
    return f"id:{plain}", is_slice


def _claimed(resource: Any) -> Iterator[tuple[str, bool]]:
    """What a DRA claim gave: by CDI name where one says which GPU, else by the driver's name."""
    driver, device = _text(resource, "driver_name"), _text(resource, "device_name")
    names = [
        name
        for item in _items(resource, "cdi_devices")
        if (name := _text(item, "name")) and "gpu" in name.lower()
    ]
    told = [found for name in names if (found := _cdi_reference(name)) is not None]
    if told:
        for reference in told:
            yield reference, False
        return
    minor = _DRA_GPU.match(device)
    if driver == "gpu.nvidia.com" and minor is not None:
        yield f"minor:{minor['minor']}", False
    elif "gpu" in driver:
        yield f"id:{driver}/{device}", False
    else:
        for name in names:
            yield f"id:{name}", False


def _cdi_reference(name: str) -> str | None:
    """``nvidia.com/gpu=NAME`` as a reference, where NAME tells the device."""
    cdi = _CDI.match(name)
    if cdi is None:
        return None
    device = cdi["name"]
    if cdi["vendor"] == "nvidia.com" and cdi["kind"] == "gpu":
        if device == "all":
            return "all"
        if device.isascii() and device.isdigit() and len(device) <= 4:
            return f"index:{int(device)}"
    found = _reference("", device)
    return found[0] if found is not None else None


# ---------------------------------------------------------------- either form of an answer


def _value(holder: Any, name: str) -> Any:
    """A field of a protobuf message, or of its JSON in snake or camel case."""
    if isinstance(holder, Mapping):
        if name in holder:
            return holder[name]
        head, *rest = name.split("_")
        return holder.get(head + "".join(part.capitalize() for part in rest))
    return getattr(holder, name, None)


def _items(holder: Any, name: str, limit: int = ITEM_LIMIT) -> list[Any]:
    value = _value(holder, name)
    if value is None or isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__len__"):
        return []
    return list(value[:limit])


def _text(holder: Any, name: str) -> str:
    value = _value(holder, name)
    return value[:TEXT_LIMIT] if isinstance(value, str) else ""
