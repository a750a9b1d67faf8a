"""The one door to the machine: each file, link, device number, command and signal passes here.

``Host(root=…)`` reads a live machine, a host mounted into a container, or a folder with a recorded
tree; tests hand it a folder. Reads are bounded and never block on a FIFO or a dead network share.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from functools import cached_property
from typing import NoReturn

from msgspec import Struct

from gpuwarden.errors import Denied, Malformed, TimedOut, Unavailable

FILE_LIMIT_BYTES = 4 << 20
"""Default bound of one read; a longer file is cut there."""
OUTPUT_LIMIT_BYTES = 32 << 20
LINK_LIMIT = 40
RING_RECORD_BYTES = 8192
RING_RECORDS_LIMIT = 200_000

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
_PROCMAP_SHARED_FILE_FROM_HERE_ON = 0x08 | 0x10 | 0x20
_PROCMAP_QUERY_FIRST = _PROCMAP_QUERY.pack(
    _PROCMAP_QUERY.size, _PROCMAP_SHARED_FILE_FROM_HERE_ON, *(0,) * 13
)
_MAPPING_LIMIT = 4096


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


class OpenFiles(Struct, frozen=True):
    """What the descriptors in one ``/proc/<pid>/fd`` lead to, as far as devices and sockets go."""

    devices: list[tuple[int, tuple[int, int]]]
    """(descriptor, (major, minor)) of each character device."""
    sockets: list[int]
    """Inodes of the sockets."""
    unread: int = 0
    """Descriptors that exist and that we may not look behind."""


class SharedMapping(Struct, frozen=True):
    """A shared mapping of a file, as the kernel keeps it."""

    start: int
    end: int
    device: tuple[int, int]
    """(major, minor) of the file system the file is on."""
    inode: int


class CommandOutput(Struct, frozen=True):
    """What a command printed, and how it ended."""

    code: int
    stdout: bytes
    stderr: bytes


def _raise(error: OSError, what: str) -> NoReturn:
    if error.errno in (errno.EACCES, errno.EPERM):
        raise Denied(f"{what}: permission denied") from error
    if error.errno in (errno.ENOENT, errno.ESRCH, errno.ENOTDIR, errno.ENXIO, errno.ENODEV):
        raise Unavailable(f"{what}: not there") from error
    if error.errno == errno.ELOOP:
        raise Malformed(f"{what}: too many symbolic links") from error
    raise Unavailable(f"{what}: {error.strerror or error}") from error


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


class Host:
    """A machine seen through its files; ``root`` is ``/`` or where another host is mounted."""

    children_are_ours = True
    """Whether our child processes are part of the scan and left out of what it finds."""

    def __init__(self, root: str = "/") -> None:
        self.root = os.path.abspath(root)
        self._prefix = "" if self.root == "/" else self.root
        self._statx = _statx_function()
        self._statx_buffer = ctypes.create_string_buffer(_STATX_BYTES)
        view = memoryview(self._statx_buffer).cast("B")
        self._statx_words = (view.cast("I"), view.cast("Q"))

    # ---------------------------------------------------------------- where

    def path(self, path: str) -> str:
        """The real path of ``path`` (absolute, as on that host), links kept inside ``root``.

        /proc is not resolved: its links are the kernel's own. Errors: Malformed on a link loop.
        """
        if not self._prefix:
            return path
        if path.startswith("/proc"):
            return self._prefix + path
        return self._resolve(path)

    def _resolve(self, path: str) -> str:
        pending = [part for part in path.split("/") if part and part != "."][::-1]
        done: list[str] = []
        links = 0
        while pending:
            part = pending.pop()
            if part == "..":
                if done:
                    done.pop()
                continue
            here = "/".join([self._prefix, *done, part])
            try:
                target = os.readlink(here)
            except OSError:
                done.append(part)
                continue
            links += 1
            if links > LINK_LIMIT:
                raise Malformed(f"{path}: too many symbolic links")
            if target.startswith("/"):
                done = []
            pending.extend([p for p in target.split("/") if p and p != "."][::-1])
        return "/".join([self._prefix, *done])

    def resolved(self, path: str) -> str:
        """``path`` as on that host with its links followed, the missing parts kept.

        Errors: Malformed on a link loop.
        """
        return self._resolve(path)[len(self._prefix) :] or "/"

    @cached_property
    def is_live(self) -> bool:
        """Whether /proc under ``root`` is this kernel's, in our own pid namespace."""
        try:
            return os.readlink(self._prefix + "/proc/self") == str(os.getpid())
        except OSError:
            return False

    @property
    def is_local(self) -> bool:
        """Whether ``root`` is our own root, so that commands and user look-ups are this host's."""
        return not self._prefix

    # ---------------------------------------------------------------- files

    def read_bytes(self, path: str, limit: int = FILE_LIMIT_BYTES) -> bytes:
        """Up to ``limit`` bytes of a file. Errors: Unavailable, Denied; Malformed if not a file."""
        real = self.path(path)
        try:
            descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as error:
            _raise(error, path)
        try:
            if not path.startswith("/proc/") and not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise Malformed(f"{path}: not a regular file")
            chunks: list[bytes] = []
            left = limit
            while left > 0:
                chunk = os.read(descriptor, min(left, 1 << 16))
                if not chunk:
                    break
                chunks.append(chunk)
                left -= len(chunk)
            return b"".join(chunks)
        except OSError as error:
            _raise(error, path)
        finally:
            os.close(descriptor)

    def read_text(self, path: str, limit: int = FILE_LIMIT_BYTES) -> str:
        """``read_bytes`` as UTF-8; bytes that are not stay visible as surrogates' escapes."""
        return self.read_bytes(path, limit).decode("utf-8", "backslashreplace")

    def read_at(self, path: str, offset: int, size: int) -> bytes:
        """Up to ``size`` bytes from ``offset``; for the heads of large files."""
        real = self.path(path)
        try:
            descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as error:
            _raise(error, path)
        try:
            return os.pread(descriptor, size, offset)
        except OSError as error:
            _raise(error, path)
        finally:
            os.close(descriptor)

    def read_link(self, path: str) -> str:
        """The target of a link, as the kernel gives it. Errors: Unavailable, Denied."""
        try:
            target = os.readlink(os.fsencode(self._prefix + path))
        except OSError as error:
            _raise(error, path)
        return target.decode("utf-8", "backslashreplace")

    def extended_attribute(self, path: str, name: str) -> bytes:
        """One extended attribute, links followed. Errors: Unavailable if unset, Denied."""
        try:
            return os.getxattr(self.path(path), name)
        except OSError as error:
            _raise(error, f"{path} ({name})")

    def names(self, path: str) -> list[str]:
        """The names in a directory. Errors: Unavailable, Denied."""
        try:
            return os.listdir(self.path(path))
        except OSError as error:
            _raise(error, path)

    def pids(self) -> list[int]:
        """The pids that listing /proc shows, ascending."""
        return sorted(
            int(name) for name in self.names("/proc") if name.isascii() and name.isdigit()
        )

    def status(self, path: str) -> FileStatus:
        """statx of a path, links followed, no server asked. Errors: Unavailable, Denied."""
        return self._status(self.path(path), path)

    def _status(self, real: str, shown: str) -> FileStatus:
        if self._statx is None:
            try:
                s = os.stat(real)
            except OSError as error:
                _raise(error, shown)
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
        raw = self._statx_buffer
        done = self._statx(
            _AT_FDCWD, os.fsencode(real), _AT_STATX_DONT_SYNC, _STATX_BASIC_STATS, raw
        )
        if done != 0:
            code = ctypes.get_errno()
            _raise(OSError(code, os.strerror(code)), shown)
        view = memoryview(raw)
        u32 = view.cast("B").cast("I")
        u64 = view.cast("B").cast("Q")
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

    def device_number(self, path: str) -> tuple[int, int] | None:
        """(major, minor) if ``path`` leads to a character device, else None."""
        status = self.status(path)
        return status.special if status.is_character_device else None

    def link_target_status(self, path: str) -> FileStatus:
        """statx through a magic link such as /proc/<pid>/fd/<n>; recorded trees may override it."""
        return self._status(self._prefix + path, path)

    # ---------------------------------------------------------------- many processes, quickly

    def read_short(self, path: str, limit: int = 4096) -> bytes:
        """One read of a short file under /proc, in three system calls. Errors as ``read_bytes``."""
        try:
            descriptor = os.open(self._prefix + path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            _raise(error, path)
        try:
            return os.read(descriptor, limit)
        except OSError as error:
            _raise(error, path)
        finally:
            os.close(descriptor)

    def kernel_pids(self) -> list[int]:
        """The pids in /proc by the kernel's own call, so that no preloaded library can omit any.

        The same as ``pids`` where the number of that call is not known. Errors as ``names``.
        """
        number = _GETDENTS64_NUMBERS.get(os.uname().machine)
        if number is None:
            return self.pids()
        try:
            descriptor = os.open(self._prefix + "/proc", os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            _raise(error, "/proc")
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
        if size < 0:
            return self.pids()
        return sorted(int(name) for name in names if name.isdigit())

    def open_files(self, directory: str) -> OpenFiles:
        """The devices and sockets behind ``/proc/<pid>/fd``; no server asked, no link's text used.

        Errors: Unavailable, Denied for the directory itself. A descriptor that closes meanwhile is
        left out.
        """
        if self._statx is None:
            return self._open_files_one_by_one(directory)
        try:
            handle = os.open(self._prefix + directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            _raise(error, directory)
        devices: list[tuple[int, tuple[int, int]]] = []
        sockets: list[int] = []
        unread = 0
        buffer = self._statx_buffer
        statx = _libc.statx
        u32, u64 = self._statx_words
        try:
            for name in os.listdir(handle):
                raw = name.encode()
                if statx(handle, raw, _AT_STATX_DONT_SYNC, _STATX_TYPE_AND_INODE, buffer) != 0:
                    unread += self._is_denied(f"{directory}/{name}")
                    continue
                kind = u32[7] & 0xF000
                if kind == stat.S_IFCHR:
                    devices.append((int(name), (u32[32], u32[33])))
                elif kind == stat.S_IFSOCK:
                    sockets.append(u64[4])
        except OSError as error:
            _raise(error, directory)
        finally:
            os.close(handle)
        return OpenFiles(devices, sockets, unread)

    def _open_files_one_by_one(self, directory: str) -> OpenFiles:
        """``open_files`` by one ``link_target_status`` a descriptor: slower, and overridable."""
        found = OpenFiles([], [])
        unread = 0
        for name in self.names(directory):
            try:
                status = self.link_target_status(f"{directory}/{name}")
            except Denied:
                unread += 1
                continue
            except Unavailable:
                continue
            if status.is_character_device:
                found.devices.append((int(name), status.special))
            elif stat.S_ISSOCK(status.mode):
                found.sockets.append(status.inode)
        return OpenFiles(found.devices, found.sockets, unread)

    def _is_denied(self, path: str) -> bool:
        try:
            self.link_target_status(path)
        except Denied:
            return True
        except (Unavailable, Malformed):
            return False
        return False

    def shared_mappings(self, pid: int) -> list[SharedMapping] | None:
        """The shared file mappings of a process; None where the kernel must be asked by text.

        Needs kernel 6.11 (PROCMAP_QUERY). Errors: Unavailable, Denied.
        """
        path = f"/proc/{pid}/maps"
        try:
            descriptor = os.open(self._prefix + path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            _raise(error, path)
        found: list[SharedMapping] = []
        query = bytearray(_PROCMAP_QUERY_FIRST)
        try:
            while len(found) < _MAPPING_LIMIT:
                fcntl.ioctl(descriptor, _PROCMAP_QUERY_REQUEST, query)
                answer = _PROCMAP_QUERY.unpack(query)
                found.append(SharedMapping(answer[3], answer[4], answer[9:11], answer[8]))
                query[:] = _PROCMAP_QUERY_FIRST
                query[16:24] = answer[4].to_bytes(8, sys.byteorder)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESRCH):
                return found
            if error.errno in (errno.ENOTTY, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                return None
            _raise(error, path)
        finally:
            os.close(descriptor)
        return found

    # ---------------------------------------------------------------- the live machine only

    def kernel_ring_records(self, path: str = "/dev/kmsg") -> Iterator[bytes]:
        """The records that the kernel's log ring holds now, oldest first; never waits for more.

        Errors: Denied without CAP_SYSLOG; Unavailable where it is not this kernel's ring.
        """
        if not self.is_live:
            raise Unavailable(f"{path}: only a live machine has one")
        if self.device_number(path) != (1, 11):
            raise Unavailable(f"{path}: not the kernel's log device")
        try:
            descriptor = os.open(self.path(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            _raise(error, path)
        try:
            for _ in range(RING_RECORDS_LIMIT):
                try:
                    record = os.read(descriptor, RING_RECORD_BYTES)
                except BlockingIOError:
                    return
                except BrokenPipeError:  # overwritten meanwhile: the next read goes on behind it
                    continue
                except OSError as error:
                    _raise(error, path)
                if not record:
                    return
                yield record
        finally:
            os.close(descriptor)

    def answers_signal(self, pid: int) -> bool:
        """Whether kill(pid, 0) finds such a thread (it also answers for threads)."""
        if not self.is_live or pid <= 0:
            return False
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            return True
        return True

    def answering_pids(self, pids: range) -> list[int]:
        """Those of ``pids`` that kill(pid, 0) finds, by the kernel's own call; threads as well.

        About a million a second. Empty where the machine is not live.
        """
        number = _KILL_NUMBERS.get(os.uname().machine)
        if not self.is_live or number is None:
            return [pid for pid in pids if self.answers_signal(pid)]
        call = _errno_libc.syscall
        return [
            pid for pid in pids if call(number, pid, 0) == 0 or ctypes.get_errno() == errno.EPERM
        ]

    def command(
        self, argv: list[str], *, deadline_seconds: float, environment: dict[str, str] | None = None
    ) -> CommandOutput:
        """Runs a program of this host and returns what it printed.

        Errors: Unavailable if it is not installed or ``root`` is another host; TimedOut.
        """
        if not self.is_local:
            raise Unavailable(f"{argv[0]}: commands are not run on a host mounted at {self.root}")
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=deadline_seconds,
                check=False,
                env={**os.environ, "LC_ALL": "C", **(environment or {})},
            )
        except FileNotFoundError as error:
            raise Unavailable(f"{argv[0]}: not installed") from error
        except PermissionError as error:
            raise Denied(f"{argv[0]}: permission denied") from error
        except subprocess.TimeoutExpired as error:
            raise TimedOut(f"{argv[0]}: no answer within {deadline_seconds:g} s") from error
        except OSError as error:
            _raise(error, argv[0])
        return CommandOutput(
            code=done.returncode,
            stdout=done.stdout[:OUTPUT_LIMIT_BYTES],
            stderr=done.stderr[:OUTPUT_LIMIT_BYTES],
        )
