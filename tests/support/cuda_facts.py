"""What was seen of the CUDA calls of one process, for tests of what tells of it."""

from __future__ import annotations

from typing import Any

from gpuwarden.model import (
    CudaLibrary,
    KernelUse,
    LaunchFit,
    LaunchWindow,
    LoadedModule,
    ModuleLoad,
    ProfileStanding,
)
from gpuwarden.outputs.cuda_lines import Caller
from gpuwarden.probes.cuda.records import ContextCall
from gpuwarden.watch.identity import of_kernel
from tests.support.open_watching import BOOT_TIME_NS, container
from tests.support.opening import contained, identity

AT_NS = 1_767_225_600_123_000_000
DIGEST = "3abf9d47547fcfcc" * 4


def caller(profile: str = "torch", **fields: Any) -> Caller:
    """A process in a known container, of a workload with a profile."""
    process = of_kernel(contained(**fields), BOOT_TIME_NS)
    return Caller(process, None, container(), "known", profile)


def module(standing: Any = "unknown", answer: str = "hash-like", **fields: Any) -> LoadedModule:
    """A module that computes like a hash and stands so in the profile."""
    values: dict[str, Any] = {
        "digest": DIGEST,
        "kind": "cubin",
        "arch": "sm_90",
        "kernels": ("sha256d_search",),
        "kernel_count": 1,
        "standings": (ProfileStanding(profile="torch", standing=standing),),
        "answer": answer,
        **fields,
    }
    return LoadedModule(**values)


def load(*modules: LoadedModule, **fields: Any) -> ModuleLoad:
    """A load from memory, all of it copied."""
    values: dict[str, Any] = {
        "pid": 200,
        "start_time_ticks": 900,
        "number": 7,
        "at_ns": AT_NS,
        "thread_id": 201,
        "function": "cuModuleLoadData",
        "image_bytes": 14_336,
        "captured_bytes": 14_336,
        "modules": modules,
        **fields,
    }
    return ModuleLoad(**values)


def call(**fields: Any) -> ContextCall:
    """A primary context on device 0."""
    values: dict[str, Any] = {
        "at_ns": AT_NS,
        "process": identity(200),
        "thread_id": 200,
        "function": "cuDevicePrimaryCtxRetain",
        "call": "retained",
        "handle": 0x5500_0000_0010,
        "device": 0,
        **fields,
    }
    return ContextCall(**values)


LIBRARY = CudaLibrary(
    device="8:1",
    inode=4711,
    path="/usr/lib/x86_64-linux-gnu/libcuda.so.550.54",
    probed=("cuModuleLoadData", "cuLaunchKernel"),
    at_start=("cuLaunchKernel",),
    problems=("2 export table slots were not resolved",),
)
WINDOW = LaunchWindow(
    pid=200,
    start_time_ticks=900,
    from_ns=0,
    until_ns=1_000_000_000,
    kernels=(
        KernelUse(name="elementwise", digest="aa", launches=400),
        KernelUse(name="gemm", digest="aa", launches=800),
        KernelUse(name="", launches=4),
    ),
    graph_launches=2,
)
FIT = LaunchFit(
    pid=200,
    start_time_ticks=900,
    profile="torch",
    launches=1204,
    explained_share=0.6,
    words=("33% of the launches are of kernels that the profile does not have: sha256d_search",),
)
