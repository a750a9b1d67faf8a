"""What processes run in and what starts them: containers, autostarts, workloads."""

from __future__ import annotations

from gpuwarden.model.facts import Fact


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


class StartedProgram(Fact, frozen=True, kw_only=True):
    """A program or script that the commands of an entry name, and the file that it leads to.

    Looked for as what reads the entry would: through its PATH, in its directory, links followed.
    """

    name: str
    """As written."""
    path: str | None = None
    """None when nothing is there, or when nobody looked: then ``unread`` says why."""
    device: str | None = None
    inode: int | None = None
    unread: dict[str, str] = {}


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
    search_path: str | None = None
    """The PATH that its file sets for its commands; None where it sets none."""
    directory: str | None = None
    """Where its commands are started; None where that is not known."""
    programs: tuple[StartedProgram, ...] = ()
    """Of the programs that its commands start, those that were looked for."""
    unread: dict[str, str] = {}


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
