"""The file behind an executable mapping: which it is, and a handle on it that asks it nothing.

A path in a maps file is only a name. The file is reached by the kernel's own link to it, and a
handle of O_PATH does not open it: nothing is started by that, and nothing told when it is closed.
Sources: proc_pid_maps(5), proc_pid_map_files(5), statx(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
import struct
from typing import NamedTuple

from gpuwarden.errors import Denied, GpuwardenError, Unavailable
from gpuwarden.host import Host
from gpuwarden.pattern import pattern
from gpuwarden.probes.cuda.library import LibraryKey
from gpuwarden.sensors.process.stat_lines import living_thread, read_line

MAPS_LIMIT_BYTES = 16 << 20
"""Of one process: a hundred and fifty thousand mappings."""
MOUNTS_LIMIT_BYTES = 8 << 20
LOCAL = frozenset(
    b"ext2 ext3 ext4 xfs btrfs zfs f2fs tmpfs ramfs squashfs erofs iso9660 vfat jfs".split()
)
"""File systems of this machine alone: what is asked of theirs is answered."""
LAYERED = b"overlay"
"""It may be asked what a file is; a read may lead to another machine."""

# struct statx (linux/stat.h): nlink, uid, gid @16, mode @28, ino, size @32, ctime @96, mtime @112,
# the device that it stands for @128 and the one that it is on @136.
_STATX = struct.Struct("=16xIIIH2xQQ48xqI4xqI4x8xII")
_STATX_BYTES = 256
_BASIC_STATS = 0x7FF
_DONT_SYNC, _EMPTY_PATH, _HERE = 0x4000, 0x1000, -100

_MOUNT = pattern(rb"^\d+ \d+ (\d+):(\d+) [^\n]*? - ([^ \n]+) ", re.M)
_NO_FILE = (0, 0, 0)
_libc = ctypes.CDLL(None, use_errno=True)
_status_buffer = ctypes.create_string_buffer(_STATX_BYTES)
"""One for all calls, of which there are hundreds a second where programs start all the time."""

MapsKey = tuple[int, int, int]
"""(major, minor, inode) as a maps file tells them: on some file systems not those of fstat."""


class Executable(NamedTuple):
    """The first executable mapping of a file in a process; ``pid``: where /proc shows it.

    That is another thread's once the first one of the process has ended.
    """

    pid: int
    start: int
    end: int


class Status(NamedTuple):
    """A file as its own file system tells it, as far as it is known here already."""

    key: LibraryKey
    mode: int
    uid: int
    size: int
    modified_ns: int
    changed_ns: int
    """Of its content or its inode; nobody can set it."""

    @property
    def mark(self) -> tuple[int, int, int]:
        """Another one once the file was written to."""
        return self.size, self.modified_ns, self.changed_ns


class Mounts(NamedTuple):
    """Devices of file systems by their kind; one that is of several kinds is of none."""

    local: frozenset[tuple[int, int]]
    layered: frozenset[tuple[int, int]]


class MappedFile(NamedTuple):
    """A regular file that a process has mapped. Who has it closes ``handle``."""

    handle: int
    status: Status


def parse_executables(data: bytes, pid: int) -> dict[MapsKey, Executable]:
    """The files mapped executable in the text of /proc/<pid>/maps (proc_pid_maps(5))."""
    found: dict[MapsKey, Executable] = {}
    for line in data.split(b"\n"):
        blank = line.find(b" ")
        if line[blank + 3 : blank + 4] != b"x":
            continue
        try:
            addresses, _, _, device, inode, *_ = line.split(None, 5)
            start, _, end = addresses.partition(b"-")
            major, _, minor = device.partition(b":")
            key = (int(major, 16), int(minor, 16), int(inode))
            place = Executable(pid, int(start, 16), int(end, 16))
        except ValueError:
            continue
        if key != _NO_FILE:
            found.setdefault(key, place)
    return found


def read_executables(host: Host, pid: int) -> dict[MapsKey, Executable]:
    """The files that a process has mapped executable; none for a kernel thread.

    Errors: Unavailable when it has ended, Denied.
    """
    found = _executables(host, pid)
    if not found:
        # A process whose first thread has ended shows its memory under its other threads only.
        thread = living_thread(host, read_line(host, pid))
        if thread is not None:
            found = _executables(host, thread.pid)
    return found


def _executables(host: Host, pid: int) -> dict[MapsKey, Executable]:
    mappings = host.executable_mappings(pid)
    if mappings is None:
        return parse_executables(host.read_bytes(f"/proc/{pid}/maps", MAPS_LIMIT_BYTES), pid)
    found: dict[MapsKey, Executable] = {}
    for mapping in mappings:
        key = (*mapping.device, mapping.inode)
        found.setdefault(key, Executable(pid, mapping.start, mapping.end))
    return found


def link_of(host: Host, place: Executable) -> str:
    """The kernel's own link to the file behind a mapping."""
    return host.path(f"/proc/{place.pid}/map_files/{place.start:x}-{place.end:x}")


