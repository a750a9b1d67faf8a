"""One control-group path, walked from the outside in: the owners that its directories name.

The forms of the names: cgroups(7), systemd.unit(5), Kubernetes "cgroup drivers", Slurm "cgroup v2
plugin", and the sources of the runtimes and schedulers named below.
"""

from __future__ import annotations

import re
from typing import Final

from msgspec import Struct, field

from gpuwarden.pattern import pattern

PATH_LIMIT: Final = 4096
SEGMENT_LIMIT: Final = 128
CHAIN_LIMIT: Final = 16
NAME_LIMIT: Final = 256

_DELETED: Final = " (deleted)"
_HEX64: Final = r"[0-9a-f]{64}"
_UUID: Final = r"[0-9a-f]{8}(?:[-_]?[0-9a-f]{4}){3}[-_]?[0-9a-f]{12}"

_BARE_ID = pattern(rf"{_HEX64}\Z")
_POD = pattern(rf"(?:\A|-)pod(?P<uid>{_UUID})(?=[.:]|\Z)")
_CONTAINER = pattern(
    r"(?:\A|[:/])(?P<runtime>cri-containerd|crio|docker|libpod-payload|libpod|nerdctl)[-:]"
    rf"(?P<id>{_HEX64})(?:\.scope)?\Z"
)
_HELPER = pattern(rf"(?P<runtime>crio|libpod)-conmon-(?P<id>{_HEX64})(?:\.scope)?\Z")
_RUNTIME_NAMES: Final = {
    "cri-containerd": "containerd",
    "crio": "crio",
    "docker": "docker",
    "libpod-payload": "podman",
    "libpod": "podman",
    "nerdctl": "containerd",
}
_BARE_PARENTS: Final = {"docker": "docker", "libpod_parent": "podman", "k8s.io": "containerd"}

_SLURM_V1 = pattern(r"slurm(?:_(?P<node>.+))?\Z")
_SLURM_V2 = pattern(r"(?:(?P<node>.+)_)?slurmstepd\.scope\Z")
_SLURM_UID = pattern(r"uid_(?P<uid>\d{1,10})\Z", re.ASCII)
_SLURM_JOB = pattern(r"job_(?P<job>\d{1,20})\Z", re.ASCII)
_SLURM_SLUID = pattern(r"(?P<sluid>s[0-9A-HJKMNP-TV-Z]{13})\Z")
_SLURM_STEP = pattern(r"step_(?P<step>.+)\Z")

_LXC = pattern(r"lxc(?:\.(?P<part>payload|monitor))?(?:\.(?P<name>.+))?\Z")
_MACHINE_SCOPE = pattern(r"machine-(?P<name>.+)\.scope\Z")
_LIBVIRT = pattern(r"(?P<driver>qemu|lxc)-\d+-(?P<name>.+)\Z")
_LIBVIRT_V1 = pattern(r"(?P<name>.+)\.libvirt-(?P<driver>qemu|lxc)\Z")
_NSPAWN = pattern(r"systemd-nspawn@(?P<name>.+)\.service\Z")
_PROXMOX_VM = pattern(r"(?P<id>\d{1,10})\.scope\Z", re.ASCII)
_ECS_TASK = pattern(rf"(?P<task>[0-9a-f]{{32}}|{_UUID})\Z")
_ECS_FARGATE = pattern(r"(?P<id>[0-9a-f]{32}-\d{1,20})\Z", re.ASCII)
_NOMAD = pattern(rf"(?P<id>{_UUID}(?:\..+?)?)(?:\.scope|\.slice)?\Z")
_YARN = pattern(r"(?P<id>container_[0-9A-Za-z_]+)\Z")
_SINGULARITY = pattern(r"(?P<runtime>singularity|apptainer)(?:-(?P<pid>\d{1,10})\.scope)?\Z")
_PID = pattern(r"\d{1,10}\Z", re.ASCII)

_USER_SLICE = pattern(r"user-(?P<uid>\d{1,10})\.slice\Z", re.ASCII)
_USER_MANAGER = pattern(r"user@(?P<uid>\d{1,10})\.service\Z", re.ASCII)
_SESSION = pattern(r"session-(?P<id>.+)\.scope\Z")
_UNIT = pattern(r".+\.(?:service|scope|socket|mount|swap)\Z")
_TRANSIENT = pattern(
    rf"run-.+\.(?:scope|service)\Z|.*-spawn-{_UUID}\.scope\Z|app-.*-(?:\d+|[0-9a-f]{{32}})\.scope\Z",
    re.ASCII,
)
_ESCAPE = pattern(r"\\x([0-9a-f]{2})")

_UNIT_LEVEL: Final = frozenset({"user", "session", "unit"})
"""Chain words that a container, a job or a machine outranks."""


