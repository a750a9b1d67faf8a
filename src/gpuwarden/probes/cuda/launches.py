"""Launches of kernels: counted per process and kernel, and in stretches told one by one."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack

from msgspec import Struct

from gpuwarden.probes import uprobes
from gpuwarden.probes.cuda import launch_records as records
from gpuwarden.probes.cuda.functions import GRAPH_LAUNCHES, LAUNCHES, OLD_LAUNCHES
from gpuwarden.probes.cuda.launch_tables import Launches, LaunchingProcesses, Process
from gpuwarden.probes.cuda.library import EntryPoint, FoundLibrary, LibraryKey
from gpuwarden.probes.cuda.object import FOLDER, UprobeObject
from gpuwarden.probes.cuda.records import AttachedLibrary, LaunchCount, SampledLaunch
from gpuwarden.probes.libbpf import RING_CALLBACK, library
from gpuwarden.probes.probe_object import ObjectHolder, ProbeObject

OBJECT = os.path.join(FOLDER, "cuda_launches.bpf.o")
PROGRAMS = ("launch_kernel", "launch_by_config", "launch_by_handle", "launch_graph")
_NANOSECONDS = 1_000_000_000
_FIRST = bytes(4)
_SETTLE_TRIES, _SETTLE_SECONDS = 20, 0.0005
KEPT_LIMIT = 1 << 18
"""Samples of one stretch that are kept until they are asked for; a drained ring takes on more."""


class LaunchSettings(Struct, frozen=True, kw_only=True):
    """How much room there is; what finds none is counted all the same, less finely."""

    handles: int = 1 << 16
    """Of all processes together; one process gets at most a ninth of them."""
    processes: int = 1 << 13
    ring_bytes: int = 1 << 22
    """A power of two."""


def _slots(most: int) -> int:
    """Of a table for ``most`` things: half of it stays free, so that all of them find a place."""
    return 1 << (2 * most - 1).bit_length()


class _Stretch(Struct, frozen=True):
    number: int = 0
    """0: none is open."""
    until_ns: int = 0
    most_of_one_process: int = 0


class LaunchProbe(ObjectHolder):
    """Counts launches between ``with`` and its end, in the libraries it was attached to.

    Calls of the launch functions are counted, whatever they come to. A driver that called one of
    them through another's exported entry would be counted at both: 535 has no such call, its
    entries are referred to by nothing but its table of names. Which kernels a launched graph has
    is not seen, nor is a launch by other functions than those of ``functions.py``.

    Errors on entering: Unavailable, Denied, Malformed, as ``ProbeObject``.
    """

    def __init__(
        self, settings: LaunchSettings | None = None, *, object_path: str = OBJECT
    ) -> None:
        super().__init__()
        self.settings = settings or LaunchSettings()
        self._object_path = object_path
        self._attached: dict[LibraryKey, tuple[AttachedLibrary, list[uprobes.Link]]] = {}
        self._forgotten: set[Process] = set()
        self._seed = int.from_bytes(os.urandom(8), "little")
        """So that no process can know which slots another one's handles come to."""
        self._stretch = _Stretch()
        self._stretches = 0
        self._untold_before: dict[Process, int] = {}
        self._records: list[bytes] = []
        self._not_kept: dict[int, int] = {}
        self._callback = RING_CALLBACK(self._take)
        self.malformed = 0
        """Records of samples that could not be read."""
        self.dropped: dict[int, int] = {}
        """By pid: launches of the stretch that ``samples`` told last that are not among them."""

    # ---------------------------------------------------------------- life

    def __enter__(self) -> LaunchProbe:
        settings = self.settings
        with library() as bpf, ExitStack() as stack:
            stack.callback(self._left)
            loaded = UprobeObject(
                bpf,
                stack,
                self._object_path,
                among=records.LAYOUTS,
                programs=PROGRAMS,
                sizes={
                    "launches": _slots(settings.handles),
                    "processes": _slots(settings.processes),
                    "samples": settings.ring_bytes,
                },
            )
            self._object = loaded
            self._launches = Launches(loaded.map("launches"), _slots(settings.handles))
            stack.callback(self._launches.close)
            self._processes = LaunchingProcesses(
                loaded.map("processes"), _slots(settings.processes)
            )
            stack.callback(self._processes.close)
            self._write_settings()
            ring = loaded.map("samples")
            self._ring = bpf.pointer("ring_buffer__new", ring, self._callback, None, None)
            stack.callback(bpf.call, "ring_buffer__free", self._ring)
            stack.callback(self._detach_all)
            self._stack = stack.pop_all()
        return self

    def fileno(self) -> int:
        """Readable when the samples of a stretch are half of what there is room for: ``drain``."""
        return self._loaded.bpf.checked("ring_buffer__epoll_fd", self._ring)

    # ---------------------------------------------------------------- libraries

    def attach(self, found: FoundLibrary) -> AttachedLibrary:
        """Attaches to every launch function of a library; what cannot be is a problem of it.

        A library that is attached to stays as it is.
        """
        loaded = self._loaded
        if found.key in self._attached:
            return self._attached[found.key][0]
        # Two names of one place are one function: its launches are not to be counted twice.
        names: dict[int, list[str]] = {}
        places: dict[str, list[int]] = {program: [] for program in PROGRAMS}
        for name, point in _launch_points(found):
            if point.file_offset not in names:
                places[_program(name)].append(point.file_offset)
            names.setdefault(point.file_offset, []).append(name)
        links: list[uprobes.Link] = []
        problems: dict[int, str] = {}
        for program, offsets in places.items():
            links += self._linked(loaded, program, found.descriptor, offsets, problems)
        probed = [name for offset, some in names.items() if offset not in problems for name in some]
        attached = AttachedLibrary(
            found.key,
            tuple(probed),
            tuple(name for name in probed if found.points[name].at_start),
            tuple(
                f"{name}: not attached: {why}"
                for offset, why in problems.items()
                for name in names[offset]
            ),
        )
        self._attached[found.key] = attached, links
        return attached

    def _linked(
        self,
        loaded: ProbeObject,
        program: str,
        descriptor: int,
        offsets: list[int],
        problems: dict[int, str],
    ) -> list[uprobes.Link]:
        """All places together, and where that cannot be one by one, to know which it is."""
        points = [uprobes.Point(offset, 0) for offset in offsets]
        try:
            return uprobes.attach(loaded.bpf, loaded.program(program), descriptor, points)
        except OSError as error:
            if len(points) == 1:
                problems[offsets[0]] = error.strerror or str(error)
                return []
        links: list[uprobes.Link] = []
        for offset in offsets:
            links += self._linked(loaded, program, descriptor, [offset], problems)
        return links

    def detach(self, key: LibraryKey) -> None:
        """Takes the probes off a library; what was counted stays. Does nothing if it has none."""
        _, links = self._attached.pop(key, (None, []))
        uprobes.detach(self._loaded.bpf, links)

    def _detach_all(self) -> None:
        for key in list(self._attached):
            self.detach(key)

    # ---------------------------------------------------------------- counts

    def counts(self) -> list[LaunchCount]:
        """Every process's launches by handle, since it was first seen; those forgotten left out.

        Errors: OSError, Unavailable.
        """
        self._look()
        if self._forgotten:
            self._launches.free(self._forgotten)
            self._processes.free(self._forgotten)
            self._forgotten = set()
            self._write_settings()
        return [*self._launches.counts(), *self._processes.counts()]

    def _look(self) -> None:
        self._launches.look(self._counter("handles"))
        self._processes.look(self._counter("processes"))

    def forget(self, pid: int, start_time_ns: int) -> None:
        """A process has ended: its counts go, when ``counts`` comes by them next."""
        self._forgotten.add((pid, start_time_ns))

    def uncounted(self) -> int:
        """Launches of processes for which there was no room: they are in no count."""
        return self._counter("uncounted")

    def _counter(self, name: str) -> int:
        index = records.COUNTERS.index(name).to_bytes(4, "little")
        value = self._loaded.get("counters", index, records.COUNTER_BYTES)
        return 0 if value is None else int.from_bytes(value, "little")

    # ---------------------------------------------------------------- samples

    def sample(self, seconds: float, most_of_one_process: int) -> None:
        """Opens a stretch: launches from now on are told one by one, so many of each process.

        It ends by itself, or with ``samples``. One that was open, and what it saw, is given up.
        """
        self._close_stretch()
        self._discard()
        self._stretches += 1
        self._look()
        self._processes.begin_stretch()
        self._untold_before = self._processes.untold()
        until_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) + int(seconds * _NANOSECONDS)
        self._stretch = _Stretch(self._stretches, until_ns, most_of_one_process)
        self._write_settings()

    def samples(self) -> list[SampledLaunch]:
        """Ends the stretch: its launches, of all processes, in order of time. Sets ``dropped``."""
        taken, dropped = self._close_stretch()
        for _ in range(_SETTLE_TRIES):
            self.drain()
            if len(self._records) + sum(self._not_kept.values()) >= taken:
                break
            time.sleep(_SETTLE_SECONDS)
        found, malformed = records.samples(self._records)
        for pid, launches in self._not_kept.items():
            dropped[pid] = dropped.get(pid, 0) + launches
        self.dropped = dropped
        self.malformed += malformed
        self._discard()
        return found

    def _discard(self) -> None:
        self._records.clear()
        self._not_kept.clear()

    def drain(self) -> None:
        """Makes room in the ring, in the middle of a stretch."""
        self._loaded.bpf.checked("ring_buffer__consume", self._ring)

    def _close_stretch(self) -> tuple[int, dict[int, int]]:
        """How many launches were told of; by pid, how many were not."""
        if not self._stretch.number:
            return 0, {}
        self._stretch = _Stretch()
        self._write_settings()
        time.sleep(_SETTLE_SECONDS)  # launches that saw it open are told of by then
        self._look()
        dropped: dict[int, int] = {}
        for (pid, start_ns), untold in self._processes.untold().items():
            if launches := untold - self._untold_before.get((pid, start_ns), 0):
                dropped[pid] = dropped.get(pid, 0) + launches
        self.drain()
        return self._processes.told(), dropped

    def _take(self, _: int | None, data: int, length: int) -> int:
        record = ctypes.string_at(data, length)
        if len(self._records) < KEPT_LIMIT:
            self._records.append(record)
        else:
            pid = records.pid_of(record)
            self._not_kept[pid] = self._not_kept.get(pid, 0) + 1
        return 0

    def _write_settings(self) -> None:
        stretch, settings = self._stretch, self.settings
        value = records.SETTINGS.pack(
            self._seed,
            stretch.until_ns,
            stretch.most_of_one_process,
            settings.ring_bytes // 2,
            self._launches.freed,
            self._processes.freed,
            settings.handles,
            _slots(settings.handles) - 1,
            settings.processes,
            _slots(settings.processes) - 1,
            stretch.number,
            0,
        )
        self._loaded.put("settings_map", _FIRST, value)


def _program(function: str) -> str:
    if function in GRAPH_LAUNCHES:
        return "launch_graph"
    if function in OLD_LAUNCHES:
        return "launch_by_handle"
    return "launch_by_config" if function.startswith("cuLaunchKernelEx") else "launch_kernel"


def _launch_points(found: FoundLibrary) -> Iterator[tuple[str, EntryPoint]]:
    for name in (*LAUNCHES, *GRAPH_LAUNCHES):
        if name in found.points:
            yield name, found.points[name]
