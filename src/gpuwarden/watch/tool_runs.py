"""Management tools that were executed, by process; and which program of a process did what."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from msgspec import Struct, field

from gpuwarden.model import ToolRun
from gpuwarden.probes.events import ExecEvent, ProcessIdentity
from gpuwarden.watch.opens import Entry
from gpuwarden.watch.waiting import Key

LIMIT = 1 << 16
OF_THE_MOMENT = ("mknod", "access")
"""What leaves no descriptor: the business of the program that did it, not of its successor."""


class _Tools(Struct):
    runs: dict[str, ToolRun] = field(default_factory=dict)
    last: ProcessIdentity | None = None
    told: int = 0


class ToolRuns:
    """Bounded; the process that was quiet for longest makes room."""

    def __init__(self) -> None:
        self._tools: OrderedDict[Key, _Tools] = OrderedDict()

    def ran(self, key: Key, event: ExecEvent, tool: str) -> None:
        """Notes that a process became a tool."""
        mine = self._tools.setdefault(key, _Tools())
        known = mine.runs.get(tool)
        mine.runs[tool] = ToolRun(
            pid=event.process.pid,
            start_time_ticks=event.process.start_time_ticks,
            tool=tool,
            at_ns=event.at_ns if known is None else known.at_ns,
            count=1 if known is None else known.count + 1,
        )
        mine.last = event.process
        self._tools.move_to_end(key)
        if len(self._tools) > LIMIT:
            self._tools.popitem(last=False)

    def of(self, key: Key) -> tuple[ToolRun, ...]:
        """The tools that a process was."""
        mine = self._tools.get(key)
        return () if mine is None else tuple(mine.runs.values())

    def last(self, key: Key) -> ProcessIdentity | None:
        """The process as it became a tool for the last time."""
        mine = self._tools.get(key)
        return None if mine is None else mine.last

    def untold(self, key: Key) -> int:
        """How often it became one since this was last asked."""
        mine = self._tools.get(key)
        if mine is None:
            return 0
        ran = sum(run.count for run in mine.runs.values())
        before, mine.told = mine.told, ran
        return ran - before

    def forget(self, key: Key) -> None:
        self._tools.pop(key, None)


def by_program(entries: Iterable[Entry]) -> list[tuple[ProcessIdentity, list[Entry]]]:
    """What each program of a process did, the one that runs last at the end.

    A container's first process makes its nodes as the runtime, before it becomes the image's own.
    """
    programs: dict[int | None, tuple[ProcessIdentity, list[Entry]]] = {}
    for entry in sorted(entries, key=lambda e: (e.event.how not in OF_THE_MOMENT, e.event.at_ns)):
        who = entry.event.process
        # One that is known from its descriptor alone tells of no program.
        inode = who.exe_inode if who.exe_inode is not None else next(reversed(programs), None)
        before, done = programs.pop(inode, (who, []))
        programs[inode] = (before if who.exe_inode is None else who, [*done, entry])
    return list(programs.values())