def path_of(host: Host, place: Executable) -> str:
    """How its process's mount namespace calls a mapped file, for people; empty if unknown."""
    try:
        target = os.readlink(os.fsencode(link_of(host, place)))
    except OSError:
        return ""
    return target.decode("utf-8", "backslashreplace")


def status_of(host: Host, place: Executable) -> Status:
    """The status of a mapped file, which is not opened. Errors: Unavailable, Denied."""
    link = link_of(host, place)
    try:
        return _status(_HERE, os.fsencode(link))
    except OSError as error:
        raise _told(error) from error


def open_mapped(link: str) -> MappedFile | None:
    """A handle on the file behind a mapping's ``link``; None if it is no regular file.

    Errors: Unavailable when it is mapped no more or its process has ended, Denied.
    """
    try:
        handle = os.open(link, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise _told(error) from error
    try:
        status = _status(handle, b"")
    except OSError as error:
        os.close(handle)
        raise _told(error) from error
    if not stat.S_ISREG(status.mode):
        os.close(handle)
        return None
    return MappedFile(handle, status)


def read_mounts(host: Host, pid: int) -> Mounts:
    """The file systems that are mounted where a process is, none if that is unknown."""
    try:
        return parse_mounts(host.read_bytes(f"/proc/{pid}/mountinfo", MOUNTS_LIMIT_BYTES))
    except GpuwardenError:
        return Mounts(frozenset(), frozenset())


def parse_mounts(data: bytes) -> Mounts:
    """``read_mounts`` in the text of /proc/<pid>/mountinfo (proc_pid_mountinfo(5))."""
    local: set[tuple[int, int]] = set()
    layered: set[tuple[int, int]] = set()
    others: set[tuple[int, int]] = set()
    for major, minor, kind in _MOUNT.findall(data):
        found = local if kind in LOCAL else layered if kind == LAYERED else others
        found.add((int(major), int(minor)))
    return Mounts(frozenset(local - others), frozenset(layered - others))


def _status(directory: int, path: bytes) -> Status:
    buffer = _status_buffer
    flags = _DONT_SYNC | (0 if path else _EMPTY_PATH)
    if _libc.statx(directory, path, flags, _BASIC_STATS, buffer) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    _, uid, _, mode, inode, size, *times, major, minor = _STATX.unpack_from(buffer)
    changed, changed_ns, modified, modified_ns = times
    return Status(
        (major, minor, inode),
        mode,
        uid,
        size,
        modified * 1_000_000_000 + modified_ns,
        changed * 1_000_000_000 + changed_ns,
    )


def _told(error: OSError) -> GpuwardenError:
    if error.errno in (errno.EACCES, errno.EPERM):
        return Denied(
            "the link to a mapped file may not be followed",
            remedy="run as root with CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE, and CAP_SYS_PTRACE",
        )
    return Unavailable(f"a mapped file: {error.strerror}")
