"""The process sensors run together, as a scan runs them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gpuwarden.errors import GpuwardenError
from gpuwarden.host import Host
from gpuwarden.model import AnyFact, Executable, Gap, Holder, Process
from gpuwarden.sensors import device_nodes, hidden, holders, sockets
from gpuwarden.sensors.process import details, stat_lines
from gpuwarden.sensors.seen import Seen


def look(host: Host, pids: list[int] | None = None) -> list[AnyFact]:
    """All process sensors once, each as the runner runs it: its own error costs it alone."""
    seen = Seen()
    facts: list[AnyFact] = []
    try:
        seen.table = stat_lines.read(host)
    except GpuwardenError:
        return facts
    wanted = list(seen.table) if pids is None else pids
    if pids is not None:
        seen.table = {pid: line for pid, line in seen.table.items() if pid in pids}
    for sensor in (
        device_nodes.read,
        holders.read,
        lambda h, s: details.read(h, s, wanted),
        lambda h, s: sockets.read(h, s, wanted),
        hidden.read,
    ):
        try:
            for fact in sensor(host, seen):
                seen.add(fact)
                facts.append(fact)
        except GpuwardenError:
            continue
    return facts


def process(pid: int, host: Host | None = None) -> Process:
    """One process, as the sensor reads it."""
    host = host or Host()
    seen = Seen(table=stat_lines.read(host))
    found = list(details.read(host, seen, [pid]))
    assert len(found) == 1 and isinstance(found[0], Process), found
    return found[0]


def binary(pid: int, host: Host | None = None) -> Executable:
    """The file behind a process."""
    exe = process(pid, host).exe
    assert exe is not None
    return exe


def node(path: Path, minor: int = 3) -> Path:
    """A node of a harmless device, that everybody may open: /dev/null."""
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
    path.chmod(0o666)
    return path


def held(host: Host, pids: set[int]) -> tuple[Seen, dict[int, list[Holder]], list[Gap]]:
    """What the sensor saw, the holdings of these processes, and what could not be seen."""
    seen = Seen(table=stat_lines.read(host))
    facts = list(holders.read(host, seen))
    found: dict[int, list[Holder]] = {}
    for fact in facts:
        if isinstance(fact, Holder) and fact.pid in pids:
            found.setdefault(fact.pid, []).append(fact)
    return seen, found, [fact for fact in facts if isinstance(fact, Gap)]
