"""ELF64 little-endian sections and segments over a buffer, each bounded before use (gABI, elf(5)).

Made for tens of thousands of small images: a section stays the tuple that its header unpacks to.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpuwarden.code.bounds import DEFAULT, Bounds
from gpuwarden.errors import Malformed

Buffer = bytes | bytearray | memoryview

MAGIC = b"\x7fELF"
IDENT_64_LITTLE = b"\x7fELF\x02\x01\x01"
"""Class 64, little-endian, version 1."""

# Elf64_Ehdr: e_ident's class, OSABI and ABI version, then the fields in their order.
HEADER = struct.Struct("<4xBxxBB7xHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")
SEGMENT = struct.Struct("<IIQQQQQQ")
SYMBOL = struct.Struct("<IBBHQQ")
# Elf64_Shdr as an array's fields.
TABLE = np.dtype(
    {
        "names": ["name", "type", "flags", "offset", "size", "info"],
        "formats": ["<u4", "<u4", "<u8", "<u8", "<u8", "<u4"],
        "offsets": [0, 4, 8, 24, 32, 44],
        "itemsize": 64,
    }
)
COUNT_IN_FIRST_SECTION = struct.Struct("<32xQII")

EM_CUDA, EM_AMDGPU = 190, 224
SHT_NULL, SHT_NOBITS = 0, 8
SHF_ALLOC, SHF_EXECINSTR = 2, 4
# Shared memory for the debugger, ``.nv_debug.shared`` of relocatable cubins: no bytes in the file.
SHT_CUDA_SHARED = 0x7000000A
NO_BYTES = frozenset({SHT_NULL, SHT_NOBITS, SHT_CUDA_SHARED})
SHN_XINDEX = 0xFFFF
NAME_LIMIT_BYTES = 1 << 16
NAME_SHARING = 8
"""Section names are at most this many times as long as the bytes that they are in."""

# Fields of a section, as its header has them.
NAME, TYPE, FLAGS, ADDRESS, OFFSET, SIZE, LINK, INFO, ALIGNMENT, ENTRY_BYTES = range(10)
SectionRow = tuple[int, int, int, int, int, int, int, int, int, int]


class Header(NamedTuple):
    """The fields of an ELF header that say where the rest is and whose code it holds."""

    os_abi: int
    abi_version: int
    machine: int
    version: int
    segments_at: int
    sections_at: int
    flags: int
    segment_bytes: int
    segments: int
    section_bytes: int
    sections: int
    names_index: int


def header_at(data: Buffer, start: int = 0) -> Header:
    """The header of the ELF64 image at ``start``. Errors: Malformed."""
    if len(data) - start < HEADER.size or bytes(data[start : start + 7]) != IDENT_64_LITTLE:
        raise Malformed("not a little-endian ELF64 header")
    fields = HEADER.unpack_from(data, start)
    (_, os_abi, abi, _, machine, version, _, segments_at, sections_at, flags, _) = fields[:11]
    return Header(os_abi, abi, machine, version, segments_at, sections_at, flags, *fields[11:])


def end_of(data: Buffer, start: int = 0, limit: int | None = None) -> int:
    """Where the image at ``start`` ends by its own headers: the last byte of tables and sections.

    Errors: Malformed when that is past ``limit`` (the buffer's end) or a table is no table.
    """
    limit = len(data) if limit is None else limit
    header = header_at(data, start)
    end = start + HEADER.size
    if header.segments and header.segment_bytes == SEGMENT.size:
        end = max(end, start + header.segments_at + header.segments * SEGMENT.size)
    if header.sections_at:
        count, _ = _section_count(data, start, limit, header)
        table = start + header.sections_at
        end = max(end, table + count * SECTION.size)
        if end <= limit:
            for row in SECTION.iter_unpack(memoryview(data)[table : table + count * SECTION.size]):
                if row[TYPE] not in NO_BYTES:
                    end = max(end, start + row[OFFSET] + row[SIZE])
    if end > limit:
        raise Malformed("ELF image: it ends past the bytes that are there")
    return end


def _section_count(data: Buffer, start: int, limit: int, header: Header) -> tuple[int, int]:
    """How many sections there are and which one has their names; both can be in section 0."""
    if header.section_bytes != SECTION.size:
        raise Malformed(f"ELF section headers of {header.section_bytes} bytes")
    first = start + header.sections_at
    if first + SECTION.size > limit:
        raise Malformed("ELF section headers: past the end")
    count, names = header.sections, header.names_index
    if count == 0 or names == SHN_XINDEX:
        size, link, _ = COUNT_IN_FIRST_SECTION.unpack_from(data, first)
        count = count or size
        names = link if names == SHN_XINDEX else names
    return count, names


class Elf:
    """The sections of one ELF64 image.

    ``rows[i]`` is a section's header, ``names[i]`` its name, which begins at ``rows[i][NAME]`` of
    ``name_bytes``; both are made when they are first asked for. Errors of the constructor:
    Malformed. ``body`` bounds what it returns.
    """

    __slots__ = ("_names", "_rows", "count", "data", "header", "name_bytes")

    def __init__(self, data: Buffer, bounds: Bounds = DEFAULT) -> None:
        self.data = memoryview(data)
        self.header = header_at(data)
        self.count = 0
        self.name_bytes = b""
        self._rows: list[SectionRow] | None = None
        self._names: list[bytes] | None = None
        if self.header.sections_at:
            self._read_sections(bounds)

    def _read_sections(self, bounds: Bounds) -> None:
        limit = len(self.data)
        count, names_index = _section_count(self.data, 0, limit, self.header)
        if count > bounds.sections:
            raise Malformed(f"ELF image of {count} sections")
        if self.header.sections_at + count * SECTION.size > limit:
            raise Malformed("ELF section headers: past the end")
        if names_index >= count:
            raise Malformed("ELF section names: in no section")
        self.count = count
        self.name_bytes = bytes(self.body(names_index))

    @property
    def rows(self) -> list[SectionRow]:
        """All section headers."""
        if self._rows is None:
            start = self.header.sections_at
            table = self.data[start : start + self.count * SECTION.size]
            self._rows = list(SECTION.iter_unpack(table))
        return self._rows

    def table(self) -> npt.NDArray[np.void]:
        """All section headers as an array of the fields' names, for images of many kernels."""
        return np.frombuffer(self.data, TABLE, self.count, self.header.sections_at)

    def row(self, index: int) -> SectionRow:
        """One section header; the index must be one of a section."""
        return SECTION.unpack_from(self.data, self.header.sections_at + index * SECTION.size)

    def name(self, index: int) -> bytes:
        """A section's name. Errors: Malformed when it has no end."""
        at = self.row(index)[NAME]
        stop = self.name_bytes.find(b"\0", at, at + NAME_LIMIT_BYTES)
        if stop < 0:
            raise Malformed("ELF section name: without an end")
        return self.name_bytes[at:stop]

    @property
    def names(self) -> list[bytes]:
        """All names, as long as ``rows``. Errors: Malformed."""
        if self._names is None:
            names = []
            # Names share bytes (.rela.text.f holds .text.f), but few bytes cannot name them all.
            room = NAME_SHARING * len(self.name_bytes) + self.count
            for index in range(self.count):
                name = self.name(index)
                room -= len(name)
                if room < 0:
                    raise Malformed("ELF section names: longer than their sum can be")
                names.append(name)
            self._names = names
        return self._names

    def body(self, index: int) -> memoryview:
        """The bytes of a section, none for NOBITS. Errors: Malformed when some are not there."""
        row = self.row(index)
        if row[TYPE] == SHT_NOBITS:
            return self.data[:0]
        start, end = row[OFFSET], row[OFFSET] + row[SIZE]
        if end > len(self.data):
            raise Malformed("ELF section: past the end")
        return self.data[start:end]

    def find(self, name: bytes) -> int | None:
        """The first section of that name."""
        strings, whole = self.name_bytes, name + b"\0"
        for index, row in enumerate(self.rows):
            if strings.startswith(whole, row[NAME]):
                return index
        return None

    def symbols(self, index: int) -> Iterator[tuple[int, int, int, int, int, int]]:
        """Rows of a symbol table: name offset, info, other, section, value, size."""
        table = self.body(index)
        return SYMBOL.iter_unpack(table[: len(table) - len(table) % SYMBOL.size])

    def strings(self, index: int) -> bytes:
        """The string table that section ``index`` links to. Errors: Malformed."""
        link = self.row(index)[LINK]
        if link >= self.count:
            raise Malformed("ELF strings: in no section")
        return bytes(self.body(link))


def string_at(strings: bytes, at: int) -> bytes:
    """The NUL-terminated string at ``at``, cut at ``NAME_LIMIT_BYTES``; empty when outside."""
    stop = strings.find(b"\0", at, at + NAME_LIMIT_BYTES)
    return strings[at:stop] if stop >= 0 else strings[at : at + NAME_LIMIT_BYTES]
