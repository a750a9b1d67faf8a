"""Processes whose CUDA calls are watched: who they are, what is declared, where they run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from gpuwarden.finding import Evidence, Subject
from gpuwarden.model import CudaProcess, Process
from gpuwarden.node import Node
from gpuwarden.policy import Policy, PolicyWorkload
from gpuwarden.rules import device_opens as opened
from gpuwarden.rules.container_allocation import container_owner
from gpuwarden.rules.hit import process_subject
from gpuwarden.rules.membership import Claim, claims
from gpuwarden.rules.placement import place_name

LIMITS_SHOWN = 6
SOURCE = "the CUDA layer"

Key = tuple[int, int]
"""(pid, start time in ticks)."""


class Watched(NamedTuple):
    """One process with what was seen of its CUDA calls."""

    pid: int
    start_time_ticks: int
    cuda: CudaProcess | None
    """None where only loaded modules are known of it."""
    process: Process | None
    """None when nothing was read of it, or when its pid has gone to another process since."""


def process_at(node: Node, key: Key) -> Process | None:
    """The process of that pid and start; None when another one has the pid now."""
    process = node.processes.get(key[0])
    return process if process is not None and process.start_time_ticks == key[1] else None


def watched(node: Node) -> Iterator[Watched]:
    """Every process that the CUDA layer or a loaded module names, in the snapshot's order."""
    seen = {(one.pid, one.start_time_ticks): one for one in node.snapshot.cuda}
    loaded = (
        (one.pid, one.start_time_ticks)
        for one in node.snapshot.modules
        if one.loaded_at_ns is not None
    )
    for key in dict.fromkeys((*seen, *loaded)):
        yield Watched(*key, seen.get(key), process_at(node, key))


def cuda_of(node: Node, process: Process) -> CudaProcess | None:
    """What was seen of a process's CUDA calls; None when they were not watched."""
    key = (process.pid, process.start_time_ticks)
    return next((c for c in node.snapshot.cuda if (c.pid, c.start_time_ticks) == key), None)


def declared(node: Node, policy: Policy, process: Process) -> Claim | None:
    """The policy entry that a process fits, a proven one first; None when it fits none."""
    fitting = [claim for claim in claims(node, policy, process) if claim.entry is not None]
    fitting.sort(key=lambda claim: claim.proof != "proven")
    return fitting[0] if fitting else None


def entry_of(node: Node, policy: Policy, process: Process | None) -> PolicyWorkload | None:
    """The same as the policy's own words."""
    claim = declared(node, policy, process) if process is not None else None
    return claim.entry if claim is not None else None


def subject_of(node: Node, one: Watched) -> Subject:
    """The process as it was when it was seen, with the GPUs that it is known to be on."""
    ids = [client.gpu_id for client in node.clients_by_pid.get(one.pid, ())]
    ids += [
        gpu.id
        for holder in node.holders_by_pid.get(one.pid, ())
        for gpu in node.gpus_of_holder(holder)
    ]
    ids += [
        gpu_id
        for used in node.snapshot.opens
        if (used.pid, used.start_time_ticks) == (one.pid, one.start_time_ticks)
        and used.how in opened.USES
        for gpu_id in opened.gpus_of(node, used)
    ]
    subject = process_subject(node, one.pid, one.process, tuple(dict.fromkeys(ids)))
    return replace(subject, start_time_ticks=one.start_time_ticks)


def owner_of(node: Node, one: Watched, claim: Claim | None) -> str | None:
    """Whom to ask: the policy entry's owner, the container's, or the account."""
    if claim is not None and claim.owner is not None:
        return claim.owner
    process = one.process
    if process is None:
        return None
    return container_owner(node, process) or process.login_user or process.user


def workload_lines(claim: Claim | None) -> Iterator[Evidence]:
    """Which workload of the policy it is, by what, and whom to ask."""
    if claim is None or claim.entry is None:
        return
    contact = f"; contact {claim.contact}" if claim.contact else ""
    owner = f", of {claim.owner}" if claim.owner else ""
    text = f"workload {claim.name}{owner}: {claim.why}, {claim.proof}{contact}"
    yield Evidence(source="policy", text=text)


def place_lines(node: Node, one: Watched) -> Iterator[Evidence]:
    """The container as its runtime tells of it, then binary, command line and account."""
    process = one.process
    if process is not None:
        container = node.container_of(process)
        place = place_name(node, process)
        if container is None and place is not None:
            yield Evidence(source="attribution", text=f"it runs in {place}")
        yield from opened.container_lines(container)
    yield from opened.process_lines(process)


def limit_lines(one: Watched) -> Iterator[Evidence]:
    """What cannot be known of its calls, so that nobody takes silence for an answer."""
    cuda = one.cuda
    if cuda is None:
        return
    if cuda.before and not cuda.limits:
        yield Evidence(
            source=SOURCE,
            text="it had the driver library before it was watched: earlier contexts and loads are "
            "not known",
        )
    if cuda.missed_loads:
        why = f" ({'; '.join(cuda.missed[:LIMITS_SHOWN])})" if cuda.missed else ""
        yield Evidence(
            source=SOURCE, text=f"the bytes of {cuda.missed_loads} of its loads were missed{why}"
        )
    for text in cuda.limits[:LIMITS_SHOWN]:
        yield Evidence(source=SOURCE, text=f"not seen: {text}")
