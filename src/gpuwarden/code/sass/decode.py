"""The instructions of many kernels at once: their codes, and what stands beside the code.

One pass of numpy over the text of up to ``CHUNK_INSTRUCTIONS`` instructions, so that neither a
module of a thousand small kernels nor one of a huge kernel is walked instruction by instruction.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gpuwarden.code.sass import groups, opcodes
from gpuwarden.code.sass.sections import INSTRUCTION_BYTES, Code

CHUNK_INSTRUCTIONS = 1 << 18
CHUNK_KERNELS = 1 << 12
MOST_INSTRUCTIONS = 1 << 21
"""Of one kernel that is looked at: more than twice the largest known, in some 200 MB."""
LEAST_INSTRUCTIONS = 8
NO_REGISTER = 255
SECOND_OPERAND = 4
"""The form whose number is the second operand."""
# Selectors of PRMT that rotate one register's bytes, or swap its halves, pairs or order.
ROTATING = (0x0321, 0x1032, 0x2103, 0x0123, 0x2107, 0x0765, 0x5432)
REVERSING = 0x0123

Integers = npt.NDArray[np.int64]


class Stream(Struct, frozen=True):
    """Instructions of ``kernels``, padding left out, one kernel after the other.

    ``starts`` (kernels + 1) bounds each kernel's part of ``codes`` (uint8) and of ``has_number``
    (bits 32 to 63 are a number). ``places`` says where each instruction is among ``words``, four
    32-bit words a row with the padding in; ``word_starts`` bounds the kernels there, dropped ones
    too, and ``branches`` are the rows of BRA.
    """

    kernels: Integers
    starts: Integers
    codes: npt.NDArray[np.uint8]
    has_number: npt.NDArray[np.bool_]
    places: Integers
    words: npt.NDArray[np.uint32]
    word_starts: Integers
    branches: Integers

    def kernel_of(self, index: Integers) -> Integers:
        """The number in ``kernels`` of each instruction, by its index in ``codes``."""
        return np.searchsorted(self.starts, index, side="right") - 1


def chunks(code: tuple[Code, ...]) -> Iterator[list[int]]:
    """Numbers of kernels that are decoded together; one too large to look at is left out."""
    chunk: list[int] = []
    room = CHUNK_INSTRUCTIONS
    for number, one in enumerate(code):
        size = one.size // INSTRUCTION_BYTES
        if size > MOST_INSTRUCTIONS:
            continue
        if chunk and (size > room or len(chunk) == CHUNK_KERNELS):
            yield chunk
            chunk, room = [], CHUNK_INSTRUCTIONS
        chunk.append(number)
        room -= size
    if chunk:
        yield chunk


def oversized(code: tuple[Code, ...]) -> tuple[str, ...]:
    """Names of the kernels that ``chunks`` leaves out."""
    return tuple(one.name for one in code if one.size // INSTRUCTION_BYTES > MOST_INSTRUCTIONS)


def decode(
    image: bytes | memoryview, code: tuple[Code, ...], numbers: list[int], arch: int
) -> Stream:
    """The stream of the kernels with these numbers; those of under eight instructions dropped."""
    counts = np.array([code[number].size // INSTRUCTION_BYTES for number in numbers])
    words = np.concatenate(
        [
            np.frombuffer(image, np.uint32, 4 * int(count), code[number].offset)
            for number, count in zip(numbers, counts, strict=True)
        ]
    ).reshape(-1, 4)
    word_starts = np.concatenate(([0], np.cumsum(counts)))
    low = words.view(np.uint16).reshape(-1, 8)[:, 0]
    first = opcodes.first_codes(opcodes.generation(arch)).take(low)
    plain = first & np.uint8(opcodes.IMMEDIATE - 1)
    keep = plain != groups.NOP
    kept = np.add.reduceat(keep, word_starts[:-1], dtype=np.int64)
    enough = kept >= LEAST_INSTRUCTIONS
    if not enough.all():
        keep &= np.repeat(enough, counts)
    places = np.flatnonzero(keep)
    codes = plain[places]
    has_number = first[places] >= opcodes.IMMEDIATE
    _look_closer(codes, has_number, places, words)
    return Stream(
        kernels=np.array(numbers, np.int64)[enough],
        starts=np.concatenate(([0], np.cumsum(kept[enough]))),
        codes=codes,
        has_number=has_number,
        places=places,
        words=words,
        word_starts=word_starts,
        branches=np.flatnonzero(plain == groups.BRA),
    )


def _by_registers() -> npt.NDArray[np.uint8]:
    """What follows from a pending kind and three bits: first register none, third none, same."""
    code = groups.CODE
    table = np.zeros((groups.BRA + 1, 8), np.uint8)
    for bits in range(8):
        no_first, no_third, same = bits & 4, bits & 2, bits & 1
        shift = "SHIFT" if no_first or no_third else "SHIFT:rotate" if same else "SHIFT:funnel"
        table[groups.SHF, bits] = code[shift]
        table[groups.LEA, bits] = code["LEA:rotate" if same and not no_first else "LEA"]
        table[groups.IMAD, bits] = code["MOV" if no_first else "IMUL"]
        table[groups.HFMA2, bits] = code["MOV" if no_first else "FP16"]
        table[groups.HFMA2_OR_IADD, bits] = code["MOV" if no_first else "IADD"]
    table[groups.PRMT] = code["PRMT"]
    table[groups.LOP3] = code["LOGIC:plain"]
    table[groups.BRA] = code["BRANCH"]
    return table.ravel()


_BY_REGISTERS = _by_registers()


def _look_closer(
    codes: npt.NDArray[np.uint8],
    has_number: npt.NDArray[np.bool_],
    places: Integers,
    words: npt.NDArray[np.uint32],
) -> None:
    """Replaces first codes by codes, from registers, truth tables and numbers."""
    octets = words.view(np.uint8).reshape(-1, INSTRUCTION_BYTES)
    found = np.flatnonzero(codes >= groups.WIDTH)
    at, kind = places[found], codes[found]
    first, third = octets[:, 3].take(at), octets[:, 8].take(at)
    no_first, no_third = first == NO_REGISTER, third == NO_REGISTER
    bits = no_first * np.uint16(4) + no_third * np.uint16(2) + (first == third)
    refined = _BY_REGISTERS.take(kind * np.uint16(8) + bits)

    logic = np.flatnonzero(kind == groups.LOP3)
    refined[logic] = groups.TABLE_CODE.take(octets[:, 9].take(at[logic]))

    multiplied = np.flatnonzero((kind == groups.IMAD) & has_number[found] & ~no_first)
    rows = at[multiplied]
    number = words[:, 1].take(rows)
    second = (words[:, 0].take(rows) >> np.uint32(9) & np.uint32(7)) == SECOND_OPERAND
    power = (number & (number - np.uint32(1)) == 0) & (number > 1) & no_third[multiplied]
    refined[multiplied[second & power]] = groups.CODE["SHIFT"]
    refined[multiplied[second & (number == 1)]] = groups.CODE["IADD"]

    permuted = np.flatnonzero((kind == groups.PRMT) & has_number[found] & ~no_first)
    selector = words[:, 1].take(at[permuted]) & np.uint32(0xFFFF)
    rotates = (first == third)[permuted] & np.isin(selector, ROTATING)
    rotates |= no_third[permuted] & (selector == REVERSING)
    refined[permuted[rotates]] = groups.CODE["PRMT:rotate"]

    codes[found] = refined
