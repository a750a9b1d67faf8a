"""Which processes are the agent's own: its children open the driver's nodes to look."""

from __future__ import annotations

import os

from gpuwarden.errors import GpuwardenError
from gpuwarden.host import Host
from gpuwarden.probes.events import ProcessIdentity
from gpuwarden.sensors.process.executables import read_namespace


class OwnProcesses:
    """The agent and its children, as the kernel's events number them."""

    def __init__(self, host: Host) -> None:
        self._namespace = read_namespace(host, "self", "pid")
        self._own = os.getpid()
        self._children: set[int] = set()
        try:
            self._seen_as = int(host.read_link("/proc/self"))
        except (GpuwardenError, ValueError):
            self._seen_as = self._own

    def set_children(self, pids: set[int]) -> None:
        """The children there are now, as we number them."""
        self._children = pids

    @property
    def pids(self) -> set[int]:
        """Ours and our children's, where /proc numbers processes as we do."""
        return {self._own, self._seen_as, *self._children}

    def has(self, process: ProcessIdentity) -> bool:
        """Whether the process of an event is the agent, its child, or that one's child."""
        if process.pid_namespace != self._namespace:
            return False
        inner = process.pid if process.pid_in_namespace is None else process.pid_in_namespace
        if inner in self.pids:
            return True
        # A child of a child (the judge's NVML child) is known by its parent.
        return process.ppid in self.pids and process.pid == inner
