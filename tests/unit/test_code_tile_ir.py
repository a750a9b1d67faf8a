"""Tile IR bytecode: told by its magic, ended by its sections."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.code import tile_ir
from gpuwarden.errors import Malformed
from tests.support import gpu_images as build
from tests.support.gpu_modules import found, module, problems

IMAGE = build.tile_ir([(1, b"x" * 300), (5, b""), (2, b"functions")])


def test_a_whole_file_is_a_module_to_its_end() -> None:
    one = module(IMAGE + b"and more")
    assert (one.kind, one.toolkit, one.place.found_by) == ("tile-ir", "Tile IR 13.1", "whole")
    assert one.image_bytes == len(IMAGE) + 8


def test_among_other_bytes_it_ends_behind_its_marker() -> None:
    one = module(b"before" + IMAGE + b"behind")
    assert one.digest == hashlib.sha256(IMAGE).hexdigest()
    assert one.place.offset == 6


@pytest.mark.parametrize("alignment", [1, 8, 64])
def test_aligned_sections_have_padding_that_counts_from_the_beginning(alignment: int) -> None:
    head = b"\x7fTileIR\0\x0d\x02\0\0" + bytes([0x83, 10, alignment])
    image = head + b"\xcb" * (-len(head) % alignment) + bytes(10) + b"\0"
    for before in (b"a", b"abcdefg"):
        assert module(before + image + b"behind").image_bytes == len(image)


@pytest.mark.parametrize(
    "image",
    [
        IMAGE[:-1],
        IMAGE[:40],
        IMAGE[:12] + b"\x81\x05\x03" + bytes(9),
        IMAGE[:12] + b"\x81\x05\x00" + bytes(9),
        IMAGE[:12] + b"\x01" + b"\xff" * 12,
    ],
)
def test_bytecode_without_an_end_is_a_problem(image: bytes) -> None:
    assert [problem.what for problem in problems(b"x" + image)] == ["Tile IR"]


def test_the_magic_alone_is_nothing() -> None:
    for words in (b"\x7fTileIR\0not a version", b"\x7fTileIR\0", b"\x7fTileIR\0\x0d\x01\0\0zzz"):
        assert found(b"text" + words) == []


@given(st.binary(max_size=200))
def test_any_bytes_behind_the_magic(data: bytes) -> None:
    image = memoryview(tile_ir.MAGIC + data)
    tile_ir.version(image)
    try:
        assert tile_ir.HEAD.size < tile_ir.end_of(image) <= len(image)
    except Malformed:
        pass
