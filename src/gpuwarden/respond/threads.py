"""Whether the threads of a process run, stand still or hang, by their state in /proc."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpuwarden.errors import GpuwardenError
from gpuwarden.host import Host
from gpuwarden.sensors.process import stat_lines

_AT_REST = "TtZXx"
_NAMED = 16


def states(host: Host, pid: int) -> Iterator[tuple[int, str]]:
    """(thread, state) of each thread of a process; none when it has gone."""
    try:
        names = host.names(f"/proc/{pid}/task")
    except GpuwardenError:
        return
    for name in names:
        line = stat_lines.read_one(host, int(name)) if name.isascii() and name.isdigit() else None
        if line is not None:
            yield line.pid, line.state


def at_rest(host: Host, pid: int) -> bool:
    """Whether each thread is stopped or has ended."""
    return all(state in _AT_REST for _, state in states(host, pid))


def is_stopped(host: Host, pid: int) -> bool:
    """Whether it is stopped by a signal: every thread that has not ended."""
    found = [state for _, state in states(host, pid)]
    return "T" in found and all(state in _AT_REST for state in found)


def moving(host: Host, pids: Sequence[int]) -> list[str]:
    """Threads that are neither stopped nor ended, in words, at most 16."""
    found: list[str] = []
    for pid in pids:
        for thread, state in states(host, pid):
            if state not in _AT_REST and len(found) < _NAMED:
                found.append(f"thread {thread} is in state {state}")
    return found
