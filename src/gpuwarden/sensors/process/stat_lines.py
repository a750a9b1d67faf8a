"""Every process of the machine by its line in /proc/<pid>/stat, in one fast pass."""

from __future__ import annotations

import os
from collections.abc import Mapping

from gpuwarden.errors import Denied, GpuwardenError, Malformed, Unavailable
from gpuwarden.host import Host
from gpuwarden.sensors.seen import StatLine

# proc_pid_stat(5): pid (comm) state ppid pgrp session tty_nr tpgid flags minflt cminflt majflt
# cmajflt utime stime cutime cstime priority nice num_threads itrealvalue starttime …
# Positions after the last ")", which alone ends comm: comm may hold anything.
_STATE, _PPID, _PROCESS_GROUP, _SESSION, _TTY = 0, 1, 2, 3, 4
_FLAGS, _USER_TICKS, _SYSTEM_TICKS, _THREADS, _START = 6, 11, 12, 17, 19
_FIELDS_NEEDED = 20
_LINE_LIMIT_BYTES = 1024
_THREADS_LIMIT = 256
_COMM_LIMIT_BYTES = 64
"""The kernel keeps 15; workqueue threads show up to 63 (proc_task_name)."""

KERNEL_THREAD = 0x00200000
"""PF_KTHREAD of linux/sched.h in ``flags``."""


def parse_stat(data: bytes) -> StatLine:
    """One /proc/<pid>/stat line. comm may hold spaces, parentheses and newlines.

    Errors: Malformed. Source: proc_pid_stat(5).
    """
    opened = data.find(b" (")
    closed = data.rfind(b") ")
    if opened < 1 or closed < opened:
        raise Malformed("a stat line without a name in parentheses")
    rest = data[closed + 2 :].split(None, _FIELDS_NEEDED)
    if len(rest) < _FIELDS_NEEDED:
        raise Malformed(f"a stat line with {len(rest)} fields after the name")
    try:
        return StatLine(
            int(data[:opened]),
            data[opened + 2 : closed][:_COMM_LIMIT_BYTES].decode("utf-8", "backslashreplace"),
            rest[_STATE][:1].decode("ascii"),
            int(rest[_PPID]),
            int(rest[_PROCESS_GROUP]),
            int(rest[_SESSION]),
            int(rest[_TTY]),
            int(rest[_FLAGS]),
            int(rest[_START]),
            int(rest[_USER_TICKS]) + int(rest[_SYSTEM_TICKS]),
            int(rest[_THREADS]),
        )
    except ValueError as error:
        raise Malformed("a stat line whose numbers are none") from error


def read(host: Host) -> dict[int, StatLine]:
    """pid → its stat line, for every process that was there when its turn came.

    A line that cannot be read or is no stat line leaves its process out.
    Errors: Unavailable or Denied if /proc itself cannot be listed.
    """
    table: dict[int, StatLine] = {}
    for pid in host.kernel_pids():
        line = read_one(host, pid)
        if line is not None:
            table[pid] = line
    return table


def read_one(host: Host, pid: int) -> StatLine | None:
    """The stat line of one process, None if it has gone or shows none."""
    try:
        return read_line(host, pid)
    except GpuwardenError:
        return None


def read_line(host: Host, pid: int) -> StatLine:
    """The stat line of one process. Errors: Unavailable, Denied, Malformed."""
    return parse_stat(host.read_short(f"/proc/{pid}/stat", _LINE_LIMIT_BYTES))


def living_thread(host: Host, line: StatLine) -> StatLine | None:
    """A thread that runs on in a process whose first thread has ended; None in any other process.

    Such a process reads as a zombie without a binary, words or descriptors, and computes all the
    same; its other threads' folders in /proc hold them. A thread that hangs in the kernel (state
    D), as a killed process's does, is none.
    """
    if line.state != "Z" or line.thread_count < 2:
        return None
    try:
        threads = host.names(f"/proc/{line.pid}/task")[:_THREADS_LIMIT]
    except GpuwardenError:
        return None
    for name in threads:
        thread = read_one(host, int(name)) if name.isascii() and name.isdigit() else None
        if thread is not None and thread.state in "RSTt":
            return thread
    return None


def is_kernel_thread(line: StatLine) -> bool:
    """Whether the kernel itself runs this process (it then has no memory and no descriptors)."""
    return bool(line.flags & KERNEL_THREAD)


def own_pids(host: Host, table: Mapping[int, StatLine]) -> set[int]:
    """Our own pid and our children's, as that /proc numbers them; empty in a recorded tree.

    The children are left out of it where ``host.children_are_ours`` is False; the agent that
    started us and its other children are in it where ``host.parent_is_ours``.
    """
    try:
        own = host.read_link("/proc/self")
    except (Unavailable, Denied):
        return {os.getpid()} if host.is_live else set()
    if not own.isdecimal():
        return set()
    found = {int(own)}
    if not host.children_are_ours:
        return found
    mine = table.get(int(own))
    if host.parent_is_ours and mine is not None and mine.ppid > 1:
        found.add(mine.ppid)
    pending = list(found)
    children: dict[int, list[int]] = {}
    for line in table.values():
        children.setdefault(line.ppid, []).append(line.pid)
    while pending:
        for child in children.get(pending.pop(), ()):
            if child not in found:
                found.add(child)
                pending.append(child)
    return found