class Walk(Struct):
    """What one path says, gathered from the outside in."""

    path: str
    preference: int
    chain: list[str] = field(default_factory=list)
    unit: str | None = None
    user_manager: str | None = None
    user_uid: int | None = None
    session: str | None = None
    runtime: str | None = None
    container_id: str | None = None
    helper: bool = False
    pod_uid: str | None = None
    slurm_job: str | None = None
    slurm_step: str | None = None
    slurm_uid: int | None = None
    slurm_node: str | None = None
    batch_job: str | None = None
    ecs_task: str | None = None
    machine: str | None = None

    @property
    def has_owner(self) -> bool:
        """Whether something that outranks a unit was met: a container, a pod, a job, a machine."""
        return any(link.partition(":")[0] not in _UNIT_LEVEL for link in self.chain)

    @property
    def unit_transient(self) -> bool:
        """Whether the unit's name is one that systemd-run or a desktop makes up."""
        return self.unit is not None and _TRANSIENT.match(self.unit) is not None

    def add(self, kind: str, name: str) -> None:
        """Appends an owner; an enclosing unit is the runtime's own service and is dropped."""
        if kind not in _UNIT_LEVEL and self.chain and self.chain[-1].startswith("unit:"):
            self.chain.pop()
            self.unit = None
        self.chain.append(f"{kind}:{name[:NAME_LIMIT]}")

    def add_container(self, runtime: str | None, identity: str, *, helper: bool = False) -> None:
        self.runtime, self.container_id, self.helper = runtime, identity, helper
        self.add("helper" if helper else runtime or "container", identity)

    @property
    def rank(self) -> tuple[int, int, int]:
        if self.container_id or self.pod_uid or self.slurm_job or self.batch_job or self.machine:
            level = 3
        elif self.session or self.unit:
            level = 2
        else:
            level = 1 if self.chain else 0
        return level, len(self.chain), self.preference


def walk_path(path: str, preference: int) -> Walk:
    """The owners on ``path``; ``preference`` decides between walks that say equally much."""
    walk = Walk(path, preference)
    parts = [
        part for part in path.removesuffix(_DELETED).split("/") if part and part not in {".", ".."}
    ][-SEGMENT_LIMIT:]
    in_kubepods = False
    at = 0
    while at < len(parts):
        in_kubepods = in_kubepods or "kubepods" in parts[at]
        used = 0
        if in_kubepods:
            used = _pod(walk, parts, at)
        used = (
            used
            or _container(walk, parts, at)
            or _slurm(walk, parts, at)
            or _machine(walk, parts, at)
            or _other_scheduler(walk, parts, at)
            or _systemd(walk, parts[at])
        )
        at += used or 1
    walk.chain = walk.chain[-CHAIN_LIMIT:]
    if walk.unit is None and walk.user_manager and not walk.has_owner and not walk.session:
        walk.unit = walk.user_manager
        walk.add("unit", walk.user_manager)
    return walk


def _pod(walk: Walk, parts: list[str], at: int) -> int:
    """A pod's own directory; with a mismatched driver it names the container in one go."""
    found = _POD.search(parts[at])
    if found is None:
        return 0
    uid = _dashed(found["uid"])
    walk.pod_uid = uid
    walk.add("pod", uid)
    named = _CONTAINER.search(parts[at], found.end())
    if named is not None:
        walk.add_container(_RUNTIME_NAMES[named["runtime"]], named["id"])
    return 1


def _dashed(uid: str) -> str:
    """A pod uid as Kubernetes writes it; a static pod's 32 digits stay as they are."""
    return uid.replace("_", "-")


def _container(walk: Walk, parts: list[str], at: int) -> int:
    part = parts[at]
    helper = _HELPER.match(part)
    if helper is not None:
        walk.add_container(_RUNTIME_NAMES[helper["runtime"]], helper["id"], helper=True)
        return 1
    named = _CONTAINER.match(part)
    if named is not None:
        quadlet = walk.unit if named["runtime"] == "libpod-payload" else None
        walk.add_container(_RUNTIME_NAMES[named["runtime"]], named["id"])
        if quadlet is not None:
            walk.unit = quadlet
            walk.chain.insert(-1, f"unit:{quadlet}")
        return 1
    if _BARE_ID.match(part):
        parent = parts[at - 1] if at else ""
        walk.add_container(_BARE_PARENTS.get(parent), part)
        return 1
    found = _SINGULARITY.match(part)
    if found is not None:
        if found["pid"]:
            walk.add_container("singularity", found["pid"])
            return 1
        if at + 1 < len(parts) and _PID.match(parts[at + 1]):
            walk.add_container("singularity", parts[at + 1])
            return 2
    return 0


