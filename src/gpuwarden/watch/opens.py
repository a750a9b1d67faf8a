"""Opens merged: one entry a (process, device, how), settled when its end is known."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from gpuwarden.model import DeviceOpen, OpenState
from gpuwarden.probes.events import (
    HOWS,
    HeldDescriptor,
    How,
    OpenCount,
    OpenEvent,
    OpenReturn,
    ProcessIdentity,
    ticks,
)
from gpuwarden.probes.skim import DENIALS, OVERLAY_ROOT, path_of
from gpuwarden.probes.states import Attempts, Twins
from gpuwarden.sensors.device_nodes import Majors, kind_of

ENTRIES_LIMIT = 1 << 16
PAST_LIMIT = 4096
PATHS_LIMIT = 8
"""Names of one device, used by one process in one way."""
FURTHEST: tuple[OpenState, ...] = ("denied", "unknown", "attempted", "opened")
"""States by how far an open came, the furthest last; what is unknown may have come further."""

Key = tuple[int, int, int, int, How, str]
"""(pid, start time since boot in ns, major, minor, how, our own denial)."""
HolderKey = tuple[int, int, int, int]


class Entry(Struct):
    """What one process did with one device in one way."""

    event: OpenEvent
    """The first of them, or the one that came furthest."""
    first_ns: int
    last_ns: int
    count: int = 1
    paths: set[str | None] = field(default_factory=set)
    """The names that it was used by so far; bounded, what comes after is told as the first."""
    raw_paths: set[bytes] = field(default_factory=set)
    """The same as the kernel has them, as far as one was only looked at."""
    told: int = 0
    """How many of them were told of in a finding or found to be nobody's business."""
    waits: bool = False
    """Its end is not known yet."""
    looked_at: bool = False
    """One that will wait is on its way to be decoded."""
    settled: bool = False
    """The end of one of them was known: ``attempted`` then is what it came to."""
    opened_by: int | None = None
    at_start: bool = False

    @property
    def process(self) -> ProcessIdentity:
        return self.event.process


