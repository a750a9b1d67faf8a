"""CUDA Tile IR bytecode, told by its magic (the Tile IR specification, "Binary Format")."""

from __future__ import annotations

import struct

from gpuwarden.errors import Malformed

MAGIC = b"\x7fTileIR\0"
# magic, major, minor, tag
HEAD = struct.Struct("<8sBBH")
# Then sections: a byte of its number and whether it is aligned, its size, its alignment, padding.
END_MARKER, ALIGNED = 0, 0x80
SECTIONS_LIMIT = 128
MAJOR_LIMIT, SECTION_LIMIT = 64, 32
"""Generous: 13 and some ten are in use."""
ALIGNMENT_LIMIT_BYTES = 1 << 20


def version(image: bytes | memoryview) -> str:
    """``13.1`` of the bytecode, empty when it is none."""
    if len(image) < HEAD.size:
        return ""
    magic, major, minor, _ = HEAD.unpack_from(image)
    return f"{major}.{minor}" if magic == MAGIC else ""


def is_bytecode(data: memoryview, start: int = 0) -> bool:
    """Whether a version and a section follow the magic, which readers of Tile IR hold alone."""
    if start + HEAD.size >= len(data):
        return False
    magic, major, _, _ = HEAD.unpack_from(data, start)
    section = data[start + HEAD.size] & ~ALIGNED
    return magic == MAGIC and 0 < major < MAJOR_LIMIT and section < SECTION_LIMIT


def end_of(data: memoryview, start: int = 0) -> int:
    """Where the bytecode at ``start`` ends: behind its end marker.

    Errors: Malformed when its sections do not lead there.
    """
    at = start + HEAD.size
    for _ in range(SECTIONS_LIMIT):
        if at >= len(data):
            break
        section = data[at]
        at += 1
        if section == END_MARKER:
            return at
        size, at = _varint(data, at)
        if section & ALIGNED:
            alignment, at = _varint(data, at)
            if alignment & (alignment - 1) or not 0 < alignment <= ALIGNMENT_LIMIT_BYTES:
                raise Malformed(f"Tile IR: a section aligned to {alignment} bytes")
            at += (start - at) % alignment
        at += size
    raise Malformed("Tile IR: no end among the bytes that are there")


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """An unsigned LEB128 of at most 64 bits, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise Malformed("Tile IR: a number without an end")
