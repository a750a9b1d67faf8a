"""Processes that a probe stopped: who they are, what holds them, how they go on.

A probe writes a process into the map ``stopped`` before it stops it (stop.h), once at a time. Who
continues one does so first and removes it from the map afterwards: dying in between leaves a record
of a process that runs, never a stopped process without a record.

What cannot be told from outside: whether a stop signal of somebody else's that came in the instant
between ours and its effect was one or two; it counts as ours. One that comes later stays pending,
and then the process is theirs. A process that holds a debugger's stop gets its signal all the same,
which takes effect once the debugger lets it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import signal
import struct
import time
from typing import Literal, NamedTuple

from gpuwarden.errors import Malformed
from gpuwarden.probes.events import ticks
from gpuwarden.probes.libbpf import Libbpf
from gpuwarden.sensors.process.stat_lines import parse_stat

LAYOUTS = {"stopped_process": (("start_ns", "Q"), ("stopped_at_ns", "Q"))}
"""Compared with the probe object's BTF by whoever loads it."""
KEY = struct.Struct("=I")
RECORD = struct.Struct("=QQ")
LIMIT = 4096
"""As many as the map has room for."""
REASONS = (
    "",
    "stops are not allowed, or nobody watches over them now",
    "somebody else is stopping, continuing or tracing the process",
    "an earlier stop of it was not over",
    "too many processes are stopped",
    "the signal was refused",
)
"""By ``enum stop_outcome`` of stop.h: why a process was not stopped."""
SETTLED_NS = 1_000_000_000
"""A process that runs so long after its record was made is not going to stop any more."""
_THREADS_LIMIT = 256
_PROC_BYTES = 8192
_PENDING = re.compile(rb"^(?:SigPnd|ShdPnd):\s*([0-9a-f]{16})$", re.MULTILINE)
_STOPPING = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
_STOP_BITS = sum(1 << (number - 1) for number in _STOPPING)

Hold = Literal["gone", "runs", "stopping", "stopped", "traced", "others"]
"""What holds a process: ``stopping``: the signal is pending; ``others``: somebody's own stop."""
Outcome = Literal["continued", "gone", "runs", "others", "kept"]


class StopRecord(NamedTuple):
    """One process that a probe stopped, or is about to stop."""

    pid: int
    start_time_ns: int
    stopped_at_ns: int
    """Boot clock."""


def boot_ns() -> int:
    """Now, on the kernel's boot clock."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class StoppedMap:
    """The map of stopped processes; the descriptor stays its owner's."""

    def __init__(self, bpf: Libbpf, descriptor: int) -> None:
        self._bpf = bpf
        self.descriptor = descriptor
        self._key = ctypes.create_string_buffer(KEY.size)
        self._following = ctypes.create_string_buffer(KEY.size)
        self._value = ctypes.create_string_buffer(RECORD.size)

    def records(self) -> list[StopRecord]:
        """All that are in it now."""
        found = []
        key = None
        for _ in range(2 * LIMIT):
            if self._bpf.call("bpf_map_get_next_key", self.descriptor, key, self._following) != 0:
                break
            key = self._key
            key.raw = self._following.raw
            record = self.record(KEY.unpack(key.raw)[0])
            if record is not None:
                found.append(record)
        return found

    def record(self, pid: int) -> StopRecord | None:
        """The record of one process; None if there is none."""
        key = KEY.pack(pid)
        done = self._bpf.call("bpf_map_lookup_elem", self.descriptor, key, self._value)
        return None if done != 0 else StopRecord(pid, *RECORD.unpack(self._value.raw))

    def release(self, record: StopRecord, *, was_sent: bool = False) -> Outcome:
        """Continues the process if it is our stop that holds it, and removes the record.

        ``was_sent``: the signal is known to have been sent, as it is once the load was told of;
        else a process that runs keeps its record until it cannot be about to stop.
        """
        pidfd = _opened(record.pid)
        try:
            hold = holds(record.pid, record.start_time_ns)
            if hold in ("gone", "others"):
                outcome: Outcome = "gone" if hold == "gone" else "others"
            elif hold != "runs" or was_sent:
                outcome = "continued" if _continue(pidfd, record.pid) else "gone"
            elif boot_ns() - record.stopped_at_ns < SETTLED_NS:
                return "kept"
            else:
                outcome = "runs"
        finally:
            if pidfd is not None:
                os.close(pidfd)
        self._remove(record)
        return outcome

    def _remove(self, record: StopRecord) -> None:
        key = KEY.pack(record.pid)
        done = self._bpf.call("bpf_map_lookup_and_delete_elem", self.descriptor, key, self._value)
        if done not in (0, -errno.ENOENT):
            # Before Linux 5.14 no hash table has such a call.
            self._bpf.call("bpf_map_delete_elem", self.descriptor, key)
        elif done == 0 and RECORD.unpack(self._value.raw) != record[1:]:
            # Somebody removed the record meanwhile and the process was stopped once more.
            _continue(None, record.pid)


def _opened(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _continue(pidfd: int | None, pid: int) -> bool:
    """Whether there was a process to signal."""
    try:
        if pidfd is None:
            os.kill(pid, signal.SIGCONT)
        else:
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)
    except OSError:
        return False
    return True


# -------------------------------------------------------------------- what /proc says


def holds(pid: int, start_time_ns: int) -> Hold:
    """What holds the process that began then. Needs a /proc of the first pid namespace."""
    try:
        line = parse_stat(_read(f"/proc/{pid}/stat"))
    except (OSError, Malformed):
        return "gone"
    if line.start_time_ticks != ticks(start_time_ns):
        return "gone"
    state = line.state
    if state not in "Tt":
        # The first thread may have ended, or wait in the kernel where it cannot be stopped.
        states = _thread_states(pid)
        if state in "ZX" and not states - {"Z", "X"}:
            return "gone"
        state = next((one for one in "tT" if one in states), state)
    try:
        pending = pending_signals(_read(f"/proc/{pid}/status")) & _STOP_BITS
    except OSError:
        return "gone"
    if state == "t":
        return "traced"
    if state == "T":
        return "others" if pending else "stopped"
    return "stopping" if pending else "runs"


def is_stopped(pid: int, thread_id: int) -> bool:
    """Whether a thread stands still and is not a debugger's."""
    try:
        return parse_stat(_read(f"/proc/{pid}/task/{thread_id}/stat")).state == "T"
    except (OSError, Malformed):
        return False


def pending_signals(status: bytes) -> int:
    """The set of signals that a /proc/PID/status says are pending, for the thread or for all."""
    found = 0
    for value in _PENDING.findall(status):
        found |= int(value, 16)
    return found


def _thread_states(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/task")[:_THREADS_LIMIT]:
            with contextlib.suppress(OSError, Malformed):
                found.add(parse_stat(_read(f"/proc/{pid}/task/{name}/stat")).state)
    return found


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _PROC_BYTES)
    finally:
        os.close(descriptor)
