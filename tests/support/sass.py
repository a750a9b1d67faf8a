"""Instructions made up for tests: any opcode that is known, and the ones that features look at."""

from __future__ import annotations

import random
import struct

import numpy as np

from gpuwarden.code.constants import families
from gpuwarden.code.sass import COLUMNS, KernelTable
from gpuwarden.code.sass.opcodes import mnemonic
from tests.support.slow_sass import slow_features

KNOWN = [opcode for opcode in range(1 << 12) if mnemonic(opcode, 90)]
LOP3, SHF, PRMT, IMAD, LEA, BRA, NOP, FFMA, HFMA2, IADD3 = (
    0x212, 0x819, 0x416, 0x824, 0x811, 0x947, 0x918, 0x223, 0x435, 0x810,
)  # fmt: skip
WATCHED = (LOP3, SHF, 0x219, PRMT, 0x816, IMAD, 0x424, LEA, 0x211, BRA, NOP, FFMA, HFMA2, IADD3,
           0x235, 0x292, 0x899, 0xC24, 0xB82)  # fmt: skip
SELECTORS = (0x0123, 0x0321, 0x0765, 0x1032, 0x2103, 0x2107, 0x5432)
NUMBERS = (0, 1, 2, 0x40, *SELECTORS, 36969, 0x428A2F98, 0xBB67AE85, 0xD2511F53)


def instruction(
    opcode: int, *, first: int = 4, second: int = 5, third: int = 6, table: int = 0x96, low: int = 0
) -> bytes:
    """One instruction; ``second`` is bits 32 to 63, ``low`` bits 16 to 23."""
    head = opcode | 7 << 12 | low << 16 | first << 24
    return struct.pack("<IIII", head, second & 0xFFFFFFFF, third | table << 8, 0x000FE200)


def branch(back: int, arch: int) -> bytes:
    """A branch to ``back`` instructions before itself, or after it when negative."""
    offset = -16 * (back + 1)
    if arch < 90:
        return instruction(BRA, second=offset)
    units = offset // 4
    return instruction(BRA, second=units >> 8 << 2, low=units & 0xFF)


def any_code(seed: int, length: int, arch: int) -> bytes:
    """Code of ``length`` instructions, in which hash-like, float and other parts take turns."""
    made = random.Random(seed)
    words = [word for family in families() for word in family.words]
    code = []
    share = 0.5
    for place in range(length):
        if place % 96 == 0:
            share = made.choice((0.05, 0.5, 0.95))
        opcode = made.choice(WATCHED if made.random() < share else KNOWN)
        if made.random() < 0.02:
            opcode = made.randrange(1 << 12)
        if opcode == BRA:
            code.append(branch(made.choice((0, 1, 2, 7, 40, 300, -3)), arch))
            continue
        number = made.choice((made.choice(NUMBERS), made.choice(words), made.getrandbits(32)))
        if opcode in (PRMT, 0x816):
            number = made.choice(SELECTORS)
        first = made.choice((4, 4, 6, 255))
        third = made.choice((4, 6, 6, 255))
        table = made.choice((0x96, 0x3C, 0xC0, 0xE8, made.randrange(256)))
        code.append(instruction(opcode, first=first, second=number, third=third, table=table))
    return b"".join(code)


def differences(
    table: KernelTable, texts: dict[str, bytes], constants: bytes = b""
) -> list[tuple[str, str, float, float]]:
    """Where the fast features are not the slow ones' float32: kernel, column, fast, slow."""
    found = []
    for kernel, values in zip(table.kernels, table.values, strict=True):
        slow = slow_features(texts[kernel], table.arch, constants)
        assert slow is not None, kernel
        for column, fast in zip(table.columns, values, strict=True):
            if not np.isclose(np.float32(slow[column]), fast, rtol=3e-7, atol=0):
                found.append((kernel, column, float(fast), slow[column]))
    assert set(table.columns) <= set(COLUMNS)
    return found
