"""How much stack the functions of a BPF object use, by their instructions."""

from __future__ import annotations

import struct
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

FRAME_LIMIT_BYTES = 56
"""From 64 on a function has, on kernels from 6.13 on, a stack that threads may share."""
_INSTRUCTION = struct.Struct("<BBhi")
_FRAME_POINTER = 10
_LOAD, _STORES, _ARITHMETIC = 1, (2, 3), (0, 1, 4, 7)
_COPY, _ADD = 0xBF, 0x07


def frames(path: Path) -> dict[str, int]:
    """How far below its frame pointer each function of a BPF object goes, in bytes."""
    found = {}
    with path.open("rb") as file:
        parsed = ELFFile(file)
        sections = list(parsed.iter_sections())
        symbols = parsed.get_section_by_name(".symtab")
        assert isinstance(symbols, SymbolTableSection)
        for symbol in symbols.iter_symbols():
            if symbol["st_info"]["type"] == "STT_FUNC":
                start = symbol["st_value"]
                code = sections[symbol["st_shndx"]].data()[start : start + symbol["st_size"]]
                found[symbol.name] = -_deepest(code)
    return found


def _deepest(code: bytes) -> int:
    deepest, addresses = 0, dict[int, int]()
    for opcode, registers, offset, immediate in _INSTRUCTION.iter_unpack(code):
        to, of = registers & 15, registers >> 4
        kind = opcode & 7
        if (kind == _LOAD and of == _FRAME_POINTER) or (kind in _STORES and to == _FRAME_POINTER):
            deepest = min(deepest, offset)
        if opcode == _COPY and of == _FRAME_POINTER:
            addresses[to] = 0
        elif opcode == _ADD and to in addresses:
            addresses[to] += immediate
            deepest = min(deepest, addresses[to])
        elif kind in _ARITHMETIC:
            addresses.pop(to, None)
    return deepest
