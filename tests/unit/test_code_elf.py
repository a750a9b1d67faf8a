"""Sections of ELF64 images: against pyelftools on real files, and on images made to mislead."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.code import elf
from gpuwarden.code.bounds import Bounds
from gpuwarden.code.elf import Elf
from gpuwarden.errors import Malformed
from tests.support import gpu_images as build
from tests.support.gpu_modules import SAMPLES

REAL_FILES = [
    Path(sys.executable).resolve(),
    *sorted(Path(path) for path in ("/bin/sh", "/lib/x86_64-linux-gnu/libc.so.6")),
]
IMAGE = SAMPLES["cubin"]
SECTIONS_AT = elf.header_at(IMAGE).sections_at


@pytest.mark.parametrize("path", REAL_FILES, ids=str)
def test_sections_are_those_that_pyelftools_reads(path: Path) -> None:
    data = path.read_bytes()
    ours = Elf(data)
    with path.open("rb") as file:
        theirs = ELFFile(file)
        sections = list(theirs.iter_sections())
        assert ours.names == [section.name.encode() for section in sections]
        for index, section in enumerate(sections):
            row = ours.rows[index]
            assert (row[elf.OFFSET], row[elf.SIZE]) == (section["sh_offset"], section["sh_size"])
            if section["sh_type"] != "SHT_NOBITS":
                assert bytes(ours.body(index)) == section.data()
        assert ours.header.machine == {"EM_X86_64": 62, "EM_AARCH64": 183}[theirs["e_machine"]]


@pytest.mark.parametrize("path", REAL_FILES, ids=str)
def test_symbols_are_those_that_pyelftools_reads(path: Path) -> None:
    ours = Elf(path.read_bytes())
    index = ours.find(b".dynsym")
    assert index is not None
    strings = ours.strings(index)
    with path.open("rb") as file:
        table = ELFFile(file).get_section_by_name(".dynsym")
        assert isinstance(table, SymbolTableSection)
        expected = [
            (symbol.name.encode(), symbol["st_value"], symbol["st_size"])
            for symbol in table.iter_symbols()
        ]
    assert [
        (elf.string_at(strings, name_at), value, size)
        for name_at, _, _, _, value, size in ours.symbols(index)
    ] == expected


@pytest.mark.parametrize("path", REAL_FILES, ids=str)
def test_an_image_ends_where_its_file_does(path: Path) -> None:
    data = path.read_bytes()
    assert elf.end_of(data) == len(data)
    assert elf.end_of(b"before" + data + b"behind", 6) == 6 + len(data)


def test_the_table_has_what_the_rows_have() -> None:
    image = Elf(IMAGE)
    fields = (elf.NAME, elf.TYPE, elf.OFFSET, elf.SIZE, elf.INFO)
    names = ("name", "type", "offset", "size", "info")
    table = image.table()
    assert [tuple(row[field] for field in fields) for row in image.rows] == [
        tuple(int(row[name]) for name in names) for row in table
    ]
    assert [image.row(index) for index in range(image.count)] == image.rows


def _with_header(**fields: int) -> bytes:
    layout = {"sections_at": (40, "<Q"), "entry_bytes": (58, "<H"), "count": (60, "<H")}
    layout |= {"names": (62, "<H")}
    image = bytearray(IMAGE)
    for name, value in fields.items():
        at, kind = layout[name]
        struct.pack_into(kind, image, at, value)
    return bytes(image)


@pytest.mark.parametrize(
    "fields",
    [
        {"sections_at": len(IMAGE) - 10},
        {"sections_at": 1 << 63},
        {"entry_bytes": 40},
        {"count": 0xFF00},
        {"names": 0x1000},
    ],
    ids=str,
)
def test_a_table_that_leads_nowhere_is_malformed(fields: dict[str, int]) -> None:
    with pytest.raises(Malformed):
        Elf(_with_header(**fields))


def test_counts_over_sixteen_bits_are_in_the_first_section() -> None:
    image = bytearray(_with_header(count=0, names=0xFFFF))
    struct.pack_into("<Q", image, SECTIONS_AT + 32, Elf(IMAGE).count)
    struct.pack_into("<I", image, SECTIONS_AT + 40, 1)
    assert Elf(bytes(image)).names == Elf(IMAGE).names


def test_more_sections_than_are_read_are_malformed() -> None:
    with pytest.raises(Malformed, match="sections"):
        Elf(IMAGE, Bounds(sections=3))


def test_a_section_past_the_end_is_malformed_when_it_is_read() -> None:
    image = bytearray(IMAGE)
    struct.pack_into("<Q", image, SECTIONS_AT + 64 * 3 + 32, 1 << 40)
    parsed = Elf(bytes(image))
    with pytest.raises(Malformed):
        parsed.body(3)
    with pytest.raises(Malformed):
        elf.end_of(bytes(image))


def test_names_that_share_bytes_cannot_become_longer_than_the_file() -> None:
    """A thousand sections named by the same sixty thousand bytes would be sixty megabytes."""
    long_name = "n" * 60_000
    sections = [build.Section(long_name), *(build.Section("x") for _ in range(1000))]
    image = bytearray(build.elf(sections))
    start = elf.header_at(bytes(image)).sections_at
    name_at = struct.unpack_from("<I", image, start + 64 * 2)[0]
    for index in range(2, 1003):
        struct.pack_into("<I", image, start + 64 * index, name_at)
    with pytest.raises(Malformed, match="names"):
        _ = Elf(bytes(image)).names


@given(st.binary(max_size=400))
def test_any_bytes_give_sections_or_malformed(data: bytes) -> None:
    _read(data)


@given(st.data())
def test_any_header_gives_sections_or_malformed(data: st.DataObject) -> None:
    image = bytearray(IMAGE)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, 63) | st.integers(SECTIONS_AT, len(image) - 1))
        image[at] = data.draw(st.integers(0, 255))
    _read(bytes(image))


def _read(data: bytes) -> None:
    try:
        image = Elf(data)
        assert len(image.names) == len(image.rows)
        for index in range(image.count):
            assert len(image.body(index)) <= len(data)
            list(image.symbols(index))
            image.strings(index)
    except Malformed:
        pass
    try:
        assert elf.end_of(data) <= len(data)
    except Malformed:
        pass
