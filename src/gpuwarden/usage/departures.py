"""Clients that ended, and what became of their memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from gpuwarden.model import ExitedClient
from gpuwarden.usage.series import Kept

MAX_KEPT = 512
SETTLED_KEPT_NS = 3600 * 10**9

ClientKey = tuple[str, int | None, int | None]
"""GPU id, pid, start time in ticks."""


class MemoryInUse(NamedTuple):
    """Memory of one GPU in one round, in bytes."""

    used: int | None
    unexplained: int | None
    """Beyond what the listed processes have; None when one of them does not tell."""


class DepartureState(msgspec.Struct, array_like=True):
    """One client that ended, as it is kept, also over a restart."""

    gpu_id: str
    pid: int
    start_time_ticks: int | None
    binary: str | None
    exited_at_ns: Kept
    memory_bytes: Kept | None
    before: Kept | None
    unexplained_before: Kept | None
    now: Kept | None = None
    unexplained: Kept | None = None

    @property
    def settled(self) -> bool:
        """Whether all that it had is free again."""
        if self.unexplained is None or self.unexplained_before is None:
            return False
        return self.unexplained <= self.unexplained_before


class Departures:
    """The clients that ended, oldest first."""

    def __init__(self) -> None:
        self._kept: dict[ClientKey, DepartureState] = {}

    def add(self, departure: DepartureState) -> None:
        """One more; of too many, one whose memory is free goes first."""
        key = (departure.gpu_id, departure.pid, departure.start_time_ticks)
        self._kept.pop(key, None)
        if len(self._kept) >= MAX_KEPT:
            settled = (k for k, kept in self._kept.items() if kept.settled)
            del self._kept[next(settled, next(iter(self._kept)))]
        self._kept[key] = departure

    def cancel(self, key: ClientKey) -> None:
        """It is listed again: it had not ended."""
        self._kept.pop(key, None)

    def look(self, at_ns: int, memory: Mapping[str, MemoryInUse]) -> None:
        """The least that is in use since each of them ended."""
        expired = []
        for key, kept in self._kept.items():
            if kept.settled:
                if at_ns - kept.exited_at_ns > SETTLED_KEPT_NS:
                    expired.append(key)
                continue
            seen = memory.get(kept.gpu_id)
            if seen is None:
                continue
            if seen.used is not None and (kept.now is None or seen.used < kept.now):
                kept.now = seen.used
            if seen.unexplained is not None and (
                kept.unexplained is None or seen.unexplained < kept.unexplained
            ):
                kept.unexplained = seen.unexplained
        for key in expired:
            del self._kept[key]

    def facts(self) -> Iterator[ExitedClient]:
        for kept in self._kept.values():
            yield ExitedClient(
                gpu_id=kept.gpu_id,
                pid=kept.pid,
                start_time_ticks=kept.start_time_ticks,
                binary=kept.binary,
                exited_at_ns=kept.exited_at_ns,
                memory_bytes=kept.memory_bytes,
                gpu_memory_before_bytes=kept.before,
                gpu_memory_now_bytes=kept.now,
                unexplained_before_bytes=kept.unexplained_before,
                unexplained_bytes=kept.unexplained,
            )

    def state(self) -> list[DepartureState]:
        return list(self._kept.values())

    def restore(self, kept: list[DepartureState]) -> None:
        for departure in kept[-MAX_KEPT:]:
            self.add(departure)
