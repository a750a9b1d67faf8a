"""Frozen facts: what sensors observe and snapshots store.

A fact never judges. A field that could not be read is ``None`` and its reason stands in
``unread`` under the field's name; ``None`` without a reason means that the kernel or the driver
answered "there is none". Units sit in names; times are Unix nanoseconds unless named otherwise.
"""

from __future__ import annotations

from gpuwarden.model.code import CodeScan, GpuModule, ModuleStanding, SeenCode
from gpuwarden.model.cuda import (
    CudaContext,
    CudaLibrary,
    CudaProcess,
    KernelUse,
    LaunchFit,
    LaunchSample,
    LaunchWindow,
    LoadedModule,
    ModuleLoad,
    ProfileStanding,
)
from gpuwarden.model.facts import (
    Fact,
    Gap,
    NodeFacts,
    SensorRun,
    SensorState,
    SourceRun,
    SourceState,
)
from gpuwarden.model.gpus import (
    DRIVER_LIBRARIES,
    AccountedProcess,
    ClientKind,
    DeviceNode,
    DriverFile,
    Gpu,
    GpuClient,
    Holder,
    LibraryCheck,
    NodeKind,
    UtilisationSample,
    Vendor,
    XidEvent,
)
from gpuwarden.model.opens import (
    DeviceOpen,
    ExitedClient,
    OpenHow,
    OpenState,
    Respawn,
    ToolRun,
    Usage,
)
from gpuwarden.model.processes import (
    LOGINUID_UNSET,
    CgroupPlacement,
    Connection,
    DriverLibrary,
    Executable,
    HiddenProcess,
    Process,
)
from gpuwarden.model.snapshots import SNAPSHOT_SCHEMA, SNAPSHOT_VERSION, AnyFact, Snapshot
from gpuwarden.model.surroundings import (
    Container,
    PersistenceEntry,
    StartedProgram,
    Workload,
)

__all__ = [
    "DRIVER_LIBRARIES",
    "LOGINUID_UNSET",
    "SNAPSHOT_SCHEMA",
    "SNAPSHOT_VERSION",
    "AccountedProcess",
    "AnyFact",
    "CgroupPlacement",
    "ClientKind",
    "CodeScan",
    "Connection",
    "Container",
    "CudaContext",
    "CudaLibrary",
    "CudaProcess",
    "DeviceNode",
    "DeviceOpen",
    "DriverFile",
    "DriverLibrary",
    "Executable",
    "ExitedClient",
    "Fact",
    "Gap",
    "Gpu",
    "GpuClient",
    "GpuModule",
    "HiddenProcess",
    "Holder",
    "KernelUse",
    "LaunchFit",
    "LaunchSample",
    "LaunchWindow",
    "LibraryCheck",
    "LoadedModule",
    "ModuleLoad",
    "ModuleStanding",
    "NodeFacts",
    "NodeKind",
    "OpenHow",
    "OpenState",
    "PersistenceEntry",
    "Process",
    "ProfileStanding",
    "Respawn",
    "SeenCode",
    "SensorRun",
    "SensorState",
    "Snapshot",
    "SourceRun",
    "SourceState",
    "StartedProgram",
    "ToolRun",
    "Usage",
    "UtilisationSample",
    "Vendor",
    "Workload",
    "XidEvent",
]
