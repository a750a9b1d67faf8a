"""Decompression that allocates no more than a bound allows, whatever the compressed bytes claim."""

from __future__ import annotations

import threading
import zlib
from typing import Any

import lz4.block  # type: ignore[import-untyped]
import lz4.frame  # type: ignore[import-untyped]
import zstandard

from gpuwarden.code.bounds import DEFAULT, Bounds
from gpuwarden.code.module import Codec
from gpuwarden.errors import Malformed

Bytes = bytes | memoryview

# What one compressed byte can become at most. LZ4: a length byte of 255. Deflate: 258 bytes from
# two bits. zstd: a block of 128 KiB from a header of three bytes and one to repeat.
MOST_FROM_ONE_BYTE: dict[Codec, int] = {
    "none": 1,
    "zlib": 1032,
    "lz4": 255,
    "lz4-frame": 255,
    "zstd": (128 << 10) // 4,
}
SLACK_BYTES = 128 << 10

_of_thread = threading.local()


def most_bytes(codec: Codec, stored_bytes: int) -> int:
    """What so many bytes can become at most."""
    slack = 0 if codec == "none" else SLACK_BYTES
    return stored_bytes * MOST_FROM_ONE_BYTE[codec] + slack


def decompress(codec: Codec, data: Bytes, size: int, bounds: Bounds = DEFAULT) -> Bytes:
    """The ``size`` bytes that ``data`` holds; neither more nor fewer are accepted.

    Errors: Malformed for a size over ``bounds.image_bytes``, a size that ``data`` cannot become,
    and for bytes that do not decompress to it.
    """
    if size > bounds.image_bytes:
        raise Malformed(f"{codec}: {size} bytes claimed, {bounds.image_bytes} are read")
    if size > most_bytes(codec, len(data)):
        raise Malformed(f"{codec}: {len(data)} bytes cannot hold the {size} that are claimed")
    image = data[:size] if codec == "none" else _decompressed(codec, data, size)
    if len(image) != size:
        raise Malformed(f"{codec}: {len(image)} bytes where {size} are claimed")
    return image


def _decompressed(codec: Codec, data: Bytes, size: int) -> bytes:
    try:
        if codec == "zstd":
            return _zstd(data, size)
        if codec == "lz4":
            return bytes(lz4.block.decompress(data, uncompressed_size=size))
        if codec == "lz4-frame":
            return _to_its_end(lz4.frame.LZ4FrameDecompressor(), data, size)
        return _to_its_end(zlib.decompressobj(), data, size)
    except (zlib.error, zstandard.ZstdError, lz4.block.LZ4BlockError) as error:
        raise Malformed(f"{codec}: {error}") from error
    except (RuntimeError, ValueError, EOFError, MemoryError, OverflowError) as error:
        # lz4.frame raises RuntimeError; sizes that no allocation has are the other four.
        raise Malformed(f"{codec}: {error}") from error


def _to_its_end(reader: Any, data: Bytes, size: int) -> bytes:
    # One byte more than is claimed: a stream that has it ends later. 0 would be no limit.
    image: bytes = reader.decompress(data, max_length=size + 1)
    if not reader.eof:
        raise Malformed("compressed stream: it does not end where its image does")
    return image


def zstd_frame_bytes(data: Bytes) -> int | None:
    """How many bytes the zstd frame at the beginning takes (RFC 8878); None when it has no end."""
    try:
        at = zstandard.frame_header_size(data)
    except zstandard.ZstdError:
        return None
    has_checksum = data[4] & 4
    while at + 3 <= len(data):
        block = data[at] | data[at + 1] << 8 | data[at + 2] << 16
        is_run = block >> 1 & 3 == 1
        at += 3 + (1 if is_run else block >> 3)
        if block & 1:
            end = at + (4 if has_checksum else 0)
            return end if end <= len(data) else None
    return None


def _zstd(data: Bytes, size: int) -> bytes:
    if size == 0:
        return b""
    # zstandard allocates what the frame says, so that must be what the container says.
    claimed = zstandard.frame_content_size(data)
    if claimed not in (size, -1):
        raise Malformed(f"zstd: a frame of {claimed} bytes where {size} are claimed")
    reader: zstandard.ZstdDecompressor | None = getattr(_of_thread, "zstd", None)
    if reader is None:
        reader = _of_thread.zstd = zstandard.ZstdDecompressor()
    return reader.decompress(data, max_output_size=size)
