"""The ELF identity of real binaries, of built images, and of anything else."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.errors import Malformed, Unavailable
from gpuwarden.host import Host
from gpuwarden.sensors.elf import (
    DT_NEEDED,
    DT_NULL,
    DT_SONAME,
    DT_STRTAB,
    PT_DYNAMIC,
    PT_LOAD,
    PT_NOTE,
    ElfIdentity,
    parse_build_id,
    parse_identity,
    read_identity,
)

BUILD_ID = bytes(range(20))


def image(bits: int = 64, order: str = "<") -> bytes:
    """A little ELF shared object: notes, dynamic entries, strings, no code."""
    wide = bits == 64
    note = struct.pack(order + "III", 4, len(BUILD_ID), 3) + b"GNU\0" + BUILD_ID
    other = struct.pack(order + "III", 5, 3, 1) + b"Test\0\0\0\0" + b"abc\0"
    notes = other + note
    strings = b"\0libfake.so.1\0libc.so.6\0libm.so.6\0"
    base = 0x10000
    header_bytes, entry_bytes = (64, 56) if wide else (52, 32)
    notes_at = header_bytes + 3 * entry_bytes
    strings_at = notes_at + len(notes)
    dynamic_at = strings_at + len(strings)
    word = order + ("QQ" if wide else "II")
    dynamic = b"".join(
        struct.pack(word, tag, value)
        for tag, value in [
            (DT_NEEDED, 14),
            (DT_NEEDED, 24),
            (DT_SONAME, 1),
            (DT_STRTAB, base + strings_at),
            (DT_NULL, 0),
            (DT_NEEDED, 1),
        ]
    )
    total = dynamic_at + len(dynamic)

    def segment(kind: int, offset: int, size: int) -> bytes:
        if wide:
            return struct.pack(order + "IIQQQQQQ", kind, 4, offset, base + offset, 0, size, size, 4)
        return struct.pack(order + "IIIIIIII", kind, offset, base + offset, 0, size, size, 4, 4)

    ident = b"\x7fELF" + bytes([2 if wide else 1, 1 if order == "<" else 2, 1]) + bytes(9)
    layout = "HHIQQQIHHHHHH" if wide else "HHIIIIIHHHHHH"
    header = ident + struct.pack(
        order + layout, 3, 62, 1, 0, header_bytes, 0, 0, header_bytes, entry_bytes, 3, 0, 0, 0
    )
    return (
        header
        + segment(PT_LOAD, 0, total)
        + segment(PT_NOTE, notes_at, len(notes))
        + segment(PT_DYNAMIC, dynamic_at, len(dynamic))
        + notes
        + strings
        + dynamic
    )


def parse(data: bytes) -> ElfIdentity:
    return parse_identity(lambda offset, size: data[offset : offset + size])


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("order", ["<", ">"])
def test_every_class_and_byte_order_is_read(bits: int, order: str) -> None:
    assert parse(image(bits, order)) == ElfIdentity(
        is_elf=True,
        build_id=BUILD_ID.hex(),
        soname="libfake.so.1",
        needed=("libc.so.6", "libm.so.6"),
    )


def test_a_linked_library_has_the_identity_that_the_linker_gave_it(tmp_path: Path) -> None:
    source = tmp_path / "a.c"
    source.write_text("int answer(void){return 42;}\n")
    target = tmp_path / "libanswer.so"
    linking = "-Wl,--build-id=0xabad1dea,-soname,libanswer.so.7,--no-as-needed"
    subprocess.run(["gcc", "-shared", "-fPIC", linking, "-o", target, source, "-lm"], check=True)
    found = read_identity(Host(), str(target))
    assert (found.is_elf, found.build_id, found.soname) == (True, "abad1dea", "libanswer.so.7")
    assert found.needed[0] == "libm.so.6"


def test_a_program_is_read_through_the_proc_link() -> None:
    found = read_identity(Host(), "/proc/self/exe")
    assert found.is_elf
    assert any(name.startswith("libc.so") for name in found.needed), sys.executable


def test_a_script_is_no_elf() -> None:
    assert parse(b"#!/bin/sh\n") == ElfIdentity(is_elf=False)
    assert parse(b"") == ElfIdentity(is_elf=False)


def test_a_directory_and_a_missing_file_are_unavailable(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(Unavailable):
            read_identity(Host(), str(path))


@pytest.mark.parametrize("keep", [4, 15, 40, 63, 64, 100, 200])
def test_a_cut_header_is_malformed(keep: int) -> None:
    with pytest.raises(Malformed):
        parse(image()[:keep])


def test_strings_outside_every_segment_are_malformed() -> None:
    data = image()
    base = struct.pack("<QQ", DT_STRTAB, 0x10000)[8:11]
    at = data.index(struct.pack("<Q", DT_STRTAB), 64 + 3 * 56 + 60)
    assert data[at + 10 : at + 11] == base[2:3]
    with pytest.raises(Malformed):
        parse(data[: at + 8] + b"\xff" * 8 + data[at + 16 :])


def test_names_that_are_not_utf8_stay_visible() -> None:
    assert parse(image().replace(b"libfake", b"lib\xffake")).soname == "lib\\xffake.so.1"


@given(st.binary(max_size=400))
def test_any_bytes_are_a_result_or_malformed(data: bytes) -> None:
    for candidate in (data, b"\x7fELF" + data, b"\x7fELF\x02\x01" + data):
        try:
            parse(candidate)
        except Malformed:
            pass
    parse_build_id(data)


@given(st.integers(0, len(image()) - 1), st.binary(min_size=1, max_size=8))
def test_any_damage_is_a_result_or_malformed(at: int, patch: bytes) -> None:
    data = image()
    try:
        found = parse(data[:at] + patch + data[at + len(patch) :])
    except Malformed:
        return
    assert len(found.needed) <= 256
