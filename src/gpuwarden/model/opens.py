"""Uses of a device node as they happened, and how GPUs were used over time: what `watch` adds."""

from __future__ import annotations

from typing import Literal

from gpuwarden.model.facts import Fact
from gpuwarden.model.gpus import NodeKind

OpenHow = Literal["open", "mknod", "access", "held", "other"]
OpenState = Literal["attempted", "opened", "denied", "unknown"]


class DeviceOpen(Fact, frozen=True, kw_only=True):
    """What one process did with one device node, however often: one a (process, device, how).

    The process stands in the snapshot's ``processes``, with what is known of it.
    """

    pid: int
    start_time_ticks: int
    major: int
    minor: int
    kind: NodeKind
    how: OpenHow
    """``held``: found with a descriptor that it did not open while it was watched."""
    state: OpenState
    """The furthest it came: ``opened`` if any of them was."""
    first_ns: int
    last_ns: int
    count: int = 1
    source: str = "cgroup/dev"
    """``cgroup/dev`` or another way of the probe, ``proc poll``, ``falco``."""
    path: str | None = None
    """The name it was opened by."""
    path_is_claimed: bool = True
    """The path is what the process gave the kernel, perhaps relative to its own directory."""
    renamed: bool | None = None
    """That name is not one that this device number has; None when the path does not tell."""
    reads: bool = False
    writes: bool = False
    open_flags: int | None = None
    io_uring: bool = False
    error: int | None = None
    """The errno that the last one ended with, where that is known."""
    denial: Literal["", "denied", "would deny"] = ""
    """Whether our own enforcement denied it, or would have."""
    opened_by: int | None = None
    """For ``held``: the pid of the forebear that opened this device while it was watched."""
    at_start: bool = False
    """For ``held``: it held it already when watching began."""
    container_state: Literal["none", "known", "unknown"] = "none"
    """Whether it is in a container, and whether the runtime told of it within its time."""
    unread: dict[str, str] = {}


class ToolRun(Fact, frozen=True, kw_only=True):
    """A GPU management tool that was executed, by the name of its file."""

    pid: int
    start_time_ticks: int
    tool: str
    at_ns: int
    count: int = 1


class Usage(Fact, frozen=True, kw_only=True):
    """How one process used one GPU in a window of time; without a pid, the GPU as a whole."""

    gpu_id: str
    pid: int | None = None
    start_time_ticks: int | None = None
    from_ns: int
    until_ns: int
    covered_seconds: float
    """Seconds of the window in which it was sampled; the rest is unknown, not idle."""
    seconds_by_decile: tuple[float, ...] = ()
    """Seconds at 0-9 % busy, 10-19 %, …, 90-100 %: ten numbers; empty if that is not measured."""
    memory_min_bytes: int | None = None
    memory_max_bytes: int | None = None
    bursts: int = 0
    """How often it went from idle (below 10 %) to 50 % or more and back."""
    busy_logged_in_seconds: float = 0.0
    """Seconds at 50 % or more while somebody was logged in."""
    busy_nobody_seconds: float = 0.0
    logged_in_seconds: float = 0.0
    """Seconds of the window in which somebody was logged in; -1 when that cannot be told."""
    clients_seen: int | None = None
    """For a GPU: the most processes that were listed at once in the window."""
    covered_without_client_seconds: float = 0.0
    """For a GPU: seconds with no process listed; ``busy_without_client_seconds`` of them busy."""
    busy_without_client_seconds: float = 0.0


class ExitedClient(Fact, frozen=True, kw_only=True):
    """A GPU client that ended while it was watched, and what became of its memory."""

    gpu_id: str
    pid: int
    start_time_ticks: int | None = None
    binary: str | None = None
    exited_at_ns: int
    memory_bytes: int | None = None
    """What it had at last."""
    gpu_memory_before_bytes: int | None = None
    gpu_memory_now_bytes: int | None = None
    """In use on the whole GPU at last, and since, at the least."""
    unexplained_before_bytes: int | None = None
    """In use beyond what the listed processes had, when it was listed last."""
    unexplained_bytes: int | None = None
    """In use now beyond what the listed processes have; at the least, since it ended."""


class Respawn(Fact, frozen=True, kw_only=True):
    """One binary that came to a GPU again and again, a new process each time."""

    gpu_id: str
    binary: str
    device: str | None = None
    inode: int | None = None
    uid: int | None = None
    starts_ns: tuple[int, ...]
    """When each began, oldest first; at most 64."""
    pids: tuple[int, ...]
    lifetimes_seconds: tuple[float, ...] = ()
