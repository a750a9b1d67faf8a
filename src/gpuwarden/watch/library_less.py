"""Holders of an accelerator in which no CUDA driver library is found, look after look."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from gpuwarden.model import CudaProcess, Process, Snapshot
from gpuwarden.probes.events import ProcessIdentity, ticks
from gpuwarden.watch.cuda_facts import NamedKey, StartKey
from gpuwarden.watch.open_judge import device_names
from gpuwarden.watch.open_watch import OpenWatch
from gpuwarden.watch.opens import fact

LOOKS = 3
"""In a row: a program may open the device a moment before its library is known here."""


class LibraryLess:
    """Which holders they are; one thread."""

    def __init__(self) -> None:
        self._seen: dict[StartKey, int] = {}

    def look(
        self, without: Iterable[tuple[int, int, tuple[str, ...]]], holding: Iterable[StartKey]
    ) -> list[StartKey]:
        """What the tracer says once a second; the processes that are one now, or no longer."""
        names = {(pid, start) for pid, start, _ in without}
        now = {key for key in holding if (key[0], ticks(key[1])) in names}
        changed = [key for key, looks in self._seen.items() if looks >= LOOKS and key not in now]
        before = self._seen
        self._seen = {key: min(before.get(key, 0) + 1, LOOKS) for key in now}
        changed += [key for key, looks in self._seen.items() if looks == LOOKS > before.get(key, 0)]
        return changed

    def has(self, key: StartKey) -> bool:
        return self._seen.get(key, 0) >= LOOKS

    def identity(self, key: StartKey, watch: OpenWatch) -> ProcessIdentity | None:
        """Who it is, by what it holds."""
        if not self.has(key):
            return None
        entries = (watch.book.entry(one) for one in watch.book.keys_of(*key))
        return next((one.event.process for one in entries if one is not None), None)

    def added(self, snapshot: Snapshot, process: Process, watch: OpenWatch) -> Snapshot:
        """The snapshot with what it holds, as a process without a library, if it is one."""
        key = next((one for one in self._seen if _is(one, process) and self.has(one)), None)
        if key is None:
            return snapshot
        names = device_names(snapshot.device_nodes)
        entries = [watch.book.entry(one) for one in sorted(watch.book.keys_of(*key))]
        opens = tuple(fact(one, watch.majors, names) for one in entries if one is not None)
        without = CudaProcess(
            pid=process.pid, start_time_ticks=process.start_time_ticks, has_descriptors=True
        )
        return replace(snapshot, cuda=(*snapshot.cuda, without), opens=snapshot.opens or opens)

    def named(self) -> list[NamedKey]:
        """They, as findings name them."""
        return [(pid, ticks(start)) for pid, start in self._seen if self.has((pid, start))]


def _is(key: StartKey, process: Process) -> bool:
    return (key[0], ticks(key[1])) == (process.pid, process.start_time_ticks)
