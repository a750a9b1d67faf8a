"""Falco's events put to processes of this machine, so that they are judged like our own."""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress

from msgspec.structs import replace

from gpuwarden.errors import GpuwardenError, Unavailable
from gpuwarden.falco_listener import FalcoListener
from gpuwarden.falco_losses import FalcoLosses, drop_findings
from gpuwarden.finding import Finding
from gpuwarden.host import Host
from gpuwarden.model import DeviceNode, Process
from gpuwarden.probes.events import (
    NANOSECONDS,
    TICKS_PER_SECOND,
    Event,
    ExitEvent,
    OpenEvent,
    OpenReturn,
    ProcessIdentity,
    ticks,
)
from gpuwarden.sensors import device_nodes
from gpuwarden.sensors.cgroup import containers_in, place
from gpuwarden.sensors.falco import FalcoDrop, FalcoEvent, FalcoProcess
from gpuwarden.sensors.falco_join import (
    FalcoDevice,
    contradiction,
    device_of,
    happened_at_ns,
    is_of_node,
    match_container,
)
from gpuwarden.sensors.process import details, stat_lines
from gpuwarden.sensors.seen import Seen, StatLine
from gpuwarden.watch.falco_unmatched import Unmatched
from gpuwarden.watch.opens import FURTHEST, Entry, Key

QUEUE_LIMIT = 4096
"""Events that wait for the agent's thread; while there are more, the listener's queue fills."""
TAKEN_AT_ONCE = 256
BUDGET_SECONDS = 0.02
"""Whoever can post decides how much there is to look up: the probe's ring comes first."""
CANDIDATES = 64
COMM_CHARACTERS = 15
MESSAGE_SHOWN = 300
PROCESSES_LIMIT = 4096
DEVICES_LIMIT = 64
"""Of one process: a machine has fewer, and whoever posts can make up any number of them."""
ENDED_SECONDS = 5.0
NODES_SECONDS = 5.0


_Process = tuple[int, int]
"""(pid, start time since boot in ns), as the open watch names a process."""


