"""Frozen facts: what sensors observe and snapshots store.

A fact never judges. A field that could not be read is ``None`` and its reason stands in
``unread`` under the field's name; ``None`` without a reason means that the kernel or the driver
answered "there is none". Units sit in names; times are Unix nanoseconds unless named otherwise.
"""

from __future__ import annotations

from typing import Literal

import msgspec

SNAPSHOT_SCHEMA = "gpuwarden.snapshot"
SNAPSHOT_VERSION = 1

LOGINUID_UNSET = -1
"""The kernel's own "no login" (4294967295 in /proc/<pid>/loginuid)."""

Vendor = Literal["nvidia", "amd", "intel", "habana", "other"]
ClientKind = Literal["C", "G", "M"]
"""Compute, graphics, MPS compute: the driver's own letters."""
NodeKind = Literal[
    "nvidia-gpu",
    "nvidia-ctl",
    "nvidia-modeset",
    "nvidia-uvm",
    "nvidia-uvm-tools",
    "nvidia-caps",
    "nvidia-other",
    "kfd",
    "drm-render",
    "drm-card",
    "accel",
    "habana",
    "other",
]
SensorState = Literal["ok", "partial", "absent", "failed", "skipped"]
SourceState = Literal["ok", "absent", "failed", "skipped"]


