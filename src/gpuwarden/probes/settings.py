"""What the eBPF probe is told, and what it counts."""

from __future__ import annotations

from msgspec import Struct

Number = tuple[int, int | None]
"""(major, minor), or (major, None) for every minor."""


class Settings(Struct, frozen=True):
    """How much the probe tells. ``limit_events``: of one process and device within the window."""

    limit_events: int = 16
    """0: no limit, every event."""
    limit_window_seconds: float = 1.0
    return_values: bool = False
    """Costs every open on the machine a quarter of its time; without, a held descriptor shows."""
    every_exec: bool = False
    """Also of processes that never had a watched device."""
    groups: bool = False
    """Also of each control group that is made."""
    ring_bytes: int = 16 << 20
    """A power of two."""


class Counters(Struct, frozen=True):
    """What went on since the probe was loaded; the ``dropped_…`` found no room in the ring."""

    hits: int = 0
    limited: int = 0
    denied: int = 0
    limiter_full: int = 0
    dropped_opens: int = 0
    dropped_returns: int = 0
    dropped_execs: int = 0
    dropped_exits: int = 0
    dropped_groups: int = 0
    malformed: int = 0

    @property
    def dropped(self) -> int:
        return (
            self.dropped_opens
            + self.dropped_returns
            + self.dropped_execs
            + self.dropped_exits
            + self.dropped_groups
        )
