"""What the agent's children that look at a host have in common."""

from __future__ import annotations

from functools import cached_property

from gpuwarden.host import Host


class HostJob:
    """A job for a child, about the host that is mounted at a root."""

    def __init__(self, root: str) -> None:
        self._root = root

    @cached_property
    def host(self) -> Host:
        """Made at first use, which is in the child: a Host remembers whose /proc/self it saw."""
        return Host(self._root)
