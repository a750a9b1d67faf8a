"""The memory of a process in windows that fit in ours, cut where no module is cut.

Read with ``pread`` from an open ``/proc/PID/mem``, or from a memory file. What is not there reads
as zeros, without being asked for: a module whose pages of zeros were never touched is whole all the
same. What vanishes while it is read is counted.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from gpuwarden.code import ptx
from gpuwarden.code.bounds import DEFAULT, Bounds
from gpuwarden.code.located import Located
from gpuwarden.code.memory_search import Haystack
from gpuwarden.code.module import Place, Problem
from gpuwarden.code.sweep import sweep
from gpuwarden.codescan.memory_map import ADDRESS_LIMIT
from gpuwarden.codescan.tasks import MemoryTask, Span
from gpuwarden.codescan.windows import MARKS, cut_at, extents_of

WINDOW_BYTES = 32 << 20
LIMIT_BYTES = 320 << 20
"""A module that is larger is cut, and then said to be."""
GAP_JOINED_BYTES = 64 << 10
"""Spans as near as this are read as one: what lies between reads as zeros."""
TEXTS_LIMIT = 100_000
TEXT_BEYOND_BYTES = 1 << 20
"""PTX says nothing of its length: of a longer one that crosses ``stop`` the rest is lost."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Scratch:
    """A buffer for one memory after the other; what was seen in it is gone with the next one.

    Made once, on huge pages where the kernel has them: filling a new one page by page takes longer
    than copying the memory.
    """

    def __init__(self) -> None:
        self._view = memoryview(b"")

    def of(self, size: int) -> memoryview:
        """``size`` writable bytes of any content."""
        if len(self._view) < size:
            whole = mmap.mmap(-1, max(size, WINDOW_BYTES), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(AttributeError, OSError):
                whole.madvise(mmap.MADV_HUGEPAGE)
            # The old one lives as long as anything looks into it.
            self._view = memoryview(whole)
        return self._view[:size]


class MemoryWindow(Struct, frozen=True):
    """Part of the memory, valid until the next is asked for, and the address of its first byte."""

    address: int
    data: memoryview
    haystack: Haystack
    """That of the data and perhaps more behind it."""
    is_marked: bool
    """Whether anything in it begins as GPU code does; else there is none."""


class Memory:
    """Spans of one descriptor, by address, read as if all between them were zeros."""

    def __init__(
        self,
        descriptor: int,
        spans: Sequence[Span],
        stop: int | None = None,
        told: Callable[[int], None] = lambda size: None,
        *,
        scratch: Scratch | None = None,
    ) -> None:
        """No window begins at ``stop`` or after; ``told`` is called with the size of each."""
        self._descriptor = descriptor
        self._spans = spans
        self._stop = stop
        self._told = told
        self._starts = [span.start for span in spans]
        self._scratch = scratch or Scratch()
        self.read_bytes = 0
        self.lost_bytes = 0
        """Of pages that were there when they were looked for and not when they were read."""
        self.has_ended = False
        """The process has, or has become another program."""

    def mapping_at(self, address: int) -> str:
        """What the span that holds an address is called."""
        at = bisect_right(self._starts, address) - 1
        span = self._spans[at] if at >= 0 else None
        return span.mapping if span is not None and address < span.start + span.size else ""

    def windows(self) -> Iterator[MemoryWindow]:
        """All of it in the order of addresses; a window overlaps no other."""
        at, size = 0, WINDOW_BYTES
        while (start := self._next(at)) is not None and not self.has_ended:
            at = start
            if self._stop is not None and at >= self._stop:
                return
            joined = self._joined_end(at, size)
            # Beyond the spans that hang together only for what says that it is longer.
            end = at + size if size > WINDOW_BYTES else min(joined, at + size, self._last)
            data = self._filled(at, end)
            haystack = Haystack(data)
            haystack.learn(MARKS)
            extents = extents_of(data, haystack)
            cut = len(data)
            if end < joined or any(cut < one.end <= one.start + LIMIT_BYTES for one in extents):
                cut = cut_at(data, LIMIT_BYTES, extents)
                if cut <= len(data) // 2 and size < LIMIT_BYTES:
                    # At least twice as long: what it says may be another number each time.
                    size = min(2 * size, LIMIT_BYTES)
                    continue
            size = WINDOW_BYTES
            cut = cut or len(data)
            self._told(cut)
            is_marked = bool(haystack.find_all(ptx.MARK, TEXTS_LIMIT) or extents)
            yield MemoryWindow(at, data[:cut], haystack, is_marked)
            at += cut

    @property
    def _last(self) -> int:
        """Where an ordinary window ends: past ``stop`` for text that begins before it."""
        return ADDRESS_LIMIT if self._stop is None else self._stop + TEXT_BEYOND_BYTES

    def _next(self, address: int) -> int | None:
        """The address itself if it is in a span, else where the next one begins."""
        at = bisect_right(self._starts, address) - 1
        if at >= 0 and address < self._spans[at].start + self._spans[at].size:
            return address
        return self._starts[at + 1] if at + 1 < len(self._starts) else None

    def _joined_end(self, address: int, size: int) -> int:
        """Where the spans end that hang together with an address, as far as ``size`` bytes on."""
        at = bisect_right(self._starts, address) - 1
        end = self._spans[at].start + self._spans[at].size
        while (
            at + 1 < len(self._spans)
            and end - address <= size
            and self._starts[at + 1] - end <= GAP_JOINED_BYTES
        ):
            at += 1
            end = max(end, self._spans[at].start + self._spans[at].size)
        return end

    def _filled(self, start: int, end: int) -> memoryview:
        size = end - start
        data = self._scratch.of(size)
        done = start
        at = max(0, bisect_right(self._starts, start) - 1)
        while at < len(self._spans) and self._starts[at] < end:
            span = self._spans[at]
            low, high = max(done, span.start), min(end, span.start + span.size)
            if low < high:
                data[done - start : low - start] = bytes(low - done)
                self._read(data[low - start : high - start], low)
                done = high
            at += 1
        data[done - start :] = bytes(end - done)
        return data

    def _read(self, into: memoryview, address: int) -> None:
        done = 0
        while done < len(into):
            try:
                count = os.preadv(self._descriptor, [into[done:]], address + done)
            except OSError as error:
                if error.errno not in (errno.EIO, errno.EFAULT):
                    raise
                count = -1
            if count == 0:
                # No memory at all any more; a memory file ends like this when it was cut.
                self.has_ended = True
            if count <= 0:
                count = min(len(into) - done, _PAGE_BYTES - (address + done) % _PAGE_BYTES)
                count = len(into) - done if self.has_ended else count
                into[done : done + count] = bytes(count)
                self.lost_bytes += count
            else:
                self.read_bytes += count
            done += count


def memory_modules(
    memory: Memory, task: MemoryTask, bounds: Bounds = DEFAULT
) -> Iterator[Located | Problem]:
    """The modules in a process's memory; each is to be done with before the next is asked for."""
    place = task.place
    for window in memory.windows():
        if not window.is_marked:
            continue
        here = Place(target=place.target, members=place.members, offset=window.address)
        for found in sweep(window.data, here, bounds, haystack=window.haystack):
            yield _named(found, memory)
    if memory.has_ended:
        yield Problem(
            place=place,
            what="its memory",
            reason="the process ended, or became another program, while it was read",
        )
    elif memory.lost_bytes:
        yield Problem(
            place=place,
            what="its memory",
            reason=f"{memory.lost_bytes >> 10} KiB went away before they were read",
        )


def _named(found: Located | Problem, memory: Memory) -> Located | Problem:
    """With what the mapping is called in which it lies."""
    place = found.place
    mapping = memory.mapping_at(place.offset or 0)
    if not mapping:
        return found
    named = Place(
        target=place.target,
        members=place.members,
        offset=place.offset,
        section=place.section,
        found_by=place.found_by,
        mapping=mapping,
    )
    if isinstance(found, Problem):
        return Problem(place=named, what=found.what, reason=found.reason)
    found.place = named
    return found
