"""The root of the cgroup version 2 hierarchy, and what a group's directory is in the kernel.

A container's own root is not the hierarchy's: only the latter has inode 1. Where no mount shows it
(a host with version 1 only), the file system is opened without mounting it anywhere.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

from msgspec import Struct

from gpuwarden.errors import Denied, GpuwardenError, Unavailable, UsageError
from gpuwarden.host import Host

ROOT_INODE = 1
DENIABLE_CONTROLLERS = ("devices", "pids", "freezer")
"""Version 1 hierarchies in which the probe looks a process up."""
# fsopen(2), fsconfig(2), fsmount(2): the same numbers on every architecture (kernel 5.2).
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_CLOEXEC, _CREATE = 1, 6


class GroupKey(Struct, frozen=True):
    """A control group as the kernel knows it; ``hierarchy`` 0 is version 2."""

    hierarchy: int
    id: int


class _Mount(Struct, frozen=True):
    where: str
    kind: str
    options: tuple[str, ...]


def parse_mounts(text: str) -> list[_Mount]:
    """The cgroup mounts in the text of /proc/<pid>/mountinfo. Source: proc_pid_mountinfo(5)."""
    found = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if len(left) >= 6 and len(right) >= 3 and right[0] in ("cgroup", "cgroup2"):
            where = left[4]
            for octal, plain in (("\\040", " "), ("\\011", "\t"), ("\\134", "\\")):
                where = where.replace(octal, plain)
            found.append(_Mount(where, right[0], tuple(right[2].split(","))))
    return found


def open_root(host: Host) -> int:
    """A descriptor on the hierarchy's root directory. Errors: Unavailable, Denied."""
    for path in _candidates(host):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        if os.fstat(descriptor).st_ino == ROOT_INODE:
            return descriptor
        os.close(descriptor)
    descriptor = _open_unmounted()
    if os.fstat(descriptor).st_ino == ROOT_INODE:
        return descriptor
    os.close(descriptor)
    raise Unavailable(
        "only a part of the cgroup 2 hierarchy is visible here: this is a cgroup namespace of its "
        "own",
        remedy="share the host's (--cgroupns=host) or mount the host's /sys/fs/cgroup",
    )


def _candidates(host: Host) -> Iterator[str]:
    for process, prefix in (("self", ""), ("1", "/proc/1/root")):
        try:
            mounts = parse_mounts(host.read_text(f"/proc/{process}/mountinfo"))
        except GpuwardenError:
            continue
        yield from (prefix + mount.where for mount in mounts if mount.kind == "cgroup2")


def _open_unmounted() -> int:
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long

    def call(number: int, *arguments: object) -> int:
        done = int(syscall(ctypes.c_long(number), *arguments))
        if done < 0:
            code = ctypes.get_errno()
            message = f"the cgroup 2 hierarchy is not mounted and cannot be: {os.strerror(code)}"
            remedy = "mount -t cgroup2 none SOMEWHERE, as root on the host"
            raise (Denied if code == 1 else Unavailable)(message, remedy=remedy)
        return done

    context = call(_FSOPEN, b"cgroup2", ctypes.c_uint(_CLOEXEC))
    try:
        call(_FSCONFIG, ctypes.c_int(context), ctypes.c_uint(_CREATE), None, None, ctypes.c_int(0))
        return call(_FSMOUNT, ctypes.c_int(context), ctypes.c_uint(_CLOEXEC), ctypes.c_uint(0))
    finally:
        os.close(context)


def group_key(host: Host, directory: str) -> GroupKey:
    """What the kernel calls the group of a directory in a mounted hierarchy.

    Errors: UsageError for a root group or a directory that is no group's; Unavailable, Denied.
    """
    status = host.status(directory)
    mounts = [
        mount
        for mount in parse_mounts(host.read_text("/proc/self/mountinfo"))
        if f"{directory}/".startswith(mount.where.rstrip("/") + "/")
    ]
    if not mounts or not status.is_directory:
        raise UsageError(f"{directory}: not the directory of a control group")
    if status.inode == ROOT_INODE:
        raise UsageError(f"{directory}: the root group holds every process of the machine")
    mount = max(mounts, key=lambda one: len(one.where))
    if mount.kind == "cgroup2":
        return GroupKey(0, status.inode)
    for line in host.read_text("/proc/self/cgroup").splitlines():
        number, controllers, _ = line.split(":", 2)
        names = controllers.split(",")
        if set(names) & set(DENIABLE_CONTROLLERS) and set(names) & set(mount.options):
            return GroupKey(int(number), status.inode)
    raise UsageError(
        f"{directory}: give the group in version 2, or in one of {', '.join(DENIABLE_CONTROLLERS)}"
    )
