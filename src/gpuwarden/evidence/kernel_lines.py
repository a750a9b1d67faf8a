"""Lines of the kernel's log about GPUs and about the subjects, as they stand there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from gpuwarden.errors import GpuwardenError
from gpuwarden.evidence.shelf import Shelf
from gpuwarden.host import Host
from gpuwarden.sensors.kernel_log import LOG_FILES, TAIL_LIMIT_BYTES

LINES_LIMIT_BYTES = 2 << 20
COMM_LEAST = 3
_GPUS = (b"NVRM", b"Xid", b"nvidia", b"amdgpu", b"kfd")


def collect(shelf: Shelf, host: Host, names: Mapping[int, str]) -> None:
    """``kernel-log``: of the ring, else of the log files. ``names``: pid → comm of the subjects."""
    with shelf.trying("kernel log"):
        try:
            lines: Iterable[bytes] = list(host.kernel_ring_records())
            source = "the kernel's ring"
        except GpuwardenError:
            lines, source = _of_files(host)
            if not source:
                raise
        kept = b"".join(select(lines, names))
        if kept:
            # The newest are at the end.
            what = f"lines of {source} about GPUs or the processes"
            shelf.put("kernel-log", kept[-LINES_LIMIT_BYTES:], what)


def select(lines: Iterable[bytes], names: Mapping[int, str]) -> Iterator[bytes]:
    """Those that speak of a GPU, name a pid, or a program of that name; each ends in a newline."""
    pids = b"|".join(b"%d" % pid for pid in names) or b"(?!)"
    of_pid = re.compile(rb"(?i)(?:pid|process|task)[^\n0-9]{0,16}(?:" + pids + rb")(?![0-9])")
    bracketed = re.compile(rb"\[(?:" + pids + rb")\]")
    comms = [name.encode() for name in names.values() if len(name) > COMM_LEAST]
    for line in lines:
        if (
            any(one in line for one in _GPUS)
            or of_pid.search(line)
            or bracketed.search(line)
            or any(name in line for name in comms)
        ):
            yield line.rstrip(b"\n") + b"\n"


def _of_files(host: Host) -> tuple[list[bytes], str]:
    for path in LOG_FILES:
        try:
            status = host.status(path)
            start = max(0, status.size_bytes - TAIL_LIMIT_BYTES)
            if status.is_regular:
                return host.read_at(path, start, TAIL_LIMIT_BYTES).split(b"\n"), path
        except GpuwardenError:
            continue
    return [], ""
