"""Finds every CUDA driver library that any process maps, whatever it is called, and who maps it.

The kernel tells of each executable mapping as it is made; processes' maps are read at the start,
when the kernel had to leave something out, and round by round in case something was missed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec import Struct

from gpuwarden.cuda.library_files import LibraryFiles
from gpuwarden.cuda.mapped_files import Executable, MapsKey, read_executables
from gpuwarden.cuda.readiness import Readiness
from gpuwarden.cuda.side_band import SideBand
from gpuwarden.cuda.without_library import WithoutLibrary
from gpuwarden.errors import Denied, GpuwardenError
from gpuwarden.host import Host
from gpuwarden.probes.cuda.library import FoundLibrary, LibraryKey
from gpuwarden.sensors.process.stat_lines import read_line

ROUND_SECONDS = 30.0
"""In which every process's maps are read once while the kernel tells of mappings."""
RESCAN_SECONDS = 1.5
"""Between reads of all maps where it does not, or has left something out."""
RESCAN_SHARE = 0.05
"""Of a CPU that those may take, which makes them rarer where there are many processes."""
PAUSE_SECONDS = 0.02
"""Until what the kernel tells next is looked at: a storm of short programs is taken in bulk."""


class LibraryNews(NamedTuple):
    """What has changed, and how it stands."""

    found: list[FoundLibrary]
    """The descriptor of each stays open until the look after the one that tells its end."""
    gone: list[LibraryKey]
    mapped: Mapping[tuple[int, int], tuple[LibraryKey, ...]]
    """(pid, start in ticks) of every process that maps one that was found → which."""
    problems: list[str]
    """What is not seen, and why, as long as that is so."""


class _User(Struct):
    start_time_ticks: int
    files: set[MapsKey]


