"""Containers on a GPU: who gave it to them, if anybody did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from gpuwarden.finding import Evidence
from gpuwarden.model import Container, Process
from gpuwarden.node import Node
from gpuwarden.rules.membership import Claim
from gpuwarden.rules.placement import place_name

NO_DEVICES = ("void", "none", "")
ITEMS_SHOWN = 8


class ContainerAllocation(NamedTuple):
    """What stands in the way of calling a container's process expected."""

    verdict: Literal["rogue-container", "unattributed", "unreadable"]
    notes: tuple[str, ...]
    claim: Claim | None
    requests: tuple[Evidence, ...]


def granted_by_runtime(container: Container | None) -> bool:
    """Whether whoever started it asked the runtime for accelerators (not an allocation)."""
    return container is not None and bool(
        container.devices
        or container.device_requests
        or (container.visible_devices or "void") not in NO_DEVICES
    )


def container_allocation(
    node: Node, process: Process, ties: Sequence[Claim]
) -> ContainerAllocation | None:
    """Judges a process in a container that no proven claim covers; None when in no container.

    A pod is given GPUs by the kubelet alone. Elsewhere, on a node where a scheduler hands GPUs out,
    a container outside it was given none; where nobody hands them out, the runtime's own request
    tells that a person did, and only the policy can say whose it is.
    """
    placement = process.cgroup
    container = node.container_of(process)
    pod_uid = placement.pod_uid if placement is not None else None
    container_id = placement.container_id if placement is not None else None
    if container is None and pod_uid is None and container_id is None:
        return None
    name = place_name(node, process)
    handing_out = [
        s.name
        for s in node.snapshot.sources
        if s.name in ("kubernetes", "slurm") and s.scheduled and s.state == "ok"
    ]
    in_pod = pod_uid is not None or (container is not None and container.pod_uid is not None)
    if in_pod and not any(c.source == "kubernetes" and not c.unanswered for c in ties):
        return None
    requests = _requests(container)
    if not in_pod and not handing_out and (container is None or not container.confirmed):
        how = (
            "given this GPU? cannot tell: no scheduler hands them out here, and its runtime could "
            "not be asked (only the cgroup path names it)"
        )
        return ContainerAllocation(
            "unreadable", (f"in a container? yes, {name}", how), None, requests
        )
    if not in_pod and not handing_out and granted_by_runtime(container):
        how = (
            "given this GPU? whoever started it passed GPUs in; no scheduler hands them out here, "
            "and the policy does not list it"
        )
        return ContainerAllocation(
            "unattributed", (f"in a container? yes, {name}", how), None, requests
        )
    by = "the kubelet" if in_pod else (" and ".join(handing_out) or "its runtime or the policy")
    claimed = next((c for c in ties if c.proof == "claimed" and (c.workload or c.entry)), None)
    notes = [f"in a container? yes, {name}", f"given this GPU? no, not by {by}"]
    if claimed is not None:
        notes.append(f"claims {claimed.name}: {claimed.why}")
    if container is None or not container.confirmed:
        notes.append("its runtime could not be asked: only the cgroup path names it")
    return ContainerAllocation("rogue-container", tuple(notes), claimed, requests)


def container_owner(node: Node, process: Process) -> str | None:
    """Whom to ask about a container: its pod's namespace and controller, or a claimed user."""
    container = node.container_of(process)
    if container is None:
        return None
    named: list[str] = []
    if container.pod_namespace:
        controller = f" ({container.pod_owner})" if container.pod_owner else ""
        named.append(f"namespace {container.pod_namespace}{controller}")
    # Platforms run everybody in one namespace and write the person into the environment.
    user = next((v for k, v in sorted(container.environment.items()) if "USER" in k), None)
    if user is not None:
        named.append(f"{user} (says its environment)")
    return ", ".join(named) or None


def _requests(container: Container | None) -> tuple[Evidence, ...]:
    """How a container came to see GPUs at all, in words."""
    if container is None:
        return ()
    facts: list[str] = []
    if container.image:
        facts.append(f"image {container.image}")
    if container.privileged:
        facts.append("it is privileged")
    if container.visible_devices:
        facts.append(f"NVIDIA_VISIBLE_DEVICES={container.visible_devices}")
    if container.device_requests:
        facts.append(f"requested devices: {', '.join(container.device_requests[:ITEMS_SHOWN])}")
    if container.devices:
        facts.append(f"passed in: {', '.join(container.devices[:ITEMS_SHOWN])}")
    mounts = [m for m in container.host_mounts if m.startswith(("/dev", "/:"))]
    if mounts:
        facts.append(f"host paths mounted: {', '.join(mounts[:ITEMS_SHOWN])}")
    return tuple(Evidence(source=container.runtime, text=f) for f in facts)
