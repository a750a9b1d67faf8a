"""Who gets a closer look: clients and holders, their ancestors, the far ends of their sockets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gpuwarden.host import Host
from gpuwarden.model import Connection, Gap, Process
from gpuwarden.sensors import sockets
from gpuwarden.sensors.process import details, stat_lines
from gpuwarden.sensors.seen import Seen, StatLine

PEER_LIMIT = 256


def read_processes(host: Host, seen: Seen) -> Iterator[Process | Gap]:
    """Details of every client and holder, and of their parents up to pid 1."""
    subjects = sorted(seen.subject_pids)
    if not seen.table:
        if seen.only_subjects:
            seen.table.update(_with_parents(host, subjects))
        else:
            seen.table.update(stat_lines.read(host))
    yield from details.read(host, seen, subjects, role="subject")
    parents = [pid for pid in details.ancestors(seen, subjects) if pid not in subjects]
    yield from details.read(host, seen, parents, role="ancestor")


def _with_parents(host: Host, pids: Iterable[int]) -> dict[int, StatLine]:
    """The stat lines of some processes and of their parents up to pid 1."""
    table: dict[int, StatLine] = {}
    pending = list(pids)
    while pending:
        pid = pending.pop()
        if pid <= 0 or pid in table:
            continue
        line = stat_lines.read_one(host, pid)
        if line is not None:
            table[pid] = line
            pending.append(line.ppid)
    return table


def read_sockets(host: Host, seen: Seen) -> Iterator[Connection | Process | Gap]:
    """Sockets of clients and holders; then of the local processes at their other ends."""
    subjects = seen.subject_pids
    found: list[Connection] = []
    for fact in sockets.read(host, seen, sorted(subjects)):
        if isinstance(fact, Connection):
            found.append(fact)
        yield fact
    peers = sorted({c.peer_pid for c in found if c.peer_pid is not None} - subjects)[:PEER_LIMIT]
    if not peers:
        return
    unknown = [pid for pid in peers if pid not in seen.processes]
    yield from details.read(host, seen, unknown, role="peer")
    yield from sockets.read(host, seen, peers)
