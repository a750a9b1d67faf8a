"""Fat binaries: the wrapper that a host program has, the header, and the entries behind it.

Layouts as nvcc 11 to 13.5 write them; ``fatbinary_section.h`` of the toolkit has the wrapper's.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterator
from typing import NamedTuple

from gpuwarden.code.bounds import NAME_TOLD
from gpuwarden.code.located import ALIGNMENT, Located, Stream, place_at
from gpuwarden.code.module import Codec, Kind, Place, Problem
from gpuwarden.errors import Malformed

WRAPPER_MAGIC = 0x466243B1
MAGIC = b"\x50\xed\x55\xba"
VERSION, HEADER_BYTES = 1, 16
MARK = MAGIC + struct.pack("<HH", VERSION, HEADER_BYTES)
"""The eight bytes that a fatbin begins with."""

WRAPPER = struct.Struct("<IIQQ")
# magic, version, header bytes, bytes behind the header
HEADER = struct.Struct("<IHHQ")
# kind, version, header bytes, padded bytes, compressed bytes, options' offset, minor, major, sm,
# identifier's offset and length, flags, key (of LTO-IR), decompressed bytes
ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
OPTIONS = struct.Struct("<II")
# images, bytes of the table; then sub-headers like ENTRY with the image's offset for header bytes
CONCAT = struct.Struct("<II")

ENTRY_VERSION = 0x0101
PTX, CUBIN, NVVM, TILE_IR, CONCATENATED = 1, 2, 8, 0x80, 0x100
KINDS: dict[int, Kind] = {PTX: "ptx", CUBIN: "cubin", NVVM: "lto-ir", TILE_IR: "tile-ir"}
ARCH_PREFIXES: dict[int, str] = {PTX: "compute_", NVVM: "lto_"}

ZLIB, LZ4, LZ4_FRAME, ZSTD, OBFUSCATED = 0x1000, 0x2000, 0x4000, 0x8000, 0x10000
ARCH_SPECIFIC, FAMILY_SPECIFIC = 0x100000, 0x200000
CODECS: tuple[tuple[int, Codec], ...] = (
    (ZSTD, "zstd"),
    (LZ4, "lz4"),
    (LZ4_FRAME, "lz4-frame"),
    (ZLIB, "zlib"),
)

ENTRY_HEADER_LIMIT_BYTES = 1 << 20


class Wrapper(NamedTuple):
    """``__fatBinC_Wrapper_t``: addresses in the process or, before relocation, of the file."""

    version: int
    """1: one fatbin. 2: ``others`` is the address of a NULL-terminated array of linked fatbins."""
    fatbin: int
    others: int


class Entry(NamedTuple):
    """An entry's fixed fields."""

    kind: int
    version: int
    header_bytes: int
    padded_bytes: int
    compressed_bytes: int
    options_at: int
    minor: int
    major: int
    sm: int
    identifier_at: int
    identifier_bytes: int
    flags: int
    key: int
    image_bytes: int


def wrapper_at(data: bytes | memoryview, start: int = 0) -> Wrapper | None:
    """The wrapper there, None where there is none."""
    if start < 0 or start + WRAPPER.size > len(data):
        return None
    magic, version, fatbin, others = WRAPPER.unpack_from(data, start)
    return (
        Wrapper(version, fatbin, others) if magic == WRAPPER_MAGIC and version in (1, 2) else None
    )


def end_of(data: memoryview, start: int) -> int | None:
    """Where the fatbin at ``start`` says that it ends, which can be past the buffer; None: none.

    A program that writes fatbins has the mark in its instructions: what ends past the buffer and
    begins with no entry is none.
    """
    if start + HEADER.size > len(data) or bytes(data[start : start + len(MARK)]) != MARK:
        return None
    size: int = HEADER.unpack_from(data, start)[3]
    end, first = start + HEADER_BYTES + size, start + HEADER_BYTES
    if end <= len(data) or first + ENTRY.size > len(data):
        return end
    return end if Entry._make(ENTRY.unpack_from(data, first)).version == ENTRY_VERSION else None


def modules(
    data: memoryview, start: int, end: int, place: Place
) -> Generator[Located | Problem, None, int]:
    """The modules of the fatbin at ``start`` that ends at ``end`` or where its bytes stop.

    What comes behind an entry that cannot be read is one Problem, and the last thing given.
    Returns where reading stopped.
    """
    at, stop = start + HEADER_BYTES, min(end, len(data))
    while at + ENTRY.size <= stop:
        entry = Entry._make(ENTRY.unpack_from(data, at))
        payload = at + entry.header_bytes
        after = payload + entry.padded_bytes
        if entry.version != ENTRY_VERSION or not (
            ENTRY.size <= entry.header_bytes <= ENTRY_HEADER_LIMIT_BYTES
        ):
            yield _problem(place, at, "fatbin entry", "its header is none that is known")
            return at
        if after > stop:
            yield _problem(place, at, "fatbin entry", "it ends past the bytes that are there")
            return at
        header = bytes(data[at:payload])
        stored = data[payload : payload + min(entry.compressed_bytes, entry.padded_bytes)]
        if not entry.compressed_bytes:
            stored = data[payload:after]
        here = place_at(place, payload)
        if entry.kind == CONCATENATED:
            yield from _concatenated(entry, header, stored, here)
        else:
            yield _located(entry, header, stored, here)
        at = after
    if end > len(data):
        yield _problem(place, start, "fatbin", "it ends past the bytes that are there")
    elif at != stop and any(data[at:stop]):
        yield _problem(place, at, "fatbin", "bytes behind its last entry")
    return stop