class OpenBook:
    """Takes events in the order they come and says which entries are news.

    News: an entry that is new, or that came further than before. A repetition only counts. What is
    here is bounded; the entry that was quiet for longest makes room (``crowded_out`` counts them).
    """

    def __init__(self, *, return_values: bool = False) -> None:
        self._entries: OrderedDict[Key, Entry] = OrderedDict()
        self._by_process: dict[tuple[int, int], set[Key]] = {}
        self._attempts = Attempts(return_values=return_values)
        self._return_values = return_values
        self._twins = Twins()
        self._holders: set[HolderKey] | None = None
        self._past: OrderedDict[tuple[int, int], set[tuple[int, int]]] = OrderedDict()
        """Devices by process that opened them and has ended: its children may hold them yet."""
        self.crowded_out = 0
        self.boot_offset_ns = 0
        """Wall clock minus boot clock, for times that are not decoded."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def merged_twins(self) -> int:
        """Second questions of the kernel about one open on overlayfs."""
        return self._twins.merged

    @property
    def attempts_waiting(self) -> int:
        """Attempts whose end is not known yet."""
        return len(self._attempts)

    @property
    def has_looked(self) -> bool:
        """Whether it is known who holds a device."""
        return self._holders is not None

    def entry(self, key: Key) -> Entry | None:
        return self._entries.get(key)

    def entries(self) -> Mapping[Key, Entry]:
        return self._entries

    # ---------------------------------------------------------------- events

    def opened(self, event: OpenEvent) -> Iterator[Key]:
        """One event of the probe; the keys that are news because of it."""
        if self._twins.is_second(event):
            return
        key = key_of(event)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._add(key, event)
            yield key
        else:
            self._count(entry, event)
            entry.looked_at = False
            self._entries.move_to_end(key)
            further = _further(entry.event.state, event.state)
            if event.source == "falco" and further != entry.event.state:
                # Falco has seen how it ended.
                entry.event = replace(entry.event, state=event.state)
                entry.settled = True
                yield key
            if event.path not in entry.paths and len(entry.paths) < PATHS_LIMIT:
                # Another name of the device: what that says may be news.
                entry.paths.add(event.path)
                entry.event = replace(entry.event, path=event.path)
                yield key
            if entry.event.process.exe_inode != event.process.exe_inode:
                # It executed another program since: that is news of its own.
                entry.event = replace(event, state=_further(entry.event.state, event.state))
                yield key
        if event.hits is not None:
            entry.count = max(entry.count, event.hits)
        # Each has an end of its own; where that is not told, one stands for all.
        alone = self._return_values or not entry.waits
        if alone and entry.event.state != "opened" and event.state == "attempted":
            entry.waits = event.how not in ("mknod", "access")
            for given_up in self._attempts.add(event):
                yield from self._settled(given_up)

    def skim(self, fields: tuple[int, ...], path: bytes) -> bool:
        """Counts an open that is one more of a known kind, from a record's ``skim.FIELDS``.

        False when there may be more to it: then it is to be decoded and given to ``opened``.
        """
        time_ns, hits, major, minor, how, denial, length, start_ns, exe_inode, tgid, traits = fields
        if denial >= len(DENIALS) or how >= len(HOWS):
            return False
        entry = self._entries.get((tgid, start_ns, major, minor, HOWS[how], DENIALS[denial]))
        if entry is None or traits & OVERLAY_ROOT:
            return False  # on overlayfs one open comes twice
        event = entry.event
        if event.process.exe_inode != exe_inode:
            return False
        name = path.partition(b"\0")[0] if length > 0 else b""
        if name not in entry.raw_paths:
            if path_of(path, length) not in entry.paths:
                return False
            entry.raw_paths.add(name)
        if event.state != "opened":
            if self._return_values:
                return False
            if not entry.waits and not entry.looked_at:
                # One of them is decoded, and waits for its end; it stands for those after it.
                entry.looked_at = True
                return False
        entry.count += 1
        entry.count = max(entry.count, hits)
        entry.last_ns = time_ns + self.boot_offset_ns
        return True

    @staticmethod
    def _count(entry: Entry, event: OpenEvent) -> None:
        entry.count += 1
        entry.last_ns = event.at_ns

    def returned(self, how: OpenReturn) -> Iterator[Key]:
        """How an open ended."""
        event = self._attempts.returned(how)
        if event is not None:
            yield from self._settled(event)

    def held(
        self, descriptors: Iterable[HeldDescriptor], at_ns: int, *, after_loss: bool = False
    ) -> tuple[list[Key], bool]:
        """Every descriptor on a watched device there is now: settles attempts, finds new holders.

        Gives the keys that are news, and whether who holds what has changed. The first call says
        who held one before watching began; so does one ``after_loss`` of events, since a holder
        whose open is not known may have been one that was not told of.
        """
        found = list(descriptors)
        news: list[Key] = []
        for event in self._attempts.held(found):
            news += self._settled(event)
        now: set[HolderKey] = set()
        at_start = after_loss or self._holders is None
        for one in found:
            holder = (one.pid, one.start_time_ns, one.major, one.minor)
            if holder in now:
                continue
            now.add(holder)
            if self._holders is not None and holder in self._holders:
                continue
            mine = self._opens_of(holder)
            if mine:
                news += self._got(mine)
            else:
                key = self._hold(one, at_ns, at_start=at_start)
                if key is not None:
                    news.append(key)
        changed, self._holders = now != self._holders, now
        return news, changed

    def expired(self, since_boot_ns: int) -> Iterator[Key]:
        """Attempts whose end did not show in time."""
        for event in self._attempts.expired(since_boot_ns):
            yield from self._settled(event)

    def counted(self, counts: Iterable[OpenCount]) -> None:
        """The kernel's own counts, which hold what the limiter did not tell of."""
        for one in counts:
            for denial in ("", "denied", "would deny"):
                key = (one.pid, one.start_time_ns, one.major, one.minor, one.how, denial)
                entry = self._entries.get(key)
                if entry is not None:
                    entry.count = max(entry.count, one.hits)
                    break

    def forget(self, pid: int, start_time_ns: int) -> list[Key]:
        """The keys of a process that has ended; they are not remembered any longer."""
        keys = self._by_process.pop((pid, start_time_ns), set())
        opened = {key[2:4] for key in keys if self._may_be_inherited(key)}
        if opened:
            self._past[(pid, start_time_ns)] = opened
            while len(self._past) > PAST_LIMIT:
                self._past.popitem(last=False)
        for key in keys:
            self._entries.pop(key, None)
        return sorted(keys)

    def keys_of(self, pid: int, start_time_ns: int) -> set[Key]:
        return set(self._by_process.get((pid, start_time_ns), ()))

    # ---------------------------------------------------------------- entries

    def _add(self, key: Key, event: OpenEvent) -> Entry:
        entry = Entry(event=event, first_ns=event.at_ns, last_ns=event.at_ns)
        entry.paths.add(event.path)
        self._entries[key] = entry
        self._by_process.setdefault(key[:2], set()).add(key)
        if len(self._entries) > ENTRIES_LIMIT:
            old, _ = self._entries.popitem(last=False)
            self.crowded_out += 1
            mine = self._by_process.get(old[:2])
            if mine is not None:
                mine.discard(old)
                if not mine:
                    del self._by_process[old[:2]]
        return entry

    def _settled(self, event: OpenEvent) -> Iterator[Key]:
        key = key_of(event)
        entry = self._entries.get(key)
        if entry is None:
            return
        before = entry.event
        state = _further(before.state, event.state) if entry.settled else event.state
        entry.waits, entry.settled = False, True
        if state != before.state or (event.error is not None and before.error is None):
            entry.event = replace(event, state=state)
            yield key

    def _opens_of(self, holder: HolderKey) -> list[Key]:
        """Its opens that may have given it what it holds: not one that was refused, nor access."""
        pid, start_ns, major, minor = holder
        return [
            key
            for key in sorted(self._by_process.get((pid, start_ns), ()))
            if key[2:4] == (major, minor)
            and key[4] in ("open", "other")
            and self._entries[key].event.state != "denied"
        ]

    def _got(self, keys: Iterable[Key]) -> Iterator[Key]:
        """It holds what it had tried to open: an open can take longer than it was waited for."""
        for key in keys:
            event = self._entries[key].event
            if event.state != "opened":
                yield from self._settled(replace(event, state="opened"))

    def _hold(self, one: HeldDescriptor, at_ns: int, *, at_start: bool) -> Key | None:
        key: Key = (one.pid, one.start_time_ns, one.major, one.minor, "held", "")
        if key in self._entries:
            return None
        event = OpenEvent(
            at_ns=at_ns,
            since_boot_ns=0,
            source="cgroup/dev",
            major=one.major,
            minor=one.minor,
            how="held",
            state="opened",
            process=ProcessIdentity(
                pid=one.pid,
                start_time_ns=one.start_time_ns,
                uid=one.uid,
                comm=one.comm,
                unread={
                    "exe": "known from its descriptor alone",
                    "argv": "known from its descriptor alone",
                },
            ),
            open_flags=one.open_flags,
        )
        entry = self._add(key, event)
        entry.at_start = at_start
        return key

    def holding(self) -> set[tuple[int, int]]:
        """(pid, start time since boot in ns) of every process that holds a device now."""
        return {holder[:2] for holder in self._holders or ()}

    def _may_be_inherited(self, key: Key) -> bool:
        entry = self._entries.get(key)
        if entry is None or entry.event.state == "denied":
            return False
        return key[4] in ("open", "other") or (key[4] == "held" and entry.at_start)

    def has_opened(self, pid: int, start_time_ns: int, major: int, minor: int) -> bool:
        """Whether that process opened this device, or held it when watching began.

        Also one that has ended since.
        """
        process = (pid, start_time_ns)
        if (major, minor) in self._past.get(process, ()):
            return True
        mine = self._by_process.get(process, ())
        return any(key[2:4] == (major, minor) and self._may_be_inherited(key) for key in mine)

    def openers(self, major: int, minor: int) -> set[int]:
        """pids that opened this device since watching began, or hold it now."""
        found = {
            key[0]
            for key in self._entries
            if key[2:4] == (major, minor) and self._may_be_inherited(key)
        }
        return found | {holder[0] for holder in self._holders or () if holder[2:] == (major, minor)}


