"""Each device event by itself, told in order once it is known who it was and how it ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from gpuwarden.model import DeviceOpen, Process
from gpuwarden.probes.events import OpenEvent
from gpuwarden.sensors.device_nodes import Majors
from gpuwarden.watch.identity import Identities
from gpuwarden.watch.open_judge import Surroundings, container_state, device_names
from gpuwarden.watch.opens import Entry, Key, OpenBook, fact
from gpuwarden.watch.waiting import HELD_SECONDS

Tell = Callable[[DeviceOpen, Process, Sequence[Process], int], None]
"""Takes an event, its process, that one's parents, and its time."""


class EventTelling:
    """A queue of events; one that is not settled holds those after it for two seconds at most."""

    def __init__(
        self, tell: Tell, book: OpenBook, identities: Identities, surroundings: Surroundings
    ) -> None:
        self._tell = tell
        self._book = book
        self._identities = identities
        self._surroundings = surroundings
        self._untold: deque[tuple[float, Key, OpenEvent]] = deque()

    def add(self, now: float, key: Key, event: OpenEvent) -> None:
        self._untold.append((now, key, event))

    def next_time(self) -> float | None:
        """When the first of them is told at the latest; None when there is none."""
        return self._untold[0][0] + HELD_SECONDS if self._untold else None

    def tell_settled(
        self, now: float, majors: Majors, is_open: Callable[[tuple[int, int]], bool]
    ) -> None:
        """Tells those that are settled; ``is_open``: whether a process is yet to be judged."""
        names = device_names(self._surroundings.device_nodes)
        while self._untold:
            since, key, event = self._untold[0]
            entry = self._book.entry(key)
            settled = entry is None or not entry.waits
            if (not settled or is_open(key[:2])) and now - since < HELD_SECONDS:
                return
            self._untold.popleft()
            shown = event if entry is None else replace(event, state=entry.event.state)
            process = self._identities.process(event.process)
            alone = Entry(event=shown, first_ns=event.at_ns, last_ns=event.at_ns)
            told = replace(
                fact(alone, majors, names),
                container_state=container_state(process, self._surroundings),
            )
            self._tell(told, process, self._identities.lineage(process), event.at_ns)
