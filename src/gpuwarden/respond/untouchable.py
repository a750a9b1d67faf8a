"""Processes that no step freezes or kills, whatever a verdict says."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping

from gpuwarden import control
from gpuwarden.host import Host
from gpuwarden.outputs.words import escape
from gpuwarden.sensors.process import exec_mark, stat_lines
from gpuwarden.sensors.seen import StatLine

_PEER = struct.Struct("=3i")
"""struct ucred (unix(7)): pid, uid, gid."""
_GENERATIONS = 64


class Untouchable:
    """Who is out of bounds at one moment: the first process, the kernel's threads, this command
    with its ancestors (the login and the shell that it was typed in) and children, the daemon with
    its children.
    """

    def __init__(self, host: Host, *, socket_path: str = control.SOCKET) -> None:
        """Errors: Unavailable, Denied if /proc cannot be listed."""
        self._host = host
        self.table: Mapping[int, StatLine] = stat_lines.read(host)
        self._above = set(self._line_of(os.getpid()))
        self._daemon = daemon_pid(socket_path)

    def _line_of(self, pid: int) -> list[int]:
        """A process and its parents, from the nearest up; a loop in a damaged table ends."""
        found = []
        for _ in range(_GENERATIONS):
            line = self.table.get(pid)
            if line is None or pid in found:
                break
            found.append(pid)
            pid = line.ppid
        return found

    def below(self, pid: int) -> list[int]:
        """The processes that descend from it by parents that still live."""
        children: dict[int, list[int]] = {}
        for line in self.table.values():
            children.setdefault(line.ppid, []).append(line.pid)
        found: dict[int, None] = {}
        pending = [pid]
        while pending:
            for child in children.get(pending.pop(), ()):
                if child not in found and child != pid:
                    found[child] = None
                    pending.append(child)
        return list(found)

    def reason(self, pid: int) -> str:
        """Why that process is out of bounds; empty when it is not."""
        line = self.table.get(pid)
        if pid <= 1:
            return "the machine's first process"
        if line is not None and stat_lines.is_kernel_thread(line):
            return "a thread of the kernel"
        if pid == os.getpid():
            return "this program"
        if pid in self._above:
            return "this program runs in it (its shell, its login)"
        above = self._line_of(pid)
        if os.getpid() in above and self._is_fork_of_ours(pid):
            return "a process of this program"
        if self._daemon is not None and self._daemon in above:
            return "the gpuwarden daemon, or a process of it"
        return ""

    def _is_fork_of_ours(self, pid: int) -> bool:
        """Whether a child of ours has executed nothing since: what another program does in a
        process that we only started is no part of us."""
        own, its = (
            exec_mark.read_mark(self._host, one, None, drawn=True) for one in (os.getpid(), pid)
        )
        return own == its


def named(untouchable: Untouchable, pid: int) -> str:
    """A process for a person, as it called itself at that moment."""
    line = untouchable.table.get(pid)
    return f"pid {pid} ({escape(line.comm)})" if line is not None else f"pid {pid}"


def daemon_pid(path: str = control.SOCKET) -> int | None:
    """Who listens on the daemon's socket, as the kernel says; None when nobody does."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
            end.settimeout(1.0)
            end.connect(path)
            raw = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    except OSError:
        return None
    pid: int = _PEER.unpack(raw)[0]
    return pid if pid > 0 else None
