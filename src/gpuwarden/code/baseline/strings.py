"""The texts of a baseline: sorted, each told by what it does not share with the one before.

A chunk is ``u16 count`` and ``count`` times ``u16 shared, u16 length, length bytes``; its first
string shares nothing, so each chunk is read by itself.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from gpuwarden.code.baseline.layout import (
    CHUNK_BYTES,
    STRING_CHUNK_LIMIT_BYTES,
    STRING_LIMIT_BYTES,
)
from gpuwarden.errors import Malformed

COUNT = struct.Struct("<H")
ENTRY = struct.Struct("<HH")


def pack_strings(strings: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
    """Chunks for sorted strings, and the number of the first string in each.

    Errors: ValueError when one is longer than ``STRING_LIMIT_BYTES``.
    """
    chunks: list[bytes] = []
    firsts: list[int] = []
    body, count, before, full = bytearray(), 0, b"", 0

    def close() -> None:
        chunks.append((COUNT.pack(count) + body).ljust(CHUNK_BYTES, b"\0"))

    for number, string in enumerate(strings):
        if len(string) > STRING_LIMIT_BYTES:
            raise ValueError(f"a text of {len(string)} bytes; at most {STRING_LIMIT_BYTES}")
        shared = _shared(before, string)
        chunk_bytes = COUNT.size + len(body) + ENTRY.size + len(string) - shared
        full += len(string)
        if count and (chunk_bytes > CHUNK_BYTES or full > STRING_CHUNK_LIMIT_BYTES):
            close()
            body, count, full = bytearray(), 0, len(string)
        if not count:
            firsts.append(number)
            shared = 0
        body += ENTRY.pack(shared, len(string) - shared) + string[shared:]
        count, before = count + 1, string
    if count:
        close()
    return chunks, firsts


def _shared(one: bytes, other: bytes) -> int:
    for place, (byte, other_byte) in enumerate(zip(one, other, strict=False)):
        if byte != other_byte:
            return place
    return min(len(one), len(other))


def unpack_strings(chunk: bytes) -> list[str]:
    """The strings of one chunk. Errors: Malformed."""
    (count,) = COUNT.unpack_from(chunk)
    place, before, strings, full = COUNT.size, b"", [], 0
    for _ in range(count):
        if place + ENTRY.size > len(chunk):
            raise Malformed("baseline strings: cut short")
        shared, length = ENTRY.unpack_from(chunk, place)
        place += ENTRY.size
        if (
            shared > len(before)
            or shared + length > STRING_LIMIT_BYTES
            or place + length > len(chunk)
        ):
            raise Malformed("baseline strings: a length that leads out of the chunk")
        before = before[:shared] + chunk[place : place + length]
        place += length
        full += len(before)
        if full > STRING_CHUNK_LIMIT_BYTES:
            raise Malformed("baseline strings: more text than a chunk may hold")
        try:
            strings.append(before.decode())
        except UnicodeDecodeError as error:
            raise Malformed("baseline strings: not UTF-8") from error
    return strings
