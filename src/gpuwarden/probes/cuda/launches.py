"""Launches of kernels: counted per process and kernel, and in stretches told one by one."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType

from msgspec import Struct

from gpuwarden.errors import Unavailable
from gpuwarden.probes import uprobes
from gpuwarden.probes.cuda import launch_records as records
from gpuwarden.probes.cuda.functions import GRAPH_LAUNCHES, LAUNCHES
from gpuwarden.probes.cuda.library import EntryPoint, FoundLibrary, LibraryKey
from gpuwarden.probes.cuda.object import FOLDER, ProbeObject
from gpuwarden.probes.cuda.records import AttachedLibrary, LaunchCount, SampledLaunch
from gpuwarden.probes.libbpf import RING_CALLBACK, library
from gpuwarden.probes.loading import NOT_LOADED

OBJECT = os.path.join(FOLDER, "cuda_launches.bpf.o")
PROGRAMS = ("launch_kernel", "launch_by_config", "launch_graph")
_NANOSECONDS = 1_000_000_000
_FIRST = bytes(4)
_SETTLE_TRIES, _SETTLE_SECONDS = 20, 0.0005
KEPT_LIMIT = 1 << 18
"""Samples of one stretch that are kept until they are asked for; a drained ring takes on more."""

_Process = tuple[int, int]


class LaunchSettings(Struct, frozen=True, kw_only=True):
    """How much room there is; what finds none is counted all the same, less finely."""

    handles: int = 1 << 16
    """Of all processes together; one process gets at most a ninth of them."""
    processes: int = 1 << 13
    sampled_processes: int = 1 << 12
    ring_bytes: int = 1 << 22


class _Stretch(Struct, frozen=True):
    number: int = 0
    """0: none is open."""
    until_ns: int = 0
    most_of_one_process: int = 0


class LaunchProbe:
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
        self.settings = settings or LaunchSettings()
        self._object_path = object_path
        self._stack = ExitStack()
        self._object: ProbeObject | None = None
        self._attached: dict[LibraryKey, tuple[AttachedLibrary, list[uprobes.Link]]] = {}
        self._forgotten: set[_Process] = set()
        self._freed = 0
        self._stretch = _Stretch()
        self._stretches = 0
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
            loaded = ProbeObject(
                bpf,
                stack,
                self._object_path,
                among=records.LAYOUTS,
                programs=PROGRAMS,
                sizes={
                    "launches": settings.handles,
                    "totals": settings.processes,
                    "shares": settings.sampled_processes,
                    "samples": settings.ring_bytes,
                },
            )
            self._object = loaded
            self._write_settings()
            ring = loaded.map("samples")
            self._ring = bpf.pointer("ring_buffer__new", ring, self._callback, None, None)
            stack.callback(bpf.call, "ring_buffer__free", self._ring)
            stack.callback(self._detach_all)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Detaches and unloads. Twice does nothing."""
        self._stack.close()

    def _left(self) -> None:
        self._object = None

    @property
    def _loaded(self) -> ProbeObject:
        if self._object is None:
            raise Unavailable(NOT_LOADED)
        return self._object

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
        links: list[uprobes.Link] = []
        probed: list[str] = []
        at_start: list[str] = []
        problems: list[str] = []
        places: dict[int, str] = {}
        for name, point in _launch_points(found):
            if point.file_offset in places:
                # Two names of one function: its launches are not to be counted twice.
                probed.append(name)
                continue
            program = loaded.program(_program(name))
            where = [uprobes.Point(point.file_offset, 0)]
            try:
                links += uprobes.attach(loaded.bpf, program, found.descriptor, where)
            except OSError as error:
                problems.append(f"{name}: not attached: {error.strerror or error}")
                continue
            places[point.file_offset] = name
            probed.append(name)
            if point.at_start:
                at_start.append(name)
        attached = AttachedLibrary(found.key, tuple(probed), tuple(at_start), tuple(problems))
        self._attached[found.key] = attached, links
        return attached

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
        loaded = self._loaded
        keys, values = loaded.entries("launches", records.KEY.size, records.COUNT.size)
        found = list(records.counts(keys, values))
        processes, totals = loaded.entries("totals", records.PROCESS.size, records.TOTALS.size)
        found += records.totals(processes, totals)
        if self._forgotten:
            found = self._buried(found, processes)
        return found

    def _buried(self, found: list[LaunchCount], processes: bytes) -> list[LaunchCount]:
        """Removes the entries of processes that were forgotten."""
        loaded, gone = self._loaded, self._forgotten
        left: list[LaunchCount] = []
        handles: list[bytes] = []
        for one in found:
            if (one.pid, one.start_time_ns) not in gone:
                left.append(one)
            elif one.handle > 0:
                handles.append(records.KEY.pack(one.start_time_ns, one.pid, 0, one.handle))
        dead = [
            records.PROCESS.pack(start_ns, pid, 0)
            for start_ns, pid, _ in records.PROCESS.iter_unpack(processes)
            if (pid, start_ns) in gone
        ]
        loaded.delete_all("launches", b"".join(handles), records.KEY.size)
        loaded.delete_all("totals", b"".join(dead), records.PROCESS.size)
        self._freed += len(handles)
        self._write_settings()
        self._forgotten = set()
        return left

    def forget(self, pid: int, start_time_ns: int) -> None:
        """A process has ended: its counts go, when ``counts`` comes by them next."""
        self._forgotten.add((pid, start_time_ns))

    def uncounted(self) -> int:
        """Launches of processes for which there was no room: they are in no count."""
        return self._counter("uncounted")

    def unsampled(self) -> int:
        """Launches in stretches that are not even among the dropped of their process."""
        return self._counter("unsampled")

    def _counter(self, name: str) -> int:
        index = records.COUNTERS.index(name).to_bytes(4, "little")
        value = self._loaded.get("counters", index, records.COUNT.size)
        return 0 if value is None else int.from_bytes(value, "little")

    # ---------------------------------------------------------------- samples

    def sample(self, seconds: float, most_of_one_process: int) -> None:
        """Opens a stretch: launches from now on are told one by one, so many of each process.

        It ends by itself, or with ``samples``. One that was open, and what it saw, is given up.
        """
        self._close_stretch()
        self._discard()
        self._stretches += 1
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
        loaded, number = self._loaded, self._stretch.number
        if not number:
            return 0, {}
        self._stretch = _Stretch()
        self._write_settings()
        time.sleep(_SETTLE_SECONDS)  # launches that saw it open are told of by then
        keys, values = loaded.entries("shares", records.PROCESS.size, records.SHARE.size)
        loaded.delete_all("shares", keys, records.PROCESS.size)
        told, dropped = records.shares(keys, values, number)
        self.drain()
        return told, dropped

    def _take(self, _: int | None, data: int, length: int) -> int:
        record = ctypes.string_at(data, length)
        if len(self._records) < KEPT_LIMIT:
            self._records.append(record)
        else:
            pid = records.pid_of(record)
            self._not_kept[pid] = self._not_kept.get(pid, 0) + 1
        return 0

    def _write_settings(self) -> None:
        stretch, ring = self._stretch, self.settings.ring_bytes
        value = records.SETTINGS.pack(
            stretch.until_ns,
            self.settings.handles,
            self._freed,
            ring // 2,
            stretch.number,
            stretch.most_of_one_process,
        )
        self._loaded.put("settings_map", _FIRST, value)


def _program(function: str) -> str:
    if function in GRAPH_LAUNCHES:
        return "launch_graph"
    return "launch_by_config" if function.startswith("cuLaunchKernelEx") else "launch_kernel"


def _launch_points(found: FoundLibrary) -> Iterator[tuple[str, EntryPoint]]:
    for name in (*LAUNCHES, *GRAPH_LAUNCHES):
        if name in found.points:
            yield name, found.points[name]
