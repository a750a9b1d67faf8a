"""One process on one GPU, or one GPU, over time: buckets in a ring for each window.

Figures go into an open bucket of ten seconds. A closed one is added to the ring of each window,
which keeps its sums as it goes: what a window costs does not depend on how long it is.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from operator import add, sub
from typing import Annotated

import msgspec

from gpuwarden.model import Usage, UtilisationSample

SECOND_NS = 10**9
FINE_SECONDS = 10
IDLE_BELOW_PERCENT = 10
BUSY_FROM_PERCENT = 50
CALM_MS = 5_000
"""Below 10 % for so long is idle: a training job between two batches is not."""
LOUD_MS = 3_000
"""At 50 % or more for so long begins a burst; one stray figure does not."""
SAMPLE_SPAN_MS = 2_000
"""A driver's sample speaks for the time since the one before it, but not for more than this."""

# What a bucket counts, in milliseconds unless named otherwise; the ten deciles come first.
LISTED, BUSY_LOGGED_IN, BUSY_NOBODY, LOGGED_IN, LOGIN_KNOWN, BURSTS, NO_CLIENT, BUSY_NO_CLIENT = (
    range(10, 18)
)
FIELDS = 18
UNKNOWN, IDLE, BUSY, IN_BURST = range(4)
"""Busy without having been seen idle before is no burst: it may have run for days."""
_ROW = struct.Struct(f"<{FIELDS}I")
_NOTHING = [0] * FIELDS
ROW_LIMIT = 1 << 28
NO_LOW, NO_HIGH = 1 << 62, -1
"""Memory that was never told: above every least, below every most."""


Kept = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
"""A time or an amount of a kept state; larger ones do not come from here."""


class RingState(msgspec.Struct, array_like=True):
    """A ring as it is kept over a restart: packed rows and, for each, its slot and extremes."""

    width_seconds: int
    rows: bytes
    slots: list[Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]]
    lows: list[Kept]
    highs: list[Annotated[int, msgspec.Meta(ge=NO_HIGH, le=1 << 62)]]
    clients: list[Kept]


class SeriesState(msgspec.Struct, array_like=True):
    """A series as it is kept over a restart; the open bucket counts as a row of its own."""

    gpu_id: str
    pid: int | None
    start_time_ticks: int | None
    binary: str | None
    first_ns: Kept
    last_ns: Kept
    ended_ns: Kept
    until_ns: Kept
    sampled_ns: Kept
    mood: int
    rings: list[RingState]


