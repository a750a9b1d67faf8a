"""Which of the units that processes are in does systemd confirm, and which were given GPUs.

A cgroup's name is a claim. On the live host systemd itself is asked, once, with ``systemctl
show``: it merges drop-ins, knows each unit's ControlGroup=, and answers in about 20 ms. Where it
cannot be asked (a mounted root, no systemctl, no answer) what it leaves on disk decides: the link
``/run/systemd/units/invocation:UNIT``, which only root can make and systemd removes when the unit
stops, and the same invocation id as an attribute of the unit's cgroup directory. Both ways root
can put a process into a confirmed unit's cgroup; neither lets anybody else.

A unit is a workload only if its own files, which root alone can change, open an accelerator with
DeviceAllow=. Other confirmed services are named in ``SourceRun.running``, unless some process
claims one of them from a cgroup that is not the unit's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import msgspec
from msgspec import Struct, field

from gpuwarden.errors import Denied, GpuwardenError, Malformed, Unavailable
from gpuwarden.expected.systemd import units
from gpuwarden.expected.systemd.units import Unit
from gpuwarden.host import Host
from gpuwarden.model import SourceRun, Workload
from gpuwarden.sensors.autostarts.systemd_units import SYSTEM_DIRECTORIES
from gpuwarden.sensors.seen import Seen

COMMAND_SECONDS = 2.0
UNIT_LIMIT = 256
_NOTE_LIMIT = 4
_LINKS = "/run/systemd/units"
_CGROUP_MOUNTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified")
_ATTRIBUTES = ("trusted.invocation_id", "user.invocation_id")
_TRANSIENT_FOLDER = "/run/systemd/transient"
_DROP_IN_LIMIT = 64


class _Claims(Struct):
    """The units that processes are in by their cgroup paths: unit → cgroup path → pids."""

    by_unit: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    nested: dict[str, int] = field(default_factory=dict)
    """Unit names that a process carries only below another unit's cgroup → a pid."""


def read(host: Host, seen: Seen) -> tuple[SourceRun, list[Workload]]:
    """Confirms the services that the processes seen are in; never raises."""
    began = time.monotonic()
    workloads: list[Workload] = []
    try:
        run, workloads = _read(host, seen)
    except GpuwardenError as error:
        run = SourceRun(
            name="systemd",
            state="failed",
            reason=str(error),
            remedy=error.remedy or "check `systemctl show` on this host; mount its /run and /sys",
        )
    seconds = time.monotonic() - began
    return msgspec.structs.replace(run, seconds=seconds, workloads=len(workloads)), workloads


def _read(host: Host, seen: Seen) -> tuple[SourceRun, list[Workload]]:
    if not _is_here(host):
        reason = "systemd is not the first process of this host"
        return SourceRun(name="systemd", state="absent", reason=reason), []
    claims = _claims(seen)
    notes: list[str] = []
    described: dict[str, Unit] = {}
    if claims.by_unit:
        described = _describe(host, claims, notes)
    running: list[str] = []
    workloads: list[Workload] = []
    for name, paths in claims.by_unit.items():
        unit = described.get(name)
        strangers = [
            pid
            for path, pids in paths.items()
            if unit is None or not unit.holds(path)
            for pid in pids
        ]
        if unit is None or unit.active_state not in units.ALIVE_STATES:
            pid = next(iter(paths.values()))[0]
            notes.append(f"systemd does not run {name}, whose name pid {pid} carries")
            continue
        if strangers:
            notes.append(f"pid {strangers[0]} carries the name of {name} outside its cgroup")
            continue
        if name in claims.nested:
            notes.append(f"pid {claims.nested[name]} carries the name of {name} in another unit")
        workload = _workload(host, seen, unit, notes)
        if workload is not None:
            workloads.append(workload)
        elif not name.startswith("user@") and name not in claims.nested:
            running.append(name)
    run = SourceRun(
        name="systemd",
        state="ok",
        reason="; ".join(notes[:_NOTE_LIMIT]),
        running=tuple(sorted(running)),
    )
    return run, workloads


def _is_here(host: Host) -> bool:
    """Whether systemd is that host's first process (sd_booted(3), and the process's name)."""
    try:
        return host.read_text("/proc/1/comm", 64).strip() == "systemd"
    except GpuwardenError:
        pass
    try:
        return host.status("/run/systemd/system").is_directory
    except GpuwardenError:
        return False


def _claims(seen: Seen) -> _Claims:
    claims = _Claims()
    for pid, process in seen.processes.items():
        outer: set[str] = set()
        for path in units.system_paths(process.cgroup_lines):
            found = units.unit_of_path(path)
            if found is None or not units.is_unit_name(found[0]):
                continue
            name, unit_path = found
            outer.add(name)
            if name in claims.by_unit or len(claims.by_unit) < UNIT_LIMIT:
                claims.by_unit.setdefault(name, {}).setdefault(unit_path, []).append(pid)
        inner = process.cgroup.unit if process.cgroup is not None else None
        if inner is not None and inner not in outer:
            claims.nested.setdefault(inner, pid)
    return claims


