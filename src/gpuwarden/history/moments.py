"""Since when: what one snapshot knows of a process's or a GPU's past."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.errors import UsageError
from gpuwarden.judge import judge_rows
from gpuwarden.model import AccountedProcess, Gpu, Process, Snapshot
from gpuwarden.node import Node
from gpuwarden.outputs.words import age, escape, memory, moment
from gpuwarden.policy import Policy

Moment = tuple[int | None, str]


def _process_moments(node: Node, process: Process) -> Iterator[Moment]:
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


def _accounted(node: Node, entry: AccountedProcess) -> Iterator[Moment]:
    busy = f", busy {entry.busy_ms / 1000:.0f} s" if entry.busy_ms is not None else ""
    peak = f", at most {memory(entry.memory_max_bytes)}" if entry.memory_max_bytes else ""
    state = {True: "running", False: "ended", None: "state unknown"}[entry.running]
    yield (
        entry.started_at_ns,
        f"pid {entry.pid} began to use GPU {node.gpu_label(entry.gpu_id)} "
        f"(driver's accounting; {state}{busy}{peak})",
    )


def _gpu_moments(node: Node, gpu: Gpu) -> Iterator[Moment]:
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


def _find_gpu(node: Node, wanted: str) -> Gpu:
    for gpu in node.snapshot.gpus:
        if wanted in (gpu.id, gpu.uuid, node.gpu_label(gpu.id), gpu.pci_address):
            return gpu
    known = ", ".join(node.gpu_label(g.id) for g in node.snapshot.gpus) or "none"
    raise UsageError(f"history: no GPU is called '{wanted}'; there are: {known}")


def tell(
    snapshot: Snapshot, policy: Policy, *, pid: int | None, gpu: str | None
) -> tuple[str, bool]:
    """A timeline as text, and whether anything was found. Errors: UsageError for an unknown GPU."""
    node = Node(snapshot)
    rows = judge_rows(node, policy)
    lines: list[str] = []
    if pid is not None:
        process = node.processes.get(pid)
        mine = [row for row in rows if row.pid == pid]
        if process is None and not mine:
            return (
                f"pid {pid}: not on a GPU in this snapshot, and nothing of it is recorded\n",
                False,
            )
        moments = list(_process_moments(node, process)) if process else []
        if process is not None and process.started_at_ns is not None:
            since = age(process.started_at_ns, snapshot.taken_at_ns)
            lines.append(f"pid {pid}: since {moment(process.started_at_ns)}, {since} ago")
        else:
            lines.append(f"pid {pid}: since when is not known")
    else:
        found = _find_gpu(node, gpu or "")
        moments = list(_gpu_moments(node, found))
        mine = [row for row in rows if row.gpu_id == found.id]
        lines.append(escape(f"GPU {node.gpu_label(found.id)}: {found.name or 'unnamed'}"))
    lines += [escape(f"  on GPU {row.gpu}: pid {row.pid or '-'}, {row.verdict}") for row in mine]
    moments.sort(key=lambda m: (m[0] is None, m[0] or 0))
    lines += [f"  {moment(at_ns):<20}  {escape(text)}" for at_ns, text in moments]
    if not snapshot.accounted:
        lines.append("  The driver's accounting is off: what ended before this scan is not known.")
    lines.append(f"  {moment(snapshot.taken_at_ns):<20}  this snapshot")
    return "\n".join(lines) + "\n", bool(moments or mine)
