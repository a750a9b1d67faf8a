"""Files that a process had the driver load by name, read as that process finds them.

A child looks: the kernel resolves the path below the process's root, so that no link and no ``..``
leads out of it; the child opens without waiting what is a regular file with bytes of its own, and
copies it. A path to one of the process's own descriptors is taken from the process. Where root may
not read, as on a network file system, the process's own user may.

The file is read after the call: what the driver read can have been another. A file that was changed
since is said to be, one that was exchanged for an older one is not seen to be.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
import struct
import time
from collections import deque
from typing import NamedTuple

from gpuwarden.errors import GpuwardenError, Malformed, TimedOut, Unavailable
from gpuwarden.probes import errands
from gpuwarden.probes.cuda import copies
from gpuwarden.probes.events import ticks
from gpuwarden.sensors.process.stat_lines import parse_stat

DEADLINE_SECONDS = 1.0
IMPATIENT_SECONDS = 0.05
"""The deadline while files have not been answered for, so that hanging ones cost others little."""
IMPATIENT_FOR_SECONDS = 60.0
HANGING_BEFORE_IMPATIENT = 3
PATH_LIMIT_BYTES = 4096
ENDED = "the process had ended before its file was read"

_OPENAT2 = 437  # on every architecture
_NO_MAGIC_LINKS, _IN_ROOT = 0x02, 0x10
_HOW = struct.Struct("=QQQ")
_PIECE_BYTES = 1 << 20
_PROC_BYTES = 1 << 16
_STATFS_BYTES = 256
_DESCRIPTOR = re.compile(rb"/+(?:proc/+(?:self|thread-self|(\d{1,10}))/+fd|dev/+fd)/+(\d{1,10})")
_CHANGED = "the file was changed after it was loaded: the driver may have read other bytes"
# linux/magic.h: what is read there is made by the kernel as it is read, or is taken away by it.
_MADE_BY_THE_KERNEL = {
    0x9FA0: "proc",
    0x62656572: "sysfs",
    0x64626720: "debugfs",
    0x74726163: "tracefs",
    0x27E0EB: "cgroup",
    0x63677270: "cgroup2",
    0xCAFE4A11: "bpf",
    0x73636673: "securityfs",
    0xF97CFF8C: "selinuxfs",
    0x62656570: "configfs",
    0xDE5E81E4: "efivarfs",
    0x6165676C: "pstore",
    0x42494E4D: "binfmt_misc",
    0x19800202: "mqueue",
    0x50494446: "pidfs",
    0x6E736673: "nsfs",
}


class NamedFile(NamedTuple):
    """A copy of a file that was loaded by name. Who takes it closes ``descriptor``."""

    descriptor: int | None
    """A sealed memory file; None when nothing was read."""
    size: int | None
    """Of the file, in bytes; ``descriptor`` has fewer where it was above the limit."""
    problem: str
    """Why it, or a part of it, was not read, or what may be wrong with it; else empty."""
    file: tuple[int, int, int] | None = None
    """Device, inode, and when it was last changed (wall clock, nanoseconds)."""


def read_named(
    pid: int,
    start_time_ns: int,
    path: str,
    limit_bytes: int,
    *,
    called_ns: int | None = None,
    mount_namespace: int | None = None,
    deadline_seconds: float | None = None,
) -> NamedFile:
    """The file that ``path`` leads the process to, as it is now.

    ``path``: as ``os.fsdecode`` gives it. ``called_ns``: when it was loaded, wall clock.
    ``mount_namespace``: the process's; where it is ours, an absolute path is also followed once the
    process has ended.
    """
    raw = os.fsencode(path)
    if not raw or b"\0" in raw or len(raw) >= PATH_LIMIT_BYTES:
        return NamedFile(None, None, "it is no path")
    if deadline_seconds is None:
        deadline_seconds = _deadline()
    here = (
        mount_namespace == os.stat("/proc/self/ns/mnt").st_ino
        and path.startswith("/")
        and _DESCRIPTOR.fullmatch(raw) is None
    )
    copy = copies.empty("named module")
    problem = ""
    found: tuple[int, int, int, int, bool] | None = None
    try:
        answer = errands.run(
            lambda kept: _fetched(kept[0], (pid, ticks(start_time_ns)), raw, limit_bytes, here),
            (copy,),
            deadline_seconds=deadline_seconds,
        )
        found = _FOUND.unpack(answer)
    except TimedOut:
        _unanswered.append(time.monotonic())
        problem = f"its file system did not answer in {deadline_seconds:g} s"
    except GpuwardenError as error:
        problem = str(error)
    descriptor = copies.sealed(copy)
    if found is None:
        return NamedFile(descriptor, None, problem)
    device, inode, changed_ns, size, ended = found
    if size > limit_bytes:
        problem = f"only the first {limit_bytes} of its {size} bytes were read"
    elif called_ns is not None and changed_ns > called_ns:
        problem = _CHANGED
    elif ended:
        problem = "the process had ended: its path was followed as this process finds it"
    return NamedFile(descriptor, size, problem, (device, inode, changed_ns))


_FOUND = struct.Struct("=QQqQ?")
_unanswered: deque[float] = deque(maxlen=HANGING_BEFORE_IMPATIENT)


def _deadline() -> float:
    many = len(_unanswered) == HANGING_BEFORE_IMPATIENT
    lately = many and time.monotonic() - _unanswered[0] < IMPATIENT_FOR_SECONDS
    return IMPATIENT_SECONDS if lately else DEADLINE_SECONDS


# -------------------------------------------------------------------- in the child


def _fetched(copy: int, of: tuple[int, int], path: bytes, limit: int, here: bool) -> bytes:
    ended = False
    try:
        process = _process(*of)
        file = _opened(process, path)
    except _EndedError:
        if not here:
            raise
        ended, process = True, os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY)
        file = _opened(process, path)
    before = os.fstat(file)
    _copy(file, copy, limit)
    after = os.fstat(file)
    if _changes(before) != _changes(after):
        raise Unavailable("the file was changed while it was read")
    changed = max(after.st_mtime_ns, after.st_ctime_ns)
    return _FOUND.pack(after.st_dev, after.st_ino, changed, after.st_size, ended)


def _changes(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


class _EndedError(Unavailable):
    def __init__(self) -> None:
        super().__init__(ENDED)


def _process(pid: int, start_ticks: int) -> int:
    """Its open /proc/PID, which is no other's whatever becomes of the pid. Errors: _EndedError."""
    try:
        process = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY)
        line = parse_stat(_read(process, "stat"))
    except (OSError, Malformed) as error:
        raise _EndedError from error
    if line.start_time_ticks != start_ticks or line.state in "ZX":
        raise _EndedError
    return process