class _Known:
    """What the open watch has already, for Falco's events to be put to the same entries."""

    def __init__(self, entries: Mapping[Key, Entry]) -> None:
        self._starts: dict[tuple[int, int], int] = {}
        self._opens: dict[tuple[int, int, int, int], Entry] = {}
        for (pid, start_ns, major, minor, how, _), entry in entries.items():
            self._starts[(pid, ticks(start_ns))] = start_ns
            if how in ("open", "other"):
                self._opens[(pid, start_ns, major, minor)] = entry

    def start_ns(self, process: Process) -> int:
        """Exactly, if the probe has told of that process; else to the tick, as /proc has it."""
        key = (process.pid, process.start_time_ticks)
        exact = self._starts.get(key)
        return key[1] * (NANOSECONDS // TICKS_PER_SECOND) if exact is None else exact

    def entry(self, identity: ProcessIdentity, device: FalcoDevice) -> Entry | None:
        """The open of that device that was seen without Falco."""
        key = (identity.pid, identity.start_time_ns, device.major, device.minor)
        entry = self._opens.get(key)
        return None if entry is None or entry.event.source == "falco" else entry


class FalcoWatch:
    """A listener whose events wait in a queue for the agent's own thread."""

    def __init__(
        self,
        host: Host,
        address: str,
        hostname: str,
        wake: Callable[[], None],
        *,
        entries: Callable[[], Mapping[Key, Entry]] = dict,
        token: str | None = None,
        allow_remote: bool = False,
    ) -> None:
        """``wake`` is called when there is something to take, mostly from the listener's thread.

        ``entries`` gives the opens that are known already. Errors: UsageError.
        """
        self._host = host
        self._hostname = hostname
        self._wake = wake
        self._entries = entries
        self._queue: deque[FalcoEvent | FalcoDrop] = deque()
        self._room = threading.Condition()
        self._closed = False
        self._losses = FalcoLosses()
        self.listener = FalcoListener(address, self._take, token=token, allow_remote=allow_remote)
        self.unmatched = Unmatched()
        self.context = 0
        """Events that are no use of a device that could be told, or of another machine."""
        self.seen_already = 0
        """Opens that the probe had told of."""
        self._told: dict[_Process, set[tuple[int, int]]] = {}
        self._ended_at = time.monotonic()
        self._nodes: tuple[DeviceNode, ...] = ()
        self._nodes_until = float("-inf")
        self._table: Mapping[int, StatLine] | None = None
        self._known: _Known | None = None

    # ---------------------------------------------------------------- the listener's thread

    def _take(self, batch: list[FalcoEvent | FalcoDrop]) -> None:
        with self._room:
            while len(self._queue) > QUEUE_LIMIT and not self._closed:
                self._room.wait()
            if self._closed:
                raise Unavailable("the agent ends")
            self._queue.extend(batch)
        self._wake()

    # ---------------------------------------------------------------- the agent's thread

    def start(self) -> None:
        """Errors: Unavailable when the address cannot be bound."""
        self.listener.start()

    def close(self) -> None:
        """What waits is lost, and so is what still comes."""
        with self._room:
            self._closed = True
            self._room.notify_all()
        self.listener.close()

    @property
    def address(self) -> str:
        """``ADDRESS:PORT`` at which it listens."""
        host = self.listener.host
        return f"{f'[{host}]' if ':' in host else host}:{self.listener.port}"

    def events(self, nodes: tuple[DeviceNode, ...]) -> list[Event]:
        """The device opens among what came, and the ends of processes that Falco told of.

        ``nodes`` are this host's own. What it has no time for is left for the next call.
        """
        until = time.monotonic() + BUDGET_SECONDS
        if self._queue and not nodes:
            nodes = self._own_nodes()
        found: list[Event] = list(self._ends())
        self._table = self._known = None
        for _ in range(TAKEN_AT_ONCE):
            event = self._next()
            if event is None:
                return found
            if isinstance(event, FalcoDrop):
                self._losses.add([event], time.time_ns())
            else:
                found += self._of(event, nodes)
            if time.monotonic() >= until:
                break
        if self._queue:
            self._wake()
        return found

    def _own_nodes(self) -> tuple[DeviceNode, ...]:
        """Read here until the first judgement of the node has told them."""
        now = time.monotonic()
        if now >= self._nodes_until:
            self._nodes_until = now + NODES_SECONDS
            with suppress(GpuwardenError):
                self._nodes = tuple(device_nodes.read(self._host, Seen()))
        return self._nodes

    def _made_since(self, path: str) -> DeviceNode | None:
        """The node at that path by now; ``_nodes`` and the last judgement's may be older."""
        try:
            return device_nodes.node_at(self._host, path, device_nodes.read_majors(self._host))
        except GpuwardenError:
            return None

    def _next(self) -> FalcoEvent | FalcoDrop | None:
        with self._room:
            if not self._queue:
                return None
            self._room.notify_all()
            return self._queue.popleft()

    def _of(self, event: FalcoEvent, nodes: tuple[DeviceNode, ...]) -> Iterator[Event]:
        device = device_of(event, nodes, self._made_since)
        if is_of_node(event, self._hostname) is False or not isinstance(device, FalcoDevice):
            self.context += 1
            return
        received_ns = time.time_ns()
        at_ns = happened_at_ns(event, received_ns)
        if self._known is None:
            self._known = _Known(self._entries())
        identity, why = self._identity(event, at_ns)
        if identity is not None:
            entry = self._known.entry(identity, device)
            if entry is not None and not _is_further(device, entry):
                self.seen_already += 1
                return
            if entry is not None and entry.waits and entry.event.thread_id is not None:
                # One open, and Falco says how it ended.
                yield _end(event, device, entry, at_ns)
                return
            if not self._has_room(identity, device):
                identity, why = None, "more processes, or devices of one, than are taken"
        if identity is None:
            self._lose(event, device, why, received_ns)
            return
        yield OpenEvent(
            at_ns=at_ns,
            since_boot_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME),
            source="falco",
            major=device.major,
            minor=device.minor,
            how="open",
            state=device.state,
            process=identity,
            path=device.path,
            error=device.error,
            unread=device.unread,
        )

    def _has_room(self, identity: ProcessIdentity, device: FalcoDevice) -> bool:
        key = (identity.pid, identity.start_time_ns)
        devices = self._told.get(key, set())
        number = (device.major, device.minor)
        if number not in devices and len(devices) >= DEVICES_LIMIT:
            return False
        if key not in self._told and len(self._told) >= PROCESSES_LIMIT:
            return False
        self._told[key] = devices | {number}
        return True

    def _ends(self) -> Iterator[ExitEvent]:
        """Falco tells of no ends, and without the probe nobody else does."""
        now = time.monotonic()
        if not self._told or now - self._ended_at < ENDED_SECONDS:
            return
        self._ended_at = now
        try:
            table = stat_lines.read(self._host)
        except GpuwardenError:
            return
        for pid, start_ns in list(self._told):
            line = table.get(pid)
            if line is None or line.start_time_ticks != ticks(start_ns):
                del self._told[(pid, start_ns)]
                yield ExitEvent(at_ns=time.time_ns(), pid=pid, start_time_ns=start_ns, exit_code=0)

    # ---------------------------------------------------------------- whose it was

    def _identity(self, event: FalcoEvent, at_ns: int) -> tuple[ProcessIdentity | None, str]:
        """The process behind an event, by its pid or, where Falco tells none, by its container."""
        claimed = event.process
        if claimed is None or self._known is None:
            return None, "Falco names no process"
        pids = [claimed.pid] if claimed.pid is not None else list(self._inside(claimed))
        found = []
        why = "it had ended before /proc could be read"
        if claimed.pid is None and (claimed.container_id is None or claimed.comm is None):
            why = "Falco tells no pid, and not which container it was in and what it is called"
        for process in self._processes([pid for pid in pids if pid > 0]):
            exact = claimed if claimed.pid is not None else replace(claimed, pid=process.pid)
            other = contradiction(exact, process, at_ns)
            if other is None:
                found.append(process)
            else:
                why = other
        if len(found) == 1:
            return _of_process(found[0], self._known.start_ns(found[0])), ""
        if len(found) > 1:
            why = f"Falco tells no pid, and {len(found)} processes fit"
        return None, why

    def _inside(self, claimed: FalcoProcess) -> Iterator[int]:
        """pids in the container that Falco names, with the name that it tells."""
        if claimed.container_id is None or claimed.comm is None:
            return
        if self._table is None:
            try:
                self._table = stat_lines.read(self._host)
            except GpuwardenError:
                return
        for pid, line in self._table.items():
            if line.comm != claimed.comm[:COMM_CHARACTERS]:
                continue
            try:
                lines = self._host.read_text(f"/proc/{pid}/cgroup", 1 << 16).splitlines()
            except GpuwardenError:
                continue
            inside = [identity for _, identity in containers_in(place(lines))]
            if match_container(claimed.container_id, inside) is not None:
                yield pid

    def _processes(self, pids: Iterable[int]) -> list[Process]:
        try:
            facts = list(details.read(self._host, Seen(), list(pids)[:CANDIDATES]))
        except GpuwardenError:
            return []
        return [fact for fact in facts if isinstance(fact, Process)]

    def _lose(self, event: FalcoEvent, device: FalcoDevice, why: str, at_ns: int) -> None:
        claimed = event.process
        name = (claimed.container_id or claimed.exe_path or claimed.comm) if claimed else None
        text = f"{device.state} {device.path}; {why}; Falco: {event.message[:MESSAGE_SHOWN]}"
        self.unmatched.note(name or "a process that Falco does not name", device.path, text, at_ns)

    def findings(self, at_ns: int) -> list[Finding]:
        """Where Falco, or the listener, was blind."""
        self._losses.look_at(self.listener.counts(), at_ns)
        return [*drop_findings(self._losses, at_ns), *self.unmatched.findings(at_ns)]


