"""Who started a process and whom it started, its threads, and the control groups it is in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpuwarden.errors import GpuwardenError
from gpuwarden.evidence.masks import mask_arguments
from gpuwarden.evidence.opened_process import OpenedProcess
from gpuwarden.evidence.shelf import Shelf
from gpuwarden.host import Host
from gpuwarden.outputs.words import escape
from gpuwarden.sensors.process import stat_lines
from gpuwarden.sensors.process.formats import (
    ARGV_LIMIT_BYTES,
    parse_argv,
    parse_cgroup_lines,
    parse_status,
)
from gpuwarden.sensors.seen import StatLine

PARENTS_LIMIT = 64
CHILDREN_LIMIT = 512
THREADS_LIMIT = 4096
STATUS_LIMIT_BYTES = 64 << 10
SESSION = "/run/systemd/sessions"
CGROUPS = "/sys/fs/cgroup"
GROUPS_LIMIT = 16
GROUP_FILE_LIMIT_BYTES = 256 << 10
PATH_LIMIT = 4096
GROUP_FILES = (
    "cgroup.type",
    "cgroup.procs",
    "cgroup.threads",
    "cgroup.freeze",
    "cgroup.events",
    "cgroup.stat",
    "cpu.max",
    "cpu.weight",
    "cpu.stat",
    "cpuset.cpus.effective",
    "memory.current",
    "memory.peak",
    "memory.max",
    "memory.high",
    "memory.events",
    "memory.swap.current",
    "pids.current",
    "pids.max",
    "io.stat",
    # Version 1 has each in a hierarchy of its own.
    "freezer.state",
    "devices.list",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "cpuset.cpus",
)


def collect(process: OpenedProcess, shelf: Shelf, table: Mapping[int, StatLine]) -> None:
    """``parents.json``, ``children.json``, ``threads.json``, ``cgroups.json`` and the session.

    ``table`` has every process of the machine.
    """
    host = process.host
    parents = list(_parents(process, table))
    shelf.put_json("parents.json", [_told(host, one) for one in parents], "parents up to pid 1")
    children = _descendants(process.pid, table)
    if len(children) > CHILDREN_LIMIT:
        more = len(children) - CHILDREN_LIMIT
        shelf.left_out(f"{more} children", f"more than {CHILDREN_LIMIT}")
    told = [_told(host, one) for one in children[:CHILDREN_LIMIT]]
    shelf.put_json("children.json", told, "children, and their children")
    _threads(process, shelf)
    _cgroups(process, shelf)
    _session(process, shelf)


def _parents(process: OpenedProcess, table: Mapping[int, StatLine]) -> Iterator[StatLine]:
    seen = {process.pid}
    pid = process.line.ppid
    for _ in range(PARENTS_LIMIT):
        line = table.get(pid)
        if line is None or pid in seen:
            return
        seen.add(pid)
        yield line
        pid = line.ppid


def _descendants(pid: int, table: Mapping[int, StatLine]) -> list[StatLine]:
    """All of them, the nearest first."""
    children: dict[int, list[StatLine]] = {}
    for line in table.values():
        children.setdefault(line.ppid, []).append(line)
    found: list[StatLine] = []
    pending = [pid]
    seen = {pid}
    for one in pending:
        for child in children.get(one, ()):
            if child.pid not in seen:
                seen.add(child.pid)
                found.append(child)
                pending.append(child.pid)
    return found


def _told(host: Host, line: StatLine) -> dict[str, Any]:
    told: dict[str, Any] = {
        "pid": line.pid,
        "start_time_ticks": line.start_time_ticks,
        "parent": line.ppid,
        "comm": escape(line.comm),
        "state": line.state,
        "session": line.session_id,
    }
    unread: dict[str, str] = {}
    if stat_lines.is_kernel_thread(line):
        return told | {"kernel_thread": True}
    try:
        with OpenedProcess(host, line.pid, line.start_time_ticks) as process:
            _fill(process, told, unread)
    except GpuwardenError as error:
        unread["process"] = str(error)
    return told | ({"unread": unread} if unread else {})


def _fill(process: OpenedProcess, told: dict[str, Any], unread: dict[str, str]) -> None:
    try:
        told["exe"] = escape(process.link("exe")[:PATH_LIMIT])
        binary = process.binary()
        if binary is not None:
            told["exe_device"], told["exe_inode"] = binary
    except GpuwardenError as error:
        unread["exe"] = str(error)
    try:
        words, truncated = parse_argv(process.read("cmdline", ARGV_LIMIT_BYTES + 1))
        told |= {"argv": mask_arguments(words), "argv_truncated": truncated}
        status = parse_status(process.read("status", STATUS_LIMIT_BYTES))
        told |= {"uid": status.uid, "effective_uid": status.effective_uid}
        told["cgroup"] = parse_cgroup_lines(process.read("cgroup", STATUS_LIMIT_BYTES))
    except GpuwardenError as error:
        unread["words"] = str(error)


def _threads(process: OpenedProcess, shelf: Shelf) -> None:
    with shelf.trying("threads"):
        names = sorted(
            (name for name in process.names("task") if name.isascii() and name.isdigit()), key=int
        )
        told = []
        for name in names[:THREADS_LIMIT]:
            try:
                line = stat_lines.parse_stat(process.read(f"task/{name}/stat", 1024))
            except GpuwardenError:
                continue
            told.append(
                {
                    "thread": line.pid,
                    "comm": escape(line.comm),
                    "state": line.state,
                    "start_time_ticks": line.start_time_ticks,
                    "cpu_ticks": line.cpu_ticks,
                }
            )
        if len(names) > THREADS_LIMIT:
            more = len(names) - THREADS_LIMIT
            shelf.left_out(f"{more} threads", f"more than {THREADS_LIMIT}")
        shelf.put_json("threads.json", told, "threads")


def _cgroups(process: OpenedProcess, shelf: Shelf) -> None:
    with shelf.trying("control groups"):
        lines = parse_cgroup_lines(process.read("cgroup", STATUS_LIMIT_BYTES))
        told = [_group(process.host, line) for line in lines[:GROUPS_LIMIT]]
        shelf.put_json("cgroups.json", told, "control groups")


def _group(host: Host, line: str) -> dict[str, Any]:
    """One line of /proc/PID/cgroup, with what the kernel says of that group (cgroups(7))."""
    _, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    told: dict[str, Any] = {"line": escape(line[:PATH_LIMIT]), "files": {}}
    if ".." in path.split("/") or "\0" in path or len(path) > PATH_LIMIT:
        return told | {"unread": "outside of the hierarchy that is mounted here"}
    hierarchy = controllers.removeprefix("name=")
    folder = f"{CGROUPS}/{hierarchy}{path}" if hierarchy else f"{CGROUPS}{path}"
    if not hierarchy and not _is_there(host, folder):
        folder = f"{CGROUPS}/unified{path}"
    if not _is_there(host, folder):
        return told | {"unread": f"{escape(folder)}: not there"}
    told["path"] = escape(folder)
    for name in GROUP_FILES:
        try:
            text = host.read_bytes(f"{folder}/{name}", GROUP_FILE_LIMIT_BYTES)
        except GpuwardenError:
            continue  # Not of this version, or that controller is not on.
        told["files"][name] = text.decode("utf-8", "backslashreplace").rstrip("\n")
    return told


def _is_there(host: Host, folder: str) -> bool:
    try:
        return host.status(folder).is_directory
    except GpuwardenError:
        return False


def _session(process: OpenedProcess, shelf: Shelf) -> None:
    """The login that it came from, where systemd keeps one: by the kernel's own number."""
    try:
        number = process.read("sessionid", 64).strip().decode("ascii", "replace")
    except GpuwardenError:
        return
    if not number.isdigit() or int(number) == (1 << 32) - 1:
        return
    path = f"{SESSION}/{number}"
    try:
        process.host.status(path)
    except GpuwardenError:
        return
    shelf.copy_text(process.host, path, STATUS_LIMIT_BYTES, "session")