class Fact(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An observation; immutable, comparable, and encodable as JSON."""


class Gap(Fact, frozen=True, kw_only=True):
    """Something a sensor could not see, so that nothing unseen is taken for clean."""

    sensor: str
    what: str
    reason: str
    remedy: str = ""
    count: int = 1


class SensorRun(Fact, frozen=True, kw_only=True):
    """How one sensor fared: its state, the reason when not ``ok``, and its wall time."""

    name: str
    state: SensorState
    reason: str = ""
    remedy: str = ""
    seconds: float = 0.0
    facts: int = 0


class SourceRun(Fact, frozen=True, kw_only=True):
    """How one source of the expected set fared.

    ``running`` and ``ended`` are the job ids the controller confirmed as such when asked; an id
    in neither was not answered for. ``scheduled`` says that this source hands out this node's
    accelerators (so that what it did not hand out is not merely unlisted).
    """

    name: str
    state: SourceState
    reason: str = ""
    remedy: str = ""
    seconds: float = 0.0
    workloads: int = 0
    running: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    scheduled: bool = False


class NodeFacts(Fact, frozen=True, kw_only=True):
    """The machine and the vantage point: who looked, from which pid namespace, with what rights."""

    hostname: str
    boot_id: str | None = None
    boot_time_ns: int | None = None
    kernel: str | None = None
    clock_ticks_per_second: int = 100
    origin: str = "live"
    """``live``, ``root`` (a host mounted under --root) or the kind of dump: ``nvidia-smi-xml``…"""
    observer_uid: int | None = None
    observer_capabilities: int | None = None
    """Effective capability mask of the observer."""
    observer_pid_namespace: int | None = None
    host_pid_namespace: bool | None = None
    """Whether the observer sees the host's pids; None when it cannot tell."""
    driver_version: str | None = None
    cuda_version: str | None = None
    process_count: int | None = None
    unread: dict[str, str] = {}


class Gpu(Fact, frozen=True, kw_only=True):
    """One accelerator, or one MIG device of it (then ``parent_id`` names the whole GPU).

    ``id`` joins every other fact to it: the UUID if there is one, else the PCI address.
    ``pci_address`` is normalised to ``dddddddd:bb:dd.f`` in lower case.
    """

    id: str
    vendor: Vendor = "nvidia"
    index: int | None = None
    minor: int | None = None
    """N of /dev/nvidiaN; for other vendors the minor of its DRM render node."""
    uuid: str | None = None
    name: str | None = None
    pci_address: str | None = None
    parent_id: str | None = None
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    mig_enabled: bool | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    """In use by clients; the driver's own reserve is not counted in."""
    memory_reserved_bytes: int | None = None
    memory_is_numa: bool | None = None
    sm_percent: int | None = None
    memory_busy_percent: int | None = None
    temperature_celsius: int | None = None
    power_watts: float | None = None
    accounting_enabled: bool | None = None
    error: str | None = None
    """A per-device error such as "GPU is lost"; the other GPUs are still reported."""
    kfd_gpu_id: int | None = None
    render_minor: int | None = None
    card_minor: int | None = None
    unread: dict[str, str] = {}


class UtilisationSample(Fact, frozen=True, kw_only=True):
    """One utilisation sample of one process as the driver kept it."""

    at_ns: int
    sm_percent: int
    memory_percent: int = 0


class GpuClient(Fact, frozen=True, kw_only=True):
    """A process that the driver lists as having a context on a GPU, once per (gpu, pid)."""

    gpu_id: str
    pid: int
    kinds: tuple[ClientKind, ...] = ()
    memory_bytes: int | None = None
    sm_percent: int | None = None
    """Newest plausible sample; None when the driver had no sample or cannot measure."""
    samples: tuple[UtilisationSample, ...] = ()
    source: str = "nvml"
    """``nvml``, ``kfd``, ``drm`` or the kind of dump."""
    reported_name: str | None = None
    """The name in a dump, as printed there: a claim."""
    engine_ns: dict[str, int] = {}
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    unread: dict[str, str] = {}


class AccountedProcess(Fact, frozen=True, kw_only=True):
    """What the driver's accounting kept of a running or ended process."""

    gpu_id: str
    pid: int
    started_at_ns: int | None = None
    busy_ms: int | None = None
    sm_percent: int | None = None
    memory_max_bytes: int | None = None
    running: bool | None = None


class DriverLibrary(Fact, frozen=True, kw_only=True):
    """A GPU driver library: mapped by a process, or the NVML library that was considered."""

    path: str
    device: str | None = None
    """``major:minor`` of the file system it is on, as in /proc/<pid>/maps."""
    inode: int | None = None
    build_id: str | None = None
    deleted: bool = False
    soname: str | None = None


class LibraryCheck(Fact, frozen=True, kw_only=True):
    """Whether the NVML library was safe to open: absolute, root-owned, not writable by others."""

    path: str
    accepted: bool
    reason: str = ""
    resolved: str | None = None
    device: str | None = None
    inode: int | None = None
    build_id: str | None = None


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
    """Whether that path, seen from the host, is the same device and inode; None inside a container
    with its own mounts, where it says nothing."""
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


class DeviceNode(Fact, frozen=True, kw_only=True):
    """An accelerator's device node as found under /dev."""

    path: str
    major: int
    minor: int
    kind: NodeKind
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    inode: int | None = None
    device: str | None = None
    pci_address: str | None = None


class Holder(Fact, frozen=True, kw_only=True):
    """A process with an open descriptor on, or a mapping of, an accelerator's device node.

    One per (pid, major, minor). ``path`` is what the descriptor's link says and can be any name:
    the device is known by its number alone.
    """

    pid: int
    major: int
    minor: int
    kind: NodeKind
    path: str
    descriptors: tuple[int, ...] = ()
    mapped: bool = False
    renamed: bool = False
    """The path is not one that this device number has under /dev."""


class Container(Fact, frozen=True, kw_only=True):
    """A container as its runtime describes it (``confirmed``) or as only a cgroup path names it."""

    id: str
    runtime: str
    confirmed: bool = False
    name: str | None = None
    image: str | None = None
    image_digest: str | None = None
    labels: dict[str, str] = {}
    privileged: bool | None = None
    host_pid: bool | None = None
    host_network: bool | None = None
    main_pid: int | None = None
    pid_namespace: int | None = None
    mount_namespace: int | None = None
    devices: tuple[str, ...] = ()
    """Host device paths that the runtime was told to pass in."""
    visible_devices: str | None = None
    """NVIDIA_VISIBLE_DEVICES in the container's configuration: a request, not an allocation."""
    device_requests: tuple[str, ...] = ()
    """Docker's DeviceRequests or CDI names: ids, or ``all``, or ``count:N``."""
    host_mounts: tuple[str, ...] = ()
    """Host paths mounted in, ``source:destination``."""
    entrypoint: tuple[str, ...] = ()
    restart_policy: str | None = None
    started_at_ns: int | None = None
    state: str | None = None
    pod_uid: str | None = None
    pod_name: str | None = None
    pod_namespace: str | None = None
    pod_container: str | None = None
    pod_labels: dict[str, str] = {}
    pod_owner: str | None = None
    """The controller that re-creates it, ``ReplicaSet/name``, when labels or metadata tell."""
    environment: dict[str, str] = {}
    """Only hints: user and job names that platforms put there (claims)."""
    parent_id: str | None = None
    unread: dict[str, str] = {}


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


class PersistenceEntry(Fact, frozen=True, kw_only=True):
    """A place that starts programs by itself, one entry of it."""

    kind: str
    """cron, systemd-service, systemd-timer, rc-local, preload, shell-profile, supervisord,
    container-restart, pod-controller, init-script, autostart, at, systemd-generator, udev-rule,
    motd-script, ssh-rc."""
    path: str
    line: int | None = None
    text: str = ""
    """The line or directive, bounded."""
    commands: tuple[str, ...] = ()
    """What it runs, as written; for a preload file the library path."""
    user: str | None = None
    unit: str | None = None
    owner_uid: int | None = None
    schedule: str | None = None
    enabled: bool | None = None
    unread: dict[str, str] = {}


class XidEvent(Fact, frozen=True, kw_only=True):
    """A GPU error line of the kernel log. A named pid is who was there, not who is to blame."""

    code: int
    pci_address: str | None = None
    pid: int | None = None
    process_name: str | None = None
    message: str = ""
    at_ns: int | None = None
    seconds_since_boot: float | None = None
    truncated: bool = False
    trusted: bool = True
    """False for a line that did not come from the NVIDIA driver (no NVRM, or facility user)."""
    gpu_instance: str | None = None
    compute_instance: str | None = None


class Workload(Fact, frozen=True, kw_only=True):
    """Something that is supposed to run here, with the accelerators it was given.

    ``gpus`` holds references as the source writes them: ``uuid:GPU-…``, ``index:0`` (NVML order),
    ``minor:0`` (/dev/nvidia0), ``pci:…``, ``mig:<parent uuid or index>/<gi>``, ``all``.
    """

    source: str
    name: str
    owner: str | None = None
    contact: str | None = None
    gpus: tuple[str, ...] = ()
    shared: bool = False
    user: str | None = None
    uid: int | None = None
    job_id: str | None = None
    account: str | None = None
    partition: str | None = None
    pod_uid: str | None = None
    pod_name: str | None = None
    pod_namespace: str | None = None
    containers: tuple[str, ...] = ()
    unit: str | None = None
    pids: tuple[int, ...] = ()
    """Processes that the scheduler itself names as this workload's (Slurm's listpids)."""
    cgroup_path: str | None = None
    state: str | None = None
    started_at_ns: int | None = None


AnyFact = (
    Gap
    | NodeFacts
    | Gpu
    | GpuClient
    | AccountedProcess
    | LibraryCheck
    | Process
    | HiddenProcess
    | DeviceNode
    | Holder
    | Container
    | Connection
    | PersistenceEntry
    | XidEvent
    | Workload
)


class Snapshot(Fact, frozen=True, kw_only=True):
    """Everything that was seen of one node at one moment; a plain value that replays anywhere."""

    schema: str = SNAPSHOT_SCHEMA
    version: int = SNAPSHOT_VERSION
    tool_version: str = ""
    taken_at_ns: int
    node: NodeFacts
    sensors: tuple[SensorRun, ...] = ()
    sources: tuple[SourceRun, ...] = ()
    gaps: tuple[Gap, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    clients: tuple[GpuClient, ...] = ()
    accounted: tuple[AccountedProcess, ...] = ()
    libraries: tuple[LibraryCheck, ...] = ()
    processes: tuple[Process, ...] = ()
    hidden: tuple[HiddenProcess, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()
    holders: tuple[Holder, ...] = ()
    containers: tuple[Container, ...] = ()
    connections: tuple[Connection, ...] = ()
    persistence: tuple[PersistenceEntry, ...] = ()
    xids: tuple[XidEvent, ...] = ()
    workloads: tuple[Workload, ...] = ()