class Ring:
    """The buckets of one window, oldest first, and the sums over all of them."""

    __slots__ = (
        "clients", "highs", "length", "lows", "newest", "rows", "slots", "sums", "width_seconds",
    )  # fmt: skip

    def __init__(self, window_seconds: int) -> None:
        fine = window_seconds <= 90 * FINE_SECONDS
        self.width_seconds = FINE_SECONDS if fine else -(-window_seconds // 600) * FINE_SECONDS
        self.length = -(-window_seconds // self.width_seconds)
        self.rows: deque[bytes] = deque()
        """Packed, all but the newest: a hundred buckets of a thousand processes are many."""
        self.newest = list(_NOTHING)
        self.slots: deque[int] = deque()
        self.lows: deque[int] = deque()
        self.highs: deque[int] = deque()
        self.clients: deque[int] = deque()
        self.sums = list(_NOTHING)

    def put(self, at_seconds: int, row: Sequence[int], low: int, high: int, clients: int) -> None:
        """Adds a closed bucket to the slot of its time."""
        slot = at_seconds // self.width_seconds
        slots = self.slots
        if slots and slots[-1] >= slot:
            self.newest = list(map(add, self.newest, row))
            self.lows[-1] = min(self.lows[-1], low)
            self.highs[-1] = max(self.highs[-1], high)
            self.clients[-1] = max(self.clients[-1], clients)
        else:
            if slots:
                self.rows.append(_ROW.pack(*self.newest))
            self.newest = list(row)
            slots.append(slot)
            # Memory that stays the same is one number, not one for each bucket.
            lows, highs = self.lows, self.highs
            lows.append(lows[-1] if lows and lows[-1] == low else low)
            highs.append(highs[-1] if highs and highs[-1] == high else high)
            self.clients.append(clients)
        self.sums = list(map(add, self.sums, row))
        if slots[0] <= slot - self.length:
            self.forget_before(slot - self.length + 1)

    def forget_before(self, slot: int) -> None:
        """Drops the buckets before a slot."""
        while self.slots and self.slots[0] < slot:
            self.slots.popleft()
            self.lows.popleft()
            self.highs.popleft()
            self.clients.popleft()
            gone: Sequence[int] = _ROW.unpack(self.rows.popleft()) if self.rows else self.newest
            self.sums = list(map(sub, self.sums, gone))

    def state(self) -> RingState:
        packed = [*self.rows, _ROW.pack(*self.newest)] if self.slots else []
        return RingState(
            self.width_seconds,
            b"".join(packed),
            list(self.slots),
            list(self.lows),
            list(self.highs),
            list(self.clients),
        )

    def restore(self, state: RingState) -> bool:
        """Takes over a former ring's buckets; False when they do not fit together."""
        count = len(state.slots)
        lengths = {len(state.lows), len(state.highs), len(state.clients)}
        if lengths != {count} or len(state.rows) != count * _ROW.size or count > 1000:
            return False
        if any(b <= a for a, b in pairwise(state.slots)):
            return False
        for place, slot in enumerate(state.slots):
            row = _ROW.unpack_from(state.rows, place * _ROW.size)
            # No bucket holds more time than passed, save for what a late sample adds.
            if sum(row[:10]) > 2 * state.width_seconds * 1000 or max(row) > ROW_LIMIT:
                return False
            low, high = state.lows[place], state.highs[place]
            self.put(slot * state.width_seconds, row, low, high, state.clients[place])
        return True


class Series:
    """What is remembered of one process on one GPU, or of a GPU as a whole."""

    __slots__ = (
        "_calm_ms", "_clients", "_high", "_loud_ms", "_low", "_mood", "_open", "_open_slot",
        "_phase", "_usages", "binary", "ended_ns", "first_ns", "gpu_id", "last_ns", "memory_bytes",
        "pid", "rings", "sampled_ns", "start_time_ticks", "until_ns",
    )  # fmt: skip

    def __init__(
        self,
        gpu_id: str,
        pid: int | None,
        start_time_ticks: int | None,
        at_ns: int,
        windows_seconds: Sequence[int],
    ) -> None:
        self.gpu_id = gpu_id
        self.pid = pid
        self.start_time_ticks = start_time_ticks
        self.binary: str | None = None
        self.first_ns = self.last_ns = at_ns
        self.until_ns = at_ns
        """Utilisation is accounted for up to here: no time counts twice."""
        self.sampled_ns = 0
        """The time of the newest sample of the driver's that was used."""
        self.ended_ns = 0
        self.memory_bytes: int | None = None
        self.rings = [Ring(seconds) for seconds in windows_seconds]
        self._mood = UNKNOWN
        self._calm_ms = self._loud_ms = 0
        self._open = list(_NOTHING)
        # Not all in one round: each closes its buckets at seconds of its own.
        self._phase = (pid or 0) % FINE_SECONDS
        self._open_slot = (at_ns // SECOND_NS + self._phase) // FINE_SECONDS
        self._low, self._high = NO_LOW, NO_HIGH
        self._clients = 0
        self._usages: tuple[Usage, ...] = ()

    # ------------------------------------------------------------------ what is seen

    def seen(self, at_ns: int, listed_ms: int, memory_bytes: int | None, clients: int) -> None:
        """It was listed in this round; closes the open bucket when its time is over."""
        slot = (at_ns // SECOND_NS + self._phase) // FINE_SECONDS
        if slot != self._open_slot:
            self._close(slot)
        self.last_ns = at_ns
        self._open[LISTED] += listed_ms
        self.memory_bytes = memory_bytes
        if memory_bytes is not None and not self._low <= memory_bytes <= self._high:
            self._low = min(self._low, memory_bytes)
            self._high = max(self._high, memory_bytes)
        if clients > self._clients:  # noqa: PLR1730 - twice as fast, and asked 200 times a second
            self._clients = clients

    def sampled(self, samples: Sequence[UtilisationSample], at_ns: int, login: bool | None) -> bool:
        """Uses the samples that are newer than the last one used; False when none is.

        ``samples`` are oldest first and may repeat those of earlier rounds. One that lies ahead of
        ``at_ns`` is not used: it would make all time until then count as accounted for.
        """
        newest, last_ns = self.sampled_ns, samples[-1].at_ns
        limit_ns = at_ns + SAMPLE_SPAN_MS * 1_000_000
        if last_ns <= newest or last_ns > limit_ns:
            return False
        first = len(samples) - 1
        while first and samples[first - 1].at_ns > newest:
            first -= 1
        self.sampled_ns = last_ns
        self._measured(samples[first:] if first else samples, SAMPLE_SPAN_MS, limit_ns, login)
        return True

    def measured(self, percent: int, at_ns: int, span_limit_ms: int, login: bool | None) -> None:
        """Uses a figure that speaks for at most ``span_limit_ms`` before ``at_ns``."""
        figure = UtilisationSample(at_ns=at_ns, sm_percent=percent)
        self._measured((figure,), span_limit_ms, at_ns, login)

    def without_client(self, percent: int, span_ms: int) -> None:
        """For a GPU: nobody was listed, in this round and in the one before."""
        self._open[NO_CLIENT] += span_ms
        if percent >= BUSY_FROM_PERCENT:
            self._open[BUSY_NO_CLIENT] += span_ms

    def _measured(
        self,
        figures: Sequence[UtilisationSample],
        span_limit_ms: int,
        limit_ns: int,
        login: bool | None,
    ) -> None:
        """Counts figures, oldest first, each for the time since the one before it."""
        row, until_ns = self._open, self.until_ns
        total_ms = busy_ms = 0
        for figure in figures:
            span_ms = (figure.at_ns - until_ns) // 1_000_000
            if span_ms <= 0 or figure.at_ns > limit_ns:
                continue
            until_ns = figure.at_ns
            if span_ms > span_limit_ms:  # noqa: PLR1730 - as above, up to 6 times as often
                span_ms = span_limit_ms
            percent = figure.sm_percent
            row[percent // 10 if 0 <= percent < 100 else (9 if percent > 0 else 0)] += span_ms
            total_ms += span_ms
            if percent >= BUSY_FROM_PERCENT:
                busy_ms += span_ms
                self._calm_ms = 0
                self._loud_ms += span_ms
                if self._mood < BUSY and self._loud_ms >= LOUD_MS:
                    self._mood = IN_BURST if self._mood == IDLE else BUSY
            elif percent >= IDLE_BELOW_PERCENT:
                self._calm_ms = 0
            else:
                self._calm_ms += span_ms
                if self._calm_ms >= CALM_MS:
                    self._settle()
        self.until_ns = until_ns
        if login is not None:
            row[LOGIN_KNOWN] += total_ms
            row[BUSY_LOGGED_IN if login else BUSY_NOBODY] += busy_ms
            if login:
                row[LOGGED_IN] += total_ms

    def _settle(self) -> None:
        """It is idle: a burst is over."""
        self._loud_ms = 0
        if self._mood == IN_BURST:
            self._open[BURSTS] += 1
        self._mood = IDLE

    def end(self, at_ns: int) -> None:
        """It is no longer listed, so it does nothing on this GPU."""
        self.ended_ns = at_ns
        self._settle()
        self._calm_ms = 0

    def again(self, at_ns: int) -> None:
        """It is listed again; what was between is not covered."""
        self.ended_ns = 0
        self.until_ns = max(self.until_ns, at_ns)

    # ------------------------------------------------------------------ what is told

    def _close(self, slot: int) -> None:
        if any(self._open):
            # The phase is left out here: a bucket of a window holds whole buckets.
            at_seconds = self._open_slot * FINE_SECONDS
            for ring in self.rings:
                ring.put(at_seconds, self._open, self._low, self._high, self._clients)
            self._open = list(_NOTHING)
        self._open_slot = slot
        self._low, self._high = NO_LOW, NO_HIGH
        self._clients = 0
        self._tell()

    def _tell(self) -> None:
        now_seconds = self._open_slot * FINE_SECONDS
        for ring in self.rings:
            ring.forget_before(now_seconds // ring.width_seconds - ring.length)
        self._usages = tuple(
            [self._usage(ring, ring.slots[0]) for ring in self.rings if ring.slots]
        )

    def usages(self) -> tuple[Usage, ...]:
        """One for each window, as of the last bucket that was closed."""
        return self._usages

    def _usage(self, ring: Ring, oldest_slot: int) -> Usage:
        sums = ring.sums
        measured_ms = sum(sums[:10])
        known = sums[LOGIN_KNOWN] > 0
        whole = self.pid is None
        low, high = min(ring.lows, default=NO_LOW), max(ring.highs, default=NO_HIGH)
        oldest_ns = oldest_slot * ring.width_seconds * SECOND_NS
        return Usage(
            gpu_id=self.gpu_id,
            pid=self.pid,
            start_time_ticks=self.start_time_ticks,
            from_ns=min(max(self.first_ns, oldest_ns), self.last_ns),
            until_ns=self.last_ns,
            covered_seconds=(measured_ms or sums[LISTED]) / 1000,
            seconds_by_decile=tuple([ms / 1000 for ms in sums[:10]]) if measured_ms else (),
            memory_min_bytes=low if low < NO_LOW else None,
            memory_max_bytes=high if high > NO_HIGH else None,
            bursts=sums[BURSTS],
            busy_logged_in_seconds=sums[BUSY_LOGGED_IN] / 1000,
            busy_nobody_seconds=sums[BUSY_NOBODY] / 1000,
            logged_in_seconds=sums[LOGGED_IN] / 1000 if known else -1.0,
            clients_seen=max(ring.clients, default=0) if whole else None,
            covered_without_client_seconds=sums[NO_CLIENT] / 1000,
            busy_without_client_seconds=sums[BUSY_NO_CLIENT] / 1000,
        )

    # ------------------------------------------------------------------ over a restart

    def state(self) -> SeriesState:
        """Everything of it; what is open becomes a bucket."""
        self._close(self._open_slot)
        return SeriesState(
            self.gpu_id, self.pid, self.start_time_ticks, self.binary, self.first_ns, self.last_ns,
            self.ended_ns, self.until_ns, self.sampled_ns, self._mood,
            [ring.state() for ring in self.rings],
        )  # fmt: skip

    @classmethod
    def restored(cls, state: SeriesState, windows_seconds: Sequence[int]) -> Series | None:
        """A series as it was; None when its parts contradict each other."""
        found = cls(
            state.gpu_id, state.pid, state.start_time_ticks, state.first_ns, windows_seconds
        )
        widths = {kept.width_seconds: kept for kept in state.rings}
        for ring in found.rings:
            kept = widths.get(ring.width_seconds)
            if kept is not None and not ring.restore(kept):
                return None
        found.binary = state.binary
        found.last_ns, found.ended_ns = state.last_ns, state.ended_ns
        found.until_ns, found.sampled_ns = state.until_ns, state.sampled_ns
        found._mood = state.mood if state.mood in (IDLE, BUSY, IN_BURST) else UNKNOWN
        found._open_slot = (state.last_ns // SECOND_NS + found._phase) // FINE_SECONDS
        found._tell()
        return found