def _read(folder: int, name: str) -> bytes:
    descriptor = os.open(name, os.O_RDONLY, dir_fd=folder)
    try:
        return os.read(descriptor, _PROC_BYTES)
    finally:
        os.close(descriptor)


def _opened(process: int, path: bytes) -> int:
    """The file, opened for reading. Errors: OSError, Unavailable."""
    try:
        status = _read(process, "status")
    except OSError as error:
        raise _EndedError from error
    own = os.open("/proc/self/fd", os.O_PATH | os.O_DIRECTORY)
    try:
        return _opened_as_we_are(process, own, status, path)
    except PermissionError:
        # A file server can distrust root and trust the user.
        _become(status)
        return _opened_as_we_are(process, own, status, path)


def _opened_as_we_are(process: int, own: int, status: bytes, path: bytes) -> int:
    handle = _handle(process, status, path)
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        raise Unavailable("it is no regular file")
    if (system := _MADE_BY_THE_KERNEL.get(_file_system(handle))) is not None:
        raise Unavailable(f"it is a file of the kernel's ({system}), which is not read")
    # A handle leads to the inode and is no way to read it: nothing of it was opened so far.
    return os.open(str(handle), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=own)


def _handle(process: int, status: bytes, path: bytes) -> int:
    caught = _DESCRIPTOR.fullmatch(path)
    if caught is not None and (caught[1] is None or int(caught[1]) in _numbers(status)):
        return os.open(b"fd/%d" % int(caught[2]), os.O_PATH, dir_fd=process)
    try:
        root = os.open("root", os.O_PATH | os.O_DIRECTORY, dir_fd=process)
        folder = os.open("cwd", os.O_PATH | os.O_DIRECTORY, dir_fd=process)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise _EndedError from error
    try:
        if path.startswith(b"/"):
            return _open_below(root, path)
        return _open_below(root, _place(process, root, folder) + b"/" + path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Unavailable(
                "its path leads in a circle, or over a link of /proc that only the process follows"
            ) from error
        raise


def _place(process: int, root: int, folder: int) -> bytes:
    """The process's working directory, as a path below its root. Errors: OSError, Unavailable."""
    top, inside = (os.readlink(name, dir_fd=process) for name in (b"root", b"cwd"))
    if top != b"/":
        if inside != top and not inside.startswith(top + b"/"):
            raise Unavailable("the process's working directory is outside its root")
        inside = inside[len(top) :]
    wanted = os.fstat(folder)
    try:
        found = _open_below(root, inside or b"/")
    except OSError as error:
        raise Unavailable("the process's working directory is not where it was") from error
    there = os.fstat(found)
    os.close(found)
    # A path is only what the directory is called now: removed, covered by a mount, or another's.
    if (there.st_dev, there.st_ino) != (wanted.st_dev, wanted.st_ino):
        raise Unavailable("the process's working directory is not to be found by its path")
    return inside


def _open_below(root: int, path: bytes) -> int:
    """A handle on what a path leads to for whoever has that root."""
    how = _HOW.pack(os.O_PATH | os.O_CLOEXEC, 0, _NO_MAGIC_LINKS | _IN_ROOT)
    libc = ctypes.CDLL(None, use_errno=True)
    number, folder, size = map(ctypes.c_long, (_OPENAT2, root, _HOW.size))
    handle: int = libc.syscall(number, folder, path, how, size)
    if handle < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return handle


def _numbers(status: bytes) -> set[int]:
    """Its pid in every namespace that has one for it."""
    found = re.search(rb"^NStgid:([\s\d]+)$", status, re.MULTILINE)
    return {int(number) for number in found[1].split()} if found else set()


def _become(status: bytes) -> None:
    """Goes to files as the process's user from now on. Errors: OSError."""
    users = re.search(rb"^Uid:\s+\d+\s+\d+\s+\d+\s+(\d+)$", status, re.MULTILINE)
    groups = re.search(rb"^Gid:\s+\d+\s+\d+\s+\d+\s+(\d+)$", status, re.MULTILINE)
    others = re.search(rb"^Groups:([\s\d]*)$", status, re.MULTILINE)
    if users is None or groups is None or int(users[1]) == 0:
        raise Unavailable("root may not read it")
    libc = ctypes.CDLL(None)
    os.setgroups([int(number) for number in others[1].split()] if others else [])
    libc.setfsgid(int(groups[1]))
    libc.setfsuid(int(users[1]))


def _file_system(descriptor: int) -> int:
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if ctypes.CDLL(None).fstatfs(ctypes.c_int(descriptor), buffer) != 0:
        return 0
    # struct statfs: its type is its first long.
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF


def _copy(file: int, copy: int, limit: int) -> None:
    left = limit
    while left > 0:
        piece = os.read(file, min(_PIECE_BYTES, left))
        if not piece:
            return
        left -= len(piece)
        view = memoryview(piece)
        while view:
            view = view[os.write(copy, view) :]
