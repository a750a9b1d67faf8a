"""The one door to the machine: each file, link, device number, command and signal passes here.

``Host(root=…)`` reads a live machine, a host mounted into a container, or a folder with a recorded
tree; tests hand it a folder. Reads are bounded and never block on a FIFO or a dead network share.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from functools import cached_property
from typing import NoReturn

from msgspec import Struct

from gpuwarden import host_calls
from gpuwarden.errors import Denied, Malformed, TimedOut, Unavailable
from gpuwarden.host_calls import FileMapping, FileStatus, Statx

__all__ = [
    "FILE_LIMIT_BYTES",
    "LINK_LIMIT",
    "CommandOutput",
    "FileMapping",
    "FileStatus",
    "Host",
    "OpenFiles",
]

FILE_LIMIT_BYTES = 4 << 20
"""Default bound of one read; a longer file is cut there."""
OUTPUT_LIMIT_BYTES = 32 << 20
LINK_LIMIT = 40


class OpenFiles(Struct, frozen=True):
    """What the descriptors in one ``/proc/<pid>/fd`` lead to, as far as devices and sockets go."""

    devices: list[tuple[int, tuple[int, int]]]
    """(descriptor, (major, minor)) of each character device."""
    sockets: list[int]
    """Inodes of the sockets."""
    unread: int = 0
    """Descriptors that exist and that we may not look behind."""


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


class Host:
    """A machine seen through its files; ``root`` is ``/`` or where another host is mounted."""

    children_are_ours = True
    """Whether our child processes are part of the scan and left out of what it finds."""
    parent_is_ours = False
    """Whether the process that started us is the agent, so that it and its children are ours."""

    def __init__(self, root: str = "/") -> None:
        self.root = os.path.abspath(root)
        self._prefix = "" if self.root == "/" else self.root
        self._statx = Statx()

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
        try:
            return self._statx.status(real)
        except OSError as error:
            _raise(error, shown)

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
        try:
            names = host_calls.directory_names(self._prefix + "/proc")
        except OSError as error:
            _raise(error, "/proc")
        if names is None:
            return self.pids()
        return sorted(int(name) for name in names if name.isdigit())

    def open_files(self, directory: str) -> OpenFiles:
        """The devices and sockets behind ``/proc/<pid>/fd``; no server asked, no link's text used.

        Errors: Unavailable, Denied for the directory itself. A descriptor that closes meanwhile is
        left out.
        """
        if not self._statx.is_here:
            return self._open_files_one_by_one(directory)
        try:
            handle = os.open(self._prefix + directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            _raise(error, directory)
        try:
            found = self._statx.devices_and_sockets(handle)
        except OSError as error:
            _raise(error, directory)
        finally:
            os.close(handle)
        unread = sum(self._is_denied(f"{directory}/{name}") for name in found.refused)
        return OpenFiles(found.devices, found.sockets, unread)

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

    def shared_mappings(self, pid: int) -> list[FileMapping] | None:
        """The shared file mappings of a process; None where the kernel must be asked by text.

        Needs kernel 6.11 (PROCMAP_QUERY). Errors: Unavailable, Denied.
        """
        return self._file_mappings(pid, executable=False)

    def executable_mappings(self, pid: int) -> list[FileMapping] | None:
        """The executable file mappings of a process, as ``shared_mappings``."""
        return self._file_mappings(pid, executable=True)

    def _file_mappings(self, pid: int, *, executable: bool) -> list[FileMapping] | None:
        path = f"/proc/{pid}/maps"
        try:
            descriptor = os.open(self._prefix + path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            _raise(error, path)
        try:
            return host_calls.file_mappings(descriptor, executable=executable)
        except OSError as error:
            _raise(error, path)
        finally:
            os.close(descriptor)

    # ---------------------------------------------------------------- the live machine only

    def kernel_ring_records(self, path: str = "/dev/kmsg") -> Iterator[bytes]:
        """The records that the kernel's log ring holds now, oldest first; never waits for more.

        Where the device may not be opened, as in most containers, the kernel is asked without it.
        Errors: Denied without CAP_SYSLOG; Unavailable where it is not this kernel's ring.
        """
        if not self.is_live:
            raise Unavailable(f"{path}: only a live machine has one")
        if self.device_number(path) != (1, 11):
            raise Unavailable(f"{path}: not the kernel's log device")
        try:
            descriptor = os.open(self.path(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            try:
                yield from host_calls.kernel_log_records()
            except OSError:
                _raise(error, path)
            return
        try:
            yield from host_calls.ring_records(descriptor)
        except OSError as error:
            _raise(error, path)
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
        answering = host_calls.answering_pids(pids) if self.is_live else []
        if answering is None:
            return [pid for pid in pids if self.answers_signal(pid)]
        return answering

    def command(
        self, argv: list[str], *, deadline_seconds: float, environment: dict[str, str] | None = None
    ) -> CommandOutput:
        """Runs a program of this host and returns what it printed.

        Errors: Unavailable if it is not installed or ``root`` is another host; TimedOut.
        """
        if not self.is_local:
            raise Unavailable(f"{argv[0]}: commands are not run on a host mounted at {self.root}")
        # Imported here: most scans run no command, and all of them start.
        import subprocess

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
