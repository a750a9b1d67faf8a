"""Host → Snapshot: one loop over the sensors, one over the sources of the expected set.

The runner owns errors and timing: each sensor is tried once, and how it fared is part of the
snapshot. A sensor that fails costs only what it would have seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from gpuwarden import __version__
from gpuwarden.errors import Denied, GpuwardenError, Malformed, TimedOut, Unavailable
from gpuwarden.expected.registry import SOURCES
from gpuwarden.host import Host
from gpuwarden.model import (
    AccountedProcess,
    AnyFact,
    CodeScan,
    Connection,
    Container,
    DeviceNode,
    DriverFile,
    Gap,
    Gpu,
    GpuClient,
    GpuModule,
    HiddenProcess,
    Holder,
    LibraryCheck,
    PersistenceEntry,
    Process,
    SensorRun,
    SensorState,
    Snapshot,
    SourceRun,
    Workload,
    XidEvent,
)
from gpuwarden.sensors import nvml
from gpuwarden.sensors.machine import read_machine
from gpuwarden.sensors.registry import SENSORS
from gpuwarden.sensors.seen import Seen

SUBJECT_SENSORS = frozenset({"nvml", "amd", "processes", "sockets", "kernel_log"})
"""Sensors that look at clients and their ancestors only."""
FACT_LIMIT = 200_000
"""Most facts kept from one sensor: what an attacker can make must stay bounded."""


CodeLook = Callable[[Host, Snapshot], Iterable[AnyFact]]
"""Looks for GPU code in processes of a snapshot that is complete but for that; yields CodeScan,
GpuModule and Gap. It is handed in, since which processes to look at is the policy's to say."""
CODE_SENSOR = "code"


class ScanOptions(NamedTuple):
    """What to look at and with what."""

    sensors: frozenset[str] | None = None
    """Names to run; None runs all. Sources of the expected set run only with all."""
    nvml_library: str | None = None
    nvml_deadline_seconds: float = 5.0
    deep: bool = False
    code: CodeLook | None = None
    """None where no policy declares whose code to look at: then there is no such sensor."""


_F = TypeVar("_F")


class _Collected(Struct):
    """Facts by kind, in the order they were seen, and how each sensor fared."""

    facts: dict[type, list[AnyFact]] = field(default_factory=dict)
    runs: list[SensorRun] = field(default_factory=list)

    def of(self, kind: type[_F]) -> tuple[_F, ...]:
        return tuple(fact for fact in self.facts.get(kind, ()) if isinstance(fact, kind))


def _state_of(error: GpuwardenError) -> SensorState:
    if isinstance(error, Denied | Malformed | TimedOut):
        return "failed"
    return "absent"


