"""Memory of a GPU that no listed process explains: leaked, held unseen, or the driver's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gpuwarden.finding import Evidence, Verdict
from gpuwarden.model import Gpu
from gpuwarden.node import Node
from gpuwarden.policy import Policy
from gpuwarden.rules import system_programs

MIB = 1 << 20
XIDS_SHOWN = 4


class GpuAnswer(NamedTuple):
    """The verdict on a GPU alone."""

    gpu: Gpu
    verdict: Verdict
    path: tuple[str, ...]
    evidence: tuple[Evidence, ...]


def _xids(node: Node, gpu: Gpu) -> tuple[Evidence, ...]:
    events = [
        x
        for x in node.snapshot.xids
        if x.trusted and x.pci_address is not None and x.pci_address == gpu.pci_address
    ]
    return tuple(
        Evidence(source="kernel log", text=f"Xid {x.code}: {x.message[:120]}")
        for x in events[-XIDS_SHOWN:]
    )


def _holders(node: Node, gpu: Gpu) -> list[int]:
    """Pids that hold the GPU's node and are no system program."""
    pids: list[int] = []
    for pid, holders in node.holders_by_pid.items():
        if not any(g.id == gpu.id for h in holders for g in node.gpus_of_holder(h)):
            continue
        process = node.processes.get(pid)
        if process is not None:
            match = system_programs.matches(node, process)
            if match is not None and match.proof == "proven":
                continue
        pids.append(pid)
    return pids


def judge_gpus(node: Node, policy: Policy) -> Iterator[GpuAnswer]:
    """GPUs whose process list cannot be read, and memory in use that nobody listed explains."""
    for gpu in node.snapshot.gpus:
        clients = list(node.clients_by_gpu.get(gpu.id, ()))
        for part in node.migs_by_parent.get(gpu.id, ()):
            clients += node.clients_by_gpu.get(part.id, ())
        if gpu.error is not None:
            yield GpuAnswer(gpu, "unreadable", (f"readable? no: {gpu.error}",), _xids(node, gpu))
            continue
        if "processes" in gpu.unread:
            yield GpuAnswer(
                gpu, "unreadable", (f"its processes? not read: {gpu.unread['processes']}",), ()
            )
            continue
        if gpu.parent_id is not None or clients or gpu.memory_used_bytes is None:
            continue
        # Without the reserve told apart, an idle card shows 300 to 700 MiB as used.
        floor = policy.thresholds.leaked_memory_mib * (
            1 if gpu.memory_reserved_bytes is not None else 2
        )
        used_mib = gpu.memory_used_bytes // MIB
        if used_mib < floor:
            continue
        question = f"{used_mib} MiB in use; a process? the driver lists none"
        if gpu.memory_is_numa:
            continue
        if not node.sees("holders"):
            run = node.sensor("holders")
            reason = (run.reason if run else "") or "not looked at"
            yield GpuAnswer(
                gpu, "unreadable", (question, f"who holds the device? {reason}"), _xids(node, gpu)
            )
            continue
        held_by = _holders(node, gpu)
        if held_by:
            continue
        gap = next((g for g in node.snapshot.gaps if g.sensor == "holders"), None)
        if gap is not None:
            yield GpuAnswer(
                gpu,
                "unreadable",
                (question, f"who holds the device? nobody seen, but {gap.what}: {gap.reason}"),
                _xids(node, gpu),
            )
            continue
        yield GpuAnswer(
            gpu,
            "leaked-memory",
            (question, "the driver's reserve? told apart", "who holds the device? nobody"),
            _xids(node, gpu),
        )
