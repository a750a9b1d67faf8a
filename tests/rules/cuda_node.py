"""Nodes with watched CUDA processes in a few lines, judged by the rules over the CUDA layer."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from gpuwarden.model import CudaContext, CudaLibrary, CudaProcess, GpuModule, Snapshot
from gpuwarden.rules.registry import CUDA_RULES
from tests.rules.open_node import OpenNode, digest
from tests.support.nodes import SECOND_NS, TAKEN_AT_NS

LIBRARY = CudaLibrary(
    device="8:1",
    inode=4711,
    path="/usr/lib/x86_64-linux-gnu/libcuda.so.550.54",
    soname="libcuda.so.1",
)
POLICY = f"""
workloads:
  - name: training
    owner: vision team
    contact: vision-oncall@example.org
    match: {{image_digest: "{digest("train")}"}}
    profile: torch
    MORE
profiles:
  - name: torch
    baselines: [starter]
"""
DECLARED = POLICY.replace("MORE", "contexts: 1")
HASHES = "hash-like integer compute: 15% xor, 39% rotates, densest window 59%"


class CudaNode(OpenNode):
    """A builder that also takes what was seen of CUDA calls."""

    rules = CUDA_RULES

    def __init__(self, **node: Any) -> None:
        super().__init__(**node)
        self.cuda: dict[int, CudaProcess] = {}
        self.modules: list[GpuModule] = []

    def watched(self, pid: int, **fields: Any) -> None:
        """A process whose calls are seen, since it began, through the host's own library."""
        values = {
            "start_time_ticks": self._ticks(pid),
            "libraries": (LIBRARY,),
            "seen_since_ns": TAKEN_AT_NS - 600 * SECOND_NS,
            "has_descriptors": True,
            **fields,
        }
        self.cuda[pid] = CudaProcess(pid=pid, **values)

    def context(self, pid: int, device: int | None = 0, **fields: Any) -> None:
        """A context of a watched process, a primary one unless another kind is named."""
        known = self.cuda[pid]
        number = len(known.contexts)
        values = {
            "kind": "primary",
            "handle": 0x5500_0000 + number,
            "device": device,
            "made_ns": TAKEN_AT_NS - (500 - number) * SECOND_NS,
            **fields,
        }
        context = CudaContext(pid=pid, start_time_ticks=known.start_time_ticks, **values)
        self.cuda[pid] = replace(known, contexts=(*known.contexts, context))

    def module(self, pid: int, **fields: Any) -> None:
        """A module that nobody knows, loaded a minute ago from memory; it does not hash."""
        values: dict[str, Any] = {
            "start_time_ticks": self._ticks(pid),
            "digest": "a3" * 32,
            "kind": "cubin",
            "arch": "sm_90",
            "kernels": ("elementwise",),
            "kernel_count": 1,
            "answer": "not hash-like",
            "loaded_at_ns": TAKEN_AT_NS - 60 * SECOND_NS,
            "loaded_by": "cuModuleLoadData",
            **fields,
        }
        self.modules.append(GpuModule(pid=pid, **values))

    def hashing(self, pid: int, **fields: Any) -> None:
        """The same, and it computes like a hash."""
        values = {
            "kernels": ("sha256d_search",),
            "answer": "hash-like",
            "score": 7.1,
            "reasons": (HASHES,),
            "consistent_with": ("SHA-256",),
            **fields,
        }
        self.module(pid, **values)

    def snapshot(self) -> Snapshot:
        return replace(
            super().snapshot(),
            cuda=tuple(self.cuda.values()),
            modules=tuple(self.modules),
        )
