"""Which processes an archive is about: the one that was named, a container's, or a GPU's."""

from __future__ import annotations

from msgspec import Struct

from gpuwarden.errors import GpuwardenError, Unavailable, UsageError
from gpuwarden.evidence.manifest import Subject
from gpuwarden.evidence.wanted import Wanted
from gpuwarden.host import Host
from gpuwarden.model import Gpu
from gpuwarden.node import Node
from gpuwarden.sensors.cgroup import containers_in, place
from gpuwarden.sensors.process import stat_lines
from gpuwarden.sensors.process.formats import parse_cgroup_lines

BOOT_ID = "/proc/sys/kernel/random/boot_id"
SUBJECTS_LIMIT = 64
SHORT_ID = 6
"""The fewest characters that name a container."""
CGROUP_LIMIT_BYTES = 64 << 10


class Whom(Struct, frozen=True):
    """A process by its identity."""

    pid: int
    start_time_ticks: int


class Subjects(Struct, frozen=True):
    """The processes, those on a GPU first, and what the archive says that it is about."""

    subject: Subject
    processes: tuple[Whom, ...]
    more: int = 0
    """Processes beyond the limit."""


def boot_id(host: Host) -> str | None:
    """Which run of the machine this is; None where the kernel does not say."""
    try:
        return host.read_text(BOOT_ID, 64).strip() or None
    except GpuwardenError:
        return None


def subjects(wanted: Wanted, host: Host, node: Node) -> Subjects:
    """The processes of the container or the GPU that is named.

    Errors: UsageError if that can be several; Unavailable when there is nobody.
    """
    boot = boot_id(host)
    if wanted.container is not None:
        return _container(wanted.container, host, node, boot)
    return _gpu(wanted.gpu or "", node, boot)


def _container(name: str, host: Host, node: Node, boot: str | None) -> Subjects:
    ids = {one.id for one in node.snapshot.containers if name in (one.id, one.name)}
    if not ids and len(name) >= SHORT_ID:
        ids = {one.id for one in node.snapshot.containers if one.id.startswith(name)}
    found: dict[str, list[Whom]] = {}
    for line in stat_lines.read(host).values():
        named = _named_containers(host, line.pid)
        match = next((one for one in named if one in ids), None)
        if match is None and not ids and len(name) >= SHORT_ID:
            match = next((one for one in named if one.startswith(name)), None)
        if match is not None:
            found.setdefault(match, []).append(Whom(line.pid, line.start_time_ticks))
    if not found:
        raise Unavailable(f"container {name}: no process of it was found")
    if len(found) > 1:
        several = ", ".join(one[:12] for one in sorted(found)[:4])
        raise UsageError(f"--container {name}: that can be {several}")
    ((identity, whom),) = found.items()
    subject = Subject(
        kind="container", text=f"container {identity}", boot_id=boot, container_id=identity
    )
    return _several(subject, whom, node)


def _named_containers(host: Host, pid: int) -> list[str]:
    try:
        lines = parse_cgroup_lines(host.read_bytes(f"/proc/{pid}/cgroup", CGROUP_LIMIT_BYTES))
    except GpuwardenError:
        return []
    return [identity for _, identity in containers_in(place(lines))]


def _gpu(name: str, node: Node, boot: str | None) -> Subjects:
    gpu = _gpu_called(name, node)
    pids = {client.pid for client in node.clients_by_gpu.get(gpu.id, ())}
    pids |= {one.pid for one in node.snapshot.holders if gpu in node.gpus_of_holder(one)}
    whom = [
        Whom(pid, process.start_time_ticks)
        for pid in sorted(pids)
        if (process := node.processes.get(pid)) is not None
    ]
    if not whom:
        raise Unavailable(f"GPU {name}: no process is on it")
    subject = Subject(kind="gpu", text=f"GPU {name}", boot_id=boot, gpu=gpu.id)
    return _several(subject, whom, node)


def _gpu_called(name: str, node: Node) -> Gpu:
    for gpu in node.snapshot.gpus:
        if name in (gpu.id, gpu.uuid, gpu.pci_address) or name == str(gpu.index):
            return gpu
    known = ", ".join(str(gpu.index) for gpu in node.snapshot.gpus[:16])
    raise Unavailable(f"GPU {name}: not on this node, which has {known or 'none'}")


def _several(subject: Subject, whom: list[Whom], node: Node) -> Subjects:
    whom.sort(key=lambda one: (one.pid not in node.clients_by_pid, one.pid))
    kept = tuple(whom[:SUBJECTS_LIMIT])
    told = Subject(
        kind=subject.kind,
        text=subject.text,
        boot_id=subject.boot_id,
        container_id=subject.container_id,
        gpu=subject.gpu,
        pids=tuple(one.pid for one in kept),
    )
    return Subjects(told, kept, len(whom) - len(kept))
