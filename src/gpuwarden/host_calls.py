"""System calls that Python has no function for, or too slow a one; by way of the C library.

Everything here works on real paths and open descriptors and raises OSError, or says None where
this kernel or this C library has no such call. ``Host`` alone uses it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import stat
import struct
import sys
from collections.abc import Iterable, Iterator

from msgspec import Struct

_AT_FDCWD = -100
_AT_STATX_DONT_SYNC = 0x4000
_STATX_BASIC_STATS = 0x7FF
# struct statx (linux/stat.h): mask u32 @0, nlink u32 @16, uid @20, gid @24, mode u16 @28,
# ino u64 @32, size u64 @40, rdev_major u32 @128, rdev_minor @132, dev_major @136, dev_minor @140.
_STATX_BYTES = 256
_STATX_TYPE_AND_INODE = 0x101
# struct linux_dirent64 (getdents64(2)): inode u64 @0, offset u64 @8, length u16 @16, type u8 @18,
# name @19, ended by NUL.
_GETDENTS64_NUMBERS = {"x86_64": 217, "aarch64": 61}
_GETDENTS_BYTES = 1 << 16
_KILL_NUMBERS = {"x86_64": 62, "aarch64": 129}
# struct procmap_query (linux/fs.h, kernel 6.11): size, query_flags, query_addr, vma_start, vma_end,
# vma_flags, vma_page_size, vma_offset, inode (u64 each), dev_major, dev_minor, name and build-id
# sizes (u32 each), their addresses (u64 each).
_PROCMAP_QUERY = struct.Struct("=9Q4I2Q")
_PROCMAP_QUERY_REQUEST = 0xC0686611
_PROCMAP_EXECUTABLE, _PROCMAP_SHARED = 0x04, 0x08
_PROCMAP_FILE_FROM_HERE_ON = 0x10 | 0x20
# syslog(2): SYSLOG_ACTION_READ_ALL, SYSLOG_ACTION_SIZE_BUFFER; its lines: <priority>[seconds] text,
# with the caller in brackets behind the time where the kernel was built so.
_KLOG_READ_ALL, _KLOG_SIZE = 3, 10
_KLOG_LIMIT_BYTES = 16 << 20
_KLOG_LINE = re.compile(rb"<(\d{1,4})>\[ *(\d{1,10})\.(\d{6})\](?:\[ *[TC]\d+\])? ?(.*)")
_RING_RECORD_BYTES = 8192
_RING_RECORDS_LIMIT = 200_000
_MAPPING_LIMIT = 4096
_EXECUTABLE_LIMIT = 65_536


class FileStatus(Struct, frozen=True):
    """What statx says of a file, without asking a network file server."""

    mode: int
    uid: int
    gid: int
    inode: int
    size_bytes: int
    link_count: int
    device: tuple[int, int]
    """(major, minor) of the file system the file is on."""
    special: tuple[int, int]
    """(major, minor) that a device node stands for; (0, 0) for other files."""

    @property
    def is_character_device(self) -> bool:
        return stat.S_ISCHR(self.mode)

    @property
    def is_regular(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)


class FileMapping(Struct, frozen=True):
    """A mapping of a file, as the kernel keeps it."""

    start: int
    end: int
    device: tuple[int, int]
    """(major, minor) of the file system the file is on."""
    inode: int


class DevicesAndSockets(Struct, frozen=True):
    """What of the files in one directory is a character device or a socket."""

    devices: list[tuple[int, tuple[int, int]]]
    """(name as a number, (major, minor)) of each character device."""
    sockets: list[int]
    """Inodes of the sockets."""
    refused: list[str]
    """Names on which statx failed."""


_errno_libc = ctypes.CDLL(None, use_errno=True)
_libc = ctypes.CDLL(None)
"""Without argument types and errno: called a hundred thousand times a scan."""


def _statx_function() -> ctypes._NamedFuncPointer | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).statx
    except (OSError, AttributeError):
        return None
    function.argtypes = [
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_uint,
        ctypes.c_void_p,
    ]
    function.restype = ctypes.c_int
    return function


class Statx:
    """statx(2) with a buffer of its own, never asking a network file server."""

    def __init__(self) -> None:
        self._function = _statx_function()
        self._buffer = ctypes.create_string_buffer(_STATX_BYTES)
        view = memoryview(self._buffer).cast("B")
        self._u32, self._u64 = view.cast("I"), view.cast("Q")

    @property
    def is_here(self) -> bool:
        """Whether the C library has statx; ``status`` works without, by way of stat."""
        return self._function is not None

    def status(self, path: str) -> FileStatus:
        """What the file behind ``path`` is, links followed. Errors: OSError."""
        if self._function is None:
            return _stat(path)
        done = self._function(
            _AT_FDCWD, os.fsencode(path), _AT_STATX_DONT_SYNC, _STATX_BASIC_STATS, self._buffer
        )
        if done != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        u32, u64 = self._u32, self._u64
        return FileStatus(
            mode=u32[7] & 0xFFFF,
            uid=u32[5],
            gid=u32[6],
            inode=u64[4],
            size_bytes=u64[5],
            link_count=u32[4],
            device=(u32[34], u32[35]),
            special=(u32[32], u32[33]),
        )

    def devices_and_sockets(self, directory: int) -> DevicesAndSockets:
        """Those behind the numbered names in an open directory; needs ``is_here``."""
        found = DevicesAndSockets([], [], [])
        statx = _libc.statx
        buffer, u32, u64 = self._buffer, self._u32, self._u64
        for name in os.listdir(directory):
            raw = name.encode()
            if statx(directory, raw, _AT_STATX_DONT_SYNC, _STATX_TYPE_AND_INODE, buffer) != 0:
                found.refused.append(name)
                continue
            kind = u32[7] & 0xF000
            if kind == stat.S_IFCHR:
                found.devices.append((int(name), (u32[32], u32[33])))
            elif kind == stat.S_IFSOCK:
                found.sockets.append(u64[4])
        return found


def _stat(path: str) -> FileStatus:
    s = os.stat(path)
    return FileStatus(
        mode=s.st_mode,
        uid=s.st_uid,
        gid=s.st_gid,
        inode=s.st_ino,
        size_bytes=s.st_size,
        link_count=s.st_nlink,
        device=(os.major(s.st_dev), os.minor(s.st_dev)),
        special=(os.major(s.st_rdev), os.minor(s.st_rdev)),
    )


def directory_names(path: str) -> list[bytes] | None:
    """The names in a directory by the kernel's own call, "." and ".." among them.

    None where the number of that call is not known, or it fails. Errors: OSError on opening.
    """
    number = _GETDENTS64_NUMBERS.get(os.uname().machine)
    if number is None:
        return None
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    names: list[bytes] = []
    buffer = ctypes.create_string_buffer(_GETDENTS_BYTES)
    wanted = ctypes.c_long(_GETDENTS_BYTES)
    try:
        while True:
            size = _libc.syscall(*map(ctypes.c_long, (number, descriptor)), buffer, wanted)
            if size <= 0:
                break
            raw = buffer.raw[:size]
            at = 0
            while at + 19 < size:
                length = raw[at + 16] | raw[at + 17] << 8
                names.append(raw[at + 19 : raw.index(0, at + 19)])
                at += max(length, 24)
    finally:
        os.close(descriptor)
    return None if size < 0 else names


def file_mappings(maps: int, *, executable: bool) -> list[FileMapping] | None:
    """The file mappings behind an open ``/proc/<pid>/maps``; None before kernel 6.11.

    The shared ones, or those that are executable.

    Errors: OSError. A process that ends meanwhile ends the list.
    """
    found: list[FileMapping] = []
    which = _PROCMAP_EXECUTABLE if executable else _PROCMAP_SHARED
    first = _PROCMAP_QUERY.pack(_PROCMAP_QUERY.size, which | _PROCMAP_FILE_FROM_HERE_ON, *(0,) * 13)
    query = bytearray(first)
    try:
        while len(found) < (_EXECUTABLE_LIMIT if executable else _MAPPING_LIMIT):
            fcntl.ioctl(maps, _PROCMAP_QUERY_REQUEST, query)
            answer = _PROCMAP_QUERY.unpack(query)
            found.append(FileMapping(answer[3], answer[4], answer[9:11], answer[8]))
            query[:] = first
            query[16:24] = answer[4].to_bytes(8, sys.byteorder)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESRCH):
            return found
        if error.errno in (errno.ENOTTY, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            return None
        raise
    return found


def answering_pids(pids: Iterable[int]) -> list[int] | None:
    """Those that kill(pid, 0) finds, threads as well; None if its number is not known here."""
    number = _KILL_NUMBERS.get(os.uname().machine)
    if number is None:
        return None
    call = _errno_libc.syscall
    return [pid for pid in pids if call(number, pid, 0) == 0 or ctypes.get_errno() == errno.EPERM]


def ring_records(descriptor: int) -> Iterator[bytes]:
    """The records of an open /dev/kmsg that are there now, oldest first. Errors: OSError."""
    for _ in range(_RING_RECORDS_LIMIT):
        try:
            record = os.read(descriptor, _RING_RECORD_BYTES)
        except BlockingIOError:
            return
        except BrokenPipeError:  # overwritten meanwhile: the next read goes on behind it
            continue
        if not record:
            return
        yield record


def kernel_log_records() -> list[bytes]:
    """The kernel's log ring by syslog(2), as records of /dev/kmsg; needs no device node.

    Errors: OSError, also where the kernel puts no times before its lines.
    """
    size = _errno_libc.klogctl(_KLOG_SIZE, None, 0)
    buffer = ctypes.create_string_buffer(max(1, min(size, _KLOG_LIMIT_BYTES)))
    got = _errno_libc.klogctl(_KLOG_READ_ALL, buffer, len(buffer))
    if size < 0 or got < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    records = records_of_log(buffer.raw[:got])
    if not records:
        raise OSError(errno.ENODATA, "no line with its time")
    return records


def records_of_log(text: bytes) -> list[bytes]:
    """Lines of syslog(2) as records of /dev/kmsg, without those that have no time.

    All are numbered 0 where the first line of the boot is still there, else 1.
    """
    found = [match.groups() for line in text.split(b"\n") if (match := _KLOG_LINE.fullmatch(line))]
    number = int(any(int(part) for part in found[0][1:3])) if found else 0
    return [
        b"%s,%d,%d,-;%s" % (priority, number, int(seconds) * 1_000_000 + int(micro), said)
        for priority, seconds, micro, said in found
    ]
