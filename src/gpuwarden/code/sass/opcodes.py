"""Opcodes of sm_70 to sm_121: their mnemonics, and the code that each is first given.

An instruction is 16 bytes and its opcode the low 12 bits. The low nine bits, the base, say what is
done and the upper three where the second and third operand come from, so that an operand form that
no listing showed is still known by its base. opcodes.json is made by scripts/make_opcodes.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuwarden.code.sass import groups

OLDEST, NEWEST = 70, 121
BASE = 0x1FF
IMMEDIATE_FORMS = (2, 4)
"""Where bits 32 to 63 are a number: in place of the third operand, or of the second."""
IMMEDIATE = 0x80
"""Added to a code whose instruction has a number in bits 32 to 63."""

_PENDING = {
    "IMAD": groups.IMAD, "HFMA2": groups.HFMA2, "LOP3": groups.LOP3, "ULOP3": groups.LOP3,
    "SHF": groups.SHF, "USHF": groups.SHF, "PRMT": groups.PRMT, "LEA": groups.LEA,
    "NOP": groups.NOP, "BRA": groups.BRA,
}  # fmt: skip


@functools.cache
def _listing() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("opcodes.json").read_text()
    return json.loads(text)  # type: ignore[no-any-return]


def generation(arch: int) -> str:
    """A (below sm_90), B (sm_90) or C (above): where training saw the same opcode differ."""
    if arch < 90:
        return "A"
    return "B" if arch == 90 else "C"


@functools.cache
def first_codes(generation_name: str) -> npt.NDArray[np.uint8]:
    """The low 16 bits of an instruction → its first code, with IMMEDIATE where it has a number.

    The four bits above the opcode are the predicate, which changes nothing here.
    """
    listing = _listing()
    trained = {**listing["trained"], **listing["trained_apart"][generation_name]}
    other = {**listing["trained"], **listing["trained_apart"]["A"]}
    table = np.full(1 << 16, groups.CODE["UNK"], np.uint8)
    words = np.arange(1 << 16, dtype=np.uint16)
    for base, mnemonic in trained.items():
        code = _PENDING.get(mnemonic, groups.CODE[groups.GROUP_OF.get(mnemonic, "OTHER")])
        if mnemonic == "IADD" and other.get(base) == "HFMA2":
            code = groups.HFMA2_OR_IADD
        table[(words & BASE) == int(base, 16)] = code
    forms = words >> np.uint16(9) & np.uint16(7)
    table[np.isin(forms, IMMEDIATE_FORMS)] |= IMMEDIATE
    return table


@functools.cache
def known_opcodes() -> npt.NDArray[np.bool_]:
    """Opcode → whether any listing has it, in this or another operand form."""
    listing = _listing()
    bases = {int(opcode, 16) & BASE for opcode in (*listing["names"], *listing["by_arch"])}
    bases |= {int(base, 16) for base in listing["trained"]}
    opcodes: npt.NDArray[np.int64] = np.arange(1 << 12)
    return np.isin(opcodes & BASE, sorted(bases))


def mnemonic(opcode: int, arch: int) -> str | None:
    """What nvdisasm calls an opcode on an architecture (``sm_90`` is 90); None when unknown."""
    listing, key = _listing(), f"{opcode:03x}"
    if key in listing["by_arch"]:
        named = {int(number): name for number, name in listing["by_arch"][key].items()}
        nearest = max((number for number in named if number <= arch), default=min(named))
        return str(named[nearest])
    if key in listing["names"]:
        return str(listing["names"][key])
    base = f"{opcode & BASE:03x}"
    apart = listing["trained_apart"][generation(arch)]
    found = apart.get(base) or listing["trained"].get(base)
    return str(found) if found else None
