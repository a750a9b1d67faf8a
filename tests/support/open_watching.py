"""An ``OpenWatch`` without a kernel: a clock to turn, an examiner to script, findings to see."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from gpuwarden.errors import GpuwardenError
from gpuwarden.finding import Finding
from gpuwarden.host import Host
from gpuwarden.model import (
    Container,
    DeviceNode,
    DeviceOpen,
    Gpu,
    NodeFacts,
    Process,
    SourceRun,
    Workload,
)
from gpuwarden.policy import Policy
from gpuwarden.probes.events import Event, ProcessIdentity
from gpuwarden.sensors.device_nodes import Majors
from gpuwarden.watch.examiner import Examination, Examined
from gpuwarden.watch.identity import Identities
from gpuwarden.watch.open_judge import Surroundings
from gpuwarden.watch.open_watch import OpenWatch
from gpuwarden.watch.workers import Worker
from tests.support.nodes import BOOT_ID, GIB, container_id, gpu_id

BOOT_TIME_NS = 1_700_000_000_000_000_000
LATER_NS = BOOT_TIME_NS + 10**18
"""After the start of every process of these tests."""
HOST_MOUNTS = 4026531832
MAJORS = Majors({195: "nvidia", 226: "drm"})
NODES = tuple(
    DeviceNode(path=f"/dev/nvidia{minor}", major=195, minor=minor, kind="nvidia-gpu")
    for minor in range(4)
)
CLUSTER = (SourceRun(name="kubernetes", state="ok", scheduled=True),)
"""A node of a cluster whose kubelet answers."""
Answer = Examined | GpuwardenError


class Clock:
    """Monotonic seconds and wall clock, turned by hand."""

    def __init__(self) -> None:
        self.now = 1_010.0  # the events of these tests begin ten seconds before

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return BOOT_TIME_NS + int(self.now * 1e9)

    def perf_counter(self) -> float:
        return time.perf_counter()

    @property
    def module(self) -> SimpleNamespace:
        """What a module of ours sees as ``time``."""
        return SimpleNamespace(
            monotonic=self.monotonic, time_ns=self.time_ns, perf_counter=self.perf_counter
        )


class StandInExaminer:
    """Has the methods of a ``Worker`` and answers when the test says so."""

    def __init__(self, answer: Callable[[Examination], Answer]) -> None:
        self.answer = answer
        self.asked: list[Examination] = []
        self.slow = False
        """Whether answers stay out."""
        self.refuses: GpuwardenError | bool = False
        """Whether no request is taken."""
        self._pending: Examination | None = None

    @property
    def busy(self) -> bool:
        return self._pending is not None

    def request(self, body: bytes) -> bool:
        if isinstance(self.refuses, GpuwardenError):
            raise self.refuses
        if self.busy or self.refuses:
            return False
        self._pending = msgspec.msgpack.decode(body, type=Examination)
        self.asked.append(self._pending)
        return True

    def take(self) -> bytes | None:
        if self._pending is None or self.slow:
            return None
        question, self._pending = self._pending, None
        answer = self.answer(question)
        if isinstance(answer, GpuwardenError):
            raise answer
        return msgspec.msgpack.encode(answer)

    def seconds_left(self) -> float | None:
        return None if self._pending is None else 12.0

    @property
    def questions(self) -> list[list[int]]:
        """The pids of each question that was about somebody."""
        return [[p.pid for p in one.processes] for one in self.asked if one.processes]


def container(name: str = "c1", **fields: Any) -> Container:
    """A container that Docker confirmed; ``tests.support.opening.contained`` is in it."""
    values: dict[str, Any] = {
        "id": container_id(name),
        "runtime": "docker",
        "confirmed": True,
        "name": name,
        "image": f"registry.example/{name}:1",
        "mount_namespace": 4026540000 + sum(name.encode()),
        "pid_namespace": 4026550000 + sum(name.encode()),
        "privileged": False,
        "state": "running",
    }
    return Container(**{**values, **fields})


def pod(name: str, gpu: int = 0) -> Workload:
    """What the kubelet says of a container's pod that was given a GPU."""
    return Workload(
        source="kubernetes",
        name=f"research/{name}",
        gpus=(f"uuid:{gpu_id(gpu)}",),
        pod_name=name,
        pod_namespace="research",
        pod_uid=f"0b2d0f4c-0000-4000-8000-{sum(name.encode()):012d}",
        containers=(container_id(name),),
    )


