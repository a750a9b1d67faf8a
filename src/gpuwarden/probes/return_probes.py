"""Whether a probe at a function's end can end the program: tried out on a child of our own.

Since Linux 6.11 a function that is probed at its end returns, on x86-64, by way of a system call
of its own (uretprobe, 335). Until 6.14, and the stable kernels that took up its change, seccomp
filters were asked about it like about any other: a filter that kills what it does not know, or
refuses it, as those of container runtimes do, then kills the program or makes it return to nowhere.
What a distribution's kernel does is known only once it was tried.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import struct
import warnings
from functools import cache
from typing import NoReturn

from gpuwarden.confinement.calls import AUDIT, PR_SET_SECCOMP, SECCOMP_MODE_FILTER
from gpuwarden.confinement.rights import PR_SET_NO_NEW_PRIVS, end_with

DANGEROUS = ((6, 11), (6, 14))
"""From the first release up to the last one, which is safe, unless something was taken up."""
_PMU = "/sys/bus/event_source/devices/uprobe/type"
_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
# struct perf_event_attr up to config2 (linux/perf_event.h): type, size, config, sample period,
# sample type, read format, flags, wakeup, breakpoint type, config1: path, config2: offset.
_ATTRIBUTES = struct.Struct("=IIQQQQQIIQQ")
_AT_RETURN = 1
_CLOSE_ON_EXEC = 8
# struct sock_filter (linux/filter.h). The calls of probes: uretprobe, and uprobe since 6.18.
_INSTRUCTION = struct.Struct("=HBBI")
_PROBE_CALLS = (335, 336)
_FILTER = b"".join(
    _INSTRUCTION.pack(*line)
    for line in (
        (0x20, 0, 0, 4),  # the architecture
        (0x15, 0, 3, AUDIT["x86_64"]),
        (0x20, 0, 0, 0),  # the call's number
        (0x15, 2, 0, _PROBE_CALLS[0]),
        (0x15, 1, 0, _PROBE_CALLS[1]),
        (0x06, 0, 0, 0x7FFF0000),  # allowed
        (0x06, 0, 0, 0x80000000),  # the process is killed
    )
)
_SECONDS = 2.0
_FUNCTION = "labs"
"""Of the C library: it makes no call, and nobody else's is probed."""


class _Program(ctypes.Structure):
    """struct sock_fprog (linux/filter.h)."""

    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


@cache
def danger() -> str:
    """Why nothing may be probed at its end on this kernel; empty where it may be."""
    if os.uname().machine != "x86_64":
        return ""
    killed = _tried()
    if killed is None:
        found = re.match(r"(\d+)\.(\d+)", os.uname().release)
        version = (int(found[1]), int(found[2])) if found else (0, 0)
        killed = DANGEROUS[0] <= version < DANGEROUS[1]
    if not killed:
        return ""
    return "on this kernel a probe at a function's end ends programs with a seccomp filter"


def _tried() -> bool | None:
    """Whether a child with a filter died of such a probe; None if that could not be tried."""
    libc = ctypes.CDLL(None, use_errno=True)
    place = _place(ctypes.cast(getattr(libc, _FUNCTION), ctypes.c_void_p).value or 0)
    if place is None:
        return None
    ready, go = os.pipe2(os.O_CLOEXEC)
    with warnings.catch_warnings():
        # The child uses no lock and no thread of its parent's.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _call_it(libc, ready, os.getppid(), go)
    os.close(ready)
    pidfd = event = -1
    try:
        pidfd = os.pidfd_open(pid)
        event = _attached(libc, pid, *place)
        os.write(go, b"g")
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(_SECONDS * 1000):
            return None
        hits = int.from_bytes(os.read(event, 8), "little")
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        if ended is None or (ended.si_code == os.CLD_EXITED and not hits):
            return None
        return ended.si_code != os.CLD_EXITED
    except (OSError, ValueError):
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        for descriptor in (go, pidfd, event):
            if descriptor >= 0:
                os.close(descriptor)


def _call_it(libc: ctypes.CDLL, ready: int, parent: int, go: int) -> NoReturn:
    try:
        os.close(go)
        program = _Program(len(_FILTER) // _INSTRUCTION.size, _FILTER)
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if (
            end_with(parent)
            and libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) == 0
            and os.read(ready, 1)
        ):
            getattr(libc, _FUNCTION)(-1)
    finally:
        os._exit(0)


def _attached(libc: ctypes.CDLL, pid: int, path: str, offset: int, *, returns: bool = True) -> int:
    """A counter of that function's returns in that process. Errors: OSError, ValueError."""
    with open(_PMU, "rb") as file:
        kind = int(file.read(16))
    name = ctypes.create_string_buffer(os.fsencode(path))
    attributes = _ATTRIBUTES.pack(
        kind,
        _ATTRIBUTES.size,
        _AT_RETURN * returns,
        0,
        0,
        0,
        0,
        0,
        0,
        ctypes.addressof(name),
        offset,
    )
    number = _PERF_EVENT_OPEN[os.uname().machine]
    event = libc.syscall(
        *map(ctypes.c_long, (number,)), attributes, pid, -1, -1, ctypes.c_ulong(_CLOSE_ON_EXEC)
    )
    if event < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(event)


def _place(address: int) -> tuple[str, int] | None:
    """The file behind an address of ours, and the offset in it."""
    with open("/proc/self/maps", "rb") as file:
        for line in file:
            fields = line.split(None, 5)
            start, _, end = fields[0].partition(b"-")
            if int(start, 16) <= address < int(end, 16) and len(fields) == 6:
                path = os.fsdecode(fields[5].strip())
                return path, address - int(start, 16) + int(fields[2], 16)
    return None
