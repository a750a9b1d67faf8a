"""The device side of the agent: the probe or its fallback, holders, majors, what was lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from gpuwarden.errors import GpuwardenError
from gpuwarden.host import Host
from gpuwarden.probes.choose import Choice, chosen, watched_numbers
from gpuwarden.probes.events import (
    Event,
    ExitEvent,
    GroupEvent,
    OpenEvent,
    boot_offset_ns,
)
from gpuwarden.probes.settings import Counters, Settings
from gpuwarden.sensors.device_nodes import Majors, assigned_majors, read_majors
from gpuwarden.sensors.process import stat_lines
from gpuwarden.watch.open_watch import OpenWatch
from gpuwarden.watch.options import WatchOptions
from gpuwarden.watch.own_processes import OwnProcesses

MAJORS_SECONDS = 5.0
COUNTS_SECONDS = 10.0
CLOCK_SECONDS = 60.0
SOON_SECONDS = (0.02, 0.1, 0.3)
"""After an attempt: when to look whether the device is held."""
FLOOD_A_SECOND = 2000
MEASURED_SECONDS = 0.05
GATHER_SECONDS = 0.005
POLL = "poll"
"""What ``--way`` calls the fallback without eBPF."""


def listed_majors(host: Host) -> Majors:
    """The accelerators' majors: those of /proc/devices, and those that are assigned for good."""
    try:
        listed = read_majors(host)
    except GpuwardenError:
        return assigned_majors()
    # A node can be made and tried before its driver is loaded.
    return Majors({**assigned_majors().names, **listed.names}, listed.misc)