def _describe(host: Host, claims: _Claims, notes: list[str]) -> dict[str, Unit]:
    """Each claimed unit as systemd knows it; units that it does not know are missing.

    Errors: Unavailable, Denied when neither systemd nor its files can be read.
    """
    if host.is_local:
        try:
            return _ask(host, claims.by_unit)
        except (Unavailable, Denied, Malformed) as error:
            notes.append(f"{error}; read from {_LINKS} instead")
    # Readable or failed: a directory that cannot be listed must not read as "no such units".
    links = set(host.names(_LINKS))
    found = {}
    for name, paths in claims.by_unit.items():
        if f"invocation:{name}" not in links:
            continue
        unit = _from_files(host, name, paths)
        if unit is not None:
            found[name] = unit
    return found


def _ask(host: Host, names: Iterable[str]) -> dict[str, Unit]:
    output = host.command(
        ["systemctl", "show", "--no-pager", f"--property={','.join(units.SHOWN)}", "--", *names],
        deadline_seconds=COMMAND_SECONDS,
        environment={"SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": ""},
    )
    if output.code != 0 or not output.stdout.strip():
        said = " ".join(output.stderr.decode("utf-8", "backslashreplace").split())[:200]
        raise Unavailable(f"systemctl gave no answer: {said or f'exit code {output.code}'}")
    return units.parse_show(output.stdout)


def _from_files(host: Host, name: str, paths: Iterable[str]) -> Unit | None:
    """A running unit as its files on disk define it; None if its cgroup is not systemd's own."""
    invocation = host.read_link(f"{_LINKS}/invocation:{name}")
    genuine = [path for path in paths if _attribute(host, path) in (None, invocation)]
    if not genuine:
        return None
    files: list[str] = []
    set_by_files = units.Directives()
    for path, text in _definition(host, name):
        files.append(path)
        set_by_files.apply(text, name)
    user = set_by_files.user or "root"
    return Unit(
        name=name,
        active_state="active",
        control_group=genuine[0],
        transient=any(path.startswith(_TRANSIENT_FOLDER) for path in files),
        device_allow=tuple(set_by_files.device_allow),
        files=tuple(files),
        user=None if user.isdigit() else user,
        uid=int(user) if user.isascii() and user.isdigit() and len(user) < 11 else None,
    )


def _attribute(host: Host, path: str) -> str | None:
    """The invocation id that systemd wrote on a cgroup directory; None if there is none to see."""
    for mount in _CGROUP_MOUNTS:
        for attribute in _ATTRIBUTES:
            try:
                value = host.extended_attribute(mount + path, attribute)
            except GpuwardenError:
                continue
            return value.decode("ascii", "backslashreplace")
    return None


def _definition(host: Host, name: str) -> Iterator[tuple[str, str]]:
    """(path, text) of the unit's file and then of its drop-ins, in the order systemd applies."""
    files, drop_in_folders = units.file_names(name)
    yield from _first(host, (f"{folder}/{file}" for file in files for folder in SYSTEM_DIRECTORIES))
    drop_ins: dict[str, list[str]] = {}
    for drop_in in drop_in_folders:
        for folder in SYSTEM_DIRECTORIES:
            try:
                names = host.names(f"{folder}/{drop_in}")
            except GpuwardenError:
                continue
            for file in names[:_DROP_IN_LIMIT]:
                if file.endswith(".conf"):
                    drop_ins.setdefault(file, []).append(f"{folder}/{drop_in}/{file}")
    for file in sorted(drop_ins):
        yield from _first(host, drop_ins[file])


def _first(host: Host, paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    for path in paths:
        try:
            text = host.read_text(path, units.TEXT_LIMIT)
        except Malformed:
            # A link to /dev/null: masked, and nothing of that name further down applies.
            return
        except GpuwardenError:
            continue
        yield path, text
        return


def _workload(host: Host, seen: Seen, unit: Unit, notes: list[str]) -> Workload | None:
    gpus = units.allotted_gpus(unit.device_allow, seen.gpus)
    if not gpus or unit.transient or not unit.files:
        return None
    for path in unit.files:
        fault = _fault(host, path)
        if fault:
            notes.append(f"{unit.name} allots GPUs, and is not believed: {fault}")
            return None
    return Workload(
        source="systemd",
        name=unit.name,
        owner=unit.user,
        gpus=gpus,
        user=unit.user,
        uid=0 if unit.user == "root" else unit.uid,
        unit=unit.name,
        cgroup_path=unit.control_group,
        state=unit.active_state,
    )


def _fault(host: Host, path: str) -> str:
    """Why somebody other than root could have written a unit file; "" when nobody could."""
    try:
        here = host.resolved(path)
        while True:
            status = host.status(here)
            if status.uid != 0:
                return f"{here} belongs to uid {status.uid}"
            if status.mode & 0o002 or (status.mode & 0o020 and status.gid != 0):
                return f"{here} can be written by others than root"
            if here == "/":
                return ""
            here = here.rpartition("/")[0] or "/"
    except GpuwardenError as error:
        return str(error)
