"""A snapshot: everything that was seen of one node at one moment."""

from __future__ import annotations

from gpuwarden.model.code import CodeScan, GpuModule
from gpuwarden.model.cuda import CudaProcess
from gpuwarden.model.facts import Fact, Gap, NodeFacts, SensorRun, SourceRun
from gpuwarden.model.gpus import (
    AccountedProcess,
    DeviceNode,
    DriverFile,
    Gpu,
    GpuClient,
    Holder,
    LibraryCheck,
    XidEvent,
)
from gpuwarden.model.opens import DeviceOpen, ExitedClient, Respawn, ToolRun, Usage
from gpuwarden.model.processes import Connection, HiddenProcess, Process
from gpuwarden.model.surroundings import Container, PersistenceEntry, Workload

SNAPSHOT_SCHEMA = "gpuwarden.snapshot"
SNAPSHOT_VERSION = 1

AnyFact = (
    Gap
    | NodeFacts
    | Gpu
    | GpuClient
    | AccountedProcess
    | LibraryCheck
    | DriverFile
    | Process
    | HiddenProcess
    | DeviceNode
    | Holder
    | Container
    | Connection
    | PersistenceEntry
    | XidEvent
    | Workload
    | GpuModule
    | CodeScan
)


class Snapshot(Fact, frozen=True, kw_only=True):
    """Everything that was seen of one node at one moment; a plain value that replays anywhere."""

    schema: str = SNAPSHOT_SCHEMA
    version: int = SNAPSHOT_VERSION
    tool_version: str = ""
    taken_at_ns: int
    node: NodeFacts
    sensors: tuple[SensorRun, ...] = ()
    sources: tuple[SourceRun, ...] = ()
    gaps: tuple[Gap, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    clients: tuple[GpuClient, ...] = ()
    accounted: tuple[AccountedProcess, ...] = ()
    libraries: tuple[LibraryCheck, ...] = ()
    processes: tuple[Process, ...] = ()
    hidden: tuple[HiddenProcess, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()
    holders: tuple[Holder, ...] = ()
    containers: tuple[Container, ...] = ()
    connections: tuple[Connection, ...] = ()
    persistence: tuple[PersistenceEntry, ...] = ()
    xids: tuple[XidEvent, ...] = ()
    workloads: tuple[Workload, ...] = ()
    driver_files: tuple[DriverFile, ...] = ()
    modules: tuple[GpuModule, ...] = ()
    """Of processes whose workload names a code profile; what is simply known is only counted."""
    code_scans: tuple[CodeScan, ...] = ()
    opens: tuple[DeviceOpen, ...] = ()
    """From here on: what only `watch` knows; empty in a scan."""
    tool_runs: tuple[ToolRun, ...] = ()
    cuda: tuple[CudaProcess, ...] = ()
    usage: tuple[Usage, ...] = ()
    exited: tuple[ExitedClient, ...] = ()
    respawns: tuple[Respawn, ...] = ()
