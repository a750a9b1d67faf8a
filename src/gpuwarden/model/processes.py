"""Processes by what the kernel keeps of them and what they say of themselves."""

from __future__ import annotations

from typing import Literal

from gpuwarden.model.facts import Fact

LOGINUID_UNSET = -1
"""The kernel's own "no login" (4294967295 in /proc/<pid>/loginuid)."""


class DriverLibrary(Fact, frozen=True, kw_only=True):
    """A GPU driver library: mapped by a process, or the NVML library that was considered."""

    path: str
    device: str | None = None
    """``major:minor`` of the file system it is on, as in /proc/<pid>/maps."""
    inode: int | None = None
    build_id: str | None = None
    deleted: bool = False
    soname: str | None = None
    file_device: str | None = None
    """``major:minor`` as stat(2) has it: on btrfs and overlayfs another one than in maps."""
    writable_by: tuple[int, ...] | None = None
    """uids other than root that own the file or can write it; -1 stands for everybody. None when
    that was not read."""


class Executable(Fact, frozen=True, kw_only=True):
    """The binary behind a process, read through /proc/<pid>/exe rather than by its name."""

    path: str
    """As the link says, without the kernel's " (deleted)"."""
    deleted: bool = False
    replaced: bool = False
    """Deleted, and another file stands at that path now (an upgrade looks like this)."""
    memfd: bool = False
    device: str | None = None
    inode: int | None = None
    link_count: int | None = None
    owner_uid: int | None = None
    mode: int | None = None
    size_bytes: int | None = None
    filesystem: str | None = None
    """Type of the file system it is on, such as ext4, tmpfs, overlay."""
    path_is_genuine: bool | None = None
    """Whether that path, seen from the host, is the same device and inode; None for another file
    seen by a process with mounts of its own, where that says nothing."""
    directory_writable_by: tuple[int, ...] = ()
    """uids other than root that can write its directory; -1 stands for everybody."""
    elf: bool | None = None
    links_python: bool | None = None
    """For a binary called python*: whether it is an interpreter (needs libpython or has it)."""
    unread: dict[str, str] = {}


class CgroupPlacement(Fact, frozen=True, kw_only=True):
    """What /proc/<pid>/cgroup says about where a process belongs: a claim until confirmed.

    ``chain`` lists every owner found from the outside in, such as
    ``("docker:<id>", "pod:<uid>", "container:<id>")``; the single fields hold the innermost.
    """

    paths: tuple[str, ...] = ()
    """Distinct non-root paths, the most telling first."""
    unit: str | None = None
    unit_transient: bool = False
    session: str | None = None
    user_slice_uid: int | None = None
    runtime: str | None = None
    container_id: str | None = None
    container_helper: bool = False
    pod_uid: str | None = None
    slurm_job: str | None = None
    slurm_step: str | None = None
    slurm_uid: int | None = None
    slurm_node: str | None = None
    batch_job: str | None = None
    """A job id of another batch system, with the system's name: ``torque:1234[3].server``."""
    ecs_task: str | None = None
    machine: str | None = None
    """A virtual machine or system container: ``qemu:NAME``, ``lxc:NAME``."""
    private_namespace: bool = False
    """The path is ``/``: a private cgroup namespace or the root group; says nothing."""
    chain: tuple[str, ...] = ()


class Process(Fact, frozen=True, kw_only=True):
    """A process that matters: a client, a holder, a bridge, or an ancestor of one.

    Keyed by (pid, start_time_ticks, boot id). ``argv`` and ``comm`` are what the process says of
    itself; ``exe``, ``uid``, ``loginuid`` and ``namespaces`` are what the kernel keeps.
    """

    pid: int
    start_time_ticks: int
    started_at_ns: int | None = None
    ppid: int = 0
    process_group: int | None = None
    session_id: int | None = None
    comm: str = ""
    state: str = "?"
    kernel_thread: bool = False
    argv: tuple[str, ...] | None = None
    argv_truncated: bool = False
    exe: Executable | None = None
    exec_mark: str | None = None
    """A digest of what the kernel laid down at the latest exec (sensors/process/exec_mark.py); None
    for ancestors and peers, where addresses are not drawn at random, and where it was not read."""
    cwd: str | None = None
    cwd_deleted: bool = False
    uid: int | None = None
    effective_uid: int | None = None
    gid: int | None = None
    user: str | None = None
    group: str | None = None
    loginuid: int | None = None
    """LOGINUID_UNSET when the kernel says nobody logged in."""
    login_user: str | None = None
    tty: str | None = None
    thread_count: int | None = None
    cpu_seconds: float | None = None
    namespaces: dict[str, int] = {}
    """Namespace kind → inode, as in /proc/<pid>/ns."""
    pids_in_namespaces: tuple[int, ...] = ()
    """NSpid: this process's pid in each pid namespace, outermost first."""
    cgroup_lines: tuple[str, ...] = ()
    cgroup: CgroupPlacement | None = None
    environment: dict[str, str] = {}
    """Only the hints we know how to use (SLURM_*, NVIDIA_VISIBLE_DEVICES, LD_PRELOAD, POOL_* …)."""
    driver_libraries: tuple[DriverLibrary, ...] = ()
    role: str = "subject"
    """``subject``, ``ancestor`` or ``peer`` (the other end of a subject's loopback socket)."""
    unread: dict[str, str] = {}


class HiddenProcess(Fact, frozen=True, kw_only=True):
    """A pid that lives but does not show in /proc even on a second look."""

    pid: int
    seen_by: tuple[str, ...]
    """``driver``, ``holder``, ``kill``, ``lookup`` (opening /proc/<pid> works, listing /proc omits
    it), ``kernel listing`` (the C library's listing omits it: a preloaded library), ``mount``
    (something is mounted over its /proc/<pid>)."""
    thread_group_leader: bool | None = None


class Connection(Fact, frozen=True, kw_only=True):
    """A socket of a GPU process, read in the process's own network namespace. Never resolved."""

    pid: int
    protocol: Literal["tcp", "tcp6", "udp", "udp6"]
    state: str
    local_address: str
    local_port: int
    remote_address: str | None = None
    remote_port: int | None = None
    network_namespace: int | None = None
    peer_pid: int | None = None
    """The process at the other end, when it is on this machine."""
