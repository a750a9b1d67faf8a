"""The CUDA layer of one process as it was seen live: libraries, contexts, loads, launches.

Handles are the driver's own numbers, meaningful within their process. Names of kernels and paths
are the process's own word.
"""

from __future__ import annotations

from typing import Literal

from gpuwarden.model.code import ModuleStanding
from gpuwarden.model.facts import Fact

ContextKind = Literal["created", "primary", "green"]


class CudaLibrary(Fact, frozen=True, kw_only=True):
    """A CUDA driver library, whatever its file is called, that some process has mapped."""

    device: str
    """``major:minor`` of its file system as the mapping has it, decimal."""
    inode: int
    path: str
    """As mapped, in the mount namespace of the process that it was first seen in."""
    build_id: str | None = None
    soname: str | None = None
    probed: tuple[str, ...] = ()
    """Functions, and slots of export tables, whose calls are seen."""
    at_start: tuple[str, ...] = ()
    """Those of ``probed`` that are attached at +0, which costs each call ten microseconds."""
    problems: tuple[str, ...] = ()
    """What of it cannot be seen, and why."""


class CudaContext(Fact, frozen=True, kw_only=True):
    """A context that a process made or retained; a primary one is one however often retained."""

    pid: int
    start_time_ticks: int
    kind: ContextKind
    handle: int
    device: int | None = None
    """The CUDA ordinal in that process, which CUDA_VISIBLE_DEVICES changes."""
    made_ns: int
    """Wall clock, nanoseconds."""
    ended_ns: int | None = None


class ProfileStanding(Fact, frozen=True, kw_only=True):
    """Where a module stands against one profile."""

    profile: str
    """Empty: against the starter baseline, for processes without a declared profile."""
    standing: ModuleStanding
    known_as: str = ""
    not_compared: str = ""
    """Why its baselines could not be asked: then ``unknown`` says nothing of the module."""


class LoadedModule(Fact, frozen=True, kw_only=True):
    """One module of the bytes that a load was given, described in a confined child."""

    digest: str
    code_digest: str = ""
    kind: str
    arch: str = ""
    image_bytes: int = 0
    offset: int | None = None
    """In the bytes that were loaded."""
    kernels: tuple[str, ...] = ()
    kernel_count: int = 0
    standings: tuple[ProfileStanding, ...] = ()
    answer: str = ""
    """What it computes by itself; empty where every profile knows it."""
    score: float | None = None
    judged: int = 0
    """Kernels that were scored."""
    kernel_scores: tuple[float, ...] = ()
    """The highest of them, for judging all modules of a process together."""
    reasons: tuple[str, ...] = ()
    consistent_with: tuple[str, ...] = ()
    broken: str = ""


class ModuleLoad(Fact, frozen=True, kw_only=True):
    """One call that gave the driver code; nested calls with the same bytes are one."""

    pid: int
    start_time_ticks: int
    number: int
    """Of this load among all that the tracer saw."""
    at_ns: int
    thread_id: int
    function: str
    """``cuModuleLoadData``, ``export table 6bd5fb6c[1]``, ``cuLinkAddData_v2``…"""
    path: str | None = None
    """For a load by name: what the process gave, in its own root."""
    image_bytes: int | None = None
    """How long it says it is."""
    captured_bytes: int = 0
    missed: str = ""
    """Why the bytes, or some of them, are not known; empty when all were copied."""
    stopped: bool = False
    """The process was stopped to read them, as the policy allows."""
    modules: tuple[LoadedModule, ...] = ()
    problems: tuple[str, ...] = ()
    handle: int | None = None
    """The module or library that came of it."""
    result: int | None = None
    """CUresult; None when the call did not return while it was watched."""


class KernelUse(Fact, frozen=True, kw_only=True):
    """Launches of one kernel by one process."""

    name: str
    """Empty when the call that named it was not seen."""
    digest: str = ""
    """Of the module that it is from; empty when that is not known."""
    launches: int = 0


class LaunchSample(Fact, frozen=True, array_like=True):
    """One launch of a sampled window."""

    at_ns: int
    """Boot clock."""
    kernel: int
    """Index into the window's ``kernels``."""
    thread_id: int
    stream: int
    grid: tuple[int, int, int] = (0, 0, 0)
    block: tuple[int, int, int] = (0, 0, 0)


class LaunchWindow(Fact, frozen=True, kw_only=True):
    """Launches of one process in a window: every one counted, some in order."""

    pid: int
    start_time_ticks: int
    from_ns: int
    until_ns: int
    """Boot clock, nanoseconds."""
    kernels: tuple[KernelUse, ...] = ()
    graph_launches: int = 0
    """Graphs launched: what kernels are in them is not seen at launch."""
    samples: tuple[LaunchSample, ...] = ()
    """In order of time; of one stretch at the window's start, as many as the cost allows."""
    dropped: int = 0
    """Launches of that stretch that found no room."""


class LaunchFit(Fact, frozen=True, kw_only=True):
    """How the launches of a process fit the launch profile of its workload."""

    pid: int
    start_time_ticks: int
    profile: str
    launches: int
    explained_share: float
    """Of all launches, 0 to 1."""
    outside: tuple[KernelUse, ...] = ()
    """Kernels that the profile does not have, the most launched first."""
    second_stream: tuple[KernelUse, ...] = ()
    """Kernels that come with a period of their own, beside the workload's."""
    second_period_seconds: float | None = None
    unexplained: tuple[KernelUse, ...] = ()
    """Kernels of more launches than learning leaves to chance, while all others are as learned."""
    words: tuple[str, ...] = ()
    """The explanation, kernels named."""
    since_ns: int | None = None
    """Wall clock: the first window that did not fit."""


class CudaProcess(Fact, frozen=True, kw_only=True):
    """How much of one process's CUDA calls was seen: the coverage of what is said of it."""

    pid: int
    start_time_ticks: int
    libraries: tuple[CudaLibrary, ...] = ()
    seen_since_ns: int | None = None
    """Wall clock: since when its calls are seen."""
    before: bool = False
    """It had the library mapped before it was probed: earlier contexts and loads are not known."""
    contexts: tuple[CudaContext, ...] = ()
    loads: int = 0
    known_loads: int = 0
    missed_loads: int = 0
    missed: tuple[str, ...] = ()
    """Why, each reason once."""
    kernels: tuple[KernelUse, ...] = ()
    """The most launched ones."""
    launches: int = 0
    graph_launches: int = 0
    fit: LaunchFit | None = None
    has_descriptors: bool | None = None
    """It holds an accelerator's descriptors; None when that is not known."""
    limits: tuple[str, ...] = ()
    """What cannot be seen of it, in words."""
