"""Members of ar archives, with GNU's and BSD's long names (ar(5), ``ar.h``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gpuwarden.code.bounds import DEFAULT, Bounds
from gpuwarden.errors import Malformed

MAGIC, THIN_MAGIC = b"!<arch>\n", b"!<thin>\n"
HEADER_BYTES = 60
NAME, SIZE, END = slice(0, 16), slice(48, 58), slice(58, 60)
HEADER_END = b"`\n"
GNU_NAMES = b"//"
SYMBOL_TABLES = (b"/", b"/SYM64/", b"__.SYMDEF", b"__.SYMDEF SORTED", b"__.SYMDEF_64")
BSD_NAME = b"#1/"
NAME_LIMIT_BYTES = 4096


class Member(NamedTuple):
    """One file of an archive and where its bytes are."""

    name: str
    start: int
    end: int


def members(data: memoryview, bounds: Bounds = DEFAULT) -> Iterator[Member]:
    """The members but for indexes. Errors: Malformed, also when a member is cut short."""
    if bytes(data[: len(THIN_MAGIC)]) == THIN_MAGIC:
        raise Malformed("thin archive: its members are files of their own, elsewhere")
    if bytes(data[: len(MAGIC)]) != MAGIC:
        raise Malformed("not an ar archive")
    at, long_names, count = len(MAGIC), b"", 0
    while at + HEADER_BYTES <= len(data):
        header = bytes(data[at : at + HEADER_BYTES])
        digits = header[SIZE].strip()
        if header[END] != HEADER_END or not digits.isdigit():
            raise Malformed(f"ar archive: no member's header at {at}")
        start, size = at + HEADER_BYTES, int(digits)
        end = start + size
        if end > len(data):
            raise Malformed(f"ar archive: the member at {at} ends past the bytes that are there")
        count += 1
        if count > bounds.members:
            raise Malformed(f"ar archive of more than {bounds.members} members")
        name = header[NAME].rstrip(b" ")
        if name == GNU_NAMES:
            long_names = bytes(data[start:end])
        else:
            name, start = _name(data, name, start, end, long_names)
            if name not in SYMBOL_TABLES:
                yield Member(name.decode("utf-8", "backslashreplace"), start, end)
        at = end + (size & 1)
    if at < len(data):
        raise Malformed("ar archive: bytes behind its last member")


def _name(
    data: memoryview, name: bytes, start: int, end: int, long_names: bytes
) -> tuple[bytes, int]:
    """The member's name, and where its content starts: BSD's long names are in front of it."""
    number = name[3:] if name.startswith(BSD_NAME) else name[1:]
    if name.startswith(BSD_NAME) and number.isdigit():
        size = int(number)
        if size > min(end - start, NAME_LIMIT_BYTES):
            raise Malformed("ar archive: a name longer than its member")
        return bytes(data[start : start + size]).rstrip(b"\0"), start + size
    if name[:1] == b"/" and number.isdigit():
        at = int(number)
        stop = long_names.find(b"\n", at, at + NAME_LIMIT_BYTES)
        return long_names[at:stop].rstrip(b"/") if stop >= 0 else name, start
    return (name if name in SYMBOL_TABLES else name.rstrip(b"/")), start
