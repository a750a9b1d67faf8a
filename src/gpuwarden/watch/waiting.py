"""Processes whose container or job is asked for: held for a while, then judged without."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from msgspec import Struct

HELD_SECONDS = 2.0
RETRY_SECONDS = 0.05
RETRY_LIMIT_SECONDS = 0.4
"""A runtime may come to know a container a moment late, and forget it a moment later: asked soon,
then twice as long each time."""
LATE_SECONDS = 2.0
"""Until a process that was judged without is asked about again; twice as long each time."""
LATE_LIMIT_SECONDS = 64.0
LIMIT = 1 << 16
BATCH = 64
"""Processes asked about at once."""

Key = tuple[int, int]
"""(pid, start time since boot in ns)."""


class _Held(Struct):
    since: float
    next_try: float
    asked: bool = False
    """Whether an answer came since it was asked about."""
    pause: float = RETRY_SECONDS


class _Late(Struct):
    next_try: float
    pause: float = LATE_SECONDS


class Waiting:
    """Who waits for an answer, since when, and when to ask next; times are monotonic seconds."""

    def __init__(self) -> None:
        self._held: OrderedDict[Key, _Held] = OrderedDict()
        self._late: OrderedDict[Key, _Late] = OrderedDict()
        self._asked: list[Key] = []

    def __len__(self) -> int:
        """Those that are held: not judged yet."""
        return len(self._held)

    def holds(self, key: Key) -> bool:
        """Whether it is held."""
        return key in self._held

    def gave_up(self, key: Key) -> bool:
        """Whether its time is up: it is judged with what is known."""
        return key in self._late

    def hold(self, key: Key, now: float) -> bool:
        """Holds it until it was asked about; True if it was not held yet."""
        one = self._held.get(key)
        if one is None:
            self._held[key] = _Held(now, now)
            return True
        if one.asked:
            one.asked, one.next_try = False, now + one.pause
            one.pause = min(one.pause * 2, RETRY_LIMIT_SECONDS)
        return False

    def later(self, key: Key, now: float) -> None:
        """Goes on asking about one that was judged without, ever more seldom."""
        one = self._late.get(key)
        if one is not None and one.next_try <= now:
            one.next_try = now + one.pause
            one.pause = min(one.pause * 2, LATE_LIMIT_SECONDS)

    def forget(self, key: Key) -> None:
        """Its surroundings are known, or it is gone."""
        self._held.pop(key, None)
        self._late.pop(key, None)

    def overdue(self, now: float) -> list[Key]:
        """Those whose time is up now; each is given once."""
        found = []
        while self._held:
            key, one = next(iter(self._held.items()))
            if now - one.since < HELD_SECONDS:
                break
            del self._held[key]
            self._late[key] = _Late(now)
            found.append(key)
            if len(self._late) > LIMIT:
                self._late.popitem(last=False)
        return found

    def unanswered(self) -> list[Key]:
        """All that are judged without an answer, for when something new is known."""
        return list(self._late)

    # ---------------------------------------------------------------- asking

    def due(self, now: float) -> list[Key]:
        """Whom to ask about, those that are held first."""
        found = [key for key, one in self._held.items() if one.next_try <= now]
        found += [key for key, one in self._late.items() if one.next_try <= now]
        return found[:BATCH]

    def asking(self, keys: Iterable[Key]) -> None:
        """They are being asked about."""
        self._asked = list(keys)

    def refused(self, keys: Iterable[Key], now: float) -> None:
        """They could not be asked about now."""
        for key in keys:
            one = self._held.get(key) or self._late.get(key)
            if one is not None:
                one.next_try = now + RETRY_LIMIT_SECONDS

    def answered(self) -> list[Key]:
        """Those whose answer came, or failed to."""
        keys, self._asked = self._asked, []
        for key in keys:
            one = self._held.get(key)
            if one is not None:
                one.asked = True
        return [key for key in keys if key in self._held or key in self._late]

    def next_time(self, *, busy: bool) -> float | None:
        """When the next one is due; while a question is under way only for giving up."""
        first = next(iter(self._held.values()), None)
        times = [] if first is None else [first.since + HELD_SECONDS]
        if not busy:
            times += [one.next_try for one in self._held.values()]
            times += [one.next_try for one in self._late.values()]
        return min(times, default=None)