def _located(entry: Entry, header: bytes, stored: memoryview, place: Place) -> Located:
    codec = codec_of(entry)
    return Located(
        kind=KINDS.get(entry.kind, "unknown"),
        arch=arch_of(entry),
        stored=stored,
        image_bytes=entry.image_bytes if codec != "none" else len(stored),
        place=place,
        codec=codec,
        identifier=_text(header, entry.identifier_at, entry.identifier_bytes),
        options=_options(entry, header),
        padded=codec == "none" and not entry.compressed_bytes,
    )


def codec_of(entry: Entry) -> Codec:
    """How the payload is compressed; obfuscated LTO-IR is taken as it is stored."""
    if not entry.compressed_bytes or entry.flags & OBFUSCATED:
        return "none"
    for flag, codec in CODECS:
        if entry.flags & flag:
            return codec
    return "none"


def arch_of(entry: Entry) -> str:
    """``sm_90a``, ``compute_80``, ``lto_80``; empty for none."""
    if not entry.sm:
        return ""
    suffix = "a" if entry.flags & ARCH_SPECIFIC else "f" if entry.flags & FAMILY_SPECIFIC else ""
    return f"{ARCH_PREFIXES.get(entry.kind, 'sm_')}{entry.sm}{suffix}"


def _text(header: bytes | memoryview, at: int, size: int) -> str:
    if not size or at < ENTRY.size or size > NAME_TOLD or at + size > len(header):
        return ""
    return bytes(header[at : at + size]).rstrip(b"\0").decode("utf-8", "backslashreplace")


def _options(entry: Entry, header: bytes | memoryview) -> str:
    at = entry.options_at
    # A cubin's are no text but its .nv.compat section.
    if entry.kind == CUBIN or at < ENTRY.size or at + OPTIONS.size > len(header):
        return ""
    return _text(header, *OPTIONS.unpack_from(header, at)).strip()


def _concatenated(
    entry: Entry, header: bytes, stored: memoryview, place: Place
) -> Iterator[Located | Problem]:
    """The images of one compressed stream, whose sub-headers are where options would be."""
    try:
        parts = list(_parts(entry, header))
    except Malformed as error:
        parts = []
        yield Problem(place=place, what="concatenated fatbin entry", reason=str(error))
    codec = codec_of(entry)
    size = entry.image_bytes if codec != "none" else len(stored)
    if not parts:
        # Nothing is lost: the stream as one image of a kind that is not known.
        yield Located("unknown", "", stored, size, place, codec)
        return
    stream = Stream(codec, stored, size, len(parts))
    for part, extras in parts:
        yield Located(
            kind=KINDS.get(part.kind, "unknown"),
            arch=arch_of(part),
            stored=stored,
            image_bytes=part.padded_bytes,
            place=place,
            codec=codec,
            identifier=_text(extras, part.identifier_at, part.identifier_bytes),
            options=_options(part, extras),
            padded=True,
            stream=stream,
            start=part.header_bytes,
        )


def _parts(entry: Entry, header: bytes) -> Iterator[tuple[Entry, memoryview]]:
    """Each sub-header with the bytes from it on. Errors: Malformed."""
    at = entry.options_at
    if at < ENTRY.size or at + CONCAT.size > len(header):
        raise Malformed("its table is outside its header")
    images, table_bytes = CONCAT.unpack_from(header, at)
    table = memoryview(header)[at : at + table_bytes]
    at, offset = CONCAT.size, 0
    for _ in range(images):
        # What a sub-header refers to comes behind it, so the next one is some steps further.
        while True:
            if at + ENTRY.size > len(table):
                raise Malformed("its table is shorter than its images")
            part = Entry._make(ENTRY.unpack_from(table, at))
            if part.version == ENTRY_VERSION and part.header_bytes == offset:
                break
            at += ALIGNMENT
        yield part, table[at:]
        offset += part.padded_bytes
        at += ENTRY.size


def _problem(place: Place, offset: int, what: str, reason: str) -> Problem:
    return Problem(place=place_at(place, offset), what=what, reason=reason)
