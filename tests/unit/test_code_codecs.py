"""Decompression: every codec, every wrong claim, and bombs, which cost no memory."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Iterator

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.code.bounds import Bounds
from gpuwarden.code.codecs import MOST_FROM_ONE_BYTE, decompress, zstd_frame_bytes
from gpuwarden.code.module import Codec
from gpuwarden.errors import Malformed
from tests.support.gpu_images import compress

CODECS: list[Codec] = ["zlib", "lz4", "lz4-frame", "zstd"]
DATA = b"GPU code is like other code " * 300
BOMB_BYTES = 64 << 20
BOUND = Bounds(image_bytes=BOMB_BYTES - 1)


@contextlib.contextmanager
def _little_memory() -> Iterator[None]:
    """Fails when a mebibyte or more was in use at any moment."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("codec", [*CODECS, "none"])
def test_what_was_compressed_comes_back(codec: Codec) -> None:
    stored = compress(codec, DATA)
    assert decompress(codec, stored, len(DATA)) == DATA
    assert decompress(codec, memoryview(stored), len(DATA)) == DATA


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("off_by", [-100, -1, 1, 100])
def test_another_size_than_is_claimed_is_malformed(codec: Codec, off_by: int) -> None:
    with pytest.raises(Malformed):
        decompress(codec, compress(codec, DATA), len(DATA) + off_by)


@pytest.mark.parametrize("codec", CODECS)
def test_a_cut_stream_is_malformed(codec: Codec) -> None:
    stored = compress(codec, DATA)
    for size in (0, 1, len(stored) // 2, len(stored) - 1):
        with pytest.raises(Malformed):
            decompress(codec, stored[:size], len(DATA))


@pytest.mark.parametrize("codec", CODECS)
def test_a_bomb_is_refused_at_the_bound_without_being_decompressed(codec: Codec) -> None:
    bomb = compress(codec, bytes(BOMB_BYTES))
    assert len(bomb) < BOMB_BYTES // 100
    with _little_memory():
        with pytest.raises(Malformed, match="are read"):
            decompress(codec, bomb, BOMB_BYTES, BOUND)
        # A claim below the bound does not open it either: no more than is claimed comes out.
        with pytest.raises(Malformed):
            decompress(codec, bomb, 4096, BOUND)


@pytest.mark.parametrize("codec", CODECS)
def test_a_claim_that_so_few_bytes_cannot_hold_allocates_nothing(codec: Codec) -> None:
    with _little_memory(), pytest.raises(Malformed, match="cannot hold"):
        decompress(codec, bytes(8), 1 << 30)


@pytest.mark.parametrize("codec", CODECS)
def test_the_densest_stream_is_under_what_a_byte_can_become(codec: Codec) -> None:
    for size in (1 << 16, 1 << 20, 1 << 24):
        stored = compress(codec, bytes(size))
        assert size <= len(stored) * MOST_FROM_ONE_BYTE[codec]
        assert decompress(codec, stored, size) == bytes(size)


def test_a_zstd_frame_that_claims_more_than_its_container_is_not_believed() -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(BOMB_BYTES))
    with _little_memory(), pytest.raises(Malformed, match="frame"):
        decompress("zstd", frame, 100_000)


@pytest.mark.parametrize("has_size", [True, False])
@pytest.mark.parametrize("has_checksum", [True, False])
def test_where_a_zstd_frame_ends(has_size: bool, has_checksum: bool) -> None:
    compressor = zstandard.ZstdCompressor(write_content_size=has_size, write_checksum=has_checksum)
    for data in (b"", b"x", bytes(300_000), DATA * 40):
        frame = compressor.compress(data)
        assert zstd_frame_bytes(frame) == len(frame)
        assert zstd_frame_bytes(frame + b"behind") == len(frame)
        assert zstd_frame_bytes(frame[:-1]) is None
        assert decompress("zstd", frame + b"behind", len(data)) == data


@given(st.sampled_from(CODECS), st.binary(max_size=300), st.integers(0, 1 << 33))
def test_any_bytes_give_that_many_or_malformed(codec: Codec, data: bytes, size: int) -> None:
    try:
        assert len(decompress(codec, data, size)) == size
    except Malformed:
        pass
    zstd_frame_bytes(data)


@given(st.sampled_from(CODECS), st.data())
def test_mutated_streams_give_that_many_or_malformed(codec: Codec, data: st.DataObject) -> None:
    stored = bytearray(compress(codec, DATA))
    for _ in range(data.draw(st.integers(1, 4))):
        stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert len(decompress(codec, bytes(stored), len(DATA))) == len(DATA)
    except Malformed:
        pass
