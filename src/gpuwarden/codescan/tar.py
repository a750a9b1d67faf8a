"""Members of a tar archive, read once from front to back, whatever its bytes are.

Sources: POSIX pax (ustar and extended headers), GNU tar's long names and base-256 numbers. Python's
tarfile keeps every member, believes sizes before it allocates and has looped on negative ones.
"""

from __future__ import annotations

import posixpath
import struct
from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from gpuwarden.codescan.streams import CHUNK_BYTES, Buffered, Part
from gpuwarden.errors import Malformed
from gpuwarden.pattern import pattern

Kind = Literal["file", "hard link", "symbolic link", "device", "directory", "FIFO", "other"]

BLOCK = 512
# name, mode, uid, gid, size, mtime, checksum, type, linked name, magic with version, owner, group,
# device numbers, prefix.
_HEADER = struct.Struct("100s8s8s8s12s12s8sc100s8s32s32s8s8s155s12x")
_CHECKSUM_AT = slice(148, 156)
_USTAR, _GNU = b"ustar\x0000", b"ustar  \0"
# Types that have data, of links, and whose data says more of the next member.
_FILES = frozenset(b"\x0007S")
_KINDS: dict[int, Kind] = {
    ord("1"): "hard link",
    ord("2"): "symbolic link",
    ord("3"): "device",
    ord("4"): "device",
    ord("5"): "directory",
    ord("6"): "FIFO",
}
_PAX, _PAX_GLOBAL, _LONG_NAME, _LONG_LINK = (ord(one) for one in "xgLK")
EXTENSION_LIMIT_BYTES = 1 << 20
NAME_LIMIT_BYTES = 1 << 16
SIZE_LIMIT = 1 << 50
_NUMBER = pattern(rb"[0-7]{1,12}\Z")
_DECIMAL = pattern(rb"[0-9]{1,18}\Z")


class TarMember(Struct, frozen=True):
    """One entry; ``data`` is a file's bytes, to be read before the next entry is asked for."""

    name: str
    kind: Kind
    size: int
    link: str
    data: Part


class _Next(Struct):
    """What extended headers say of the entry after them."""

    name: bytes | None = None
    link: bytes | None = None
    size: int | None = None


def is_tar(head: bytes) -> bool:
    """Whether these first bytes are a tar header: by its checksum, which any tar has."""
    if len(head) < BLOCK:
        return False
    block = head[:BLOCK]
    wanted = _octal(block[_CHECKSUM_AT])
    return block[0] != 0 and wanted is not None and wanted in _checksums(block)


def members(stream: Buffered, limit: int) -> Iterator[TarMember]:
    """The entries, at most ``limit``. Errors: Malformed where it cannot be followed any further."""
    following = _Next()
    for _ in range(limit):
        block = stream.take(BLOCK)
        if block.count(0) == len(block):
            _check_end(stream)
            return
        if len(block) < BLOCK or _octal(block[_CHECKSUM_AT]) not in _checksums(block):
            raise Malformed("tar: no header where one should be")
        fields = _HEADER.unpack(block)
        size = _number(fields[4])
        if size is None or size > SIZE_LIMIT:
            raise Malformed("tar: a size that cannot be")
        kind = fields[7][0]
        if kind in (_PAX, _PAX_GLOBAL, _LONG_NAME, _LONG_LINK):
            _extend(following, kind, _extension(stream, size))
            continue
        name = following.name or _name(fields)
        link = following.link or fields[8].partition(b"\0")[0]
        shown: Kind = "file" if kind in _FILES else _KINDS.get(kind, "other")
        # Only files and what is not known here have data, whatever the size of the others says.
        held = following.size if following.size is not None else size
        held = held if shown in ("file", "other") else 0
        if shown == "file" and kind in b"\00" and name.endswith(b"/"):
            shown = "directory"
        following = _Next()
        data = Part(stream, held)
        yield TarMember(_text(name), shown, held, _text(link), data)
        data.skip()
        _padding(stream, held)
    raise Malformed(f"tar: more than {limit} members")


def entry_path(name: str) -> str:
    """Where an entry lies in the root that it is unpacked to: ``usr/lib/x``; empty for the root."""
    return posixpath.normpath("/" + name).lstrip("/")


def _extension(stream: Buffered, size: int) -> bytes:
    if size > EXTENSION_LIMIT_BYTES:
        raise Malformed(f"tar: an extended header of {size} bytes")
    data = stream.take(size)
    _padding(stream, size)
    return data


def _extend(following: _Next, kind: int, data: bytes) -> None:
    if kind == _LONG_NAME:
        following.name = data.partition(b"\0")[0][:NAME_LIMIT_BYTES]
    elif kind == _LONG_LINK:
        following.link = data.partition(b"\0")[0][:NAME_LIMIT_BYTES]
    elif kind == _PAX:
        for key, value in _records(data):
            if key == b"path":
                following.name = value[:NAME_LIMIT_BYTES]
            elif key == b"linkpath":
                following.link = value[:NAME_LIMIT_BYTES]
            elif key == b"size":
                if not _DECIMAL.match(value):
                    raise Malformed("tar: a size that cannot be")
                following.size = int(value)


def _records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """``LENGTH KEY=VALUE\\n`` records; the length counts all of it."""
    at = 0
    while at < len(data) and data[at]:
        blank = data.find(b" ", at, at + 8)
        if blank < 0 or not data[at:blank].isdigit():
            raise Malformed("tar: an extended header that cannot be read")
        end = at + int(data[at:blank])
        if end <= blank or end > len(data):
            raise Malformed("tar: an extended header that cannot be read")
        key, _, value = data[blank + 1 : end].removesuffix(b"\n").partition(b"=")
        yield key, value
        at = end


def _name(fields: tuple[bytes, ...]) -> bytes:
    name, prefix = fields[0].partition(b"\0")[0], fields[14].partition(b"\0")[0]
    return prefix + b"/" + name if prefix and fields[9] == _USTAR else name


def _padding(stream: Buffered, size: int) -> None:
    stream.take(-size % BLOCK)


def _check_end(stream: Buffered) -> None:
    """Reads the rest. What is behind the end of an archive is unpacked by nobody, nor looked at."""
    hidden = 0
    while data := stream.read(CHUNK_BYTES):
        hidden += len(data.strip(b"\0"))
    if hidden:
        raise Malformed(f"tar: {hidden} bytes behind the end of the archive were not looked at")


def _octal(field: bytes) -> int | None:
    digits = field.strip(b" \0")
    return int(digits, 8) if _NUMBER.match(digits) else None


def _number(field: bytes) -> int | None:
    """Octal, or base 256 with the highest bit set; None for what is neither or is negative."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    if not field.strip(b" \0"):
        return 0
    return _octal(field)


def _checksums(block: bytes) -> tuple[int, int]:
    """Of the header with blanks for the checksum; old tars added up signed bytes."""
    rest = block[: _CHECKSUM_AT.start] + b" " * 8 + block[_CHECKSUM_AT.stop :]
    unsigned = sum(rest)
    high = sum(1 for byte in rest if byte > 127) if not rest.isascii() else 0
    return unsigned, unsigned - 256 * high


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")
