"""The control groups that can be frozen as one, version 2's and version 1's freezer: who is in
them, whether they are frozen, and the switch.

Source: Documentation/admin-guide/cgroup-v2.rst (cgroup.freeze, cgroup.events) and
cgroup-v1/freezer-subsystem.rst (freezer.state) of the kernel.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, Literal

from msgspec import Struct

from gpuwarden.enforcement import located_by_process
from gpuwarden.errors import Denied, GpuwardenError, Unavailable
from gpuwarden.host import Host
from gpuwarden.model import Container
from gpuwarden.probes import cgroup2
from gpuwarden.probes.cgroup2 import GroupKey
from gpuwarden.sensors.cgroup import place

GROUPS_LIMIT: Final = 4096
"""Below one group, itself included."""
MEMBERS_LIMIT: Final = 65_536
_LINES_LIMIT: Final = 64
_READ_BYTES: Final = 4 << 20
_DEPTH_LIMIT: Final = 32
_FREEZER: Final = "freezer"

Kind = Literal["container", "job", "leaf"]


class FreezerGroup(Struct, frozen=True):
    """One group; ``kind`` says whose: a container's own, a Slurm task's, or one without groups
    below it, which may be anybody's.
    """

    directory: str
    version: Literal[1, 2]
    kind: Kind
    name: str
    """For a person, as its runtime, scheduler or maker named it: hostile."""


def groups_of(host: Host, pid: int, container: Container | None) -> list[FreezerGroup]:
    """The groups of a process that may be its own, the most fitting first; none where none is.

    A container's is taken only if its runtime confirmed the container. Errors: Unavailable, Denied.
    """
    own = _container_keys(host, pid, container)
    lines = host.read_bytes(f"/proc/{pid}/cgroup", 64 << 10).decode("utf-8", "surrogateescape")
    found = []
    for number, path, mount in _hierarchies(host, lines.splitlines()[:_LINES_LIMIT]):
        version: Literal[1, 2] = 2 if number == 0 else 1
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), max(0, len(parts) - _DEPTH_LIMIT), -1):
            within = "/" + "/".join(parts[:depth])
            directory = mount + within
            kind = _kind(directory, number, within, own)
            if kind is not None and os.path.exists(_switch(directory, version)):
                name = container.id[:12] if kind == "container" and container else within
                found.append(FreezerGroup(directory, version, kind, name))
    rank = ("container", "job", "leaf")
    return sorted(found, key=lambda one: (rank.index(one.kind), -one.version))


def _container_keys(host: Host, pid: int, container: Container | None) -> frozenset[GroupKey]:
    if container is None or not container.confirmed:
        return frozenset()
    located = located_by_process(host, pid)
    return frozenset(
        key for one in located if one.container_id == container.id for key in one.groups
    )


def _hierarchies(host: Host, lines: list[str]) -> Iterator[tuple[int, str, str]]:
    """(number, path, mount point) of each hierarchy that can freeze and is mounted whole."""
    own = host if host.is_local else Host()
    mounts = cgroup2.parse_mounts(own.read_text("/proc/self/mountinfo"))
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        unified = number == "0" and not controllers
        if not number.isdigit() or not (unified or _FREEZER in controllers.split(",")):
            continue
        if not path.startswith("/") or ".." in path.split("/"):
            continue
        for mount in mounts:
            kind, options = mount.kind, mount.options
            if kind == "cgroup2" if unified else kind == "cgroup" and _FREEZER in options:
                yield int(number), path, mount.where.rstrip("/")
                break


def _kind(directory: str, number: int, path: str, own: frozenset[GroupKey]) -> Kind | None:
    try:
        inode = os.stat(directory).st_ino
    except OSError:
        return None
    if GroupKey(number, inode) in own:
        return "container"
    if inode == cgroup2.ROOT_INODE or _below(directory):
        return None
    placement = place((f"{number}:{'devices' if number else ''}:{path}",))
    in_step = placement.slurm_job is not None and placement.slurm_step is not None
    return "job" if in_step and "/task_" in path else "leaf"


def _below(directory: str) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def members(group: FreezerGroup) -> list[int]:
    """The processes in a group and in those below it.

    Errors: Unavailable if they cannot all be told (too many, another pid namespace's, threads).
    """
    found: list[int] = []
    pending, seen = [group.directory], 0
    while pending:
        directory = pending.pop()
        seen += 1
        words = _read(f"{directory}/cgroup.procs").split()
        if "0" in words or not all(word.isdigit() for word in words):
            raise Unavailable(f"{directory}: processes of another pid namespace are in it")
        found += map(int, words)
        pending += _below(directory)
        if seen + len(pending) > GROUPS_LIMIT or len(found) > MEMBERS_LIMIT:
            raise Unavailable(f"{group.directory}: too many processes or groups in it")
    return found


def _switch(directory: str, version: int) -> str:
    return f"{directory}/{'cgroup.freeze' if version == 2 else 'freezer.state'}"


def is_frozen(group: FreezerGroup) -> bool:
    """Whether all of it has come to rest. Errors: Unavailable, Denied."""
    if group.version == 2:
        return "frozen 1" in _read(f"{group.directory}/cgroup.events").splitlines()
    return _read(_switch(group.directory, 1)).strip() == "FROZEN"


def is_switched(group: FreezerGroup) -> bool:
    """Whether this very group was told to freeze, at rest yet or not. Errors as above."""
    name = "cgroup.freeze" if group.version == 2 else "freezer.self_freezing"
    return _read(f"{group.directory}/{name}").strip() == "1"


def switch(group: FreezerGroup, *, frozen: bool) -> None:
    """Tells a group to freeze or to go on. Errors: Unavailable, Denied."""
    words = ("0", "1") if group.version == 2 else ("THAWED", "FROZEN")
    path = _switch(group.directory, group.version)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, words[frozen].encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _explained(path, error) from error


def switched_of(host: Host, pid: int, container: Container | None) -> FreezerGroup | None:
    """The group of a process that was told to freeze, of those that it may have been; else None."""
    with suppress(GpuwardenError):
        for group in groups_of(host, pid, container):
            with suppress(GpuwardenError):
                if is_switched(group):
                    return group
    return None


def _read(path: str) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            chunks: list[bytes] = []
            while (chunk := os.read(descriptor, _READ_BYTES)) and len(chunks) < 64:
                chunks.append(chunk)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _explained(path, error) from error
    return b"".join(chunks).decode("ascii", "backslashreplace")


def _explained(path: str, error: OSError) -> Denied | Unavailable:
    message = f"{path}: {error.strerror or error}"
    if isinstance(error, PermissionError) or "Read-only" in message:
        return Denied(message, remedy="run as root on the host, /sys/fs/cgroup writable")
    return Unavailable(message)
