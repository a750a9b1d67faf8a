"""The features of one kernel again, one instruction after the other, in plain Python.

Written from what the columns mean and sharing only the lists of names with the fast path, so that a
slip in one shows as a difference.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from importlib import resources

from gpuwarden.code.constants import families
from gpuwarden.code.sass import columns
from gpuwarden.code.sass.groups import GROUPS, MEMBERS, TRUTH_TABLES

LISTING = json.loads(resources.files("gpuwarden.code.sass").joinpath("opcodes.json").read_text())
GROUP = {name: group for group, names in MEMBERS.items() for name in names.split()}
ALU = set("LOGIC SHIFT PRMT IADD IMUL LEA ICMP BIT MOV".split())
INTEGER = ALU - {"ICMP", "MOV"}
FLOAT = set("FP32 MUFU FP16 FP64 TENSOR CVT".split())
MEMORY = set("LDGL STGL LDSH STSH LOCAL ATOM TEX".split())
BREAK = FLOAT | MEMORY | {"BRANCH", "BAR"}
RZ = 255


@dataclass
class Instruction:
    """One decoded instruction; ``table`` is that of a LOP3, ``number`` a 32-bit operand."""

    place: int
    group: str
    mnemonic: str
    depth: int = 0
    table: int | None = None
    number: int | None = None
    funnel: bool = False
    rotate: bool = False
    byte_rotate: bool = False
    bank: int = 0
    in_bank: bool = False

    @property
    def xor(self) -> bool:
        """Some input flips the output whatever the others are, and another one matters too."""
        if self.table is None:
            return False
        rows = [self.table >> row & 1 for row in range(8)]
        matters = [any(rows[r] != rows[r ^ bit] for r in range(8)) for bit in (1, 2, 4)]
        flips = [all(rows[r] != rows[r ^ bit] for r in range(8)) for bit in (1, 2, 4)]
        return any(flips) and sum(matters) > 1

    @property
    def mixing(self) -> bool:
        return self.xor or self.funnel or self.byte_rotate

    @property
    def core(self) -> bool:
        return self.mixing or self.group == "IADD"


def _names(base: int, arch: int) -> tuple[str, set[str]]:
    """What training called a base on this architecture, and on any."""
    key = f"{base:03x}"
    apart = LISTING["trained_apart"]
    own = apart["A" if arch < 90 else "B" if arch == 90 else "C"].get(key)
    shared = LISTING["trained"].get(key, "")
    return own or shared, {shared, *(table.get(key, "") for table in apart.values())}


def _instruction(place: int, raw: bytes, arch: int) -> Instruction:
    low = int.from_bytes(raw[:8], "little")
    high = int.from_bytes(raw[8:], "little")
    opcode = low & 0xFFF
    form, first, third = opcode >> 9, low >> 24 & 255, high & 255
    name, any_name = _names(opcode & 0x1FF, arch)
    one = Instruction(place, GROUP.get(name, "OTHER") if name else "UNK", name)
    operand = low >> 32
    if form in (2, 4):
        one.number = operand
    one.in_bank, one.bank = form in (3, 5), low >> 54 & 31
    if name == "IMAD":
        if first == RZ:
            one.group = "MOV"
        elif form == 4 and operand == 1:
            one.group = "IADD"
        elif form == 4 and third == RZ and operand > 1 and operand.bit_count() == 1:
            one.group = "SHIFT"
    elif "HFMA2" in any_name:
        one.group = "MOV" if first == RZ else one.group
    elif name in ("LOP3", "ULOP3"):
        one.table = high >> 8 & 255
    elif name in ("SHF", "USHF"):
        one.funnel = RZ not in (first, third)
        one.rotate = one.funnel and first == third
    elif name == "LEA":
        one.funnel = one.rotate = first == third != RZ
    elif name == "PRMT" and one.number is not None and first != RZ:
        selector = operand & 0xFFFF
        turned = (0x0321, 0x1032, 0x2103, 0x0123, 0x2107, 0x0765, 0x5432)
        one.byte_rotate = (first == third and selector in turned) or (
            third == RZ and selector == 0x0123
        )
    return one


def _branch_target(place: int, raw: bytes, arch: int) -> int:
    offset = int.from_bytes(raw[4:8], "little", signed=True)
    if arch >= 90:
        offset = ((offset >> 2) * 256 + raw[2]) * 4
    return (place * 16 + 16 + offset) // 16


def slow_features(text: bytes, arch: int, constants: bytes = b"") -> dict[str, float] | None:
    """Every column of one kernel, None when it has under eight instructions without padding."""
    raw = [text[at : at + 16] for at in range(0, len(text) - 15, 16)]
    code = [_instruction(place, each, arch) for place, each in enumerate(raw)]
    loops = []
    for one, each in zip(code, raw, strict=True):
        if one.mnemonic == "BRA":
            target = _branch_target(one.place, each, arch)
            if 0 <= target <= one.place - 2:
                loops.append((target, one.place))
    for first, last in loops:
        for one in code[first : last + 1]:
            one.depth = min(one.depth + 1, 3)
    kept = [one for one in code if one.mnemonic != "NOP"]
    if len(kept) < 8:
        return None
    found = _mix(kept, loops, code)
    found |= _plain_windows(kept)
    found |= _numbers(kept)
    solid = [one for one in kept if one.group not in FLOAT]
    for tag, width in (("h1", 256), ("h2", 1024)):
        found |= _hot(tag, width, solid)
    found["h_nwin"] = float(sum(one.mixing for one in solid) > 0.3 * max(len(solid), 1))
    if len(solid) >= 256:
        dense = [sum(one.mixing for one in solid[at : at + 256]) / 256 > 0.3
                 for at in range(0, len(solid) - 255, 256)]  # fmt: skip
        found["h_nwin"] = math.log2(1 + sum(dense))
    found |= _module(constants)
    return {name: found[name] for name in columns.COLUMNS}


def _mix(
    kept: list[Instruction], loops: list[tuple[int, int]], code: list[Instruction]
) -> dict[str, float]:
    n, weight = len(kept), sum(8**one.depth for one in kept)
    tables = Counter(one.table for one in kept if one.table is not None)
    logic = max(sum(tables.values()), 1)
    kinds = {
        "xor": [one for one in kept if one.xor], "fun": [one for one in kept if one.funnel],
        "rot": [one for one in kept if one.rotate], "prot": [o for o in kept if o.byte_rotate],
        "core": [one for one in kept if one.core], "bit": [one for one in kept if one.mixing],
        "int": [one for one in kept if one.group in INTEGER],
        "fp": [one for one in kept if one.group in FLOAT],
        "mem": [one for one in kept if one.group in MEMORY],
    }  # fmt: skip
    found: dict[str, float] = {f"{kind}_s": len(those) / n for kind, those in kinds.items()}
    for kind in ("core", "bit", "fp", "int"):
        found[f"{kind}_w"] = sum(8**one.depth for one in kinds[kind]) / max(weight, 1)
    grouped = Counter(one.group for one in kept)
    for group in GROUPS:
        found[f"g_{group}"] = grouped[group] / n
        weighed = sum(8**one.depth for one in kept if one.group == group)
        found[f"w_{group}"] = weighed / max(weight, 1)
    for name, table in TRUTH_TABLES.items():
        found[f"lut_{name}"] = tables[table] / logic
    longest = run = 0
    for one in kept:
        run = 0 if one.group in BREAK else run + 1
        longest = max(longest, run)
    banked = [one for one in kept if one.bank >= 2]
    return found | {
        "n": n, "log_n": math.log2(n), "n_loops": len(loops),
        "maxloop": max((last - first for first, last in loops), default=0),
        "maxdepth": max(one.depth for one in code), "unk": grouped["UNK"] / n,
        "xor_of_logic": len(kinds["xor"]) / logic, "logic_n": logic,
        "bit_abs": len(kinds["bit"]), "rot_abs": len(kinds["rot"]) + len(kinds["prot"]),
        "int_mul_s": grouped["IMUL"] / n,
        "ldg_per_int": grouped["LDGL"] / (len(kinds["int"]) + 1),
        "run": longest, "log_run": math.log2(longest + 1),
        "usesC3": sum(one.in_bank and one.group in ALU for one in banked) / n,
        "ldc3": sum(one.group == "CONST" for one in banked) / n,
    }  # fmt: skip


def _plain_windows(kept: list[Instruction]) -> dict[str, float]:
    series = {
        "bitwin": [one.mixing for one in kept], "corewin": [one.core for one in kept],
        "rotwin": [one.rotate or one.byte_rotate for one in kept],
        "intwin": [one.group in INTEGER for one in kept],
        "memwin": [one.group in MEMORY for one in kept],
    }  # fmt: skip

    def shares(values: list[bool], width: int) -> list[float]:
        if len(values) <= width:
            return [sum(values) / width]
        starts = range(0, len(values) - width + 1, width // 4)
        return [sum(values[at : at + width]) / width for at in starts]

    found: dict[str, float] = {}
    for name, values in series.items():
        narrow = shares(values, 128)
        found[f"{name}_max"] = max(narrow)
        if name == "bitwin":
            found["bitwin_n30"] = sum(share > 0.3 for share in narrow)
            found["bitwin_frac30"] = found["bitwin_n30"] / len(narrow)
        if name == "corewin":
            found["corewin_frac50"] = sum(share > 0.5 for share in narrow) / len(narrow)
        if name in ("bitwin", "corewin"):
            found[f"{name}512_max"] = max(shares(values, 512))
    return found


def _hot(tag: str, width: int, solid: list[Instruction]) -> dict[str, float]:
    window = solid
    if len(solid) > width:
        starts = range(0, len(solid) - width + 1, width // 8)
        best = max(starts, key=lambda at: (sum(one.mixing for one in solid[at : at + width]), -at))
        window = solid[best : best + width]
    size = max(len(window), 1)
    tables = Counter(one.table for one in window if one.table is not None)
    grouped = Counter(one.group for one in window)
    found: dict[str, float] = {
        f"{tag}_fill": min(len(window) / width, 1),
        f"{tag}_bit": sum(one.mixing for one in window) / size,
        f"{tag}_core": sum(one.core for one in window) / size,
        f"{tag}_xor": sum(one.xor for one in window) / size,
        f"{tag}_fun": sum(one.funnel for one in window) / size,
        f"{tag}_rot": sum(one.rotate for one in window) / size,
        f"{tag}_prot": sum(one.byte_rotate for one in window) / size,
        f"{tag}_namt": len(_amounts(window)),
    }
    for name in columns.HOT_TABLES:
        found[f"{tag}_l_{name}"] = tables[TRUTH_TABLES[name]] / max(sum(tables.values()), 1)
    for group in columns.HOT_GROUPS:
        found[f"{tag}_g_{group}"] = grouped[group] / size
    return found


def _amounts(code: list[Instruction]) -> set[int]:
    return {one.number % 64 for one in code if one.funnel and one.number is not None}


def _numbers(kept: list[Instruction]) -> dict[str, float]:
    words = {one.number for one in kept if one.number is not None and one.group in ALU}
    random = sum(map(_looks_random, words))
    found: dict[str, float] = {
        "nhi": random, "nhi_s": random / len(kept), "n_rot_amt": len(_amounts(kept))
    }  # fmt: skip
    for family in families():
        found[f"c_{family.key}"] = len(words & set(family.words))
    return found


def _looks_random(word: int) -> bool:
    signed = word - (word >> 31 << 32)
    unlike = len(set(word.to_bytes(4, "little"))) == 4
    return abs(signed) >= 1 << 20 and unlike and 8 <= word.bit_count() <= 24 and word & 0xFFF != 0


def _module(constants: bytes) -> dict[str, float]:
    words = {
        int.from_bytes(constants[at : at + 4], "little") for at in range(0, len(constants) - 3, 4)
    }
    found: dict[str, float] = {
        "modconst_n": len(words), "modconst_hi": sum(map(_looks_random, words))
    }  # fmt: skip
    return found | {f"m_{family.key}": len(words & set(family.words)) for family in families()}
