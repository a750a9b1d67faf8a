"""What the CUDA layer adds to the judgement of a process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from gpuwarden.finding import Finding
from gpuwarden.model import Process, Snapshot
from gpuwarden.probes.events import ProcessIdentity

StartKey = tuple[int, int]
"""(pid, start time since boot in ns)."""
NamedKey = tuple[int, int]
"""(pid, start time in ticks)."""


class CudaFacts(Protocol):
    """Asked by ``OpenWatch``."""

    def identity(self, key: StartKey) -> ProcessIdentity | None:
        """Who called the driver library; None for nobody."""

    def added(self, snapshot: Snapshot, process: Process) -> Snapshot:
        """The snapshot with what the process did by CUDA."""

    def wants(self, finding: Finding, process: Process) -> bool:
        """Whether a finding is this process's, and not told by another one already."""

    def untold(self, key: StartKey) -> int:
        """Loads and contexts since this was asked last."""

    def calling(self) -> Iterable[NamedKey]:
        """Processes that are there and use CUDA: what was found of them holds."""
