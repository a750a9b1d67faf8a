"""What the probes tell: opens, how they ended, the life of processes, held descriptors.

Times are nanoseconds of the wall clock (``at_ns``) or since boot (``…_ns`` of the kernel's boot
clock). Text is raw: what a process says of itself (argv, comm, path) is its own claim.
"""

from __future__ import annotations

import os
import time
from typing import Literal

from gpuwarden.model.facts import Fact

How = Literal["open", "mknod", "access", "held", "other"]
State = Literal["attempted", "opened", "denied", "unknown"]
Denial = Literal["", "denied", "would deny"]
Source = Literal[
    "cgroup/dev", "lsm", "fmod_ret", "fentry", "kprobe", "tracepoint", "proc poll", "falco"
]

HOWS: tuple[How, ...] = ("other", "open", "mknod", "access", "open")
"""By their numbers in the kernel; the last one is an open through io_uring."""
LOGINUID_UNSET = -1
NANOSECONDS = 1_000_000_000
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
TOOLS = (
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps",
    "rocm-smi",
    "rocminfo",
    "amd-smi",
    "nvtop",
    "nvitop",
    "gpustat",
    "dcgmi",
    "xpu-smi",
    "hl-smi",
)
"""What the names of GPU management tools begin with; the probe itself compares the same ones."""


def ticks(start_time_ns: int) -> int:
    """A start time of the kernel's boot clock as /proc/<pid>/stat has it."""
    return start_time_ns // (NANOSECONDS // TICKS_PER_SECOND)


class ProcessIdentity(Fact, frozen=True, kw_only=True):
    """A process as the kernel had it at the moment of the event, also if it is gone by now."""

    pid: int
    start_time_ns: int
    """Since boot; with the boot id, what makes a pid unique."""
    ppid: int = 0
    uid: int | None = None
    gid: int | None = None
    loginuid: int | None = None
    """LOGINUID_UNSET when nobody logged in."""
    comm: str = ""
    parent_comm: str = ""
    tty: str | None = None
    argv: tuple[str, ...] | None = None
    argv_truncated: bool = False
    exe_path: str | None = None
    """In the process's own mount namespace; not absolute if ``exe_path_cut``."""
    exe_path_cut: bool = False
    exe_device: str | None = None
    """``major:minor`` of the file system it is on, decimal."""
    exe_inode: int | None = None
    cgroup_id: int | None = None
    """Of the group in the version 2 hierarchy; ids of other hierarchies can be the same."""
    cgroup_v1_id: int | None = None
    cgroup_v1_hierarchy: int | None = None
    """The deepest version 1 group (devices, pids, freezer), its hierarchy as in /proc/cgroups."""
    cgroup_path: str | None = None
    """The deeper of the two groups by name, from its hierarchy's root."""
    cgroup_path_hierarchy: int | None = None
    """0: version 2."""
    cgroup_path_cut: bool = False
    mount_namespace: int | None = None
    pid_namespace: int | None = None
    user_namespace: int | None = None
    pid_in_namespace: int | None = None
    overlay_root: bool = False
    """Its root directory is on overlayfs, where one open of a node is asked about twice."""
    unread: dict[str, str] = {}

    @property
    def start_time_ticks(self) -> int:
        """As /proc/<pid>/stat has it."""
        return ticks(self.start_time_ns)


class OpenEvent(Fact, frozen=True, kw_only=True):
    """Somebody opened, made or tried a watched device, or was found holding it."""

    at_ns: int
    since_boot_ns: int
    source: Source
    major: int
    minor: int
    how: How
    state: State
    process: ProcessIdentity
    thread_id: int | None = None
    io_uring: bool = False
    reads: bool = False
    writes: bool = False
    open_flags: int | None = None
    system_call: int | None = None
    path: str | None = None
    """As the process gave it, perhaps relative; after a return value the file's own path."""
    path_is_claimed: bool = True
    denial: Denial = ""
    """Whether our own rule denied it, or would have in a dry run."""
    error: int | None = None
    """The errno it ended with, where that is known."""
    hits: int | None = None
    """How often this process was here for this device so far, those not told of included."""
    unread: dict[str, str] = {}


class OpenReturn(Fact, frozen=True, kw_only=True):
    """How an attempt ended: ``result`` is a descriptor or a negative errno."""

    at_ns: int
    attempt_since_boot_ns: int
    pid: int
    thread_id: int
    start_time_ns: int
    major: int
    minor: int
    result: int
    open_flags: int = 0
    path: str | None = None


class ExecEvent(Fact, frozen=True, kw_only=True):
    """A process became another program; ``touched``: it, or a parent, had a watched device."""

    at_ns: int
    touched: bool
    process: ProcessIdentity
    tool: str | None = None
    """The file's name, if it begins as one of TOOLS does: a script's own, or the binary's.

    Not known by it: a copy under another name, a script given to its interpreter as an argument.
    """


class GroupEvent(Fact, frozen=True, kw_only=True):
    """A control group was made; no process is in it yet."""

    at_ns: int
    cgroup_id: int
    hierarchy: int
    """0: version 2."""
    path: str
    """From its hierarchy's root."""
    path_cut: bool = False


class ExitEvent(Fact, frozen=True, kw_only=True):
    """The last thread of a process has ended."""

    at_ns: int
    pid: int
    start_time_ns: int
    exit_code: int
    """As wait(2) gives it."""
    comm: str = ""


class HeldDescriptor(Fact, frozen=True, kw_only=True):
    """A descriptor on a watched device, however the process came by it."""

    pid: int
    start_time_ns: int
    thread_id: int
    descriptor: int
    major: int
    minor: int
    inode: int
    open_flags: int
    uid: int
    comm: str


class OpenCount(Fact, frozen=True, kw_only=True):
    """How often a process was here for a device, as the limiter counted in the kernel."""

    pid: int
    start_time_ns: int
    major: int
    minor: int
    how: How
    hits: int


Event = OpenEvent | OpenReturn | ExecEvent | ExitEvent | GroupEvent


def boot_offset_ns() -> int:
    """Wall clock minus boot clock, now."""
    return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