def key_of(event: OpenEvent) -> Key:
    process = event.process
    place = (event.major, event.minor, event.how, event.denial)
    return (process.pid, process.start_time_ns, *place)


def fact(entry: Entry, majors: Majors, names: Mapping[tuple[int, int], set[str]]) -> DeviceOpen:
    """An entry as the rules see it; ``names``: the paths that each number has under /dev."""
    event = entry.event
    known = names.get((event.major, event.minor))
    path, renamed = event.path, _is_renamed(event.path, known)
    for other in sorted(one for one in entry.paths if one is not None):
        # Of several names the one that is not its own is what matters.
        if not renamed and _is_renamed(other, known):
            path, renamed = other, True
    return DeviceOpen(
        pid=event.process.pid,
        start_time_ticks=ticks(event.process.start_time_ns),
        major=event.major,
        minor=event.minor,
        kind=kind_of(event.major, event.minor, majors) or "other",
        how=event.how,
        state=event.state,
        first_ns=entry.first_ns,
        last_ns=entry.last_ns,
        count=entry.count,
        source=event.source,
        path=path,
        path_is_claimed=event.path_is_claimed,
        renamed=renamed,
        reads=event.reads,
        writes=event.writes,
        open_flags=event.open_flags,
        io_uring=event.io_uring,
        error=event.error,
        denial=event.denial,
        opened_by=entry.opened_by,
        at_start=entry.at_start,
        unread=dict(event.unread),
    )


def _is_renamed(path: str | None, known: set[str] | None) -> bool | None:
    if path is None or not path.startswith("/"):
        return None
    # A number that has no node here may have one in a container's /dev.
    return path not in known if known else not path.startswith("/dev/")


def _further(one: OpenState, other: OpenState) -> OpenState:
    return max(one, other, key=FURTHEST.index)
