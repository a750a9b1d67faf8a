"""What is judged: every (process, GPU), and the answer that a judgement gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpuwarden.finding import Evidence, Proof, Verdict
from gpuwarden.model import GpuClient, Holder, Process
from gpuwarden.node import GPU_NODE_KINDS, Node
from gpuwarden.rules.membership import Claim

DRIVER_PID_SOURCES = frozenset({"nvml", "kfd"})
"""Sources that name pids as the driver counts them: those of the host's pid namespace."""


class Answer(NamedTuple):
    """A verdict with everything that explains it."""

    verdict: Verdict
    path: tuple[str, ...]
    claim: Claim | None = None
    proof: Proof = "none"
    owner: str | None = None
    contact: str | None = None
    evidence: tuple[Evidence, ...] = ()


class Subject(NamedTuple):
    """One process on one GPU, before it is judged."""

    pid: int
    gpu_id: str | None
    process: Process | None
    clients: tuple[GpuClient, ...]
    """Its contexts on this GPU; empty for a holder only."""
    holders: tuple[Holder, ...]


# ------------------------------------------------------------------ subjects


def _process_of(node: Node, clients: Sequence[GpuClient]) -> Process | None:
    """The process behind a client; None where the driver counts pids in another namespace."""
    pid = clients[0].pid
    foreign = node.snapshot.node.host_pid_namespace is False and any(
        c.source in DRIVER_PID_SOURCES for c in clients
    )
    # A stranger may have that number here; holding a device makes it the same process.
    if foreign and pid not in node.holders_by_pid:
        return None
    return node.processes.get(pid)


def subjects(node: Node) -> Iterator[Subject]:
    """Every (process, GPU): the driver's clients first, then holders that it does not list."""
    by_key: dict[tuple[int, str], list[GpuClient]] = {}
    for client in node.snapshot.clients:
        by_key.setdefault((client.pid, client.gpu_id), []).append(client)
    for (pid, gpu_id), clients in by_key.items():
        yield Subject(
            pid,
            gpu_id,
            _process_of(node, clients),
            tuple(clients),
            tuple(node.holders_by_pid.get(pid, ())),
        )
    for pid, holders in node.holders_by_pid.items():
        if pid in node.clients_by_pid:
            continue
        held: dict[str | None, list[Holder]] = {}
        for holder in holders:
            if holder.kind not in GPU_NODE_KINDS and holder.kind != "kfd":
                continue
            found = list(node.gpus_of_holder(holder))
            for gpu in found:
                held.setdefault(gpu.id, []).append(holder)
            if not found:
                held.setdefault(None, []).append(holder)
        if len(held) > 1:
            held.pop(None, None)
        for held_id, nodes in held.items():
            yield Subject(pid, held_id, node.processes.get(pid), (), tuple(nodes))
