"""A child that takes a whole snapshot and judges it, as `scan` does, with what watch remembers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from gpuwarden.finding import Report
from gpuwarden.judge import judge
from gpuwarden.model import (
    Container,
    CudaProcess,
    DeviceNode,
    DeviceOpen,
    ExitedClient,
    Fact,
    GpuModule,
    Respawn,
    SeenCode,
    Snapshot,
    Usage,
    Workload,
)
from gpuwarden.node import Node
from gpuwarden.policy import Policy
from gpuwarden.rules.registry import RULES, TIME_RULES
from gpuwarden.scan import ScanOptions, take_snapshot
from gpuwarden.watch.host_job import HostJob

if TYPE_CHECKING:
    from gpuwarden.codescan.live import LiveCode

DEADLINE_SECONDS = 60.0
CODE_SECONDS = 20.0
"""For looks at GPU code in one judgement; what is left waits for the next."""
CODE_AGAIN_SECONDS = 1800.0
"""A process that was wholly seen is looked at again after this."""
KIN_SHOWN = 16


class Memory(Fact, frozen=True, kw_only=True):
    """What only a daemon knows, for the rules over time."""

    usage: tuple[Usage, ...] = ()
    exited: tuple[ExitedClient, ...] = ()
    respawns: tuple[Respawn, ...] = ()
    opens: tuple[DeviceOpen, ...] = ()
    """Of the last while: short processes that no sample showed."""
    code: tuple[SeenCode, ...] = ()
    """What the last judgement saw of GPU code."""
    cuda: tuple[CudaProcess, ...] = ()
    modules: tuple[GpuModule, ...] = ()
    """Those that were seen being loaded."""


class Kin(Fact, frozen=True, kw_only=True):
    """What a judgement knows of a client, for its samples."""

    pid: int
    start_time_ticks: int
    path: str | None = None
    device: str | None = None
    inode: int | None = None
    uid: int | None = None
    parents: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    verdicts: dict[str, str] = {}
    """By GPU."""


class Judged(Fact, frozen=True, kw_only=True):
    """The report, and of its snapshot what the next device opens are judged with."""

    report: Report
    containers: tuple[Container, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()
    workloads: tuple[Workload, ...] = ()
    kin: tuple[Kin, ...] = ()
    users: dict[int, str] = {}
    """Names of the users of the processes that were seen."""
    asked_at_ns: int = 0
    """When the sources were asked, at the earliest."""
    seconds: float = 0.0
    """Without the looks at GPU code, which are seldom."""
    code: tuple[SeenCode, ...] = ()


_encoder = msgspec.msgpack.Encoder()
_question = msgspec.msgpack.Decoder(Memory)
_answer = msgspec.msgpack.Decoder(Judged)


def encode(memory: Memory) -> bytes:
    return _encoder.encode(memory)


def decode(body: bytes) -> Judged:
    return _answer.decode(body)


class Judgement(HostJob):
    """The job of the child: one snapshot and its report for each question."""

    def __init__(
        self, root: str, options: ScanOptions, policy: Policy, policy_path: str | None
    ) -> None:
        super().__init__(root)
        self._options = options
        self._policy = policy
        self._policy_path = policy_path

    @cached_property
    def _code(self) -> LiveCode | None:
        if not self._policy.profiles:
            return None
        # Imported here: what reads GPU code is much, and few policies ask for it.
        from gpuwarden.codescan.live import LiveCode

        return LiveCode(self._policy, seconds=CODE_SECONDS, again_after_seconds=CODE_AGAIN_SECONDS)

    def __call__(self, body: bytes) -> bytes:
        self.host.parent_is_ours = True
        memory = _question.decode(body)
        begun = time.perf_counter()
        asked_at_ns = time.time_ns()
        code, spent = self._code, 0.0
        if code is not None:
            code.recall(memory.code)
            spent = code.spent_seconds
        snapshot = replace(
            take_snapshot(self.host, self._options._replace(code=code)),
            usage=memory.usage,
            exited=memory.exited,
            respawns=memory.respawns,
            opens=memory.opens,
            cuda=memory.cuda,
        )
        snapshot = replace(snapshot, modules=(*snapshot.modules, *memory.modules))
        report = judge(snapshot, self._policy, self._policy_path, (*RULES, *TIME_RULES))
        if code is not None:
            spent = code.spent_seconds - spent
        return _encoder.encode(
            Judged(
                report=report,
                containers=snapshot.containers,
                device_nodes=snapshot.device_nodes,
                workloads=snapshot.workloads,
                kin=tuple(_kin(snapshot, report)),
                users={p.uid: p.user for p in snapshot.processes if p.uid is not None and p.user},
                asked_at_ns=asked_at_ns,
                seconds=round(max(0.0, time.perf_counter() - begun - spent), 6),
                code=code.remembered() if code is not None else (),
            )
        )


def _kin(snapshot: Snapshot, report: Report) -> Iterator[Kin]:
    node = Node(snapshot)
    verdicts: dict[int, dict[str, str]] = {}
    for row in report.rows:
        if row.pid is not None and row.gpu_id is not None:
            verdicts.setdefault(row.pid, {})[row.gpu_id] = row.verdict
    for pid, of_gpus in verdicts.items():
        process = node.processes.get(pid)
        if process is None:
            continue
        exe = process.exe
        peers = {
            f"{c.remote_address}:{c.remote_port}"
            for c in node.connections_by_pid.get(pid, ())
            if c.remote_address is not None
        }
        yield Kin(
            pid=pid,
            start_time_ticks=process.start_time_ticks,
            path=None if exe is None else exe.path,
            device=None if exe is None else exe.device,
            inode=None if exe is None else exe.inode,
            uid=process.uid,
            parents=tuple(p.exe.path if p.exe else p.comm for p in node.ancestors(pid))[:KIN_SHOWN],
            peers=tuple(sorted(peers))[:KIN_SHOWN],
            verdicts=of_gpus,
        )
