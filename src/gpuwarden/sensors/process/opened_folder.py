"""The folder of one process in /proc, held open: what is read through it is never another's.

The kernel binds an open ``/proc/PID`` to the process, not to the number: once that process has
ended every read fails, whoever has its pid by then.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import ClassVar, Self

from gpuwarden.errors import Denied, GpuwardenError, Unavailable
from gpuwarden.host import Host
from gpuwarden.sensors.process.stat_lines import living_thread, read_line

CHUNK_BYTES = 1 << 20
_OPEN = os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK


class OpenedFolder:
    """A context manager. Errors: Unavailable if there is no such process; Denied."""

    keeps_cut_reads: ClassVar[bool] = False
    """Where reading breaks off: whether what was read before counts, or is an error."""

    def __init__(self, host: Host, pid: int, start_time_ticks: int | None = None) -> None:
        """``start_time_ticks``: only the process that began then."""
        self.line = read_line(host, pid)
        self._check(pid, start_time_ticks)
        # One whose first thread has ended shows what it has under its other threads only.
        self.thread = living_thread(host, self.line)
        self.folder = f"/proc/{self.thread.pid if self.thread is not None else pid}"
        self.descriptor = opened(host.path(self.folder), os.O_RDONLY | os.O_DIRECTORY)
        try:
            # It was the same process before and after: so it is the one that was opened.
            start_time_ticks = self.line.start_time_ticks
            self.line = read_line(host, pid)
            self._check(pid, start_time_ticks)
        except BaseException:
            self.close()
            raise

    def _check(self, pid: int, start_time_ticks: int | None) -> None:
        if start_time_ticks not in (None, self.line.start_time_ticks):
            raise Unavailable(f"pid {pid} has ended, and another process has its number")

    def close(self) -> None:
        """Lets go of it. Twice does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def open(self, name: str | bytes, flags: int) -> int:
        """A descriptor of a file in it, which the caller closes; ``O_PATH`` opens nothing behind
        a link. Errors: Unavailable, Denied.
        """
        return opened(name, flags, self.descriptor, f"{self.folder}/{os.fsdecode(name)}")

    def read(self, name: str, limit: int) -> bytes:
        """Up to ``limit`` bytes of a file in it. Errors: Unavailable, Denied."""
        descriptor = self.open(name, os.O_RDONLY)
        chunks: list[bytes] = []
        try:
            while limit > 0 and (chunk := os.read(descriptor, min(limit, CHUNK_BYTES))):
                chunks.append(chunk)
                limit -= len(chunk)
        except OSError as error:
            if not (self.keeps_cut_reads and chunks):
                raise self.refused(error, name) from error
        finally:
            os.close(descriptor)
        return b"".join(chunks)

    def link(self, name: str) -> str:
        """What a link in it says. Errors: Unavailable, Denied."""
        try:
            target = os.readlink(os.fsencode(name), dir_fd=self.descriptor)
        except OSError as error:
            raise self.refused(error, name) from error
        return target.decode("utf-8", "backslashreplace")

    def refused(self, error: OSError, name: str) -> GpuwardenError:
        """The error of ours for a file in it."""
        return _refused(error, f"{self.folder}/{name}")


def opened(
    path: str | bytes, flags: int, directory: int | None = None, shown: str | None = None
) -> int:
    """A descriptor that waits for nobody and becomes no terminal. Errors: Unavailable, Denied."""
    try:
        return os.open(os.fsencode(path), flags | _OPEN, dir_fd=directory)
    except OSError as error:
        raise _refused(error, os.fsdecode(path) if shown is None else shown) from error


def _refused(error: OSError, what: str) -> GpuwardenError:
    if isinstance(error, PermissionError):
        return Denied(f"{what}: permission denied", remedy="run as root with CAP_SYS_PTRACE")
    if isinstance(error, ProcessLookupError | FileNotFoundError):
        return Unavailable(f"{what}: not there, or the process has ended")
    return Unavailable(f"{what}: {error.strerror or error}")
