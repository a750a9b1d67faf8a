"""Calls of the CUDA driver library: loads with their bytes, contexts, names of kernels.

Needs kernel 5.15 with BTF; from 6.0 on images are copied while their caller waits, so that nothing
it does afterwards changes what was seen.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack

from msgspec import Struct

from gpuwarden.errors import Malformed, Unavailable
from gpuwarden.probes import return_probes
from gpuwarden.probes.cuda import call_records, late_bytes
from gpuwarden.probes.cuda.call_links import CallLinks
from gpuwarden.probes.cuda.call_points import CALLS
from gpuwarden.probes.cuda.call_records import (
    HEAD_BYTES,
    SETTINGS,
    CallDecoder,
    ContextTold,
    Copied,
    LoadBegun,
    NameTold,
    Piece,
    Record,
    Returned,
)
from gpuwarden.probes.cuda.captures import COPY, Capture, Captures
from gpuwarden.probes.cuda.library import FoundLibrary, LibraryKey
from gpuwarden.probes.cuda.object import FOLDER, UprobeObject
from gpuwarden.probes.cuda.records import (
    AttachedLibrary,
    CallCounters,
    CallSink,
    ContextCall,
    HandleNamed,
)
from gpuwarden.probes.cuda.stopped import StoppedMap
from gpuwarden.probes.events import boot_offset_ns
from gpuwarden.probes.libbpf import RING_CALLBACK, library
from gpuwarden.probes.probe_object import ObjectHolder, ProbeObject

OBJECT = os.path.join(FOLDER, "cuda_calls.bpf.o")
SLEEPING = ("loading", "linked")
TOLD = ("loading_told", "linked_told")
PROGRAMS = ("calling", "returned")
RECORDS_LIMIT, BYTES_LIMIT = 2048, 64 << 20
"""Taken in one ``poll``, so that a flood does not keep it from returning."""
POLL_SECONDS = 0.25
_FIRST = bytes(4)


class CallSettings(Struct, frozen=True, kw_only=True):
    """How much is copied of what processes load."""

    ring_bytes: int = 64 << 20
    """A power of two."""
    module_limit_bytes: int = 512 << 20
    may_stop: bool = False
    """A process is stopped, while a guardian allows it, when its image finds no room."""
    wait_ms: int = 20
    """How long a load may be delayed, in all, while there is no room."""
    spool_bytes: int = 1 << 30
    """What the bytes of loads may take until they are told of."""
    window_seconds: float = 1.0
    loads_of_one: int = 5_000
    """Loads of one process that are told in a window, the last without bytes; more are counted."""
    contexts_of_one: int = 2_000
    names_of_one: int = 50_000


class CudaCalls(ObjectHolder):
    """Tells its sink of calls between ``with`` and its end, in the libraries it was attached to.

    Errors on entering: Unavailable, Denied, Malformed, as ``ProbeObject``.
    """

    def __init__(
        self, settings: CallSettings, sink: CallSink, *, object_path: str = OBJECT
    ) -> None:
        super().__init__()
        self.settings = settings
        self._sink = sink
        self._object_path = object_path
        self._decoder = CallDecoder()
        self._captures = Captures(settings.spool_bytes)
        self._callback = RING_CALLBACK(self._take)
        self._telling: deque[Capture | Callable[[], None]] = deque()
        self._failure: BaseException | None = None
        self._taken_records = self._taken_bytes = 0
        self._malformed = self._missed = self._stops = 0
        self.no_copies = ""
        """Why images are read after their loads, not while the caller waits; empty if they are."""
        self.no_returns = ""
        """Why results, handles and names are not seen; empty where they are."""

    # ---------------------------------------------------------------- life

    def __enter__(self) -> CudaCalls:
        self.no_returns = return_probes.danger()
        try:
            self._enter(copies=True)
        except Unavailable as error:
            self.no_copies = f"images are read after their loads, by a race: {error}"
            self._enter(copies=False)
        return self

    def _enter(self, *, copies: bool) -> None:
        with library() as bpf, ExitStack() as stack:
            stack.callback(self._left)
            loaded = UprobeObject(
                bpf,
                stack,
                self._object_path,
                among=call_records.LAYOUTS,
                programs=(*PROGRAMS, *(SLEEPING if copies else TOLD)),
                sizes={"records": self.settings.ring_bytes},
            )
            self._object = loaded
            self._write_settings(loaded)
            self._stops_map = StoppedMap(bpf, loaded.map("stopped"))
            self._captures.boot_offset_ns = boot_offset_ns()
            ring = loaded.map("records")
            self._ring = bpf.pointer("ring_buffer__new", ring, self._callback, None, None)
            stack.callback(bpf.call, "ring_buffer__free", self._ring)
            self._poll = stack.enter_context(select.epoll())
            self._poll.register(bpf.checked("ring_buffer__epoll_fd", self._ring), select.EPOLLIN)
            self._more = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            stack.callback(os.close, self._more)
            self._poll.register(self._more, select.EPOLLIN)
            self._links = CallLinks(loaded, self.no_copies, self.no_returns)
            stack.callback(self._links.detach_all)
            self._stack = stack.pop_all()

    def _left(self) -> None:
        super()._left()
        while self._telling:
            telling = self._telling.popleft()
            if isinstance(telling, Capture):
                telling.close()
        self._captures.close()

    def _write_settings(self, loaded: ProbeObject) -> None:
        settings = self.settings
        value = SETTINGS.pack(
            settings.module_limit_bytes,
            settings.wait_ms * 1_000_000,
            int(settings.window_seconds * 1e9),
            settings.names_of_one,
            settings.contexts_of_one,
            settings.loads_of_one,
            settings.may_stop,
            not self.no_returns,
            0,
        )
        try:
            loaded.put("settings_map", _FIRST, value)
        except OSError as error:
            raise Unavailable(f"the probes were not told what to do: {error.strerror}") from error

    @property
    def stopped_map(self) -> int:
        """The map of processes that are stopped, for a guardian (``stopped.StoppedMap``)."""
        return self._loaded.map("stopped")

    @property
    def stops_until(self) -> int:
        """The map with the one time until which a guardian lets processes be stopped."""
        return self._loaded.map("stops_until")

    # ---------------------------------------------------------------- libraries

    def attach(self, found: FoundLibrary) -> AttachedLibrary:
        """Attaches to what is watched of a library; what cannot be is a problem of it.

        A library that is attached to stays as it is.
        """
        self._loaded  # noqa: B018 - raises
        return self._links.attach(found)

    def detach(self, key: LibraryKey) -> None:
        """Takes the probes of a library away, if there are any."""
        self._links.detach(key)

    # ---------------------------------------------------------------- what is told

    def fileno(self) -> int:
        """Readable when there is something to ``poll``."""
        self._loaded  # noqa: B018 - raises
        return self._poll.fileno()

    def poll(self) -> None:
        """Tells the sink what there is, in its order; call it once a second in any case."""
        until = time.monotonic() + POLL_SECONDS
        self._empty_ring()
        for capture in self._captures.overdue(time.monotonic()):
            self._tell_load(capture)
        while self._telling and time.monotonic() < until:
            telling = self._telling[0]
            if isinstance(telling, Capture) and self._is_moving(telling):
                self._empty_ring()
                continue
            self._telling.popleft()
            if not isinstance(telling, Capture):
                telling()
                continue
            load = self._captures.load(telling)
            if load is not None:
                self._missed += bool(load.missed)
                self._sink.load(load)
        os.eventfd_write(self._more, 1)
        if not self._telling:
            os.eventfd_read(self._more)

    def _is_moving(self, capture: Capture) -> bool:
        try:
            return capture.image.move() > 0
        except OSError as error:
            capture.problem = capture.problem or f"no room for it here: {error.strerror}"
            capture.image.close()
            return False

    def _empty_ring(self) -> None:
        if self._telling and self._captures.is_nearly_full:
            return  # what waits in the ring is waited for, or told as missed, by its own rules
        self._taken_records = self._taken_bytes = 0
        self._loaded.bpf.call("ring_buffer__poll", self._ring, 0)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def resynchronise(self) -> None:
        """Takes the wall clock anew, after it was set."""
        self._captures.boot_offset_ns = boot_offset_ns()

    def forget(self, pid: int, start_time_ns: int) -> None:
        """Lets go of what is kept of a process that has ended."""
        for capture in self._captures.forget(pid, start_time_ns):
            self._tell_load(capture)

    def counters(self) -> CallCounters:
        """What went on since the probes were loaded. Errors: OSError."""
        loaded = self._loaded
        cpus = loaded.bpf.checked("libbpf_num_possible_cpus")
        values = (ctypes.c_uint64 * cpus)()
        found = {}
        for index, name in enumerate(call_records.COUNTERS):
            key = ctypes.c_uint32(index)
            loaded.bpf.checked(
                "bpf_map_lookup_elem",
                loaded.map("counters"),
                ctypes.byref(key),
                ctypes.byref(values),
            )
            found[name] = sum(values)
        return CallCounters(
            loads=found["loads"],
            context_calls=found["contexts"],
            names=found["names"],
            copied_bytes=self._captures.copied_bytes,
            missed_loads=self._missed,
            dropped=found["dropped"] + found["limited"] + self._malformed,
            stops=self._stops,
        )

    # ---------------------------------------------------------------- records

    def _take(self, context: int | None, data: int, size: int) -> int:
        try:
            head = ctypes.string_at(data, min(size, HEAD_BYTES))
            self._record(self._decoder.decode(head, size), data)
        except Malformed:
            self._malformed += 1
        except BaseException as error:  # noqa: BLE001 - none may pass through the library that calls
            self._failure = error
            return -errno.EINTR
        self._taken_records += 1
        self._taken_bytes += size
        full = self._taken_records >= RECORDS_LIMIT or self._taken_bytes >= BYTES_LIMIT
        return -errno.EAGAIN if full else 0

    def _record(self, record: Record, data: int) -> None:
        if isinstance(record, Piece):
            self._captures.piece(record, data)
        elif isinstance(record, LoadBegun):
            oldest = self._captures.begin(record)
            if oldest is not None:
                self._tell_load(oldest)
        elif isinstance(record, Copied):
            self._copied(record)
        elif isinstance(record, Returned):
            self._telling.append(lambda: self._returned(record))
        elif isinstance(record, ContextTold):
            self._context(record)
        else:
            self._name(record)

    def _copied(self, record: Copied) -> None:
        capture = self._captures.copied(record)
        if capture is None:
            return
        limit = self.settings.module_limit_bytes
        if record.stop_asked:
            self._stops += late_bytes.read_stopping(capture, record, self._stops_map, limit)
        elif record.missing == COPY and not capture.is_by_name:
            late_bytes.read_racing(capture, limit)
        self._tell_load(capture)

    def _returned(self, record: Returned) -> None:
        returned = self._captures.returned(record)
        if returned is not None:
            self._sink.returned(returned)

    def _tell_load(self, capture: Capture) -> None:
        self._telling.append(capture)

    def _context(self, record: ContextTold) -> None:
        call = CALLS[record.call.function]
        if call.context is None:
            raise Malformed(f"{call.function} is about no context")
        told = ContextCall(
            at_ns=record.call.time_ns + self._captures.boot_offset_ns,
            process=record.process,
            thread_id=record.call.pid,
            function=call.function,
            call=call.context,
            handle=record.handle,
            device=record.device if record.device >= 0 else None,
            result=record.result,
        )
        self._telling.append(lambda: self._sink.context(told))

    def _name(self, record: NameTold) -> None:
        name = "" if record.name is None else record.name.decode("utf-8", "backslashreplace")
        told = HandleNamed(
            record.call.tgid,
            record.call.start_ns,
            record.call.name,
            record.handle,
            record.of,
            name,
        )
        self._telling.append(lambda: self._sink.named(told))