def _is_further(device: FalcoDevice, entry: Entry) -> bool:
    """Whether Falco knows of an open that came further than the one that was seen."""
    if entry.waits:
        return device.state != "unknown"
    return FURTHEST.index(device.state) > FURTHEST.index(entry.event.state)


def _end(event: FalcoEvent, device: FalcoDevice, entry: Entry, at_ns: int) -> OpenReturn:
    attempt = entry.event
    failed = device.state != "opened"
    return OpenReturn(
        at_ns=at_ns,
        attempt_since_boot_ns=attempt.since_boot_ns,
        pid=attempt.process.pid,
        thread_id=attempt.thread_id or 0,
        start_time_ns=attempt.process.start_time_ns,
        major=device.major,
        minor=device.minor,
        result=-(device.error or errno.EIO) if failed else max(event.descriptor or 0, 0),
        open_flags=attempt.open_flags or 0,
    )


def _of_process(process: Process, start_ns: int) -> ProcessIdentity:
    exe, namespaces = process.exe, process.namespaces
    return ProcessIdentity(
        pid=process.pid,
        start_time_ns=start_ns,
        ppid=process.ppid,
        uid=process.uid,
        gid=process.gid,
        loginuid=process.loginuid,
        comm=process.comm,
        tty=process.tty,
        argv=process.argv,
        argv_truncated=process.argv_truncated,
        exe_path=None if exe is None else exe.path,
        exe_device=None if exe is None else exe.device,
        exe_inode=None if exe is None else exe.inode,
        cgroup_path=next(iter(process.cgroup.paths), None) if process.cgroup else None,
        mount_namespace=namespaces.get("mnt"),
        pid_namespace=namespaces.get("pid"),
        user_namespace=namespaces.get("user"),
    )
