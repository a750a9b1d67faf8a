"""One process, held by its directory in /proc: what is read through it is never another's.

The kernel binds an open ``/proc/PID`` to the process, not to the number: once that process has
ended every read fails, whoever has its pid by then.
"""

from __future__ import annotations

import os
import stat
from types import TracebackType
from typing import Self

from gpuwarden.errors import Denied, GpuwardenError, Unavailable
from gpuwarden.host import Host
from gpuwarden.host_calls import FileStatus, Statx
from gpuwarden.sensors.process.stat_lines import living_thread, parse_stat, read_line
from gpuwarden.sensors.seen import StatLine

STAT_LIMIT_BYTES = 1024
CHUNK_BYTES = 1 << 20
_OPEN = os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK


class OpenedProcess:
    """A context manager. Errors: Unavailable if there is no such process; Denied."""

    def __init__(self, host: Host, pid: int, start_time_ticks: int | None = None) -> None:
        """``start_time_ticks``: only the process that began then."""
        self.host = host
        self.pid = pid
        self._statx = Statx()
        self._directory = -1
        try:
            self.line = read_line(host, pid)
            if start_time_ticks is not None and self.line.start_time_ticks != start_time_ticks:
                raise Unavailable(f"pid {pid} has ended, and another process has its number")
            # One whose first thread has ended shows what it has under its other threads only.
            thread = living_thread(host, self.line)
            self.folder = f"/proc/{thread.pid if thread is not None else pid}"
            self._directory = _open(host.path(self.folder), os.O_RDONLY | os.O_DIRECTORY, None)
            if thread is None and self.stat().start_time_ticks != self.line.start_time_ticks:
                raise Unavailable(f"pid {pid} has ended, and another process has its number")
        except BaseException:
            self.close()
            raise

    @property
    def start_time_ticks(self) -> int:
        """As the kernel keeps it."""
        return self.line.start_time_ticks

    def close(self) -> None:
        """Lets go of it."""
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------- reading

    def read(self, name: str, limit: int) -> bytes:
        """Up to ``limit`` bytes of a file in its directory. Errors: Unavailable, Denied."""
        descriptor = self.open(name, os.O_RDONLY)
        chunks: list[bytes] = []
        try:
            while limit > 0 and (chunk := os.read(descriptor, min(limit, CHUNK_BYTES))):
                chunks.append(chunk)
                limit -= len(chunk)
        except OSError as error:
            if not chunks:
                raise _refused(error, f"{self.folder}/{name}") from error
        finally:
            os.close(descriptor)
        return b"".join(chunks)

    def link(self, name: str) -> str:
        """What a link in its directory says. Errors: Unavailable, Denied."""
        try:
            target = os.readlink(os.fsencode(name), dir_fd=self._directory)
        except OSError as error:
            raise _refused(error, f"{self.folder}/{name}") from error
        return target.decode("utf-8", "backslashreplace")

    def names(self, name: str) -> list[str]:
        """The names in one of its directories. Errors: Unavailable, Denied."""
        descriptor = self.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return os.listdir(descriptor)
        except OSError as error:
            raise _refused(error, f"{self.folder}/{name}") from error
        finally:
            os.close(descriptor)

    def open(self, name: str, flags: int) -> int:
        """A descriptor of a file in its directory; ``O_PATH`` opens nothing behind a link."""
        try:
            return _open(name, flags, self._directory)
        except GpuwardenError as error:
            raise type(error)(f"{self.folder}/{error}", remedy=error.remedy) from error

    def status(self, name: str) -> FileStatus:
        """What a link leads to, no server asked, nothing opened. Errors: Unavailable, Denied."""
        try:
            return self._statx.status(f"/proc/self/fd/{self._directory}/{name}")
        except OSError as error:
            raise _refused(error, f"{self.folder}/{name}") from error

    def handle_status(self, handle: int) -> FileStatus:
        """What an ``O_PATH`` handle names, no server asked. Errors: Unavailable, Denied."""
        try:
            return self._statx.status(f"/proc/self/fd/{handle}")
        except OSError as error:
            raise _refused(error, f"{self.folder}: a file of it") from error

    # ------------------------------------------------------------------------------- who it is

    def stat(self) -> StatLine:
        """Its stat line now. Errors: Unavailable when it has ended; Malformed."""
        return parse_stat(self.read("stat", STAT_LIMIT_BYTES))

    def why_gone(self) -> str:
        """Empty while it lives; else what became of it."""
        try:
            line = self.stat()
        except GpuwardenError:
            return "it has ended" + self._whose_number()
        if line.state in "ZX" and living_thread(self.host, line) is None:
            return "it has ended, and its parent has not asked how"
        return ""

    def _whose_number(self) -> str:
        try:
            line = read_line(self.host, self.pid)
        except GpuwardenError:
            return ""
        if line.start_time_ticks == self.start_time_ticks:
            return ""
        return ", and another process has its number"

    def binary(self) -> tuple[str, int] | None:
        """Device (``major:minor``) and inode of its binary; None when that cannot be told."""
        try:
            status = self.status("exe")
        except GpuwardenError:
            return None
        return f"{status.device[0]}:{status.device[1]}", status.inode


def is_regular(status: FileStatus) -> bool:
    """Whether it is a file whose bytes lie somewhere, and no device, socket or pipe."""
    return stat.S_ISREG(status.mode)


def _open(name: str, flags: int, directory: int | None) -> int:
    try:
        return os.open(os.fsencode(name), flags | _OPEN, dir_fd=directory)
    except OSError as error:
        raise _refused(error, name) from error


def _refused(error: OSError, what: str) -> GpuwardenError:
    if isinstance(error, PermissionError):
        return Denied(f"{what}: permission denied", remedy="run as root with CAP_SYS_PTRACE")
    if isinstance(error, ProcessLookupError | FileNotFoundError):
        return Unavailable(f"{what}: not there, or the process has ended")
    return Unavailable(f"{what}: {error.strerror or error}")
