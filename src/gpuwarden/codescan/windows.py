"""A large stream in parts that fit in memory, cut where no module is cut.

A fatbin or a code object that a part would cut begins the next part instead; one that is larger
than a part may grow to is cut, and then said to be. Sections of a host program are not told: their
table is at the end of a file that has not come yet.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from gpuwarden.code import ar, elf, fatbin, tile_ir
from gpuwarden.code.memory_search import Haystack
from gpuwarden.codescan.streams import Stream
from gpuwarden.errors import Malformed

WINDOW_BYTES = 64 << 20
WINDOW_LIMIT_BYTES = 320 << 20
TEXT_LIMIT_BYTES = 16 << 20
"""PTX that is longer may be cut."""
CUT_ALIGNMENT = 64

# AMD: CCOB, version, method, then the size of all of it: u32 in version 2, u64 in 3; a bundle has
# its count of entries (u64), and of each its offset, its size and the length of its name (u64).
COMPRESSED_BUNDLE, BUNDLE = b"CCOB", b"__CLANG_OFFLOAD_BUNDLE__"
_COMPRESSED = {2: struct.Struct("<8xI"), 3: struct.Struct("<8xQ")}
_ENTRY = struct.Struct("<3Q")
BUNDLE_ENTRIES_LIMIT = 256
CANDIDATES_LIMIT = 200_000
SETTLING_LIMIT = 64


class Window(Struct, frozen=True):
    """Part of a stream and where it begins; valid until the next is asked for."""

    offset: int
    data: memoryview


class Extent(NamedTuple):
    """Where something begins, and where by its header it ends."""

    start: int
    end: int


def windows(
    stream: Stream, size: int = WINDOW_BYTES, limit: int = WINDOW_LIMIT_BYTES
) -> Iterator[Window]:
    """The stream in parts of about ``size`` bytes, at most ``limit``.

    Errors: Malformed where the stream cannot be read to its end, after all that could be read.
    """
    data, offset = bytearray(), 0
    damage: Malformed | None = None
    while True:
        wanted = size
        while True:
            try:
                ended = not _fill(stream, data, wanted)
            except Malformed as error:
                ended, damage = True, error
            cut = len(data) if ended else cut_at(memoryview(data), limit)
            if ended or cut > len(data) // 2 or wanted >= limit:
                break
            wanted = min(2 * wanted, limit)
        cut = cut or len(data)
        if offset == 0 and not ended and data.startswith(ar.MAGIC):
            # Plain bytes: as an archive it could only be read whole.
            data[: len(ar.MAGIC)] = bytes(len(ar.MAGIC))
        yield Window(offset, memoryview(data)[:cut])
        if damage is not None:
            raise damage
        if ended:
            return
        data, offset = data[cut:], offset + cut


def _fill(stream: Stream, data: bytearray, size: int) -> bool:
    while len(data) < size:
        more = stream.read(size - len(data))
        if not more:
            return False
        data += more
    return True


def cut_at(view: memoryview, limit: int, extents: Sequence[Extent] | None = None) -> int:
    """Where nothing is cut that can be whole within ``limit``.

    It is in the second half, or where something begins that a longer part would hold whole.
    ``extents`` are those of the view, if they are known already.
    """
    half, end = len(view) // 2, len(view)
    extents = extents_of(view) if extents is None else extents
    extents = [one for one in extents if one.end - one.start <= limit]
    over = [one.start for one in extents if one.end > end]
    if over and min(over) <= half and end < limit:
        return min(over)
    cut = end if any(start > half for start in over) else text_end(view)
    for _ in range(SETTLING_LIMIT):
        across = [
            one
            for one in extents
            if one.start < cut < one.end <= end or half < one.start < cut < one.end
        ]
        if not across:
            break
        late = [one.start for one in across if one.start > half]
        cut = min(late) if late else max(one.end for one in across)
    return cut


def extents_of(view: memoryview, haystack: Haystack | None = None) -> list[Extent]:
    """Each fatbin and code object, whether it is one or only looks so; bounded.

    ``haystack``, that of the view, knows their beginnings then.
    """
    haystack = haystack or Haystack(view)
    return [
        Extent(at, end_of(view, at))
        for mark, end_of in _ENDS
        for at in haystack.find_all(mark, CANDIDATES_LIMIT)
    ]


def text_end(view: memoryview) -> int:
    """After the last NUL at a round offset: text ends in one, and code is full of them."""
    # Not at the very end: what begins there may not be all there to be known.
    last = max(0, len(view) - len(view) % CUT_ALIGNMENT - CUT_ALIGNMENT)
    first = max(0, last - TEXT_LIMIT_BYTES)
    ends = np.frombuffer(view[first:last], np.uint8)[CUT_ALIGNMENT - 1 :: CUT_ALIGNMENT]
    nuls = np.flatnonzero(ends == 0)
    return first + (int(nuls[-1]) + 1) * CUT_ALIGNMENT if len(nuls) else last or len(view)


def _fatbin_end(view: memoryview, at: int) -> int:
    # A header that is not all there yet crosses the end as well.
    return fatbin.end_of(view, at) or len(view) + 1


def _elf_end(view: memoryview, at: int) -> int:
    try:
        header = elf.header_at(view, at)
    except Malformed:
        return len(view) + 1
    if header.machine not in (elf.EM_CUDA, elf.EM_AMDGPU):
        return 0
    sections = header.sections_at + header.sections * header.section_bytes
    return at + max(sections, header.segments_at + header.segments * header.segment_bytes)


def _compressed_bundle_end(view: memoryview, at: int) -> int:
    version = int.from_bytes(view[at + 4 : at + 6], "little")
    layout = _COMPRESSED.get(version)
    if layout is None:
        return 0
    if at + layout.size > len(view):
        return len(view) + 1
    return at + int(layout.unpack_from(view, at)[0])


def _bundle_end(view: memoryview, at: int) -> int:
    place = at + len(BUNDLE)
    entries = int.from_bytes(view[place : place + 8], "little")
    if entries > BUNDLE_ENTRIES_LIMIT:
        return 0
    place, end = place + 8, at
    for _ in range(entries):
        if place + _ENTRY.size > len(view):
            return len(view) + 1
        offset, size, name = _ENTRY.unpack_from(view, place)
        end, place = max(end, at + offset + size), place + _ENTRY.size + name
    return end


def _tile_ir_end(view: memoryview, at: int) -> int:
    try:
        return tile_ir.end_of(view, at)
    except Malformed:
        return len(view) + 1


_ENDS: tuple[tuple[bytes, Callable[[memoryview, int], int]], ...] = (
    (fatbin.MARK, _fatbin_end),
    (elf.IDENT_64_LITTLE, _elf_end),
    (COMPRESSED_BUNDLE, _compressed_bundle_end),
    (BUNDLE, _bundle_end),
    (tile_ir.MAGIC, _tile_ir_end),
)
MARKS = tuple(mark for mark, _ in _ENDS)
"""What machine code begins with; PTX is text, of which most text has parts."""
