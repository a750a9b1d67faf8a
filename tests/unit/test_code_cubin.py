"""Cubins: architecture, notes, kernels with their resources, and any bytes."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.code import cubin
from gpuwarden.code.bounds import KERNELS_TOLD, Bounds
from gpuwarden.code.cubin import Cubin
from gpuwarden.code.elf import Elf, header_at
from gpuwarden.errors import Malformed
from tests.support import gpu_images as build
from tests.support.gpu_images import KernelImage, Section
from tests.support.gpu_modules import CUBIN, module


def _parsed(image: bytes) -> Cubin:
    return Cubin(Elf(image))


@pytest.mark.parametrize(
    ("sm", "suffix", "abi", "toolkit", "arch"),
    [
        (90, "", 8, True, "sm_90"),
        (90, "a", 8, True, "sm_90a"),
        (100, "f", 8, True, "sm_100f"),
        (120, "", 8, False, "sm_120"),
        (86, "", 7, False, "sm_86"),
        (90, "a", 7, False, "sm_90a"),
        (61, "", 7, True, "sm_61"),
    ],
)
def test_the_architecture_of_a_bare_cubin(
    sm: int, suffix: str, abi: int, toolkit: bool, arch: str
) -> None:
    image = build.cubin(sm=sm, suffix=suffix, abi=abi, toolkit=toolkit)
    assert module(image).arch == arch
    assert cubin.sm_of(header_at(image)) == sm


def test_a_suffix_without_notes_is_told_by_the_compatibility_section() -> None:
    specific = Section(".nv.compat", b"\0\2\3\0\2\x09\1\0")
    assert module(build.cubin(sm=90, toolkit=False, more=[specific])).arch == "sm_90a"
    general = Section(".nv.compat", b"\0\2\3\0\2\x09\0\0")
    assert module(build.cubin(sm=90, toolkit=False, more=[general])).arch == "sm_90"


def test_options_for_another_architecture_are_not_believed() -> None:
    note = Section(".note.nv.tkinfo", build.toolkit_note(options="-arch sm_100a"), build.SHT_NOTE)
    assert module(build.cubin(sm=90, toolkit=False, more=[note])).arch == "sm_90"


def test_the_toolkit_and_the_options_are_those_of_the_note() -> None:
    one = module(CUBIN)
    assert (one.toolkit, one.options) == ("ptxas 13.5.37", "-arch sm_90a -m 64")


def test_an_older_toolkit_is_told_by_its_version_alone() -> None:
    note = build.note(b"NVIDIA Corp", 1000, struct.pack("<HHHH", 2, 80, 128, 0))
    image = build.cubin(toolkit=False, more=[Section(".note.nv.cuinfo", note, build.SHT_NOTE)])
    assert module(image).toolkit == "CUDA 12.8"
    old = bytearray(build.cubin(sm=80, abi=7, toolkit=False))
    struct.pack_into("<I", old, 20, 111)
    assert module(bytes(old)).toolkit == "CUDA 11.1"
    assert module(build.cubin(sm=80, abi=7, toolkit=False)).toolkit == ""


def test_kernels_with_their_resources() -> None:
    first, second = module(CUBIN).kernels
    assert (first.name, first.registers, first.shared_bytes) == ("first", 40, 1024)
    assert (first.instructions, first.code_bytes) == (16, 256)
    assert (second.name, second.registers, second.shared_bytes) == ("second", 8, 0)
    assert second.instructions == 32


def test_registers_of_old_images_are_in_the_section_header() -> None:
    code = Section(".text.k", bytes(256), info=24 << 24 | 3)
    image = build.elf([code], machine=190, os_abi=0x33, abi_version=7, flags=70)
    (kernel,) = module(image).kernels
    assert kernel.registers == 24


def test_registers_behind_attributes_of_other_sizes() -> None:
    attributes = b"".join(
        [
            struct.pack("<BBHII", 4, 0x11, 8, 1, 99),
            struct.pack("<BBH", 3, 0x1B, 255),
            struct.pack("<BBHIIII", 4, 0x17, 16, 1, 2, 3, 4),
            struct.pack("<BBHII", 4, 0x2F, 8, 1, 33),
            struct.pack("<BBH", 2, 0x4C, 1),
            struct.pack("<BBHII", 4, 0x2F, 8, 2, 44),
        ]
    )
    sections = [
        Section(".nv.info", attributes),
        Section(".text.a", bytes(128), info=1),
        Section(".text.b", bytes(128), info=2),
    ]
    image = build.elf(sections, machine=190, os_abi=0x41, abi_version=8, flags=90 << 8)
    assert [kernel.registers for kernel in module(image).kernels] == [33, 44]


ATTRIBUTE = st.one_of(
    st.builds(
        lambda symbol, count: struct.pack("<BBHII", 4, 0x2F, 8, symbol, count),
        st.integers(0, 9),
        st.integers(0, 255),
    ),
    st.builds(
        lambda kind, size: struct.pack("<BBH", 4, kind, size) + bytes(size),
        st.integers(0, 255),
        st.sampled_from([0, 4, 8, 12, 16]),
    ),
    st.builds(
        lambda form, kind, value: struct.pack("<BBH", form, kind, value),
        st.sampled_from([1, 2, 3]),
        st.integers(0, 255),
        st.integers(0, 65535),
    ),
)


@given(st.lists(ATTRIBUTE, max_size=400))
def test_registers_are_those_that_a_plain_reader_finds(attributes: list[bytes]) -> None:
    expected = {}
    for attribute in attributes:
        form, kind, size = struct.unpack_from("<BBH", attribute)
        if (form, kind, size) == (4, 0x2F, 8):
            symbol, count = struct.unpack_from("<II", attribute, 4)
            expected[symbol] = count
    image = build.elf([Section(".nv.info", b"".join(attributes))], machine=190)
    assert cubin._registers(_parsed(image)) == expected


@pytest.mark.parametrize(
    ("sm", "code_bytes", "count"),
    [(90, 256, 16), (70, 160, 10), (61, 256, 24), (50, 64, 6), (35, 128, 14), (20, 80, 10)],
)
def test_how_many_instructions_are_in_some_bytes(sm: int, code_bytes: int, count: int) -> None:
    assert cubin.instructions(sm, code_bytes) == count


def test_of_many_kernels_all_are_counted_and_some_are_told() -> None:
    image = build.cubin([KernelImage(f"k{number}", bytes(128)) for number in range(200)])
    one = module(image)
    assert one.kernel_count == 200
    assert [kernel.name for kernel in one.kernels] == [f"k{n}" for n in range(KERNELS_TOLD)]
    with pytest.raises(Malformed, match="200"):
        cubin.kernels(_parsed(image), Bounds(kernels=199))


def test_long_names_are_told_in_part() -> None:
    long_name = "n" * 20_000
    cubins = module(build.cubin([KernelImage(long_name, bytes(128), shared_bytes=64)]))
    amd = module(build.amd_code_object([build.AmdKernel(long_name)]))
    text = module(build.ptx([long_name]))
    for one in (cubins, amd, text):
        assert long_name.startswith(one.kernels[0].name)
        assert len(one.kernels[0].name) < 5000
    assert cubins.kernels[0].shared_bytes == 64
    note = Section(".note.nv.tkinfo", build.toolkit_note(options="o" * 20_000), build.SHT_NOTE)
    assert len(module(build.cubin(toolkit=False, more=[note])).options) < 5000


def test_sections_are_told_by_their_names_whatever_their_types_say() -> None:
    names = {
        "codes": [".text.k", ".text."],
        "constants": [
            *(".nv.constant1.k", ".nv.constant3", ".nv.constant01", ".nv.constant10.k"),
            *(".nv.global.init", ".rodata", ".rodata.k"),
        ],
        "capsules": [".nv.capmerc.text.k"],
        "shared": [".nv.shared.k"],
        "nothing": [
            *(".nv.constant0", ".nv.constant0.k", ".nv.info.k", ".nv.global", ".nv.callgraph"),
            *(".textual", ".nv.merc.text", ".nv.capmerc.data", ".debug_frame", ".nv.sharedx", ""),
        ],
    }
    every = [name for group in names.values() for name in group]
    for kind in (1, 3, 7, 0x7000_0000):
        image = build.elf([Section(name, b"x", kind) for name in every], machine=190)
        parsed = _parsed(image)
        for group in ("codes", "constants", "capsules", "shared"):
            told = [parsed.image.name(index).decode() for index in getattr(parsed, group)]
            assert told == names[group], group


def test_a_name_outside_the_names_is_malformed() -> None:
    image = bytearray(CUBIN)
    struct.pack_into("<I", image, header_at(CUBIN).sections_at + 64 * 3, 1 << 31)
    with pytest.raises(Malformed):
        _parsed(bytes(image))
    assert module(bytes(image)).broken


@given(st.data())
def test_any_change_gives_a_description(data: st.DataObject) -> None:
    image = bytearray(CUBIN)
    table_at = header_at(CUBIN).sections_at
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(64, len(image) - 1) | st.integers(table_at, len(image) - 1))
        image[at] = data.draw(st.integers(0, 255))
    try:
        parsed = _parsed(bytes(image))
        cubin.kernels(parsed)
        cubin.built(parsed)
        cubin.arch_of(parsed)
    except Malformed:
        pass
