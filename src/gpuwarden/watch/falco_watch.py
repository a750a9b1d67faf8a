"""Falco's events put to processes of this machine, so that they are judged like our own."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

from msgspec.structs import replace

from gpuwarden.errors import GpuwardenError, Unavailable
from gpuwarden.falco_listener import (
    FALCO_EVENTS_DROPPED,
    FalcoListener,
    FalcoLosses,
    drop_findings,
)
from gpuwarden.finding import Advisory, Evidence, Finding, Subject
from gpuwarden.host import Host
from gpuwarden.model import DeviceNode, Process
from gpuwarden.probes.events import NANOSECONDS, TICKS_PER_SECOND, OpenEvent, ProcessIdentity
from gpuwarden.sensors.cgroup import containers_in, place
from gpuwarden.sensors.falco import FalcoDrop, FalcoEvent, FalcoProcess
from gpuwarden.sensors.falco_join import (
    FalcoDevice,
    contradiction,
    device_of,
    is_of_node,
    match_container,
)
from gpuwarden.sensors.process import details, stat_lines
from gpuwarden.sensors.seen import Seen
from gpuwarden.watch.own_sight import own_finding

TAKEN_AT_ONCE = 256
CANDIDATES = 64
COMM_CHARACTERS = 15
MESSAGE_SHOWN = 300
LOST_LIMIT = 64
LOST_STAYS_NS = 3600 * 10**9

FALCO_OPEN_UNMATCHED = Advisory(
    id="falco_open_unmatched",
    title="Falco saw a device open by a process that is not there to look at",
    severity="warning",
    explanation="The process had ended, or Falco did not tell enough to know which one it was, so "
    "whether it belongs here could not be judged.",
    steps=(
        "Let Falco's rules tell proc.pid (append_output in falco.yaml).",
        "Run the probe of gpuwarden on this node: it keeps who it was at the moment of the open.",
    ),
)
FALCO_ADVISORIES = (FALCO_EVENTS_DROPPED, FALCO_OPEN_UNMATCHED)


class FalcoWatch:
    """A listener whose events wait in a queue for the agent's own thread."""

    rules = frozenset(advisory.id for advisory in FALCO_ADVISORIES)

    def __init__(self, host: Host, address: str, hostname: str, wake: Callable[[], None]) -> None:
        """``wake`` is called from the listener's thread when there is something to take."""
        self._host = host
        self._hostname = hostname
        self._wake = wake
        self._queue: deque[FalcoEvent | FalcoDrop] = deque()
        self._losses = FalcoLosses()
        self.listener = FalcoListener(address, self._take)
        self.context = 0
        """Events that are no use of a device that could be told, or of another machine."""
        self.unmatched = 0
        self._lost: OrderedDict[tuple[str, str], tuple[int, str]] = OrderedDict()
        """Events whose process was gone, or was another one by then."""

    def _take(self, batch: list[FalcoEvent | FalcoDrop]) -> None:
        self._queue.extend(batch)
        self._wake()

    def events(self, nodes: tuple[DeviceNode, ...]) -> list[OpenEvent]:
        """The device opens among what came; ``nodes`` are this host's own."""
        taken: list[FalcoEvent | FalcoDrop] = []
        while self._queue and len(taken) < TAKEN_AT_ONCE:
            taken.append(self._queue.popleft())
        self._losses.add(taken, time.time_ns())
        return list(self._opens(taken, nodes))

    def _opens(
        self, taken: list[FalcoEvent | FalcoDrop], nodes: tuple[DeviceNode, ...]
    ) -> Iterator[OpenEvent]:
        for event in taken:
            if isinstance(event, FalcoDrop):
                continue
            if is_of_node(event, self._hostname) is False:
                self.context += 1
                continue
            device = device_of(event, nodes)
            if isinstance(device, FalcoDevice):
                opened = self._open(event, device)
                if opened is not None:
                    yield opened
            else:
                self.context += 1

    def _open(self, event: FalcoEvent, device: FalcoDevice) -> OpenEvent | None:
        received_ns = time.time_ns()
        identity = self._identity(event, device, received_ns)
        if identity is None:
            return None
        return OpenEvent(
            at_ns=received_ns if event.at_ns is None else event.at_ns,
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

    def _identity(
        self, event: FalcoEvent, device: FalcoDevice, received_ns: int
    ) -> ProcessIdentity | None:
        """The process behind an event, by its pid or, where Falco tells none, by its container."""
        claimed = event.process
        assert claimed is not None  # noqa: S101 - an event without one is no device's
        pids = [claimed.pid] if claimed.pid is not None else list(self._inside(claimed))
        at_ns = event.at_ns or received_ns
        found = []
        why = "it had ended before /proc could be read"
        for process in self._processes([pid for pid in pids if pid > 0]):
            exact = claimed if claimed.pid is not None else replace(claimed, pid=process.pid)
            other = contradiction(exact, process, at_ns)
            if other is None:
                found.append(process)
            else:
                why = other
        if len(found) == 1:
            return _of_process(found[0])
        if len(found) > 1:
            why = f"Falco tells no pid, and {len(found)} processes fit"
        self._note(event, device, why, received_ns)
        return None

    def _inside(self, claimed: FalcoProcess) -> Iterator[int]:
        """pids in the container that Falco names, with the name that it tells."""
        if claimed.container_id is None or claimed.comm is None:
            return
        try:
            table = stat_lines.read(self._host)
        except GpuwardenError:
            return
        for pid, line in table.items():
            if line.comm != claimed.comm[:COMM_CHARACTERS]:
                continue
            try:
                lines = self._host.read_text(f"/proc/{pid}/cgroup", 1 << 16).splitlines()
            except GpuwardenError:
                continue
            inside = [identity for _, identity in containers_in(place(lines))]
            if match_container(claimed.container_id, inside) is not None:
                yield pid

    def _processes(self, pids: list[int]) -> list[Process]:
        try:
            facts = list(details.read(self._host, Seen(), pids[:CANDIDATES]))
        except GpuwardenError:
            return []
        return [fact for fact in facts if isinstance(fact, Process)]

    def _note(self, event: FalcoEvent, device: FalcoDevice, why: str, at_ns: int) -> None:
        self.unmatched += 1
        claimed = event.process
        name = (claimed.container_id or claimed.exe_path or claimed.comm) if claimed else None
        key = (name or "a process that Falco does not name", device.path)
        text = f"{device.state} {device.path}; {why}; Falco: {event.message[:MESSAGE_SHOWN]}"
        self._lost.pop(key, None)
        self._lost[key] = (at_ns, text)
        while len(self._lost) > LOST_LIMIT:
            self._lost.popitem(last=False)

    def findings(self, at_ns: int) -> list[Finding]:
        """Where Falco, or the listener, was blind."""
        self._losses.look_at(self.listener.counts(), at_ns)
        found = drop_findings(self._losses, at_ns)
        for (name, path), (seen_ns, text) in list(self._lost.items()):
            if at_ns - seen_ns >= LOST_STAYS_NS:
                del self._lost[(name, path)]
                continue
            subject = Subject(kind="source", name=f"falco: {name} {path}")
            evidence = (Evidence(source="falco", text=text),)
            found.append(own_finding(FALCO_OPEN_UNMATCHED, subject, evidence))
        return found

    def start(self) -> None:
        """Errors: UsageError, Unavailable."""
        try:
            self.listener.start()
        except OSError as error:
            raise Unavailable(str(error)) from error

    def close(self) -> None:
        self.listener.close()


def _of_process(process: Process) -> ProcessIdentity:
    exe, namespaces = process.exe, process.namespaces
    return ProcessIdentity(
        pid=process.pid,
        start_time_ns=process.start_time_ticks * (NANOSECONDS // TICKS_PER_SECOND),
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
        mount_namespace=namespaces.get("mnt"),
        pid_namespace=namespaces.get("pid"),
        user_namespace=namespaces.get("user"),
    )
