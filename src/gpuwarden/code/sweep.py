"""Modules by their magic anywhere in some bytes: what no section points to, and process memory.

One pass for each magic, whatever the bytes are. What is found and cannot be read is a Problem;
bytes that merely look like a magic are not.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

from gpuwarden.code import amdgpu, elf, fatbin, ptx, tile_ir
from gpuwarden.code.bounds import DEFAULT, Bounds
from gpuwarden.code.codecs import zstd_frame_bytes
from gpuwarden.code.cubin import sm_of
from gpuwarden.code.located import Located, Stream, place_at, place_found
from gpuwarden.code.memory_search import Haystack
from gpuwarden.code.module import FoundBy, Kind, Place, Problem
from gpuwarden.errors import Malformed

Found = Located | Problem
Steps = Generator[Found, None, int | None]
"""Gives what is there, returns from where to look on; None where there was no module."""
Step = Callable[[int], Steps]

EFFORT_FACTOR = 8
"""Bytes looked at in vain or twice, at most this many times those that are there."""
EFFORT_FLOOR_BYTES = 64 << 20
PIECE_BYTES = 1 << 20
IMAGES_IN_IMAGES = 2
"""A stale header can claim bytes that hold other fatbins and cubins by now: these are looked for
inside images too."""


def sweep(
    data: memoryview,
    place: Place,
    bounds: Bounds = DEFAULT,
    *,
    start: int = 0,
    end: int | None = None,
    found_by: FoundBy = "sweep",
    section: str = "",
    haystack: Haystack | None = None,
) -> Iterator[Found]:
    """The modules in [start, end) of ``data`` in the order of their offsets.

    ``place.offset``, when it is there, is the address of the first byte of ``data``. ``haystack``
    is that of ``data`` or of more behind it, if it was searched already.
    """
    place = place_found(place, found_by, section)
    whole = data if end is None else data[:end]
    yield from _Sweep(whole, place, bounds, start, haystack=haystack).modules()


class _Exhausted(Exception):
    pass


class _Sweep:
    def __init__(
        self,
        data: memoryview,
        place: Place,
        bounds: Bounds,
        start: int = 0,
        *,
        depth: int = 0,
        haystack: Haystack | None = None,
    ) -> None:
        self.data, self.place, self.bounds = data, place, bounds
        self.start, self.end, self.depth = start, len(data), depth
        self.haystack = haystack or Haystack(data)
        size = self.end - start
        self.false_starts = bounds.false_starts
        self.effort = EFFORT_FACTOR * size + EFFORT_FLOOR_BYTES
        self.covered = start
        """The end of what was found before: no text begins before it."""

    def modules(self) -> Iterator[Found]:
        if self.depth > self.bounds.nesting:
            yield self._problem(self.start, "bytes", "nested too deep")
            return
        try:
            yield from self._modules()
        except _Exhausted:
            reason = "too much looks like GPU code and is none; the rest was not looked at"
            yield self._problem(self.covered, "bytes", reason)

    def _modules(self) -> Iterator[Found]:
        # What can be inside an image that is not there as a whole comes first.
        steps: tuple[tuple[bytes, Step], ...] = (
            (fatbin.MARK, self._fatbin),
            (elf.IDENT_64_LITTLE, self._elf),
            (ptx.MARK, self._ptx),
            (tile_ir.MAGIC, self._tile_ir),
            (amdgpu.BUNDLE_MAGIC, self._bundle),
            (amdgpu.COMPRESSED_MAGIC, self._compressed),
        )
        find, at = self.haystack.find, self.start
        while at < self.end:
            # All magics in a piece that the cache holds, and none where an image was found already.
            stop = min(at + PIECE_BYTES, self.end)
            nexts = [-1] * len(steps)
            while at < stop:
                for index, (needle, _) in enumerate(steps):
                    floor = at if index < IMAGES_IN_IMAGES else max(at, self.covered)
                    if nexts[index] < floor:
                        found = find(needle, floor, min(stop + len(needle) - 1, self.end))
                        nexts[index] = stop if found < 0 else found
                at = min(nexts)
                if at < stop:
                    at = yield from self._step(steps[nexts.index(at)][1], at)

    def _step(self, step: Step, at: int) -> Generator[Found, None, int]:
        resume = yield from step(at)
        if resume is None:
            self.false_starts -= 1
            if self.false_starts < 0:
                raise _Exhausted
            resume = at + 1
        return resume

    def _spend(self, looked_at: int) -> None:
        self.effort -= looked_at
        if self.effort < 0:
            raise _Exhausted

    def _problem(self, at: int, what: str, reason: str) -> Problem:
        return Problem(place=place_at(self.place, at), what=what, reason=reason)

    def _fatbin(self, at: int) -> Steps:
        end = fatbin.end_of(self.data, at)
        if end is None:
            return None
        stopped = yield from fatbin.modules(self.data, at, end, self.place)
        self.covered = max(self.covered, stopped)
        return max(stopped, at + len(fatbin.MARK))

    def _elf(self, at: int) -> Steps:
        try:
            header = elf.header_at(self.data, at)
        except Malformed:
            return None
        if header.machine not in (elf.EM_CUDA, elf.EM_AMDGPU):
            return None
        is_cuda = header.machine == elf.EM_CUDA
        kind: Kind = "cubin" if is_cuda else "amdgpu"
        self._spend(header.sections * elf.SECTION.size)
        try:
            end = elf.end_of(self.data, at)
        except Malformed as error:
            yield self._problem(at, "cubin" if is_cuda else "AMD code object", str(error))
            return None
        if at < self.covered:
            # A header whose image was overwritten can claim what others are in.
            self._spend(end - at)
        stored = self.data[at:end]
        arch = f"sm_{sm_of(header)}" if is_cuda else amdgpu.arch_of(header)
        yield Located(kind, arch, stored, len(stored), place_at(self.place, at))
        self.covered = max(self.covered, end)
        return at + len(elf.IDENT_64_LITTLE)

    def _ptx(self, at: int) -> Steps:
        head, looked_at = ptx.head_at(self.data, at, self.end)
        if head is None:
            self._spend(looked_at)
            return None
        start = ptx.beginning(self.data, at, self.covered)
        end = ptx.ending(self.data, at, self.end)
        stored, arch = self.data[start:end], f"compute_{head.target}"
        yield Located("ptx", arch, stored, len(stored), place_at(self.place, start))
        self.covered = max(self.covered, end)
        return end

    def _tile_ir(self, at: int) -> Steps:
        if not tile_ir.is_bytecode(self.data, at):
            return None
        try:
            end = tile_ir.end_of(self.data, at)
        except Malformed as error:
            yield self._problem(at, "Tile IR", str(error))
            return None
        stored = self.data[at:end]
        yield Located("tile-ir", "", stored, len(stored), place_at(self.place, at))
        self.covered = max(self.covered, end)
        return end

    def _bundle(self, at: int) -> Steps:
        if not amdgpu.is_bundle(self.data, at):
            return None
        resume = at + len(amdgpu.BUNDLE_MAGIC)
        try:
            for entry in amdgpu.entries(self.data, at):
                self._spend(entry.end - entry.start)
                stored = self.data[entry.start : entry.end]
                place = place_at(self.place, entry.start)
                if amdgpu.is_amd(entry.target):
                    arch = amdgpu.arch_of_target(entry.target)
                    yield Located("amdgpu", arch, stored, len(stored), place)
                else:
                    yield from self._inside(stored, place)
                resume = max(resume, entry.end)
        except Malformed as error:
            yield self._problem(at, "offload bundle", str(error))
        self.covered = max(self.covered, resume)
        return resume

    def _inside(self, part: memoryview, place: Place) -> Iterator[Found]:
        yield from _Sweep(part, place, self.bounds, depth=self.depth + 1).modules()

    def _compressed(self, at: int) -> Steps:
        head = amdgpu.compressed_at(self.data, at)
        if head is None:
            return None
        end = at + (head.stored_bytes or self.end - at)
        if end > self.end:
            yield self._problem(at, "CCOB", "it ends past the bytes that are there")
            return None
        blob = self.data[at:end]
        try:
            bundle = amdgpu.bundle_of(blob, head, self.bounds)
            found = list(amdgpu.entries(bundle))
        except Malformed as error:
            yield self._problem(at, "CCOB", str(error))
            return None
        if not head.stored_bytes:
            stream_bytes = zstd_frame_bytes(blob[head.stream_at :]) if head.codec == "zstd" else 0
            end = at + head.stream_at + (stream_bytes or 0)
        self.covered = max(self.covered, end)
        place = place_at(self.place, at)
        stream = Stream(head.codec, blob[head.stream_at :], len(bundle), len(found), bundle)
        for entry in found:
            self._spend(entry.end - entry.start)
            if amdgpu.is_amd(entry.target):
                yield Located(
                    "amdgpu",
                    amdgpu.arch_of_target(entry.target),
                    blob,
                    entry.end - entry.start,
                    place,
                    head.codec,
                    stream=stream,
                    start=entry.start,
                )
            else:
                part = bundle[entry.start : entry.end]
                yield from self._inside(part, place)
        return end
