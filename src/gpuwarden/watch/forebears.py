"""Where a held descriptor came from, when its holder did not open it: a forebear, or nobody."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpuwarden.model import Process
from gpuwarden.watch.opens import OpenBook
from gpuwarden.watch.waiting import Key


class Forebears:
    """Looks for who opened a device among those that a process descends from."""

    def __init__(self, book: OpenBook) -> None:
        self.origin: Callable[[int, int], Key | None] | None = None
        """Who used a device first in a process's line of forks, as the probe keeps it."""
        self._book = book

    def of(
        self, major: int, minor: int, process: Process, start_ns: int, lineage: Sequence[Process]
    ) -> int | None:
        """The pid of a forebear that opened the device while it was watched; None for none."""
        openers = self._book.openers(major, minor)
        for parent in lineage:
            if parent.pid in openers:
                return parent.pid
        if self.origin is not None:
            # The kernel follows forks, also when those between have ended.
            found = self.origin(process.pid, start_ns)
            if found is not None and self._book.has_opened(*found, major, minor):
                return found[0]
            return None
        # A parent that has ended leaves its number behind as its children's group or session.
        for pid in (process.ppid, process.process_group, process.session_id):
            if pid is not None and pid != process.pid and pid in openers:
                return pid
        return None
