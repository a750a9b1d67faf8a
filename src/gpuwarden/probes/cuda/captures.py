"""Loads put together from the records of the ring: their bytes go into a memory file as they come.

The pieces of a load come in order and from one thread, so that those of many loads mix, and none is
there twice. A load that goes on to another of the watched functions is one load: what the inner one
told of a load by name are its bytes; of the same image it is dropped once its bytes are the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpuwarden.probes.cuda import copies
from gpuwarden.probes.cuda.call_points import CALLS, LINKED, PATH
from gpuwarden.probes.cuda.call_records import PIECE_BYTES, Copied, LoadBegun, Piece, Returned
from gpuwarden.probes.cuda.records import CapturedLoad, LoadReturn
from gpuwarden.probes.events import ProcessIdentity

PATH_LIMIT_BYTES = 4096
LOADS_LIMIT = 1024
"""That are being copied at one moment; each is a thread that waits."""
PATIENCE_SECONDS = 5.0
"""Without a piece of a load, before it is taken as it is."""
KNOWN_LIMIT = 1 << 14
"""Loads whose return can still be told."""
KEPT_LIMIT = 64
KEPT_LIMIT_BYTES = 256 << 20
KEPT_SECONDS = 1.0
"""Images that are kept, for loads that go on to another one."""

NOTHING, ROOM, UNREADABLE, TOO_LARGE, UNKNOWN_SIZE, COPY, PARTS = range(7)
"""By ``enum missing`` of cuda_records.h."""
REASONS = {
    ROOM: "the ring buffer was full",
    UNREADABLE: "the process's memory could not be read",
    TOO_LARGE: "it is larger than what is copied",
    UNKNOWN_SIZE: "nothing says how long it is",
    COPY: "this kernel copies nothing while the caller waits",
    PARTS: "more fatbins than are followed",
}
_IMAGE = 0
LoadKey = tuple[int, int]
"""(thread, when it began)."""


@dataclass
class Known:
    """What is remembered of a load until it returns."""

    number: int
    function: str
    pid: int
    start_time_ns: int
    path: str | None = None
    is_by_name: bool = False


@dataclass
class Capture:
    """A load whose bytes are coming."""

    begun: LoadBegun
    number: int
    within: Known | None
    heard_at: float
    descriptor: int | None = None
    bytes: int = 0
    path: bytearray = field(default_factory=bytearray)
    problem: str = ""

    @property
    def is_by_name(self) -> bool:
        return CALLS[self.begun.call.function].task == PATH


class Captures:
    """``spool_bytes``: what memory files of loads that are being copied may hold together."""

    def __init__(self, spool_bytes: int) -> None:
        self._spool_bytes = spool_bytes
        self._held_bytes = 0
        self._loads: dict[LoadKey, Capture] = {}
        self._known: OrderedDict[LoadKey, Known] = OrderedDict()
        self._kept: OrderedDict[LoadKey, tuple[int, int, float]] = OrderedDict()
        self._kept_bytes = 0
        self._number = 0
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.pwrite.argtypes = [
            ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
        ]  # fmt: skip
        self._libc.pwrite.restype = ctypes.c_ssize_t
        self.boot_offset_ns = 0
        self.copied_bytes = 0

    def close(self) -> None:
        """Lets go of every memory file that was not handed over."""
        for capture in self._loads.values():
            if capture.descriptor is not None:
                os.close(capture.descriptor)
        self._loads.clear()
        while self._kept:
            self._drop_kept(next(iter(self._kept)))

    # ---------------------------------------------------------------- what the ring tells

    def begin(self, begun: LoadBegun) -> Iterator[CapturedLoad]:
        """A load began; gives those that must be taken as they are to make room for it."""
        key = begun.call.load
        if key in self._loads:
            return
        if len(self._loads) >= LOADS_LIMIT:
            oldest = next(iter(self._loads))
            yield self._ended(oldest, "too many loads are copied at once")
        within = self._known.get((key[0], begun.within_ns)) if begun.within_ns else None
        self._number += 1
        capture = Capture(begun, self._number, within, time.monotonic())
        self._loads[key] = capture
        self._remember(
            key,
            Known(
                self._number,
                begun.call.name,
                begun.call.tgid,
                begun.call.start_ns,
                is_by_name=capture.is_by_name,
            ),
        )

    def piece(self, piece: Piece, record: int) -> None:
        """Bytes of a load; ``record`` is the address of the ring's record."""
        capture = self._loads.get(piece.call.load)
        if capture is None or capture.problem:
            return
        capture.heard_at = time.monotonic()
        if piece.of != _IMAGE:
            room = PATH_LIMIT_BYTES - len(capture.path)
            capture.path += ctypes.string_at(record + PIECE_BYTES, min(piece.length, room))
            return
        if piece.offset < capture.bytes or piece.offset > capture.bytes + 7:
            capture.problem = "a piece of it was lost"
            return
        if self._held_bytes + piece.length > self._spool_bytes:
            capture.problem = "too many bytes are held at once"
            return
        try:
            if capture.descriptor is None:
                capture.descriptor = copies.empty("module")
            self._write(capture.descriptor, record + PIECE_BYTES, piece.length, piece.offset)
        except OSError as error:
            capture.problem = f"no room for it here: {error.strerror}"
            return
        self._held_bytes += piece.offset + piece.length - capture.bytes
        capture.bytes = piece.offset + piece.length
        self.copied_bytes += piece.length

    def _write(self, descriptor: int, address: int, length: int, offset: int) -> None:
        while length:
            wrote = self._libc.pwrite(descriptor, address, length, offset)
            if wrote <= 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
            address, length, offset = address + wrote, length - wrote, offset + wrote

    def copied(self, copied: Copied) -> CapturedLoad | None:
        """A load is complete, or as complete as it gets; None if it was told of before."""
        key = copied.call.load
        capture = self._loads.get(key)
        if capture is None:
            return None
        missed = capture.problem or REASONS.get(copied.missing, "")
        if not missed and not capture.is_by_name and capture.bytes != copied.sent_bytes:
            missed = "a piece of it was lost"
        load = self._ended(key, missed, copied)
        if capture.within is None or capture.within.is_by_name:
            self._keep(key, load)
            return load
        if self._is_the_same(load, capture):
            if load.descriptor is not None:
                os.close(load.descriptor)
            self._known[key] = capture.within
            return None
        return load

    def image_of(self, copied: Copied) -> Capture | None:
        """A load that is about to be told of by ``copied``."""
        return self._loads.get(copied.call.load)

    def returned(self, returned: Returned) -> LoadReturn | None:
        """What a load came to; None if it is not known."""
        key = returned.call.load
        known = self._known.pop(key, None)
        self._drop_kept(key)
        if known is None:
            return None
        return LoadReturn(
            known.number, known.pid, known.start_time_ns, returned.handle, returned.result
        )

    def overdue(self, now: float) -> Iterator[CapturedLoad]:
        """Loads of which nothing was heard for too long, as they are."""
        late = [key for key, one in self._loads.items() if now - one.heard_at > PATIENCE_SECONDS]
        for key in late:
            yield self._ended(key, f"it was not copied to its end in {PATIENCE_SECONDS:g} s")
        for key in [key for key, one in self._kept.items() if now - one[2] > KEPT_SECONDS]:
            self._drop_kept(key)

    def forget(self, pid: int, start_time_ns: int) -> Iterator[CapturedLoad]:
        """Forgets a process that has ended; gives its loads that were still being copied."""
        for key, capture in list(self._loads.items()):
            call = capture.begun.call
            if (call.tgid, call.start_ns) == (pid, start_time_ns):
                yield self._ended(key, "the process ended meanwhile")
        for key, known in list(self._known.items()):
            if (known.pid, known.start_time_ns) == (pid, start_time_ns):
                del self._known[key]
                self._drop_kept(key)

    # ---------------------------------------------------------------- handing over

    def _ended(self, key: LoadKey, missed: str, copied: Copied | None = None) -> CapturedLoad:
        capture = self._loads.pop(key)
        begun, within = capture.begun, capture.within
        self._held_bytes -= capture.bytes
        path: str | None = None
        if capture.is_by_name:
            path = os.fsdecode(bytes(capture.path)) if capture.path else ""
            if key in self._known:
                self._known[key].path = path
        number, function = capture.number, begun.call.name
        if within is not None and within.is_by_name:
            # What a load by name goes on to is that load, now with its bytes.
            number, function, path = within.number, within.function, within.path
            self._known[key] = within
        image_bytes = (copied.image_bytes if copied else 0) or begun.image_bytes or None
        descriptor = capture.descriptor
        if descriptor is not None:
            descriptor = copies.sealed(descriptor)
        return CapturedLoad(
            number=number,
            at_ns=begun.call.time_ns + self.boot_offset_ns,
            process=begun.process,
            thread_id=begun.call.pid,
            function=function,
            address=0 if capture.is_by_name else begun.image,
            path=path,
            image_bytes=None if capture.is_by_name else image_bytes,
            captured_bytes=capture.bytes if descriptor is not None else 0,
            missed=missed,
            stopped=False,
            descriptor=descriptor,
        )

    def _remember(self, key: LoadKey, known: Known) -> None:
        if CALLS[self._loads[key].begun.call.function].task == LINKED:
            return  # it is told of when it returns, and that is all
        self._known[key] = known
        if len(self._known) > KNOWN_LIMIT:
            self._known.popitem(last=False)

    # ---------------------------------------------------------------- one load, told twice

    def _keep(self, key: LoadKey, load: CapturedLoad) -> None:
        if load.descriptor is None or load.missed or load.captured_bytes > KEPT_LIMIT_BYTES:
            return
        with contextlib.suppress(OSError):
            kept = os.dup(load.descriptor)
            self._kept[key] = (kept, load.captured_bytes, time.monotonic())
            self._kept_bytes += load.captured_bytes
        while len(self._kept) > KEPT_LIMIT or self._kept_bytes > KEPT_LIMIT_BYTES:
            self._drop_kept(next(iter(self._kept)))

    def _drop_kept(self, key: LoadKey) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            os.close(kept[0])
            self._kept_bytes -= kept[1]

    def _is_the_same(self, load: CapturedLoad, capture: Capture) -> bool:
        kept = self._kept.get((capture.begun.call.pid, capture.begun.within_ns))
        if kept is None or load.missed or load.descriptor is None:
            return False
        return kept[1] == load.captured_bytes and _same_bytes(kept[0], load.descriptor, kept[1])


def start_of(descriptor: int | None) -> bytes:
    """The first bytes of a memory file."""
    return b"" if descriptor is None else os.pread(descriptor, PATH_LIMIT_BYTES, 0)


def _same_bytes(one: int, other: int, size: int) -> bool:
    with (
        mmap.mmap(one, size, prot=mmap.PROT_READ) as first,
        mmap.mmap(other, size, prot=mmap.PROT_READ) as second,
        memoryview(first) as left,
        memoryview(second) as right,
    ):
        return left == right


def process_of(capture: Capture) -> ProcessIdentity:
    """Who loads."""
    return capture.begun.process
