"""Every GPU module in any bytes: images as a whole, in the sections of programs, in ar archives.

The sections that toolkits use are read first, then everything else is swept: cuFFT has one module
in its section and 24,453 elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from mmap import mmap

from gpuwarden.code import amdgpu, ar, elf, fatbin, ltoir, tile_ir
from gpuwarden.code.bounds import DEFAULT, Bounds
from gpuwarden.code.codecs import most_bytes
from gpuwarden.code.located import Located, place_at, place_found
from gpuwarden.code.module import Kind, Place, Problem
from gpuwarden.code.sweep import sweep
from gpuwarden.errors import Malformed

SECTIONS = (b".nv_fatbin", b"__nv_relfatbin", b".hip_fatbin")
"""Of fatbins, of relocatable fatbins, of AMD's offload bundles."""
NAMES = tuple(name + b"\0" for name in SECTIONS)
WHOLE_MAGICS = (amdgpu.COMPRESSED_MAGIC, amdgpu.BUNDLE_MAGIC[:4])

Found = Located | Problem
Buffer = bytes | bytearray | memoryview | mmap


def modules_in(buffer: Buffer, place: Place, bounds: Bounds = DEFAULT) -> Iterator[Found]:
    """Every module in ``buffer`` (bytes, a memory map, a memoryview), and what could not be read.

    ``place`` says where the buffer is; its ``offset``, when it is there, is the address of the
    buffer's first byte. Nothing is decompressed but CCOB blobs, which hold their table of contents
    compressed. Never raises: a bound that is reached is a Problem too.
    """
    total = 0
    for count, one in enumerate(_modules(memoryview(buffer).cast("B"), place, bounds, 0)):
        if count >= bounds.modules:
            yield Problem(place=place, what="bytes", reason=f"more than {bounds.modules} modules")
            return
        if isinstance(one, Located):
            # What is claimed and will be refused costs nothing, and must not end the search.
            if one.image_bytes <= min(bounds.image_bytes, most_bytes(one.codec, len(one.stored))):
                total += one.image_bytes
            if total > bounds.total_bytes:
                reason = f"images of more than {bounds.total_bytes} bytes together"
                yield Problem(place=one.place, what="bytes", reason=reason)
                return
        yield one


def _modules(data: memoryview, place: Place, bounds: Bounds, depth: int) -> Iterator[Found]:
    head = bytes(data[:8])
    if head in (ar.MAGIC, ar.THIN_MAGIC):
        yield from _members(data, place, bounds, depth)
        return
    if head[:4] == ltoir.MAGIC or head == tile_ir.MAGIC:
        kind: Kind = "tile-ir" if head == tile_ir.MAGIC else "lto-ir"
        yield Located(kind, "", data, len(data), place_at(place_found(place, "whole"), 0))
        # Where it ends is not sure, so it must not hide what else is there.
        yield from sweep(data, place, bounds, start=len(head))
        return
    taken: list[tuple[int, int]] = []
    if head[:7] == elf.IDENT_64_LITTLE:
        for name, from_header, end in _sections(data, bounds):
            # Sections that overlap would have their modules told more than once.
            start = max(from_header, taken[-1][1] if taken else 0)
            if start < end:
                taken.append((start, end))
                yield from sweep(
                    data, place, bounds, start=start, end=end, found_by="section", section=name
                )
    at = 0
    for start, end in [*taken, (len(data), len(data))]:
        if at < start:
            for one in sweep(data, place, bounds, start=at, end=start):
                yield _whole(one, data, place)
        at = end


def _sections(data: memoryview, bounds: Bounds) -> list[tuple[str, int, int]]:
    """The sections of a program that hold modules, in the file's order."""
    try:
        image = elf.Elf(data, bounds)
    except Malformed:
        return []  # Not a program that a loader takes; the sweep takes any bytes.
    if image.header.machine in (elf.EM_CUDA, elf.EM_AMDGPU):
        return []
    found = []
    for row in image.rows:
        # By a look at each name's beginning: one name that leads nowhere hides no other section.
        at = row[elf.NAME]
        if not image.name_bytes.startswith(NAMES, at) or row[elf.TYPE] == elf.SHT_NOBITS:
            continue
        start, end = row[elf.OFFSET], row[elf.OFFSET] + row[elf.SIZE]
        if end <= len(data):
            found.append((image.name_bytes[at : image.name_bytes.index(b"\0", at)], start, end))
    return [
        (name.decode(), start, end)
        for name, start, end in sorted(found, key=lambda section: section[1])
    ]


def _whole(one: Found, data: memoryview, place: Place) -> Found:
    """Says ``whole`` of what begins where the buffer begins, and of what a fatbin there holds."""
    if isinstance(one, Located):
        at = (one.place.offset or 0) - (place.offset or 0)
        in_fatbin = at < (fatbin.end_of(data, 0) or 0)
        if in_fatbin or bytes(data[:4]) in WHOLE_MAGICS or (at == 0 and one.codec == "none"):
            one.place = place_found(one.place, "whole")
    return one


def _members(data: memoryview, place: Place, bounds: Bounds, depth: int) -> Iterator[Found]:
    if depth >= bounds.nesting:
        yield Problem(place=place, what="ar archive", reason="nested too deep")
        return
    read = len(ar.MAGIC)
    try:
        for member in ar.members(data, bounds):
            inner = Place(
                target=place.target,
                members=(*place.members, member.name),
                mapping=place.mapping,
            )
            for one in _modules(data[member.start : member.end], inner, bounds, depth + 1):
                if isinstance(one, Located) and one.place.found_by == "whole":
                    one.place = place_found(one.place, "archive")
                yield one
            read = member.end
    except Malformed as error:
        yield Problem(place=place, what="ar archive", reason=str(error))
        yield from sweep(data, place, bounds, start=read)
