"""Fatbins: every field of an entry, every codec, streams of several images, and broken ones."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.code import fatbin
from gpuwarden.code.located import Located
from gpuwarden.code.module import Problem
from gpuwarden.errors import Malformed
from tests.support import gpu_images as build
from tests.support.gpu_images import EntryImage
from tests.support.gpu_modules import CUBIN, PLACE, found, module, modules, problems

DIGEST = hashlib.sha256(CUBIN).hexdigest()


@pytest.mark.parametrize("codec", build.CODEC_FLAGS)
def test_an_image_is_the_same_in_every_codec(codec: str) -> None:
    one = module(build.fatbin([EntryImage("cubin", CUBIN, 90, codec)]))
    assert (one.digest, one.codec, one.image_bytes) == (DIGEST, codec, len(CUBIN))
    assert one.broken == ""


def test_what_an_entry_says_of_its_image() -> None:
    image = EntryImage("ptx", build.ptx(), 80, "zstd", "dir/source.cu", "-O3 --fmad=false")
    one = module(build.fatbin([image]))
    assert (one.kind, one.arch) == ("ptx", "compute_80")
    assert (one.identifier, one.options) == ("dir/source.cu", "-O3 --fmad=false")


@pytest.mark.parametrize(
    ("kind", "flags", "arch"),
    [
        ("cubin", 0, "sm_90"),
        ("cubin", build.ARCH_A, "sm_90a"),
        ("cubin", build.ARCH_F, "sm_90f"),
        ("ptx", build.ARCH_A, "compute_90a"),
        ("lto-ir", build.OBFUSCATED, "lto_90"),
        ("tile-ir", 0, "sm_90"),
    ],
)
def test_the_architecture_of_an_entry(kind: str, flags: int, arch: str) -> None:
    (one,) = found(build.fatbin([EntryImage(kind, CUBIN, 90, flags=flags)]))
    assert isinstance(one, Located)
    assert (one.kind, one.arch) == (kind, arch)


def test_an_image_loses_the_padding_behind_it_and_nothing_else() -> None:
    odd = build.cubin([build.KernelImage("k", bytes(256))])[:-1] + b"\1"
    text = build.ptx() + b" "
    assert len(odd) % 8 == 0
    for size in range(8):
        (one,) = found(build.fatbin([EntryImage("ptx", text + b"x" * size)]))
        assert isinstance(one, Located)
        assert bytes(one.image()) == text + b"x" * size
    behind = odd + b"\0\0\1"
    assert module(build.fatbin([EntryImage("cubin", behind)])).image_bytes >= len(behind)


def test_obfuscated_lto_ir_is_known_by_its_stored_bytes() -> None:
    entry = EntryImage("lto-ir", b"not zstd at all!", 80, "none", flags=build.OBFUSCATED | 0x8000)
    one = module(build.fatbin([entry]))
    assert one.digest == hashlib.sha256(b"not zstd at all!").hexdigest()
    assert (one.kind, one.codec, one.code_digest) == ("lto-ir", "none", "")


def test_an_entry_of_an_unknown_kind_is_not_lost() -> None:
    images = [EntryImage(0x40, b"what is it?", 80, "zstd"), EntryImage("cubin", CUBIN)]
    unknown, known = modules(build.fatbin(images))
    assert (unknown.kind, unknown.image_bytes) == ("unknown", len(b"what is it?"))
    assert known.digest == DIGEST


@pytest.mark.parametrize("codec", ["zstd", "lz4", "zlib"])
def test_a_stream_of_several_images(codec: str) -> None:
    other = build.cubin(sm=75, abi=7)
    parts = [EntryImage("cubin", CUBIN, 90, flags=build.ARCH_A), EntryImage("cubin", other, 75)]
    data = build.fatbin([build.concat_entry(parts, codec), EntryImage("ptx", build.ptx())])
    first, second, text = modules(data)
    assert (first.digest, first.arch, first.codec) == (DIGEST, "sm_90a", codec)
    assert (second.digest, second.arch) == (hashlib.sha256(other).hexdigest(), "sm_75")
    assert text.kind == "ptx"


def test_a_shared_stream_can_be_asked_for_again() -> None:
    parts = [EntryImage("cubin", CUBIN), EntryImage("cubin", build.cubin(sm=75, abi=7), 75)]
    located = found(build.fatbin([build.concat_entry(parts)]))
    for _ in range(3):
        for one, part in zip(located, parts, strict=True):
            assert isinstance(one, Located)
            assert bytes(one.image()) == part.image


def test_a_stream_whose_table_is_broken_is_told_and_kept_as_a_whole() -> None:
    data = bytearray(build.fatbin([build.concat_entry([EntryImage("cubin", CUBIN)] * 2)]))
    struct.pack_into("<I", data, 16 + 64, 500)
    assert [problem.what for problem in problems(bytes(data))] == ["concatenated fatbin entry"]
    (one,) = modules(bytes(data))
    assert one.kind == "unknown"
    assert one.image_bytes == 2 * (len(CUBIN) + -len(CUBIN) % 8)


def test_the_entries_before_a_broken_one_are_found_and_the_rest_is_told() -> None:
    good, bad = EntryImage("cubin", CUBIN), bytearray(build.entry(EntryImage("cubin", CUBIN)))
    bad[2] = 9
    data = build.fatbin([good, bytes(bad)])
    assert modules(data)[0].digest == DIGEST
    assert [problem.what for problem in problems(data)] == ["fatbin entry"]


def test_a_fatbin_that_is_cut_short_is_told_with_what_is_there() -> None:
    data = build.fatbin([EntryImage("cubin", CUBIN), EntryImage("cubin", CUBIN, 80, "zstd")])
    cut = data[:-20]
    assert modules(cut)[0].digest == DIGEST
    assert problems(cut)


def test_a_payload_that_does_not_decompress_is_broken_and_known_by_what_is_stored() -> None:
    stored = b"this is no zstd frame at all...."
    image = EntryImage("cubin", stored, 90)
    data = bytearray(build.fatbin([image]))
    struct.pack_into("<I", data, 16 + 16, len(stored))
    struct.pack_into("<Q", data, 16 + 40, build.LINUX_64 | build.CODEC_FLAGS["zstd"])
    struct.pack_into("<Q", data, 16 + 56, 5000)
    one = module(bytes(data))
    assert one.broken.startswith("zstd")
    assert one.digest == hashlib.sha256(stored).hexdigest()


def test_a_bomb_is_a_broken_module() -> None:
    bomb = EntryImage("cubin", bytes(1 << 20), 90, "zstd")
    data = bytearray(build.fatbin([bomb, EntryImage("cubin", CUBIN)]))
    struct.pack_into("<Q", data, 16 + 56, 1 << 40)
    broken, sound = modules(bytes(data))
    assert "are read" in broken.broken
    assert sound.digest == DIGEST


@pytest.mark.parametrize("version", [1, 2])
def test_a_wrapper(version: int) -> None:
    data = b"abc" + build.wrapper(version, 0x7000_1000, 0x7000_2000)
    assert fatbin.wrapper_at(data, 3) == fatbin.Wrapper(version, 0x7000_1000, 0x7000_2000)
    assert fatbin.wrapper_at(data, 2) is None
    assert fatbin.wrapper_at(data[:-1], 3) is None
    assert fatbin.wrapper_at(build.wrapper(3)) is None


@given(st.binary(max_size=600))
def test_any_bytes_behind_a_header_give_modules_and_problems(body: bytes) -> None:
    data = memoryview(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body)
    _read(data)


ENTRIES = build.fatbin(
    [
        build.concat_entry([EntryImage("cubin", b"c" * 40), EntryImage("ptx", b"p" * 16)]),
        EntryImage("ptx", build.ptx(), 80, "lz4", "name", "options"),
    ]
)


@given(st.data())
def test_any_change_to_entries_gives_modules_and_problems(data: st.DataObject) -> None:
    image = bytearray(ENTRIES)
    for _ in range(data.draw(st.integers(1, 6))):
        image[data.draw(st.integers(0, len(image) - 1))] = data.draw(st.integers(0, 255))
    _read(memoryview(bytes(image)))


def _read(data: memoryview) -> None:
    end = fatbin.end_of(data, 0)
    if end is None:
        return
    for one in fatbin.modules(data, 0, end, PLACE):
        if isinstance(one, Problem):
            continue
        try:
            one.image()
        except Malformed:
            pass