def write_process(root: Path, process: ProcessIdentity, **files: str | None) -> None:
    """The process as its /proc would show it; ``files``: other contents, None for no such file."""
    folder = root / "proc" / str(process.pid)
    folder.mkdir(parents=True, exist_ok=True)
    ids = "\t".join([str(process.uid or 0)] * 4)
    rest = f"S {process.ppid} {process.pid} {process.pid} 0 -1 4194304 0 0 0 0 1 1 0 0 20 0 1 0"
    contents: dict[str, str | None] = {
        "stat": f"{process.pid} ({process.comm}) {rest} {process.start_time_ticks} 0 0\n",
        "status": f"Name:\t{process.comm}\nTgid:\t{process.pid}\nPid:\t{process.pid}\n"
        f"Uid:\t{ids}\nGid:\t{ids}\nNSpid:\t{process.pid}\n",
        "cgroup": f"0::{process.cgroup_path}\n",
        "cmdline": "".join(f"{word}\0" for word in process.argv or ()),
        "loginuid": f"{(process.loginuid or 0) & 0xFFFFFFFF}\n",
        "comm": f"{process.comm}\n",
        **files,
    }
    for name, text in contents.items():
        if text is not None:
            (folder / name).write_text(text)
    links = {
        "ns/mnt": f"mnt:[{process.mount_namespace}]",
        "ns/pid": f"pid:[{process.pid_namespace}]",
        "exe": process.exe_path or "",
    }
    (folder / "ns").mkdir(exist_ok=True)
    for name, target in links.items():
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)


def surroundings(**fields: Any) -> Surroundings:
    """A node of a cluster with four GPUs, asked a moment ago."""
    values: dict[str, Any] = {
        "node": NodeFacts(
            hostname="node1",
            boot_id=BOOT_ID,
            boot_time_ns=BOOT_TIME_NS,
            observer_uid=0,
            host_pid_namespace=True,
        ),
        "sources": CLUSTER,
        "sources_at_ns": LATER_NS,
        "gpus": tuple(
            Gpu(
                id=gpu_id(minor),
                uuid=gpu_id(minor),
                index=minor,
                minor=minor,
                memory_total_bytes=80 * GIB,
            )
            for minor in range(4)
        ),
        "device_nodes": NODES,
        "host_mount_namespace": HOST_MOUNTS,
    }
    return Surroundings(**{**values, **fields})


class Watching:
    """An open watch whose processes have ended before /proc is read, with all that it tells."""

    def __init__(
        self,
        root: Path,
        monkeypatch: Any = None,
        *,
        around: Surroundings | None = None,
        answer: Callable[[Examination], Answer] | None = None,
        policy: Policy | None = None,
        return_values: bool = False,
        events: bool = False,
    ) -> None:
        self.clock = Clock()
        if monkeypatch is not None:
            monkeypatch.setattr("gpuwarden.watch.open_watch.time", self.clock.module)
        self.around = around or surroundings()
        self.examiner = StandInExaminer(answer or (lambda question: Examined()))
        self.told: list[tuple[DeviceOpen, Process, int]] = []
        self.rounds: list[list[Finding]] = []
        (root / "proc").mkdir(exist_ok=True)
        self.identities = Identities(Host(str(root)), boot_time_ns=BOOT_TIME_NS, same_pids=True)
        self.watch = OpenWatch(
            identities=self.identities,
            surroundings=self.around,
            policy=policy or Policy(),
            policy_path=None,
            majors=MAJORS,
            worker=cast(Worker, self.examiner),
            observe=self.rounds.append,
            tell=self._tell if events else None,
            return_values=return_values,
        )
        self.watch.held([], BOOT_TIME_NS)

    def _tell(
        self, event: DeviceOpen, process: Process, lineage: Sequence[Process], at_ns: int
    ) -> None:
        self.told.append((event, process, at_ns))

    def know(self, *containers: Container, at_ns: int = LATER_NS) -> None:
        """Containers that were seen before, at that time."""
        self.around.keep(containers, at_ns)

    def feed(self, *events: Event) -> None:
        """Takes events and works, as the agent does in one turn; answers of before are taken."""
        self.watch.events(events)
        self.turn()

    def turn(self, seconds: float = 0.0) -> None:
        """One turn of the agent's loop, after some time."""
        self.clock.now += seconds
        self.watch.answered()
        self.watch.work(1e9)

    def wait(self, seconds: float) -> None:
        """Turns as often as the agent does."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.turn(min(0.05, until - self.clock.now))

    @property
    def findings(self) -> list[Finding]:
        """All that were told, in order."""
        return [finding for told in self.rounds for finding in told]

    def of(self, process: ProcessIdentity) -> list[Finding]:
        """Those of one process."""
        ticks = process.start_time_ticks
        return [
            one
            for one in self.findings
            if (one.subject.pid, one.subject.start_time_ticks) == (process.pid, ticks)
        ]


def occurrences(findings: Iterable[Finding]) -> dict[str, int]:
    """How often each finding was told to have happened, by id."""
    counts: dict[str, int] = {}
    for one in findings:
        counts[one.id] = counts.get(one.id, 0) + one.occurrences
    return counts
