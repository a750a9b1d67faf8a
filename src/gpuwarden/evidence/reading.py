"""Reads an archive from its first byte to its last: each member found, and all that is wrong.

Nothing is unpacked and nothing written. Any bytes give a result, in one pass over the file and
with the memory of its manifest; after a damaged header it goes on at the next one that is whole.
"""

from __future__ import annotations

import hashlib
import os
import stat
from typing import Literal

from msgspec import Struct

from gpuwarden import tar_format
from gpuwarden.errors import Malformed, Unavailable
from gpuwarden.evidence import manifest as words
from gpuwarden.evidence.directory import refuse
from gpuwarden.tar_format import BLOCK_BYTES, HEADER_BYTES, Header

CHUNK_BYTES = 1 << 20
FAULTS_LIMIT = 256

_FIRST_NAME_BYTES = tar_format.encode(Header("x", 0, 0, tar_format.UNFINISHED))[:100]
_KEPT = {words.MANIFEST: words.MANIFEST_LIMIT_BYTES, words.SEAL: words.SEAL_LIMIT_BYTES}

State = Literal["whole", "damaged", "cut off", "unfinished"]


class Found(Struct, frozen=True, kw_only=True):
    """One member as it is in the file."""

    header: Header
    at: int
    """Where its headers begin."""
    state: State
    fault: str = ""
    data: bytes | None = None
    """Of the manifest and the seal."""

    @property
    def name(self) -> str:
        """As its header says."""
        return self.header.name


class Fault(Struct, frozen=True):
    """Something that is not as a writer leaves it, and where."""

    at: int
    text: str
    before: int
    """How many members were found before it: by that the manifest tells which one it is in."""


class Reading(Struct, kw_only=True):
    """Everything in a file."""

    size_bytes: int
    found: list[Found] = []
    faults: list[Fault] = []
    more_faults: int = 0
    is_ended: bool = False
    """Whether the two zero blocks stand at the very end."""
    tail: str = ""
    """What the file breaks off in, if not in a member's content."""

    def add_fault(self, at: int, text: str) -> None:
        """One more fault, within the limit."""
        if len(self.faults) < FAULTS_LIMIT:
            self.faults.append(Fault(at, text, len(self.found)))
        else:
            self.more_faults += 1


def open_archive(path: str) -> int:
    """A descriptor of a regular file. Errors: Unavailable, Denied, Malformed, UsageError."""
    flags = os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags)
    except (OSError, ValueError) as error:
        refuse(error, path)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise Malformed(f"{path}: not a regular file")
    return handle


def read(handle: int) -> Reading:
    """What is in an open file. Errors: Unavailable if it cannot be read."""
    size = os.fstat(handle).st_size
    reading = Reading(size_bytes=size)
    names, folders = set[str](), set[str]()
    limits = dict(_KEPT)
    at = 0
    while at < size:
        block = _at(handle, at, min(HEADER_BYTES, size - at))
        if block.startswith(tar_format.END):
            reading.is_ended = at + len(tar_format.END) == size
            if not reading.is_ended:
                left = size - at - len(tar_format.END)
                reading.add_fault(at, f"{left} bytes after the end")
            return reading
        try:
            header = tar_format.decode(block)
        except Malformed as error:
            if len(block) < HEADER_BYTES:
                _end(reading, at, block)
                return reading
            reading.add_fault(at, str(error))
            at = _next_header(handle, at + BLOCK_BYTES, size)
            continue
        if len(reading.found) >= words.MEMBERS_LIMIT + 2:
            reading.add_fault(at, f"more than {words.MEMBERS_LIMIT} members: not looked at further")
            return reading
        if header.name in names or header.name in folders:
            reading.add_fault(at, f"{header.name} is there twice")
        names.add(header.name)
        parts = header.name.split("/")
        folders.update("/".join(parts[:count]) for count in range(1, len(parts)))
        found = _member(handle, at, header, size, limits.pop(header.name, -1))
        reading.found.append(found)
        if found.state in ("cut off", "unfinished"):
            return reading
        at += HEADER_BYTES + header.size + header.padding
    return reading


def _end(reading: Reading, at: int, block: bytes) -> None:
    """What stands at the end of the file: less than a header, and not the end of an archive."""
    if not block.strip(b"\0"):
        reading.tail = f"cut off in its end: {len(block)} zero bytes"
    elif _FIRST_NAME_BYTES.startswith(block[: len(_FIRST_NAME_BYTES)]):
        reading.tail = f"cut off in the headers of a member: {len(block)} bytes"
    else:
        reading.add_fault(at, "the end of the archive is not as it was written")


def _member(handle: int, at: int, header: Header, size: int, keep_limit: int) -> Found:
    begin = at + HEADER_BYTES
    if header.sha256 == tar_format.UNFINISHED and not header.size:
        text = f"was being written: {size - begin} bytes follow, of it and not whole"
        return Found(header=header, at=at, state="unfinished", fault=text)
    if begin + header.size + header.padding > size:
        text = f"cut off: {min(header.size, max(0, size - begin))} of {header.size} bytes"
        return Found(header=header, at=at, state="cut off", fault=text)
    kept = bytearray() if header.size <= keep_limit else None
    digest = hashlib.sha256()
    for offset in range(begin, begin + header.size, CHUNK_BYTES):
        piece = _at(handle, offset, min(CHUNK_BYTES, begin + header.size - offset))
        digest.update(piece)
        if kept is not None:
            kept += piece
    fault = ""
    if digest.digest() != header.sha256:
        fault = "its content is not what it was when it was written"
    elif any(_at(handle, begin + header.size, header.padding)):
        fault = "there are bytes in the padding after its content"
    return Found(
        header=header,
        at=at,
        state="damaged" if fault else "whole",
        fault=fault,
        data=None if kept is None else bytes(kept),
    )


def _next_header(handle: int, at: int, size: int) -> int:
    """Where the next header that is whole begins, or the end of the file."""
    while at < size:
        chunk = _at(handle, at, min(CHUNK_BYTES, size - at))
        for offset in range(0, len(chunk), BLOCK_BYTES):
            if chunk.startswith(_FIRST_NAME_BYTES, offset):
                block = _at(handle, at + offset, min(HEADER_BYTES, size - at - offset))
                try:
                    tar_format.decode(block)
                except Malformed:
                    continue
                return at + offset
        at += CHUNK_BYTES
    return size


def _at(handle: int, at: int, length: int) -> bytes:
    """Exactly that many bytes. Errors: Unavailable."""
    data = b""
    while len(data) < length:
        try:
            piece = os.pread(handle, length - len(data), at + len(data))
        except OSError as error:
            raise Unavailable(f"the archive cannot be read: {error.strerror}") from error
        if not piece:
            raise Unavailable("the archive became shorter while it was read")
        data += piece
    return data
