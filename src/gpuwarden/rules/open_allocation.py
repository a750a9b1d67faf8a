"""Whether it is sure that nobody gave a container the accelerators that it used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpuwarden.finding import Evidence, Severity, severity_rank
from gpuwarden.model import DeviceOpen
from gpuwarden.node import Node
from gpuwarden.policy import Policy
from gpuwarden.rules import device_opens as opened
from gpuwarden.rules.container_allocation import container_allocation
from gpuwarden.rules.device_opens import Inside, Opener
from gpuwarden.rules.membership import claims

HANDING_OUT = ("kubernetes", "slurm")
"""Sources that can hand accelerators out to jobs and pods."""


class Judged(NamedTuple):
    """How grave an open by a container is at most, and why."""

    severity: Severity
    why: tuple[str, ...]
    requests: tuple[Evidence, ...] = ()
    """How the container came to see GPUs at all."""


def not_asked(node: Node) -> str | None:
    """Why nobody can tell what was handed out on this node; None when it can be told."""
    for name in HANDING_OUT:
        source = node.source(name)
        if source is not None and source.state in ("failed", "skipped"):
            return f"{name} gave no answer ({source.reason or source.state})"
    if all(node.source(name) is None for name in HANDING_OUT):
        return "no scheduler was asked"
    return None


def judged(
    node: Node, policy: Policy, opener: Opener, place: Inside, opens: Sequence[DeviceOpen]
) -> Judged:
    """Whether it is sure that nobody gave a container these devices."""
    process = opener.process
    where = f"in a container? yes, {place.name}"
    if process is None:
        return Judged("warning", (where, "given this GPU? cannot tell: nothing is known of it"))
    ties = claims(node, policy, process)
    expected = next(
        (c for c in opened.proven(node, policy, process, place) if opened.references(c)), None
    )
    if expected is not None:
        given = ", ".join(opened.references(expected)[:8])
        return Judged("warning", (where, f"given this GPU? no: {expected.name} was given {given}"))
    allocation = container_allocation(node, process, ties)
    if allocation is None:
        silent = next((c for c in ties if c.unanswered), None)
        why = (
            f"{silent.source} gave no answer ({silent.unanswered})"
            if silent is not None
            else "its runtime could not be asked"
        )
        return Judged("warning", (where, f"given this GPU? cannot tell: {why}"))
    if allocation.verdict != "rogue-container":
        return Judged("warning", allocation.notes, allocation.requests)
    why_not = list(allocation.notes)
    severity: Severity = "critical"
    if not place.answered:
        named = allocation.claim is not None and all(
            opened.gives_device(node, allocation.claim, one) for one in opens
        )
        # Its workload was given the device; only the tie to it is not confirmed.
        severity = "warning" if named else "error"
        if place.container is not None and place.container.confirmed:
            why_not.append("its runtime did not tell of it within its time")
        # Without its runtime a pod that the kubelet names by name alone cannot be told from it.
        nameless = any(w.source == "kubernetes" and not w.pod_uid for w in node.snapshot.workloads)
        if nameless and (place.container is None or place.container.pod_name is None):
            severity = "warning"
            why_not.append("the kubelet names pods whose uids its runtime did not tell")
    in_pod = any(c.source == "kubernetes" and not c.unanswered for c in ties)
    silent_source = None if in_pod else not_asked(node)
    if silent_source is not None:
        severity = min(severity, "error", key=severity_rank)
        why_not.append(f"not sure: {silent_source}")
    return Judged(severity, tuple(why_not), allocation.requests)
