"""The tables of the launch probe: array maps of the kernel, mapped and read while it counts."""

from __future__ import annotations

import mmap
from collections.abc import Iterable

from gpuwarden.probes import layouts
from gpuwarden.probes.cuda.launch_records import LAYOUTS
from gpuwarden.probes.cuda.records import OTHER_HANDLES, LaunchCount

WORD = 8
Process = tuple[int, int]
"""(pid, start time since boot in ns)."""
_PID = 0xFFFFFFFF


def _word(layout: str, member: str) -> int:
    """Where a member is, in words; all members of a slot are words."""
    return layouts.offset(layout, member, among=LAYOUTS) // WORD


class SlotTable:
    """One table; a slot's start time is 0 while the slot is free or being taken."""

    layout: str

    def __init__(self, descriptor: int, slots: int) -> None:
        self._words_each = layouts.size(self.layout, among=LAYOUTS) // WORD
        self._mapping = mmap.mmap(descriptor, slots * self._words_each * WORD)
        self._words = memoryview(self._mapping).cast("Q")
        self._start = _word(self.layout, "start_ns")
        self._owner = _word(self.layout, "owner")
        self._taken_seen = 0
        self.taken: list[int] = []
        """Where the slots begin that are in use, in words."""
        self.freed = 0

    def close(self) -> None:
        self._words.release()
        self._mapping.close()

    def look(self, taken: int) -> None:
        """Finds the slots in use, if any was taken since: ``taken`` is the kernel's count."""
        if taken != self._taken_seen:
            self._taken_seen = taken
            starts = self._words[self._start :: self._words_each].tolist()
            each = self._words_each
            self.taken = [index * each for index, start in enumerate(starts) if start]

    def process(self, at: int) -> Process:
        """Whose slot it is."""
        return self._words[at + self._owner] & _PID, self._words[at + self._start]

    def free(self, gone: set[Process]) -> None:
        """Frees the slots of processes that have ended."""
        left = []
        for at in self.taken:
            if self.process(at) not in gone:
                left.append(at)
                continue
            # What the kernel looks for goes first, what it takes a slot by goes last.
            self._words[at + self._start] = 0
            for word in range(self._words_each):
                if word != self._owner:
                    self._words[at + word] = 0
            self._words[at + self._owner] = 0
        self.freed += len(self.taken) - len(left)
        self.taken = left


class Launches(SlotTable):
    """Launches by process and handle."""

    layout = "launch_slot"
    _slot = layouts.packed(layout, among=LAYOUTS)

    def counts(self) -> list[LaunchCount]:
        """One entry a process and handle."""
        found: dict[tuple[int, int, int], int] = {}
        for at in self.taken:
            start_ns, handle, launches, owner = self._slot.unpack_from(self._mapping, at * WORD)
            key = (owner & _PID, start_ns, handle)
            # Threads that came at once have one slot each.
            found[key] = found.get(key, 0) + launches
        return [LaunchCount(*key, launches) for key, launches in found.items()]


class LaunchingProcesses(SlotTable):
    """What is counted of a process beside its handles."""

    layout = "launching_process"
    _graphs = _word(layout, "graphs")
    _others = _word(layout, "others")
    _told = _word(layout, "told")
    _untold = _word(layout, "untold")
    _told_before = _word(layout, "told_before")

    def counts(self) -> Iterable[LaunchCount]:
        """Graphs, and launches by handles that found no room, where there are any."""
        for at in self.taken:
            pid, start_ns = self.process(at)
            if graphs := self._words[at + self._graphs]:
                yield LaunchCount(pid, start_ns, 0, graphs)
            if others := self._words[at + self._others]:
                yield LaunchCount(pid, start_ns, OTHER_HANDLES, others)

    def begin_stretch(self) -> None:
        """What was told until now is no part of the next stretch."""
        for at in self.taken:
            self._words[at + self._told_before] = self._words[at + self._told]

    def told(self) -> int:
        """Launches told of since ``begin_stretch``."""
        return sum(
            self._words[at + self._told] - self._words[at + self._told_before] for at in self.taken
        )

    def untold(self) -> dict[Process, int]:
        """Launches in stretches that were not told of, since each process was first seen."""
        return {self.process(at): self._words[at + self._untold] for at in self.taken}