class _Runner:
    """Runs sensors one after the other, keeps their facts, owns their errors and seconds."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.collected = _Collected()

    def run(self, name: str, read: Callable[[], Iterable[AnyFact]]) -> None:
        """Tries one sensor once; any GpuwardenError becomes its state and reason."""
        started = time.perf_counter()
        state: SensorState = "ok"
        reason = remedy = ""
        count = 0
        try:
            for fact in read():
                if isinstance(fact, Gap):
                    if state == "ok":
                        state, reason, remedy = (
                            "partial",
                            f"{fact.what}: {fact.reason}",
                            fact.remedy,
                        )
                else:
                    count += 1
                    if count > FACT_LIMIT:
                        raise Malformed(
                            f"{name}: more than {FACT_LIMIT} facts; the rest is not kept"
                        )
                    self.seen.add(fact)
                self.collected.facts.setdefault(type(fact), []).append(fact)
        except GpuwardenError as error:
            state = _state_of(error)
            if count and state == "absent":
                state = "partial"
            reason, remedy = str(error), error.remedy
        except Exception as error:  # noqa: BLE001
            # A defect of ours must not take the other sensors' sight away.
            state, reason = "failed", f"{type(error).__name__}: {error}"
            remedy = "this is a defect of gpuwarden: please report it with the snapshot"
        self.collected.runs.append(
            SensorRun(
                name=name,
                state=state,
                reason=reason,
                remedy=remedy,
                seconds=round(time.perf_counter() - started, 6),
                facts=count,
            )
        )

    def skip(self, name: str) -> None:
        self.collected.runs.append(SensorRun(name=name, state="skipped", reason="not asked for"))


def ask_sources(
    host: Host, seen: Seen, *, skipped: bool = False
) -> Iterator[tuple[SourceRun, list[Workload]]]:
    """How each source of the expected set fared, with what it expects; never raises."""
    for name, read in SOURCES:
        if skipped:
            yield SourceRun(name=name, state="skipped", reason="not asked for"), []
            continue
        started = time.perf_counter()
        workloads: list[Workload] = []
        try:
            run, workloads = read(host, seen)
        except GpuwardenError as error:
            run = SourceRun(name=name, state="failed", reason=str(error), remedy=error.remedy)
        except Exception as error:  # noqa: BLE001
            run = SourceRun(name=name, state="failed", reason=f"{type(error).__name__}: {error}")
        yield (
            replace(run, seconds=round(time.perf_counter() - started, 6), workloads=len(workloads)),
            workloads,
        )


def take_snapshot(
    host: Host,
    options: ScanOptions | None = None,
    *,
    meanwhile: Callable[[], None] | None = None,
) -> Snapshot:
    """Reads everything once. Never raises for what a sensor meets; it is in ``sensors``.

    ``meanwhile`` is called once the driver is being asked in its child, which takes a while.
    """
    options = options or ScanOptions()
    taken_at_ns = time.time_ns()
    seen = Seen(
        deep=options.deep,
        only_subjects=options.sensors is not None and options.sensors <= SUBJECT_SENSORS,
    )
    runner = _Runner(seen)

    def wanted(name: str) -> bool:
        return options.sensors is None or name in options.sensors

    query: nvml.NvmlQuery | None = None
    refused: GpuwardenError | None = None
    if wanted("nvml"):
        # First and in a child: it works while this process reads /proc.
        try:
            query = nvml.start(
                host,
                library=options.nvml_library,
                deadline_seconds=options.nvml_deadline_seconds,
            )
        except GpuwardenError as error:
            refused = error

    if meanwhile is not None:
        meanwhile()

    def read_nvml() -> Iterable[AnyFact]:
        if query is None:
            raise refused or Unavailable("NVML was not started")
        return query.read(seen)

    for sensor in SENSORS:
        if not wanted(sensor.name):
            runner.skip(sensor.name)
        elif sensor.name == "nvml":
            runner.run("nvml", read_nvml)
        else:
            runner.run(sensor.name, lambda read=sensor.read: read(host, seen))  # type: ignore[misc]

    sources: list[SourceRun] = []
    workloads: list[Workload] = []
    for run, found in ask_sources(host, seen, skipped=options.sensors is not None):
        sources.append(run)
        workloads.extend(found)

    machine = read_machine(host, None if seen.only_subjects else len(seen.table) or None)
    node = replace(
        machine,
        driver_version=query.driver_version if query is not None else None,
        cuda_version=query.cuda_version if query is not None else None,
    )
    collected = runner.collected
    snapshot = Snapshot(
        tool_version=__version__,
        taken_at_ns=taken_at_ns,
        node=node,
        sensors=tuple(collected.runs),
        sources=tuple(sources),
        gaps=collected.of(Gap),
        gpus=collected.of(Gpu),
        clients=collected.of(GpuClient),
        accounted=collected.of(AccountedProcess),
        libraries=collected.of(LibraryCheck),
        processes=tuple({p.pid: p for p in reversed(collected.of(Process))}.values())[::-1],
        hidden=collected.of(HiddenProcess),
        device_nodes=collected.of(DeviceNode),
        holders=collected.of(Holder),
        containers=collected.of(Container),
        connections=collected.of(Connection),
        persistence=collected.of(PersistenceEntry),
        xids=collected.of(XidEvent),
        workloads=tuple(workloads),
        driver_files=collected.of(DriverFile),
    )
    if options.code is None:
        return snapshot
    look = options.code
    runner.run(CODE_SENSOR, lambda: look(host, snapshot))
    return replace(
        snapshot,
        sensors=tuple(collected.runs),
        gaps=collected.of(Gap),
        modules=collected.of(GpuModule),
        code_scans=collected.of(CodeScan),
    )
