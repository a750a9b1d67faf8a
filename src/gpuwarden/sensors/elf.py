"""Who an ELF file is: its build-id, its soname and the libraries it asks for (elf(5), gABI).

Nothing is loaded or mapped, and sizes in the file are bounded before they are used.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from msgspec import Struct

from gpuwarden.errors import Malformed
from gpuwarden.host import Host

MAGIC = b"\x7fELF"
CLASSES = {1: 32, 2: 64}
BYTE_ORDERS = {1: "<", 2: ">"}

# Elf32_Ehdr, Elf64_Ehdr after e_ident: e_phoff is field 4, e_phentsize 8, e_phnum 9.
HEADERS = {32: "16xHHIIIIIHHHHHH", 64: "16xHHIQQQIHHHHHH"}
# p_type, p_offset, p_vaddr, p_filesz in this order, picked from the unpacked entry.
SEGMENTS = {32: ("IIIIIIII", (0, 1, 2, 4)), 64: ("IIQQQQQQ", (0, 2, 3, 5))}
DYNAMIC_ENTRIES = {32: "II", 64: "QQ"}
NOTE_HEADER = "III"

PT_LOAD, PT_DYNAMIC, PT_NOTE = 1, 2, 4
DT_NULL, DT_NEEDED, DT_STRTAB, DT_SONAME = 0, 1, 5, 14
NT_GNU_BUILD_ID = 3
GNU_OWNER = b"GNU\0"

HEAD_BYTES = 4096
SEGMENT_LIMIT = 256
NOTES_LIMIT_BYTES = 64 << 10
DYNAMIC_LIMIT_BYTES = 64 << 10
BUILD_ID_LIMIT_BYTES = 64
NAME_LIMIT_BYTES = 255
NEEDED_LIMIT = 256
FILE_OFFSET_LIMIT = 1 << 62

ReadAt = Callable[[int, int], bytes]
"""(offset, size) → the bytes there, fewer or none past the end of the file."""


class ElfIdentity(Struct, frozen=True):
    """What an ELF file says of itself; nothing but ``is_elf`` is set when it is not ELF."""

    is_elf: bool
    build_id: str | None = None
    """GNU build-id in lower-case hexadecimal, None when the file carries none."""
    soname: str | None = None
    needed: tuple[str, ...] = ()
    """DT_NEEDED names in the file's order."""


class _Segment(Struct, frozen=True):
    kind: int
    offset: int
    address: int
    size: int


def read_identity(host: Host, path: str) -> ElfIdentity:
    """The identity of the file at ``path``, which may be a /proc magic link.

    Errors: Unavailable, Denied; Malformed when it has the ELF magic and its tables lead nowhere.
    """
    return parse_identity(lambda offset, size: host.read_at(path, offset, size))


def parse_identity(read_at: ReadAt) -> ElfIdentity:
    """The identity of an ELF image behind ``read_at``. Errors: Malformed."""
    head = read_at(0, HEAD_BYTES)
    if head[:4] != MAGIC:
        return ElfIdentity(is_elf=False)
    if len(head) < 16 or head[4] not in CLASSES or head[5] not in BYTE_ORDERS:
        raise Malformed("ELF header: unknown class or byte order")
    bits, order = CLASSES[head[4]], BYTE_ORDERS[head[5]]

    def at(offset: int, size: int) -> bytes:
        if offset + size <= len(head):
            return head[offset : offset + size]
        if offset >= FILE_OFFSET_LIMIT:
            return b""
        return read_at(offset, size)

    segments = _segments(at, bits, order)
    build_id = None
    for segment in segments:
        if segment.kind == PT_NOTE and build_id is None:
            notes = at(segment.offset, min(segment.size, NOTES_LIMIT_BYTES))
            build_id = parse_build_id(notes, order)
    soname, needed = None, ()  # type: tuple[str | None, tuple[str, ...]]
    for segment in segments:
        if segment.kind == PT_DYNAMIC:
            soname, needed = _dynamic(at, segments, segment, bits, order)
            break
    return ElfIdentity(is_elf=True, build_id=build_id, soname=soname, needed=needed)


def _segments(at: ReadAt, bits: int, order: str) -> list[_Segment]:
    layout = order + HEADERS[bits]
    header = at(0, struct.calcsize(layout))
    if len(header) < struct.calcsize(layout):
        raise Malformed("ELF header: cut short")
    fields = struct.unpack(layout, header)
    table_offset, entry_bytes, count = fields[4], fields[8], fields[9]
    if count == 0:
        return []
    entry_layout, picks = SEGMENTS[bits]
    if entry_bytes != struct.calcsize(order + entry_layout) or count > SEGMENT_LIMIT:
        raise Malformed(f"ELF header: {count} program headers of {entry_bytes} bytes")
    table = at(table_offset, entry_bytes * count)
    if len(table) < entry_bytes * count:
        raise Malformed("ELF program headers: cut short")
    return [
        _Segment(*(entry[pick] for pick in picks))
        for entry in struct.iter_unpack(order + entry_layout, table)
    ]


def parse_build_id(notes: bytes, order: str = "<") -> str | None:
    """The GNU build-id among ELF notes in hexadecimal, None when there is none."""
    header = struct.Struct(order + NOTE_HEADER)
    place = 0
    while place + header.size <= len(notes):
        owner_bytes, body_bytes, kind = header.unpack_from(notes, place)
        owner_at = place + header.size
        body_at = owner_at + (owner_bytes + 3 & ~3)
        body = notes[body_at : body_at + min(body_bytes, BUILD_ID_LIMIT_BYTES + 1)]
        owner = notes[owner_at : owner_at + min(owner_bytes, len(GNU_OWNER) + 1)]
        if kind == NT_GNU_BUILD_ID and owner == GNU_OWNER and len(body) == body_bytes > 0:
            return body.hex() if len(body) <= BUILD_ID_LIMIT_BYTES else None
        place = body_at + (body_bytes + 3 & ~3)
    return None


def _dynamic(
    at: ReadAt, segments: list[_Segment], dynamic: _Segment, bits: int, order: str
) -> tuple[str | None, tuple[str, ...]]:
    layout = struct.Struct(order + DYNAMIC_ENTRIES[bits])
    table = at(dynamic.offset, min(dynamic.size, DYNAMIC_LIMIT_BYTES))
    strings_address: int | None = None
    soname_at: int | None = None
    needed_at: list[int] = []
    for tag, value in layout.iter_unpack(table[: len(table) - len(table) % layout.size]):
        if tag == DT_NULL:
            break
        if tag == DT_STRTAB:
            strings_address = value
        elif tag == DT_SONAME:
            soname_at = value
        elif tag == DT_NEEDED and len(needed_at) < NEEDED_LIMIT:
            needed_at.append(value)
    if strings_address is None or (soname_at is None and not needed_at):
        return None, ()
    strings = _file_offset(segments, strings_address)
    if strings is None:
        raise Malformed("ELF dynamic section: its strings are in no segment")

    def name(offset: int) -> str:
        raw = at(strings + offset, NAME_LIMIT_BYTES + 1).split(b"\0", 1)[0]
        return raw[:NAME_LIMIT_BYTES].decode("utf-8", "backslashreplace")

    soname = name(soname_at) if soname_at is not None else None
    return soname or None, tuple(found for found in map(name, needed_at) if found)


def _file_offset(segments: list[_Segment], address: int) -> int | None:
    for segment in segments:
        if segment.kind == PT_LOAD and segment.address <= address < segment.address + segment.size:
            return segment.offset + address - segment.address
    return None
