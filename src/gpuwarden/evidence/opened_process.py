"""One process whose evidence is collected, held by its folder in /proc, and what became of it."""

from __future__ import annotations

import os
import stat

from gpuwarden.errors import GpuwardenError
from gpuwarden.host import Host
from gpuwarden.host_calls import FileStatus, Statx
from gpuwarden.sensors.process.opened_folder import OpenedFolder
from gpuwarden.sensors.process.stat_lines import living_thread, parse_stat, read_line
from gpuwarden.sensors.seen import StatLine

STAT_LIMIT_BYTES = 1024


class OpenedProcess(OpenedFolder):
    """A context manager. Errors: Unavailable if there is no such process; Denied."""

    # What a process that ends in the middle had until then is evidence.
    keeps_cut_reads = True

    def __init__(self, host: Host, pid: int, start_time_ticks: int | None = None) -> None:
        """``start_time_ticks``: only the process that began then."""
        super().__init__(host, pid, start_time_ticks)
        self.host = host
        self.pid = pid
        self._statx = Statx()

    @property
    def start_time_ticks(self) -> int:
        """As the kernel keeps it."""
        return self.line.start_time_ticks

    # ------------------------------------------------------------------------------- reading

    def names(self, name: str) -> list[str]:
        """The names in one of its directories. Errors: Unavailable, Denied."""
        descriptor = self.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return os.listdir(descriptor)
        except OSError as error:
            raise self.refused(error, name) from error
        finally:
            os.close(descriptor)

    def status(self, name: str) -> FileStatus:
        """What a link leads to, no server asked, nothing opened. Errors: Unavailable, Denied."""
        try:
            return self._statx.status(f"/proc/self/fd/{self.descriptor}/{name}")
        except OSError as error:
            raise self.refused(error, name) from error

    def handle_status(self, handle: int) -> FileStatus:
        """What an ``O_PATH`` handle names, no server asked. Errors: Unavailable, Denied."""
        try:
            return self._statx.status(f"/proc/self/fd/{handle}")
        except OSError as error:
            raise self.refused(error, "a file of it") from error

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
