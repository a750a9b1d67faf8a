"""The tar that an evidence archive is: every byte of its framing follows from four values.

A member is 1,536 bytes of headers, its content, and zero bytes up to the next 512: a PAX header
(``x``) with one record, ``comment=sha256:…`` of the content, then a USTAR header. Two zero blocks
end the file. Any ``tar`` opens it; a reader builds the headers anew and compares them, so no bit
of them can differ unseen. Format: POSIX.1-2008, pax, "ustar Interchange Format".
"""

from __future__ import annotations

import os

from msgspec import Struct

from gpuwarden.errors import Malformed
from gpuwarden.pattern import pattern

BLOCK_BYTES = 512
HEADER_BYTES = 3 * BLOCK_BYTES
END = bytes(2 * BLOCK_BYTES)
NAME_LIMIT = 100
MEMBERS_LIMIT = 16386
"""The manifest and the seal among them."""
SIZE_LIMIT_BYTES = (8 << 30) - 1
"""Eleven octal digits."""
MTIME_LIMIT = (1 << 33) - 1
DIGEST_BYTES = 32
UNFINISHED = bytes(DIGEST_BYTES)
"""The digest in the headers of a member whose content is still being written."""

_CHUNK_BYTES = 1 << 20
_RECORD = b"83 comment=sha256:%s\n"
_PAX_NAME = b"PaxHeaders/sha256"
_MODE = b"0000600\0"
_ZERO_ID = b"0000000\0"
_MAGIC = b"ustar\x0000"
_CHECKSUM = slice(148, 156)
_NAME_FIELD = slice(0, 100)
_SIZE_FIELD = slice(124, 135)
_MTIME_FIELD = slice(136, 147)
_DIGEST_FIELD = slice(BLOCK_BYTES + 18, BLOCK_BYTES + 82)
_PLAIN_NAME = pattern(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]*(?:/[A-Za-z0-9_][A-Za-z0-9._+=@-]*)*")
_OCTAL = pattern(rb"[0-7]{11}")
_HEX = pattern(rb"[0-9a-f]{64}")


class Header(Struct, frozen=True):
    """What the headers of one member say."""

    name: str
    size: int
    mtime: int
    """Seconds; one value for the whole archive."""
    sha256: bytes
    """Of the content as stored; ``UNFINISHED`` while it is being written."""

    @property
    def padding(self) -> int:
        """Zero bytes after the content."""
        return -self.size % BLOCK_BYTES


def is_name(name: str) -> bool:
    """Whether a member may be called so: relative, of plain characters, no part hidden."""
    return len(name) <= NAME_LIMIT and _PLAIN_NAME.fullmatch(name) is not None


def encode(header: Header) -> bytes:
    """The 1,536 bytes before a member's content. Errors: ValueError for values out of range."""
    if not (
        is_name(header.name)
        and 0 <= header.size <= SIZE_LIMIT_BYTES
        and 0 <= header.mtime <= MTIME_LIMIT
        and len(header.sha256) == DIGEST_BYTES
    ):
        raise ValueError(f"no such member: {header.name[:120]!r}")
    record = _RECORD % header.sha256.hex().encode()
    return (
        _block(_PAX_NAME, len(record), header.mtime, b"x")
        + record.ljust(BLOCK_BYTES, b"\0")
        + _block(header.name.encode(), header.size, header.mtime, b"0")
    )


def decode(data: bytes) -> Header:
    """The header in 1,536 bytes that ``encode`` made. Errors: Malformed for any others."""
    if len(data) != HEADER_BYTES:
        raise Malformed("cut off in a header")
    last = data[2 * BLOCK_BYTES :]
    size, mtime, digest = last[_SIZE_FIELD], last[_MTIME_FIELD], data[_DIGEST_FIELD]
    name = last[_NAME_FIELD].rstrip(b"\0").decode("latin-1")
    if not (_OCTAL.fullmatch(size) and _OCTAL.fullmatch(mtime) and _HEX.fullmatch(digest)):
        raise Malformed("not a header of an evidence archive")
    if not is_name(name):
        raise Malformed("a header names no plain file")
    header = Header(name, int(size, 8), int(mtime, 8), bytes.fromhex(digest.decode()))
    if encode(header) != data:
        raise Malformed(f"the header of {name} is not as it was written")
    return header


def looks_like(data: bytes) -> bool:
    """Whether the first 512 bytes of a file are those of an evidence archive."""
    return data.startswith(_PAX_NAME + b"\0") and data[257:265] == _MAGIC


def find(handle: int, name: str, limit_bytes: int) -> bytes | None:
    """The content of a member, by going from header to header; None if there is none before the end
    or before something damaged. The archive as a whole is not verified.

    Errors: Malformed if that member is damaged or larger than ``limit_bytes``; OSError.
    """
    # Imported here: a scan of a live node needs no cryptography library.
    import hashlib

    at = 0
    for _ in range(MEMBERS_LIMIT):
        try:
            header = decode(os.pread(handle, HEADER_BYTES, at))
        except Malformed:
            return None
        begin = at + HEADER_BYTES
        at = begin + header.size + header.padding
        if header.name != name:
            continue
        if header.size > limit_bytes:
            raise Malformed(f"its {name} has more than {limit_bytes >> 20} MiB")
        data = bytearray()
        while len(data) < header.size:
            piece = os.pread(handle, min(_CHUNK_BYTES, header.size - len(data)), begin + len(data))
            if not piece:
                raise Malformed(f"its {name} is cut off")
            data += piece
        if hashlib.sha256(data).digest() != header.sha256:
            raise Malformed(f"its {name} is not what was written")
        return bytes(data)
    return None


def _block(name: bytes, size: int, mtime: int, kind: bytes) -> bytes:
    block = bytearray(BLOCK_BYTES)
    fields = (name.ljust(100, b"\0"), _MODE, _ZERO_ID, _ZERO_ID, b"%011o\0%011o\0" % (size, mtime))
    front = b"".join(fields) + b" " * 8 + kind
    block[: len(front)] = front
    block[257:265] = _MAGIC
    block[329:345] = _ZERO_ID * 2  # of a device: none
    block[_CHECKSUM] = b"%06o\0 " % sum(block)
    return bytes(block)
