"""Dynamic symbols of a 64-bit ELF file looked up by name, as the loader does (gABI, GNU hash).

Only what a look-up needs is read: of a library that lacks a name, a few words of its hash table.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from gpuwarden.errors import Malformed
from gpuwarden.sensors.elf import (
    DYNAMIC_LIMIT_BYTES,
    FILE_OFFSET_LIMIT,
    HEAD_BYTES,
    MAGIC,
    PT_DYNAMIC,
    PT_LOAD,
    SEGMENT_LIMIT,
    ReadAt,
)

# Elf64_Ehdr after e_ident: e_type, e_machine, e_phoff, e_phentsize, e_phnum.
_HEADER = struct.Struct("<16xHH12xQ14xHH6x")
# Elf64_Phdr: p_type, p_flags, p_offset, p_vaddr, p_filesz.
_PROGRAM_HEADER = struct.Struct("<IIQQ8xQ16x")
# Elf64_Dyn, Elf64_Sym (st_name, st_info, st_shndx, st_value).
_DYNAMIC = struct.Struct("<QQ")
_SYMBOL = struct.Struct("<IBxHQ8x")
# DT_HASH: nbucket, nchain. DT_GNU_HASH: nbuckets, symoffset, bloom_size, bloom_shift.
_HASH_HEADER = struct.Struct("<II")
_GNU_HASH_HEADER = struct.Struct("<IIII")
_WORD = struct.Struct("<I")
_BLOOM_WORD = struct.Struct("<Q")

ELF64 = MAGIC + b"\2\1"
"""How a 64-bit little-endian file begins."""
EM_X86_64, EM_AARCH64 = 62, 183
PF_X = 1
DT_NULL, DT_HASH, DT_STRTAB, DT_SYMTAB, DT_GNU_HASH = 0, 4, 5, 6, 0x6FFFFEF5
SHN_UNDEF, SHN_ABS = 0, 0xFFF1
STT_NOTYPE, STT_FUNC, STT_GNU_IFUNC = 0, 2, 10

CHAIN_LIMIT = 1024
OLD_CHAIN_LIMIT = 256
"""Symbols of one bucket; a library of a million symbols has a dozen."""
ALIKE_LIMIT = 8
"""Symbols of one name's 31-bit hash."""
CHUNK = 64
_WORD_BITS = 64


class Segment(NamedTuple):
    """A program header; ``size`` is what of it is in the file."""

    kind: int
    flags: int
    offset: int
    address: int
    size: int


class Symbol(NamedTuple):
    """A symbol that the file defines: its type (STT_…) and its address before relocation."""

    kind: int
    address: int


