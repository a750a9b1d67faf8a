"""What the store keeps of findings: their states, the news of them, and who got which."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import msgspec


class LedgerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much of findings is kept."""

    spool_rows: int = 100_000
    spool_bytes: int = 64 << 20
    resolved_age_ns: int = 90 * 86_400 * 10**9
    resolved_rows: int = 100_000
    """A process a second that should not be there must not fill the disk in a month."""


class FindingState(NamedTuple):
    """What the life of one finding needs after a restart; ``state`` is its caller's to read."""

    id: str
    open: bool
    last_seen_ns: int
    state: bytes


class News(NamedTuple):
    """One transition to be delivered."""

    sequence: int
    at_ns: int
    body: bytes


class SinkCursor(msgspec.Struct):
    """How far one sink is; ``dropped`` counts what it never got and never will."""

    cursor: int = 0
    dropped: int = 0


class Unwritten:
    """What could not be written yet; merged, so that a full disk costs bounded memory."""

    def __init__(self) -> None:
        self.states: dict[str, FindingState] = {}
        self.news: deque[News] = deque()
        self.cursors = False

    def __bool__(self) -> bool:
        return bool(self.states or self.news or self.cursors)

    def clear(self) -> None:
        self.states.clear()
        self.news.clear()
        self.cursors = False
