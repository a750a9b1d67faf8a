"""Since when: the moments of the past that one snapshot knows of a process or a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gpuwarden.model import AccountedProcess, Fact, Gpu, Process
from gpuwarden.node import Node
from gpuwarden.outputs.words import memory

Dated = tuple[int | None, str]


class Moment(Fact, frozen=True, kw_only=True, omit_defaults=False):
    """Something that happened; ``at_ns`` is None when it is not known when."""

    at_ns: int | None
    text: str


def in_order(moments: Iterable[Dated]) -> tuple[Moment, ...]:
    """Oldest first, those of an unknown time last."""
    ordered = sorted(moments, key=lambda m: (m[0] is None, m[0] or 0))
    return tuple(Moment(at_ns=at_ns, text=text) for at_ns, text in ordered)


def of_process(node: Node, process: Process) -> Iterator[Dated]:
    """Its forebears, its container, its job, the driver's accounting and faults."""
    for ancestor in reversed(list(node.ancestors(process.pid))):
        name = ancestor.exe.path if ancestor.exe else ancestor.comm
        yield ancestor.started_at_ns, f"ancestor pid {ancestor.pid} started: {name}"
    name = process.exe.path if process.exe else process.comm
    yield process.started_at_ns, f"pid {process.pid} started: {name}"
    container = node.container_of(process)
    if container is not None and container.started_at_ns is not None:
        yield container.started_at_ns, f"container {container.name or container.id[:12]} started"
    for workload in node.snapshot.workloads:
        if workload.job_id and process.cgroup and process.cgroup.slurm_job == workload.job_id:
            yield workload.started_at_ns, f"{workload.name} started ({workload.user or '?'})"
    for entry in node.accounted_by_pid.get(process.pid, ()):
        yield from _accounted(node, entry)
    for event in node.snapshot.xids:
        if event.pid == process.pid and (
            process.started_at_ns is None
            or event.at_ns is None
            or event.at_ns >= process.started_at_ns
        ):
            yield event.at_ns, f"Xid {event.code} named this pid: {event.message[:100]}"


def _accounted(node: Node, entry: AccountedProcess) -> Iterator[Dated]:
    busy = f", busy {entry.busy_ms / 1000:.0f} s" if entry.busy_ms is not None else ""
    peak = f", at most {memory(entry.memory_max_bytes)}" if entry.memory_max_bytes else ""
    state = {True: "running", False: "ended", None: "state unknown"}[entry.running]
    yield (
        entry.started_at_ns,
        f"pid {entry.pid} began to use GPU {node.gpu_label(entry.gpu_id)} "
        f"(driver's accounting; {state}{busy}{peak})",
    )


def of_gpu(node: Node, gpu: Gpu) -> Iterator[Dated]:
    """Who used it, as far as the driver kept account, who is on it, and its faults."""
    for entry in node.snapshot.accounted:
        if entry.gpu_id == gpu.id:
            yield from _accounted(node, entry)
    for client in node.clients_by_gpu.get(gpu.id, ()):
        process = node.processes.get(client.pid)
        if process is None:
            yield None, f"pid {client.pid} is listed; its start is not known"
            continue
        name = process.exe.path if process.exe else process.comm
        yield process.started_at_ns, f"pid {client.pid} started: {name}"
    for event in node.snapshot.xids:
        if event.pci_address is not None and event.pci_address == gpu.pci_address:
            yield event.at_ns, f"Xid {event.code}: {event.message[:100]}"
