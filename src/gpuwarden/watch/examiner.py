"""A child that asks container runtimes and schedulers about processes that opened a device."""

from __future__ import annotations

import time

import msgspec

from gpuwarden.errors import GpuwardenError
from gpuwarden.host import Host
from gpuwarden.model import (
    Container,
    DeviceNode,
    Fact,
    Gap,
    Gpu,
    Process,
    SourceRun,
    Workload,
)
from gpuwarden.scan import ask_sources
from gpuwarden.sensors import containers
from gpuwarden.sensors.process import stat_lines
from gpuwarden.sensors.seen import Seen
from gpuwarden.watch.host_job import HostJob

DEADLINE_SECONDS = 12.0
"""Slurm's commands and a runtime's socket have deadlines of their own, well below it."""


class Examination(Fact, frozen=True, kw_only=True):
    """What is asked: about these processes (with their forebears), and of the sources too?"""

    processes: tuple[Process, ...]
    gpus: tuple[Gpu, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()
    sources: bool = True


class Examined(Fact, frozen=True, kw_only=True):
    """What was answered; ``sources_at_ns`` is when the sources were asked, 0 if they were not."""

    asked_at_ns: int = 0
    """When the runtimes were asked, at the earliest."""
    containers: tuple[Container, ...] = ()
    gaps: tuple[Gap, ...] = ()
    sources: tuple[SourceRun, ...] = ()
    workloads: tuple[Workload, ...] = ()
    sources_at_ns: int = 0


_encoder = msgspec.msgpack.Encoder()
_question = msgspec.msgpack.Decoder(Examination)
_answer = msgspec.msgpack.Decoder(Examined)


def encode(question: Examination) -> bytes:
    return _encoder.encode(question)


def decode(body: bytes) -> Examined:
    return _answer.decode(body)


class Examiner(HostJob):
    """The job of the child: one question at a time."""

    def __call__(self, body: bytes) -> bytes:
        return _encoder.encode(examine(self.host, _question.decode(body)))


def examine(host: Host, question: Examination) -> Examined:
    """Asks; never raises for what a runtime or a source does."""
    begun_at_ns = time.time_ns()
    seen = Seen(gpus=list(question.gpus), device_nodes=list(question.device_nodes))
    for process in question.processes:
        seen.add(process)
    gaps: list[Gap] = []
    try:
        seen.table.update(stat_lines.read(host))
    except GpuwardenError as error:
        gaps.append(Gap(sensor="processes", what="/proc", reason=str(error)))
    found: list[Container] = []
    for fact in containers.read(host, seen):
        if isinstance(fact, Gap):
            gaps.append(fact)
        else:
            found.append(fact)
            seen.add(fact)
    runs: list[SourceRun] = []
    workloads: list[Workload] = []
    asked_at_ns = 0
    if question.sources:
        asked_at_ns = time.time_ns()
        for run, told in ask_sources(host, seen):
            runs.append(run)
            workloads += told
    return Examined(
        asked_at_ns=begun_at_ns,
        containers=tuple(found),
        gaps=tuple(gaps),
        sources=tuple(runs),
        workloads=tuple(workloads),
        sources_at_ns=asked_at_ns,
    )
