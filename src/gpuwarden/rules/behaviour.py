"""Behaviour: what the load looks like at one moment; always a weak sign in a single scan."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.finding import Evidence
from gpuwarden.model import GpuClient
from gpuwarden.node import Node
from gpuwarden.policy import Thresholds


def observe(node: Node, client: GpuClient, thresholds: Thresholds) -> Iterator[Evidence]:
    """Saturated compute, from the process's own samples or, if it is alone, from its GPU's."""
    gpu = node.gpus.get(client.gpu_id)
    if client.kinds and not {"C", "M"} & set(client.kinds):
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