class DeviceSide:
    """Feeds an ``OpenWatch`` from whatever way of seeing opens works here; one thread."""

    def __init__(
        self, host: Host, options: WatchOptions, own: OwnProcesses, *, same_pids: bool = True
    ) -> None:
        """``same_pids``: /proc numbers processes as the kernel's events do."""
        self.majors = listed_majors(host)
        self.choice = Choice(way="")
        self._host = host
        self._options = options
        self._own = own
        self._same_pids = same_pids
        self._majors_at = self._counts_at = self._clock_at = time.monotonic()
        self._look_at: list[float] = []
        self._changed: Callable[[], None] = lambda: None
        self._ended: Callable[[int], None] = lambda pid: None
        self._counters = Counters()
        self._opened: set[int] = set()
        self._dropped_opens = 0
        self._measured_at, self._taken, self._flooded = time.monotonic(), 0, False

    def start(self, stack: ExitStack) -> None:
        """Loads the best way. Errors: UsageError for a way that there is not."""
        options = self._options
        settings = Settings(
            limit_events=options.limit_events,
            return_values=options.return_values,
            groups=options.enforce,
        )
        ways = options.ways
        if ways is not None:
            ways = tuple(way for way in ways if way != POLL)
        self.choice = stack.enter_context(
            chosen(watched_numbers(self.majors), settings, host=self._host, ways=ways)
        )

    def attend(
        self, watch: OpenWatch, changed: Callable[[], None], ended: Callable[[int], None]
    ) -> None:
        """``changed``: who holds what is different; ``ended``: a process that had a device."""
        self._watch, self._changed, self._ended = watch, changed, ended
        watch.book.boot_offset_ns = boot_offset_ns()
        if self.choice.probe is not None:
            self.choice.probe.skim = watch.skim
            watch.forebears.origin = self.choice.probe.opener

    # ---------------------------------------------------------------- events

    def take(self) -> list[GroupEvent]:
        """Hands what the ring holds to the watch; gives the control groups that were made."""
        probe = self.choice.probe
        if probe is None:
            return []
        events = probe.poll(0)
        if not events:
            return []
        mine: list[Event] = []
        groups: list[GroupEvent] = []
        for event in events:
            if isinstance(event, GroupEvent):
                groups.append(event)
                continue
            if isinstance(event, OpenEvent):
                if self._own.has(event.process):
                    continue
                self._opened.add(event.process.pid)
            elif isinstance(event, ExitEvent):
                self._ended(event.pid)
            mine.append(event)
        before = self._watch.book.attempts_waiting
        self._watch.events(mine)
        if self._watch.book.attempts_waiting > before and not self._look_at:
            now = time.monotonic()
            self._look_at = [now + seconds for seconds in SOON_SECONDS]
        return groups

    def opened_since(self) -> set[int]:
        """Processes that opened a device since this was asked last."""
        opened, self._opened = self._opened, set()
        return opened

    def seconds_to_gather(self) -> float:
        """In a flood, how long to let records gather: a turn for each would cost ten times more."""
        probe, now = self.choice.probe, time.monotonic()
        if probe is None:
            return 0.0
        if now - self._measured_at >= MEASURED_SECONDS:
            rate = (probe.taken - self._taken) / (now - self._measured_at)
            self._flooded = rate >= FLOOD_A_SECOND
            self._measured_at, self._taken = now, probe.taken
        return GATHER_SECONDS if self._flooded else 0.0

    def look(self, *, now: bool = False) -> None:
        """Looks who holds a device, if it is time; always with ``now``."""
        probe = self.choice.probe
        due = self._look_at and time.monotonic() >= self._look_at[0]
        if probe is None or not (now or due):
            return
        if due:
            del self._look_at[0]
        own = self._own.pids
        dropped = probe.counters().dropped_opens
        try:
            held = [one for one in probe.holders(once=True) if one.pid not in own]
        except GpuwardenError:
            return
        # Who is new among the holders may have opened it with one of the events that were lost.
        lost, self._dropped_opens = dropped > self._dropped_opens, dropped
        if not self._watch.book.has_looked:
            # Their end is told of from now on, as of those that are seen to open one.
            for pid, start_ns in {(one.pid, one.start_time_ns) for one in held}:
                probe.follow(pid, start_ns)
        if self._watch.held(held, time.time_ns(), after_loss=lost):
            self._changed()

    def seconds_to_wait(self) -> float | None:
        """Until the next look; None when none is due before the next round."""
        return max(self._look_at[0] - time.monotonic(), 0.0) if self._look_at else None

    # ---------------------------------------------------------------- rounds

    def round(self) -> None:
        """Once a second: holders, attempts that came to nothing, majors, clocks."""
        now = time.monotonic()
        self._poll()
        self.look(now=True)
        probe = self.choice.probe
        if probe is not None:
            self._watch.expired(time.clock_gettime_ns(time.CLOCK_BOOTTIME))
            self._counters = probe.counters()
            if now - self._clock_at >= CLOCK_SECONDS:
                self._clock_at = now
                probe.resynchronise()
                self._watch.book.boot_offset_ns = boot_offset_ns()
        if now - self._majors_at >= MAJORS_SECONDS:
            self._majors_at = now
            self._follow_majors()
            self._bury()

    def _bury(self) -> None:
        """Notes the end of processes that have findings and whose exit is not told of."""
        if self._same_pids:
            alarms, now_ns = self._watch.alarms, time.time_ns()
            for pid, start_time_ticks in alarms.living():
                line = stat_lines.read_one(self._host, pid)
                if line is None or line.start_time_ticks != start_time_ticks:
                    alarms.ended((pid, start_time_ticks), now_ns)

    def _poll(self) -> None:
        poll = self.choice.poll
        if poll is None:
            return
        try:
            found = poll.look()
        except GpuwardenError:
            return
        self._watch.events([event for event in found if not self._own.has(event.process)])
        if found:
            self._changed()

    def _follow_majors(self) -> None:
        majors = listed_majors(self._host)
        if majors == self.majors:
            return
        self.majors = self._watch.majors = majors
        if self.choice.probe is not None:
            self.choice.probe.watch(watched_numbers(majors))
        self._changed()

    def forget(self, ended: Sequence[tuple[int, int]]) -> None:
        """Takes the exact counts of processes that have ended, then makes room."""
        probe, now = self.choice.probe, time.monotonic()
        if probe is not None and (ended or now - self._counts_at >= COUNTS_SECONDS):
            self._counts_at = now
            self._watch.counted(probe.counts())
        for pid, start_ns in ended:
            keys = self._watch.forget(pid, start_ns)
            if probe is not None:
                probe.forget(pid, start_ns, {key[2:5] for key in keys})

    # ---------------------------------------------------------------- sight

    def lost(self) -> dict[str, int]:
        """Events lost since the start, by cause."""
        counters = self._counters
        return {
            "opens, no room in the ring": counters.dropped_opens,
            "returns, no room in the ring": counters.dropped_returns,
            "execs, no room in the ring": counters.dropped_execs,
            "exits, no room in the ring": counters.dropped_exits,
            "records that could not be decoded": counters.malformed,
            **self.own_losses(),
        }

    def own_losses(self) -> dict[str, int]:
        """Events lost in the agent itself, by cause."""
        return {
            "queue full": self._watch.counts.queue_full,
            "too many processes at once": self._watch.book.crowded_out,
            "too many findings at once": self._watch.alarms.crowded_out,
        }
