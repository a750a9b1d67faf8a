"""Devices that were opened, also by processes that have ended since: for the next judgement."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from gpuwarden.model import DeviceOpen
from gpuwarden.sensors.device_nodes import Majors
from gpuwarden.watch.open_judge import Surroundings, device_names
from gpuwarden.watch.opens import Key, OpenBook, fact

LIMIT = 256


class PastOpens:
    """The last opens that succeeded, of a bounded number of processes."""

    def __init__(self, book: OpenBook, surroundings: Surroundings) -> None:
        self._book = book
        self._surroundings = surroundings
        self._past: deque[DeviceOpen] = deque(maxlen=LIMIT)

    def keep(self, keys: Iterable[Key], majors: Majors) -> None:
        """Remembers what a process opened that is about to be forgotten."""
        self._past.extend(self._opened_by(keys, majors))

    def recent(self, majors: Majors) -> tuple[DeviceOpen, ...]:
        """By processes that are there and by the last that ended."""
        return (*self._past, *self._opened_by(list(self._book.entries())[-LIMIT:], majors))

    def _opened_by(self, keys: Iterable[Key], majors: Majors) -> Iterator[DeviceOpen]:
        names = device_names(self._surroundings.device_nodes)
        for key in sorted(keys):
            entry = self._book.entry(key)
            if entry is not None and entry.event.state == "opened":
                yield fact(entry, majors, names)
