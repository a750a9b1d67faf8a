"""Binaries that come to a GPU again and again, a new process each time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from gpuwarden.model import Respawn
from gpuwarden.usage.series import Kept

MAX_LINES = 1024
MAX_RUNS = 64
MIN_RUNS = 3
KEPT_NS = 3600 * 10**9
SECOND_NS = 10**9


class Binary(NamedTuple):
    """What a process runs, by what the kernel keeps of it."""

    path: str
    device: str | None
    inode: int | None
    uid: int | None


class RunState(msgspec.Struct, array_like=True):
    """One process of a line; ``ended_ns`` is 0 while it lives."""

    pid: int
    start_time_ticks: int | None
    began_ns: Kept
    ended_ns: Kept = 0


class LineState(msgspec.Struct, array_like=True):
    """All processes of one binary and user on one GPU, as kept, also over a restart."""

    gpu_id: str
    path: str
    device: str | None
    inode: int | None
    uid: int | None
    runs: list[RunState]

    @property
    def last_ns(self) -> int:
        return max((run.ended_ns or run.began_ns for run in self.runs), default=0)


LineKey = tuple[str, str | None, int | None, int | None]


class Successions:
    """For each binary on each GPU the processes that it was, the one heard of last at the end."""

    def __init__(self) -> None:
        self._lines: dict[LineKey, LineState] = {}

    @staticmethod
    def _key(gpu_id: str, binary: Binary) -> LineKey:
        return (gpu_id, binary.device, binary.inode, binary.uid)

    def began(self, gpu_id: str, binary: Binary, run: RunState) -> None:
        """A process came to a GPU, or was taken for ended and is still there."""
        if binary.inode is None:
            return
        key = self._key(gpu_id, binary)
        line = self._lines.pop(key, None)
        if line is None:
            if len(self._lines) >= MAX_LINES:
                del self._lines[next(iter(self._lines))]
            line = LineState(gpu_id, binary.path, binary.device, binary.inode, binary.uid, [])
        self._lines[key] = line
        for known in line.runs:
            if (known.pid, known.start_time_ticks) == (run.pid, run.start_time_ticks):
                known.ended_ns = 0
                return
        line.runs.append(run)
        del line.runs[:-MAX_RUNS]

    def ended(
        self, gpu_id: str, binary: Binary, pid: int, start_time_ticks: int | None, at_ns: int
    ) -> None:
        """A process is gone from a GPU."""
        line = self._lines.get(self._key(gpu_id, binary))
        for run in line.runs if line is not None else ():
            if (run.pid, run.start_time_ticks) == (pid, start_time_ticks):
                run.ended_ns = at_ns

    def forget(self, at_ns: int) -> None:
        """Drops lines that nobody heard of for an hour."""
        old = [
            key
            for key, line in self._lines.items()
            if at_ns - line.last_ns > KEPT_NS and all(run.ended_ns for run in line.runs)
        ]
        for key in old:
            del self._lines[key]

    def facts(self, at_ns: int) -> Iterator[Respawn]:
        """Lines of three or more. A lifetime stands for each start, save for one that lives last.

        One that lives while later ones have begun counts as living until now: it overlaps them.
        """
        for line in self._lines.values():
            if len(line.runs) < MIN_RUNS:
                continue
            lifetimes = [((run.ended_ns or at_ns) - run.began_ns) / SECOND_NS for run in line.runs]
            if not line.runs[-1].ended_ns:
                lifetimes.pop()
            yield Respawn(
                gpu_id=line.gpu_id,
                binary=line.path,
                device=line.device,
                inode=line.inode,
                uid=line.uid,
                starts_ns=tuple(run.began_ns for run in line.runs),
                pids=tuple(run.pid for run in line.runs),
                lifetimes_seconds=tuple(max(0.0, seconds) for seconds in lifetimes),
            )

    def state(self) -> list[LineState]:
        return list(self._lines.values())

    def restore(self, lines: list[LineState]) -> None:
        for line in lines[-MAX_LINES:]:
            del line.runs[:-MAX_RUNS]
            if line.runs:
                self._lines[(line.gpu_id, line.device, line.inode, line.uid)] = line
