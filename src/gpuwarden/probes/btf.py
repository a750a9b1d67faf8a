"""The structures that a compiled BPF object describes: its .BTF section, read without a library.

Source: Documentation/bpf/btf.rst of the kernel; elf(5).
"""

from __future__ import annotations

import struct

from gpuwarden.errors import Malformed
from gpuwarden.probes.layouts import Members

# Elf64_Ehdr up to e_shstrndx; Elf64_Shdr. Objects for BPF are 64-bit and little-endian here.
_ELF_HEADER = struct.Struct("<4sBB10xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SECTIONS_LIMIT = 4096
# struct btf_header, struct btf_type, struct btf_member, struct btf_array (linux/btf.h).
_HEADER = struct.Struct("<HBBIIIII")
_TYPE = struct.Struct("<III")
_MEMBER = struct.Struct("<III")
_ARRAY = struct.Struct("<III")
_MAGIC = 0xEB9F
_INT, _POINTER, _ARRAY_KIND, _STRUCT, _UNION, _ENUM = 1, 2, 3, 4, 5, 6
_TYPEDEF, _VOLATILE, _CONST, _RESTRICT = 8, 9, 10, 11
_FUNCTION_PROTOTYPE, _VARIABLE, _SECTION_KIND, _TYPE_TAG, _ENUM64 = 13, 14, 15, 18, 19
_DECLARATION_TAG = 17
_MORE_BYTES = {_INT: 4, _ARRAY_KIND: 12, _VARIABLE: 4, _DECLARATION_TAG: 4}
_EACH_BYTES = {_STRUCT: 12, _UNION: 12, _ENUM: 8, _FUNCTION_PROTOTYPE: 8, _SECTION_KIND: 12}
_EACH_BYTES[_ENUM64] = 12
_SAME_SIZE = (_TYPEDEF, _VOLATILE, _CONST, _RESTRICT, _TYPE_TAG)
_DEPTH_LIMIT = 32


def structures(elf: bytes) -> dict[str, tuple[int, Members]]:
    """Named structures of a BPF object: name → (size, member → (offset, size)), in bytes.

    Errors: Malformed.
    """
    try:
        return _structures(_section(elf, b".BTF"))
    except (struct.error, IndexError, ValueError, KeyError) as error:
        raise Malformed(f"the probe object's BTF cannot be read: {error}") from error


def _section(elf: bytes, wanted: bytes) -> bytes:
    header = _ELF_HEADER.unpack_from(elf)
    if header[:3] != (b"\x7fELF", 2, 1):
        raise Malformed("the probe object is not a 64-bit little-endian ELF file")
    at, count, names_index = header[8], header[14], header[15]
    if count > _SECTIONS_LIMIT:
        raise Malformed(f"the probe object says it has {count} sections")
    sections = [_SECTION.unpack_from(elf, at + i * _SECTION.size) for i in range(count)]
    names_at = sections[names_index][4]
    for section in sections:
        start = names_at + section[0]
        if elf[start : elf.index(0, start)] == wanted:
            return elf[section[4] : section[4] + section[5]]
    raise Malformed(f"the probe object has no section {wanted.decode()}")


class _Types:
    """All types of one .BTF section: (name, kind, vlen, size or type, where its details are)."""

    def __init__(self, data: bytes) -> None:
        magic, _, _, header, types_at, types_length, names_at, _ = _HEADER.unpack_from(data)
        if magic != _MAGIC:
            raise Malformed("the probe object's BTF begins with another number")
        self.data = data
        self.names_at = header + names_at
        self.types: list[tuple[int, int, int, int, int]] = [(0, 0, 0, 0, 0)]
        at, end = header + types_at, header + types_at + types_length
        while at < end:
            name, information, value = _TYPE.unpack_from(data, at)
            kind, count = information >> 24 & 0x1F, information & 0xFFFF
            at += _TYPE.size
            self.types.append((name, kind, count, value, at))
            at += _MORE_BYTES.get(kind, 0) + _EACH_BYTES.get(kind, 0) * count

    def text(self, name: int) -> str:
        start = self.names_at + name
        return self.data[start : self.data.index(0, start)].decode("utf-8", "backslashreplace")

    def size(self, type_id: int, depth: int = 0) -> int:
        if depth > _DEPTH_LIMIT:
            raise Malformed("the probe object's BTF nests types too deeply")
        _, kind, _, value, details = self.types[type_id]
        if kind == _POINTER:
            return 8
        if kind == _ARRAY_KIND:
            element, _, count = _ARRAY.unpack_from(self.data, details)
            return int(count) * self.size(element, depth + 1)
        if kind in _SAME_SIZE:
            return self.size(value, depth + 1)
        return value


def _structures(data: bytes) -> dict[str, tuple[int, Members]]:
    types = _Types(data)
    found: dict[str, tuple[int, Members]] = {}
    for name, kind, count, length, details in types.types:
        if kind != _STRUCT or not name:
            continue
        members: Members = {}
        for index in range(count):
            member, type_id, bits = _MEMBER.unpack_from(types.data, details + index * _MEMBER.size)
            # With kind_flag the upper byte is a bit field's width; none of our structures has one.
            members[types.text(member)] = ((bits & 0xFFFFFF) // 8, types.size(type_id))
        found.setdefault(types.text(name), (length, members))
    return found
