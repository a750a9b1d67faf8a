"""Loads put together from the records of the ring: their bytes go into a memory file as they come.

The pieces of a load come in order and from one thread; those of many loads mix. A load that goes on
to another of the watched functions is one load: inside a load by name it gives that one its bytes;
of the same image it is dropped, once its bytes are known to be the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from gpuwarden.probes.cuda.call_points import CALLS, LINKED, PATH
from gpuwarden.probes.cuda.call_records import PIECE_BYTES, Copied, LoadBegun, Piece, Returned
from gpuwarden.probes.cuda.records import CapturedLoad, LoadReturn
from gpuwarden.probes.cuda.spool import Blocks, Image

PATH_LIMIT_BYTES = 4096
LOADS_LIMIT = 1024
"""That are being copied at one moment; each is a thread that waits."""
PATIENCE_SECONDS = 5.0
"""Without a piece of a load, before it is taken as it is."""
KNOWN_LIMIT = 1 << 13
"""Loads whose return can still be told."""
KEPT_LIMIT = 64
KEPT_LIMIT_BYTES = 256 << 20
KEPT_SECONDS = 1.0
"""Images that are kept, for loads that go on to another one."""

NOTHING, ROOM, UNREADABLE, TOO_LARGE, UNKNOWN_SIZE, COPY, PARTS, LIMIT = range(8)
"""By ``enum missing`` of cuda_records.h."""
REASONS = {
    ROOM: "the ring buffer was full",
    UNREADABLE: "the process's memory could not be read",
    TOO_LARGE: "it is larger than what is copied",
    UNKNOWN_SIZE: "nothing says how long it is",
    COPY: "this kernel copies nothing while the caller waits",
    PARTS: "more fatbins than are followed",
    LIMIT: "the process loads more at once than is told of",
}
LOST = "a piece of it was lost"
_IMAGE = 0
_GAP_BYTES = 7
"""At most, between parts of an image."""
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
    """A load whose bytes are coming, or have come."""

    begun: LoadBegun
    number: int
    within: Known | None
    heard_at: float
    image: Image
    path: bytearray = field(default_factory=bytearray)
    problem: str = ""
    copied: Copied | None = None
    stopped: bool = False
    rest: int | None = None
    """A file with the rest of its bytes, read from its process."""
    rest_from: int = 0
    """How many bytes of that file were known before."""
    is_read_again: bool = False

    @property
    def key(self) -> LoadKey:
        return self.begun.call.load

    @property
    def is_by_name(self) -> bool:
        return CALLS[self.begun.call.function].task == PATH

    def close(self) -> None:
        """Lets go of its bytes."""
        self.image.close()
        if self.rest is not None:
            os.close(self.rest)
            self.rest = None


class Captures:
    """``spool_bytes``: what the bytes of loads that were not told of yet may take together."""

    def __init__(self, spool_bytes: int) -> None:
        self._spool_bytes = spool_bytes
        self._held_bytes = 0
        self._loads: dict[LoadKey, Capture] = {}
        self._known: OrderedDict[LoadKey, Known] = OrderedDict()
        self._kept: OrderedDict[LoadKey, tuple[int, int, float]] = OrderedDict()
        self._kept_bytes = 0
        self._blocks = Blocks()
        self._used_at = 0.0
        self._number = 0
        self.boot_offset_ns = 0
        self.copied_bytes = 0

    def close(self) -> None:
        """Lets go of every image that was not handed over."""
        for capture in self._loads.values():
            capture.close()
        self._loads.clear()
        while self._kept:
            self._drop_kept(next(iter(self._kept)))
        self._blocks.release()

    @property
    def is_nearly_full(self) -> bool:
        """Whether loads had better be told of before more is taken."""
        return self._held_bytes > self._spool_bytes * 3 // 4

    # ---------------------------------------------------------------- what the ring tells

    def begin(self, begun: LoadBegun) -> Capture | None:
        """A load began; gives one that must be told of as it is, to make room for it."""
        key = begun.call.load
        if key in self._loads:
            return None
        oldest = None
        if len(self._loads) >= LOADS_LIMIT:
            oldest = self._loads.pop(next(iter(self._loads)))
            oldest.problem = oldest.problem or "too many loads are copied at once"
        within = self._known.get((key[0], begun.within_ns)) if begun.within_ns else None
        self._number += 1
        self._used_at = time.monotonic()
        image = Image(self._blocks, begun.image_bytes)
        capture = Capture(begun, self._number, within, time.monotonic(), image)
        self._loads[key] = capture
        if CALLS[begun.call.function].task != LINKED:  # which is told of when it has returned
            call = begun.call
            known = Known(self._number, call.name, call.tgid, call.start_ns)
            known.is_by_name = capture.is_by_name
            self._known[key] = known
            if len(self._known) > KNOWN_LIMIT:
                self._known.popitem(last=False)
        return oldest

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
        image, before = capture.image, capture.image.bytes
        if piece.offset < before or piece.offset > before + _GAP_BYTES:
            capture.problem = LOST
            return
        if self._held_bytes + piece.length > self._spool_bytes:
            capture.problem = "too many bytes are held at once"
            return
        try:
            image.append(record + PIECE_BYTES, piece.length, piece.offset)
        except (OSError, ValueError) as error:
            capture.problem = f"no room for it here: {error}"
            return
        self._held_bytes += image.bytes - before
        self.copied_bytes += piece.length

    def copied(self, copied: Copied) -> Capture | None:
        """A load is as complete as it gets; None if it was told of before."""
        capture = self._loads.pop(copied.call.load, None)
        if capture is None:
            return None
        capture.copied = copied
        if not capture.problem:
            capture.problem = REASONS.get(copied.missing, "")
        if not capture.problem and capture.image.bytes != copied.sent_bytes:
            capture.problem = LOST
        if capture.is_by_name and capture.key in self._known:
            self._known[capture.key].path = _path(capture)
        return capture

    def overdue(self, now: float) -> list[Capture]:
        """Loads of which nothing was heard for too long."""
        if now - self._used_at > PATIENCE_SECONDS:
            self._blocks.release()
        for key in [key for key, one in self._kept.items() if now - one[2] > KEPT_SECONDS]:
            self._drop_kept(key)
        late = [one for one in self._loads.values() if now - one.heard_at > PATIENCE_SECONDS]
        return [self._given_up(one, f"not at its end in {PATIENCE_SECONDS:g} s") for one in late]

    def forget(self, pid: int, start_time_ns: int) -> list[Capture]:
        """Forgets a process that has ended; gives its loads that were still being copied."""
        for key, known in list(self._known.items()):
            if (known.pid, known.start_time_ns) == (pid, start_time_ns):
                del self._known[key]
                self._drop_kept(key)
        calls = [(one, one.begun.call) for one in self._loads.values()]
        mine = [one for one, call in calls if (call.tgid, call.start_ns) == (pid, start_time_ns)]
        return [self._given_up(one, "the process ended meanwhile") for one in mine]

    def _given_up(self, capture: Capture, why: str) -> Capture:
        del self._loads[capture.key]
        capture.problem = capture.problem or why
        return capture

    # ---------------------------------------------------------------- telling

    def load(self, capture: Capture) -> CapturedLoad | None:
        """What is told of a load; None if it is known already. Whoever takes it closes its file."""
        missed, descriptor = capture.problem, None
        self._held_bytes -= capture.image.bytes
        try:
            if capture.rest is not None:
                capture.is_read_again = True
                capture.image.append_file(capture.rest, capture.rest_from)
            descriptor = capture.image.file()
        except OSError as error:
            missed = missed or f"no room for it here: {error.strerror}"
        finally:
            captured_bytes = capture.image.bytes
            capture.close()
        load = self._load(capture, missed, descriptor, captured_bytes)
        within = capture.within
        if within is not None and self._is_the_same(load, capture):
            if load.descriptor is not None:
                os.close(load.descriptor)
            self._known[capture.key] = within
            return None
        if within is None or within.is_by_name:
            if within is not None:
                self._known[capture.key] = within
            self._keep(capture.key, load)
        return load

    def _load(
        self, capture: Capture, missed: str, descriptor: int | None, captured_bytes: int
    ) -> CapturedLoad:
        begun, within, copied = capture.begun, capture.within, capture.copied
        number, function = capture.number, begun.call.name
        path = _path(capture) if capture.is_by_name else None
        if within is not None and within.is_by_name:
            # What a load by name goes on to is that load, now with its bytes.
            number, function, path = within.number, within.function, within.path
        image_bytes = (copied.image_bytes if copied else 0) or begun.image_bytes
        if descriptor is None:
            captured_bytes = 0
        elif capture.is_read_again and not missed:
            image_bytes = captured_bytes
        return CapturedLoad(
            number=number,
            at_ns=begun.call.time_ns + self.boot_offset_ns,
            process=begun.process,
            thread_id=begun.call.pid,
            function=function,
            address=0 if capture.is_by_name else begun.image,
            path=path,
            image_bytes=None if capture.is_by_name else image_bytes or None,
            captured_bytes=captured_bytes,
            missed=missed,
            stopped=capture.stopped,
            descriptor=descriptor,
        )

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


def _path(capture: Capture) -> str:
    return os.fsdecode(bytes(capture.path))


def _same_bytes(one: int, other: int, size: int) -> bool:
    with (
        mmap.mmap(one, size, prot=mmap.PROT_READ) as first,
        mmap.mmap(other, size, prot=mmap.PROT_READ) as second,
        memoryview(first) as left,
        memoryview(second) as right,
    ):
        return left == right
