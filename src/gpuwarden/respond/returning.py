"""What comes back after a process was killed: a process of the same program, and who started it.

Taken for the same: the same binary by device and inode, or by its content in another file (one of
the system's, which everybody starts, only under the same parent); the same words; what the same
entry of cron, systemd or another starter names.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from gpuwarden.errors import GpuwardenError
from gpuwarden.host import Host
from gpuwarden.model import Container, Process, Snapshot
from gpuwarden.node import Node
from gpuwarden.outputs.words import escape
from gpuwarden.rules import respawn
from gpuwarden.rules.autostart_ties import runner_of
from gpuwarden.rules.masquerade import SYSTEM_DIRECTORIES
from gpuwarden.sensors.process import details, stat_lines
from gpuwarden.sensors.process.mounts import NETWORK_TYPES
from gpuwarden.sensors.seen import Seen, StatLine

CONTENT_LIMIT_BYTES = 512 << 20
NEW_LIMIT = 2000
"""New processes that are looked at in one round; a fork bomb does not keep us."""
_CHUNK_BYTES = 1 << 20
_PARENTS = 4
_WORDS = 200


class Former(Struct):
    """The program of a process, kept from before it is killed; ``close`` lets go of its file."""

    process: Process | None
    exe: tuple[str, int] | None
    descriptor: int | None = None
    """On its binary, which may be deleted and is gone for good once the process is."""
    size_bytes: int = -1
    digest: str | None = None

    def close(self) -> None:
        """Closes the file. Twice does nothing."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def remember(host: Host, pid: int, process: Process | None) -> Former:
    """What is needed to know the process again; its binary stays open and is not read yet."""
    process = _read(host, [pid], {}).get(pid) or process
    former = Former(process, _exe(process))
    if process is not None and _is_near(process):
        try:
            former.descriptor = os.open(
                host.path(f"/proc/{pid}/exe"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
            )
            former.size_bytes = os.fstat(former.descriptor).st_size
        except (OSError, GpuwardenError):
            former.close()
    return former


class Watcher:
    """Looks for processes that began after it did, each once for each program that it becomes."""

    def __init__(self, host: Host, former: Former, snapshot: Snapshot) -> None:
        """Errors: Unavailable, Denied if /proc cannot be listed."""
        self._host = host
        self._former = former
        self._snapshot = snapshot
        self._before = {(line.pid, line.start_time_ticks) for line in _table(host).values()}
        self._looked_at: set[tuple[object, ...]] = set()
        self._entries = self._entries_of(former.process)
        self.overflowed = False
        """More began than were looked at."""

    def look(self) -> list[Process]:
        """Those that are the same program and were not given before. Errors: as above."""
        table = _table(self._host)
        fresh = {}
        for pid, line in table.items():
            if (pid, line.start_time_ticks) in self._before or stat_lines.is_kernel_thread(line):
                continue
            try:
                binary = self._host.link_target_status(f"/proc/{pid}/exe")
                words = self._host.read_short(f"/proc/{pid}/cmdline")
            except GpuwardenError:
                continue
            key = (pid, line.start_time_ticks, binary.device, binary.inode, words)
            if key not in self._looked_at:
                fresh[pid] = key
        self.overflowed = self.overflowed or len(fresh) > NEW_LIMIT
        chosen = list(fresh)[:NEW_LIMIT]
        self._looked_at.update(fresh[pid] for pid in chosen)
        read = _read(self._host, chosen, table)
        return [process for process in read.values() if self._is_same(process)]

    def _is_same(self, process: Process) -> bool:
        former = self._former.process
        if former is None:
            return False
        same_words = bool(process.argv) and process.argv == former.argv
        if process.exe is not None and not same_words:
            # Everybody starts an interpreter or sleep: here it is by whom.
            shared = process.exe.path.startswith(SYSTEM_DIRECTORIES)
            same_parent = process.ppid == former.ppid and process.ppid > 1
            if (same_parent or not shared) and (
                _exe(process) == self._former.exe or self._same_content(process)
            ):
                return True
        return same_words or bool(self._entries & self._entries_of(process))

    def _entries_of(self, process: Process | None) -> frozenset[tuple[str, int | None, str]]:
        """What would start it again by itself, as far as that names it and no whole service."""
        if process is None:
            return frozenset()
        others = tuple(one for one in self._snapshot.processes if one.pid != process.pid)
        node = Node(replace(self._snapshot, processes=(*others, process)))
        # What its script starts besides, a sleep between two rounds, is not the program.
        aside = runner_of(node, process).is_general
        return frozenset(
            (entry.path, entry.line, entry.text)
            for entry, tie, member in respawn.tied(node, process)
            if tie.sure
            and tie.kind not in ("unit", "container")
            and (member is process or not aside)
        )

    def _same_content(self, process: Process) -> bool:
        former = self._former
        exe = process.exe
        if former.descriptor is None or exe is None or exe.size_bytes != former.size_bytes:
            return False
        if former.size_bytes > CONTENT_LIMIT_BYTES or not _is_near(process):
            return False
        try:
            other = os.open(
                self._host.path(f"/proc/{process.pid}/exe"),
                os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC,
            )
            try:
                if former.digest is None:
                    former.digest = _digest(former.descriptor)
                return former.digest == _digest(other)
            finally:
                os.close(other)
        except (OSError, GpuwardenError):
            return False


def who_started(
    host: Host, process: Process, snapshot: Snapshot, former: Container | None
) -> Iterator[str]:
    """Who brought it back, in clauses, the surest first: parents, unit, persistence, container."""
    table = _table(host)
    parents = _parents(table, process)
    people = list(_read(host, [line.pid for line in parents], table).values())
    known = {one.pid for one in people} | {process.pid}
    others = tuple(one for one in snapshot.processes if one.pid not in known)
    node = Node(replace(snapshot, processes=(*others, *people, process)))
    if parents:
        said = ", of ".join(f"pid {line.pid} ({escape(line.comm)})" for line in parents)
        yield f"its parent is {said}"
        if parents[0].pid == 1:
            yield "who started it has ended, so that the first process adopted it"
    placement = process.cgroup
    if placement is not None and placement.unit is not None:
        yield f"it is in the unit {escape(placement.unit)}"
    for evidence in respawn.observe(node, process):
        yield f"{escape(evidence.text)[:_WORDS]} ({escape(evidence.source)[:_WORDS]})"
    container = node.container_of(process) or former
    inside = placement is not None and placement.container_id is not None
    if container is not None and inside:
        name = escape(container.name or container.id[:12])
        policy = container.restart_policy
        if policy and policy != "no":
            yield f"its container {name} has the restart policy {escape(policy)}"
        if container.pod_owner is not None:
            yield f"its pod is made again by {escape(container.pod_owner)}"
        elif container.pod_name is not None:
            yield f"the kubelet starts the containers of pod {escape(container.pod_name)} again"
        yield f"it is in container {name}"


def _parents(table: dict[int, StatLine], process: Process) -> list[StatLine]:
    found: list[StatLine] = []
    pid = process.ppid
    while len(found) < _PARENTS and (line := table.get(pid)) is not None and line not in found:
        found.append(line)
        if pid <= 1:
            break
        pid = line.ppid
    return found


def _table(host: Host) -> dict[int, StatLine]:
    return stat_lines.read(host)


def _read(host: Host, pids: list[int], table: dict[int, StatLine]) -> dict[int, Process]:
    seen = Seen(table=table)
    return {one.pid: one for one in details.read(host, seen, pids) if isinstance(one, Process)}


def _exe(process: Process | None) -> tuple[str, int] | None:
    exe = process.exe if process is not None else None
    if exe is None or exe.device is None or exe.inode is None:
        return None
    return exe.device, exe.inode


def _is_near(process: Process) -> bool:
    """Whether its binary can be read without asking a server that may not answer."""
    filesystem = process.exe.filesystem if process.exe is not None else None
    return filesystem is not None and not filesystem.startswith(NETWORK_TYPES)


def _digest(descriptor: int) -> str:
    digest = hashlib.sha256()
    at = 0
    while at < CONTENT_LIMIT_BYTES and (chunk := os.pread(descriptor, _CHUNK_BYTES, at)):
        digest.update(chunk)
        at += len(chunk)
    return digest.hexdigest()
