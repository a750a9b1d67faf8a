"""Behaviour: what the load looks like; a weak sign at one moment, a strong one over minutes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gpuwarden.finding import Evidence
from gpuwarden.model import GpuClient, Usage
from gpuwarden.node import Node
from gpuwarden.policy import Thresholds
from gpuwarden.rules import system_programs

SATURATED_SHARE = 0.95
STATIC_BYTES = 32 << 20
STATIC_SHARE = 0.05
"""Memory that moves by less than either is unchanged: libraries and small buffers come and go."""


class Saturation(NamedTuple):
    """A process that kept a GPU saturated for minutes."""

    minutes: float
    memory_percent: float | None
    """The most that it had of the GPU's memory; None when either is not known."""
    memory_is_static: bool


def saturation(node: Node, client: GpuClient, thresholds: Thresholds) -> Saturation | None:
    """How long and with how much memory a client saturated its GPU; None when it did not.

    Only of the very process that is in the snapshot: one whose start is not known is nobody.
    """
    process = node.processes.get(client.pid)
    if process is None:
        return None
    identity = (client.gpu_id, client.pid, process.start_time_ticks)
    found: Usage | None = None
    for usage in node.usage_by_client.get(identity, ()):
        if _is_saturated(usage, thresholds) and (
            found is None or usage.covered_seconds > found.covered_seconds
        ):
            found = usage
    if found is None:
        return None
    gpu = node.gpus.get(client.gpu_id)
    percent, static = None, False
    low, high = found.memory_min_bytes, found.memory_max_bytes
    if low is not None and high is not None:
        static = high - low <= max(STATIC_BYTES, high * STATIC_SHARE)
        if gpu is not None and gpu.memory_total_bytes:
            percent = 100 * high / gpu.memory_total_bytes
    return Saturation(found.covered_seconds / 60, percent, static)


def _is_saturated(usage: Usage, thresholds: Thresholds) -> bool:
    if usage.covered_seconds < 60 * thresholds.sustained_minutes:
        return False
    if len(usage.seconds_by_decile) != 10:
        return False
    # A threshold within a decile counts only what is surely above it.
    first = min(-(-thresholds.busy_sm_percent // 10), 9)
    busy = sum(usage.seconds_by_decile[first:])
    return busy >= SATURATED_SHARE * usage.covered_seconds


def observe(node: Node, client: GpuClient, thresholds: Thresholds) -> Iterator[Evidence]:
    """Saturated compute: for minutes with small, unchanged memory, or at this moment.

    At this moment from the process's own samples or, if it is alone, from its GPU's. What a proven
    system program does is never a strong sign: an MPS server computes for others.
    """
    gpu = node.gpus.get(client.gpu_id)
    if client.kinds and not {"C", "M"} & set(client.kinds):
        return
    lasting = saturation(node, client, thresholds)
    if (
        lasting is not None
        and lasting.memory_is_static
        and lasting.memory_percent is not None
        and lasting.memory_percent < thresholds.small_memory_percent
        and not _is_system(node, client)
    ):
        yield Evidence(
            kind="behaviour",
            strength="strong",
            source="driver, over time",
            text=f"keeps the GPU {thresholds.busy_sm_percent}% busy or more for "
            f"{lasting.minutes:.0f} min with only {lasting.memory_percent:.0f}% of its memory, "
            "unchanged",
        )
        return
    sm_percent, source = client.sm_percent, "driver, per process"
    if sm_percent is None and gpu is not None and gpu.sm_percent is not None:
        others = [
            c
            for c in node.clients_by_gpu.get(client.gpu_id, ())
            if c.pid != client.pid and {"C", "M"} & set(c.kinds or ("C",))
        ]
        if not others:
            sm_percent, source = gpu.sm_percent, "driver, its GPU (no other compute client)"
    if sm_percent is None or sm_percent < thresholds.busy_sm_percent:
        return
    memory = ""
    if client.memory_bytes is not None and gpu is not None and gpu.memory_total_bytes:
        share = 100 * client.memory_bytes / gpu.memory_total_bytes
        if share < thresholds.small_memory_percent:
            memory = f" with only {share:.0f}% of its memory"
    yield Evidence(
        kind="behaviour",
        strength="weak",
        source=source,
        text=f"keeps the GPU {sm_percent}% busy{memory}",
    )


def _is_system(node: Node, client: GpuClient) -> bool:
    process = node.processes.get(client.pid)
    match = system_programs.matches(node, process) if process is not None else None
    return match is not None and match.proof == "proven"