def _slurm(walk: Walk, parts: list[str], at: int) -> int:
    rest = parts[at + 1 : at + 4]
    found = _SLURM_V2.match(parts[at])
    uid: int | None = None
    used = 1
    if found is None:
        found = _SLURM_V1.match(parts[at])
        owner = _SLURM_UID.match(rest[0]) if found is not None and rest else None
        if found is None or owner is None:
            return 0
        uid, rest, used = int(owner["uid"]), rest[1:], 2
    job = _SLURM_JOB.match(rest[0]) if rest else None
    sluid = _SLURM_SLUID.match(rest[0]) if rest else None
    if job is not None:
        name = job["job"]
    elif sluid is not None:
        name = f"sluid:{sluid['sluid']}"
    else:
        return 0
    used += 1
    step = _SLURM_STEP.match(rest[1]) if len(rest) > 1 else None
    walk.slurm_job, walk.slurm_uid, walk.slurm_node = name, uid, found["node"]
    walk.slurm_step = step["step"][:NAME_LIMIT] if step else None
    walk.add("slurm", f"{name}.{walk.slurm_step}" if walk.slurm_step else name)
    return used + (1 if step else 0)


def _machine(walk: Walk, parts: list[str], at: int) -> int:
    part = parts[at]
    following = parts[at + 1] if at + 1 < len(parts) else None
    lxc = _LXC.match(part)
    if lxc is not None:
        name, used = (lxc["name"], 1) if lxc["name"] else (following, 2)
        if name is None:
            return 0
        walk.machine = f"lxc:{name[:NAME_LIMIT]}"
        walk.helper = walk.helper or lxc["part"] == "monitor"
        walk.add("lxc-monitor" if lxc["part"] == "monitor" else "lxc", name)
        return used
    kind = name = None
    scope = _MACHINE_SCOPE.match(part)
    nspawn = _NSPAWN.match(part)
    old = _LIBVIRT_V1.match(part)
    if scope is not None:
        plain = _unescaped(scope["name"])
        libvirt = _LIBVIRT.match(plain)
        kind, name = (libvirt["driver"], libvirt["name"]) if libvirt else ("nspawn", plain)
    elif nspawn is not None:
        kind, name = "nspawn", _unescaped(nspawn["name"])
    elif old is not None:
        kind, name = old["driver"], old["name"]
    elif part == "qemu.slice" and following and (guest := _PROXMOX_VM.match(following)):
        walk.machine = f"qemu:{guest['id']}"
        walk.add("qemu", guest["id"])
        return 2
    if kind is None or name is None:
        return 0
    walk.machine = f"{kind}:{name[:NAME_LIMIT]}"
    walk.add(kind, name)
    return 1


def _other_scheduler(walk: Walk, parts: list[str], at: int) -> int:
    part, rest = parts[at], parts[at + 1 : at + 4]
    if part == "ecs" and rest:
        task_at = next((i for i, p in enumerate(rest[:2]) if _ECS_TASK.match(p)), None)
        if task_at is None:
            return 0
        walk.ecs_task = rest[task_at]
        walk.add("ecs-task", rest[task_at])
        identity = rest[task_at + 1] if task_at + 1 < len(rest) else ""
        if _BARE_ID.match(identity):
            walk.add_container("docker", identity)
        elif _ECS_FARGATE.match(identity):
            walk.add_container("ecs", identity)
        else:
            return task_at + 2
        return task_at + 3
    job: str | None = None
    used = 2
    if part == "torque" and rest:
        job = f"torque:{rest[0]}"
    elif part == "pbs_jobs.service" and rest[:1] == ["jobid"] and len(rest) > 1:
        job, used = f"pbs:{rest[1]}", 3
    elif part == "hadoop-yarn" and rest and (yarn := _YARN.match(rest[0])):
        job = f"yarn:{yarn['id']}"
    elif part in {"nomad", "nomad.slice"}:
        for skipped, candidate in enumerate(rest):
            nomad = _NOMAD.match(candidate)
            if nomad is not None:
                job, used = f"nomad:{nomad['id']}", skipped + 2
                break
    if job is None:
        return 0
    walk.batch_job = job[:NAME_LIMIT]
    kind, _, name = job.partition(":")
    walk.add(kind, name)
    return used


def _systemd(walk: Walk, part: str) -> int:
    inside = walk.has_owner
    if not inside:
        user = _USER_SLICE.match(part)
        if user is not None:
            walk.user_uid = int(user["uid"])
            walk.add("user", user["uid"])
            return 1
        manager = _USER_MANAGER.match(part)
        if manager is not None:
            walk.user_manager = part
            if walk.user_uid is None:
                walk.user_uid = int(manager["uid"])
                walk.add("user", manager["uid"])
            return 1
        session = _SESSION.match(part)
        if session is not None:
            walk.session = session["id"][:NAME_LIMIT]
            walk.add("session", session["id"])
            return 1
    if not _UNIT.match(part):
        return 0
    if part == "init.scope" and (inside or walk.user_manager):
        return 1
    if walk.chain and walk.chain[-1].startswith("unit:"):
        walk.chain.pop()
    walk.add("unit", part)
    if not inside:
        walk.unit = part[:NAME_LIMIT]
    return 1


def _unescaped(name: str) -> str:
    """systemd's \\xNN undone, for names that are shown and compared (systemd-escape(1))."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16)), name)