class Libraries:
    """Looks when asked; ``fileno`` is readable when there is something to look at."""

    def __init__(self, host: Host, *, side_band: bool = True) -> None:
        self._host = host
        self._files = LibraryFiles(host)
        self._users: dict[int, _User] = {}
        self._to_read = self._files.to_read
        self._denied: dict[int, str] = {}
        """Processes that are there and whose maps cannot be read → why."""
        self._round: list[int] = []
        self._round_size = 0
        self._round_at = self._round_began = 0.0
        self._all_at = 0.0
        self._all_due = True
        self._now = time.monotonic()
        self._readiness = Readiness()
        self._side_band: SideBand | None = None
        if side_band:
            try:
                self._side_band = SideBand()
            except GpuwardenError as error:
                self._files.problem("side band", f"mappings are found by rescans alone: {error}")
        self._watch()

    def close(self) -> None:
        if self._side_band is not None:
            self._side_band.close()
        self._readiness.close()
        self._files.close()

    def fileno(self) -> int:
        return self._readiness.fileno()

    def look(self, pids: Iterable[int] | None = None) -> LibraryNews:
        """What is found by now. ``pids``: processes to look at in any case."""
        self._now = time.monotonic()
        self._files.begin(self._now)
        self._hear()
        self._to_read.update(pids or ())
        self._rescan()
        self._read_those()
        self._files.take()
        self._read_those()
        used = {key for user in self._users.values() for key in user.files}
        turns = self._files.book.turns(used, self._now)
        self._watch()
        return LibraryNews(turns.found, turns.gone, self._mapped(), self._problems())

    def ended(self, pid: int) -> None:
        """A process is gone."""
        self._users.pop(pid, None)

    def without_library(self, holders: Iterable[tuple[int, int]]) -> list[WithoutLibrary]:
        """Those of the processes (pid, start in ticks) that are known to map no driver library.

        One whose maps cannot be read, or of which a file is still being looked at, is left out.
        """
        found = []
        for pid, start in holders:
            if pid in self._users:
                continue
            try:
                keys = read_executables(self._host, pid)
                if not keys or read_line(self._host, pid).start_time_ticks != start:
                    continue
            except GpuwardenError:
                continue
            known = [self._files.book.files.get(key) for key in keys]
            if any(one is None or one.waits or one.library is not None for one in known):
                self._to_read.add(pid)
                continue
            names = {one.soname for one in known if one is not None and one.soname}
            found.append(WithoutLibrary(pid, start, tuple(sorted(names))))
        return found

    # ---------------------------------------------------------------- whose maps are read

    def _hear(self) -> None:
        self._readiness.resume()
        if self._side_band is None:
            return
        heard = self._side_band.hear()
        files, users, own = self._files.book.files, self._users, self._files.own_pids
        for pid, key, generation, start, end in heard.mapped:
            if pid in users:
                self._to_read.add(pid)
            known = files.get(key)
            if (
                known is not None
                and known.library is None
                and not known.waits
                and known.checked_at == self._now
                and known.generation in (generation, None)
            ):
                continue
            if key[2] and pid not in own:
                known = self._files.meet(pid, key, Executable(pid, start, end), generation)
                # Mapped no more as it was told, it may be in another way.
                if known is None or known.library is not None:
                    self._to_read.add(pid)
        self._to_read.update(child for child, parent in heard.forked if parent in users)
        self._to_read.update(pid for pid in heard.ended if pid in users)
        self._all_due |= heard.lost
        if heard.mapped:
            self._readiness.pause(self._side_band.fileno(), PAUSE_SECONDS)

    def _rescan(self) -> None:
        """All processes where that is due, else those whose turn in the round has come."""
        self._all_due |= self._side_band is None
        if self._all_due and self._now >= self._all_at:
            began = time.monotonic()
            self._begin_round()
            self._to_read.update(self._round)
            self._round.clear()
            self._read_those()
            self._all_due = False
            ended = time.monotonic()
            self._all_at = ended + max(RESCAN_SECONDS, (ended - began) / RESCAN_SHARE)
            return
        if not self._round and self._now - self._round_began >= ROUND_SECONDS:
            self._begin_round()
        if self._round:
            share = (self._now - self._round_at) / ROUND_SECONDS
            count = min(int(self._round_size * share), len(self._round))
            if count:
                self._to_read.update(self._round[-count:])
                del self._round[-count:]
                self._round_at = self._now

    def _begin_round(self) -> None:
        self._files.prune(self._round_began)
        self._round_began = self._round_at = self._now
        try:
            self._round = self._host.kernel_pids()
            self._files.problems.pop("processes", None)
        except GpuwardenError as error:
            self._files.problem("processes", f"processes are not listed: {error}")
        self._round_size = len(self._round)

    def _read_those(self) -> None:
        own = self._files.own_pids
        while self._to_read:
            pid = self._to_read.pop()
            if pid not in own:
                self._read(pid)

    def _read(self, pid: int) -> None:
        """Reads what a process has mapped now."""
        files: set[MapsKey] = set()
        start = 0
        try:
            for key, place in read_executables(self._host, pid).items():
                known = self._files.meet(pid, key, place)
                if known is not None and known.library is not None:
                    files.add(key)
            if files:
                start = read_line(self._host, pid).start_time_ticks
            self._denied.pop(pid, None)
        except Denied as error:
            files.clear()
            self._denied[pid] = str(error)
        except GpuwardenError:
            files.clear()
            self._denied.pop(pid, None)
        if files:
            self._users[pid] = _User(start, files)
        else:
            self._users.pop(pid, None)

    # ---------------------------------------------------------------- what is told

    def _mapped(self) -> dict[tuple[int, int], tuple[LibraryKey, ...]]:
        found = {}
        for pid, user in self._users.items():
            keys = set()
            for key in user.files:
                known = self._files.book.files.get(key)
                told = known.library.told if known is not None and known.library else None
                if told is not None:
                    keys.add(told.file.status.key)
            if keys:
                found[pid, user.start_time_ticks] = tuple(sorted(keys))
        return found

    def _problems(self) -> list[str]:
        problems = list(self._files.problems.values())
        if self._denied:
            pid, why = next(iter(self._denied.items()))
            what = f"what {len(self._denied)} processes map is not known, as of pid {pid}"
            problems.append(f"{what}: {why}")
        return problems

    def _watch(self) -> None:
        ours = set() if self._side_band is None else {self._side_band.fileno()}
        self._readiness.watch(self._files.filenos() | ours)
