"""What earlier sensors of the same scan found: where later ones look."""

from __future__ import annotations

from msgspec import Struct, field

from gpuwarden.model import (
    AnyFact,
    Connection,
    Container,
    DeviceNode,
    Gpu,
    GpuClient,
    Holder,
    Process,
)


class StatLine(Struct, frozen=True):
    """The part of /proc/<pid>/stat that every process is known by (proc_pid_stat(5))."""

    pid: int
    comm: str
    state: str
    ppid: int
    process_group: int
    session_id: int
    tty_number: int
    flags: int
    start_time_ticks: int
    cpu_ticks: int
    thread_count: int


class Seen(Struct):
    """The facts so far and two tables that are not facts: every process, every socket's owner."""

    table: dict[int, StatLine] = field(default_factory=dict)
    socket_owners: dict[int, int] = field(default_factory=dict)
    """Socket inode → a pid that has it open."""
    gpus: list[Gpu] = field(default_factory=list)
    clients: list[GpuClient] = field(default_factory=list)
    device_nodes: list[DeviceNode] = field(default_factory=list)
    holders: list[Holder] = field(default_factory=list)
    processes: dict[int, Process] = field(default_factory=dict)
    containers: list[Container] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    deep: bool = False
    only_subjects: bool = False
    """Nothing but clients and their ancestors is asked for: no need to read every process."""

    def add(self, fact: AnyFact) -> None:
        """Keeps a fact for the sensors that come after."""
        if isinstance(fact, Process):
            self.processes[fact.pid] = fact
            return
        kinds: tuple[tuple[type, list[AnyFact]], ...] = (
            (Gpu, self.gpus),  # type: ignore[assignment]
            (GpuClient, self.clients),
            (DeviceNode, self.device_nodes),
            (Holder, self.holders),
            (Container, self.containers),
            (Connection, self.connections),
        )
        for kind, facts in kinds:
            if isinstance(fact, kind):
                facts.append(fact)
                return

    @property
    def subject_pids(self) -> set[int]:
        """Processes that are on an accelerator: clients and holders."""
        return {c.pid for c in self.clients} | {h.pid for h in self.holders}