class DynamicSymbols:
    """The symbols that a 64-bit little-endian ELF file gives to others. Errors: Malformed."""

    def __init__(self, read_at: ReadAt) -> None:
        self._read_at = read_at
        self._head = read_at(0, HEAD_BYTES)
        if not self._head.startswith(ELF64):
            raise Malformed("ELF header: not a 64-bit little-endian file")
        _, self.machine, offset, entry_bytes, count = _HEADER.unpack(self._at(0, _HEADER.size))
        if count > SEGMENT_LIMIT or (count and entry_bytes != _PROGRAM_HEADER.size):
            raise Malformed(f"ELF header: {count} program headers of {entry_bytes} bytes")
        table = self._at(offset, entry_bytes * count)
        self.segments = [Segment(*entry) for entry in _PROGRAM_HEADER.iter_unpack(table)]
        dynamic = self._dynamic()
        self._names = dynamic.get(DT_STRTAB)
        self._symbols = dynamic.get(DT_SYMTAB)
        self._gnu_hash = dynamic.get(DT_GNU_HASH)
        self._hash = dynamic.get(DT_HASH)

    def find(self, name: str) -> Symbol | None:
        """The symbol of that name if the file defines it. Errors: Malformed."""
        # Where there are both tables the loader uses the newer one alone.
        if self._gnu_hash is not None:
            return self._find_by_gnu_hash(self._gnu_hash, name.encode())
        return None if self._hash is None else self._find_by_hash(self._hash, name.encode())

    def file_offset(self, address: int, *, executable: bool = False) -> int | None:
        """Where in the file the byte at ``address`` is from; None if from nowhere there."""
        # A later segment is mapped over an earlier one.
        for segment in reversed(self.segments):
            if (
                segment.kind == PT_LOAD
                and segment.address <= address < segment.address + segment.size
            ):
                if executable and not segment.flags & PF_X:
                    return None
                return segment.offset + address - segment.address
        return None

    def in_code(self, offset: int) -> bool:
        """Whether the byte at ``offset`` of the file is mapped executable."""
        return any(
            segment.kind == PT_LOAD
            and segment.flags & PF_X
            and segment.offset <= offset < segment.offset + segment.size
            for segment in self.segments
        )

    # ---------------------------------------------------------------- tables

    def _dynamic(self) -> dict[int, int]:
        """The first value of each tag."""
        found: dict[int, int] = {}
        for segment in self.segments:
            if segment.kind != PT_DYNAMIC:
                continue
            size = min(segment.size, DYNAMIC_LIMIT_BYTES)
            table = self._at(segment.offset, size - size % _DYNAMIC.size)
            for tag, value in _DYNAMIC.iter_unpack(table):
                if tag == DT_NULL:
                    break
                found.setdefault(tag, value)
            break
        return found

    def _find_by_gnu_hash(self, table: int, name: bytes) -> Symbol | None:
        buckets, first, bloom_words, shift = _GNU_HASH_HEADER.unpack(
            self._mapped(table, _GNU_HASH_HEADER.size)
        )
        if not buckets or not bloom_words:
            return None
        hashed = _gnu_hash(name)
        bloom = table + _GNU_HASH_HEADER.size
        word_at = (hashed // _WORD_BITS & bloom_words - 1) * _BLOOM_WORD.size
        (word,) = _BLOOM_WORD.unpack(self._mapped(bloom + word_at, _BLOOM_WORD.size))
        for bit in (hashed, hashed >> (shift & 31)):
            if not word >> bit % _WORD_BITS & 1:
                return None
        bucket_table = bloom + bloom_words * _BLOOM_WORD.size
        index = self._word(bucket_table + hashed % buckets * _WORD.size)
        if index < max(first, 1):
            return None
        chain = bucket_table + (buckets - first) * _WORD.size
        alike = 0
        for _ in range(CHAIN_LIMIT // CHUNK):
            # The last chunk of a table may lie at the end of its segment.
            words = self._mapped(chain + index * _WORD.size, CHUNK * _WORD.size, whole=False)
            for (entry,) in _WORD.iter_unpack(words[: len(words) & ~3]):
                if entry | 1 == hashed | 1:
                    if symbol := self._symbol(index, name):
                        return symbol
                    alike += 1
                if entry & 1:
                    return None
                if alike > ALIKE_LIMIT:
                    raise Malformed("ELF hash table: one hash for many names")
                index += 1
            if len(words) < CHUNK * _WORD.size:
                break
        raise Malformed("ELF hash table: a chain without an end")

    def _find_by_hash(self, table: int, name: bytes) -> Symbol | None:
        buckets, symbols = _HASH_HEADER.unpack(self._mapped(table, _HASH_HEADER.size))
        if not buckets:
            return None
        words = table + _HASH_HEADER.size
        index = self._word(words + _hash(name) % buckets * _WORD.size)
        for _ in range(OLD_CHAIN_LIMIT):
            if not 0 < index < symbols:
                return None
            if symbol := self._symbol(index, name):
                return symbol
            index = self._word(words + (buckets + index) * _WORD.size)
        raise Malformed("ELF hash table: a chain without an end")

    def _symbol(self, index: int, name: bytes) -> Symbol | None:
        if self._symbols is None or self._names is None:
            raise Malformed("ELF dynamic section: a hash table without symbols")
        raw = self._mapped(self._symbols + index * _SYMBOL.size, _SYMBOL.size)
        name_at, info, section, address = _SYMBOL.unpack(raw)
        if section in (SHN_UNDEF, SHN_ABS) or not address:
            return None
        wanted = name + b"\0"
        if self._mapped(self._names + name_at, len(wanted), whole=False) != wanted:
            return None
        return Symbol(info & 0xF, address)

    # ---------------------------------------------------------------- reading

    def _word(self, address: int) -> int:
        value: int = _WORD.unpack(self._mapped(address, _WORD.size))[0]
        return value

    def _mapped(self, address: int, size: int, *, whole: bool = True) -> bytes:
        offset = self.file_offset(address)
        if offset is None:
            raise Malformed("ELF dynamic section: a table that is in no segment")
        return self._at(offset, size, whole=whole)

    def _at(self, offset: int, size: int, *, whole: bool = True) -> bytes:
        if offset + size <= len(self._head):
            return self._head[offset : offset + size]
        found = b"" if offset >= FILE_OFFSET_LIMIT else self._read_at(offset, size)
        if whole and len(found) < size:
            raise Malformed("ELF tables: cut short")
        return found


def _gnu_hash(name: bytes) -> int:
    hashed = 5381
    for byte in name:
        hashed = hashed * 33 + byte & 0xFFFFFFFF
    return hashed


def _hash(name: bytes) -> int:
    hashed = 0
    for byte in name:
        hashed = (hashed << 4) + byte
        high = hashed & 0xF0000000
        hashed = (hashed ^ high >> 24) & ~high & 0xFFFFFFFF
    return hashed
