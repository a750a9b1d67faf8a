"""Which group an instruction is counted in, and the codes that decoding gives instructions.

A code is a group, or a finer part of one that a feature asks for: a LOP3 by its truth table, a
shift that rotates, a byte permute that rotates. All shares are sums over codes, so that one
histogram of codes answers for all of them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]

MEMBERS = {
    "LOGIC": "LOP3 ULOP3 LOP",
    "SHIFT": "SHF USHF SHL SHR BMSK SGXT USGXT",
    "PRMT": "PRMT UPRMT BREV UBREV",
    "IADD": "IADD3 IADD UIADD3 VIADD IABS VIADDMNMX UIABS",
    "IMUL": "IMAD UIMAD IMUL IDP XMAD",
    "LEA": "LEA ULEA",
    "ICMP": "ISETP UISETP IMNMX VIMNMX VIMNMX3 SEL USEL UIMNMX UVIMNMX PLOP3 UPLOP3 P2R R2P UP2UR "
    "PSETP",
    "BIT": "POPC FLO UPOPC UFLO",
    "MOV": "MOV UMOV CS2R R2UR S2R S2UR B2R BMOV LEPC UR2UP",
    "FP32": "FADD FMUL FFMA FMNMX FMNMX3 FSEL FSET FSETP FCHK FSWZADD UFFMA UFMUL UFSEL UFSETP "
    "UFADD FADD2 FMUL2 FFMA2 FADD32I",
    "MUFU": "MUFU",
    "FP16": "HADD2 HMUL2 HFMA2 HMNMX2 HSET2 HSETP2",
    "FP64": "DADD DMUL DFMA DSETP",
    "TENSOR": "HMMA IMMA HGMMA QGMMA IGMMA OMMA QMMA DMMA BMMA BGMMA UTCHMMA UTCQMMA UTCIMMA "
    "UTCOMMA UTCMMA WARPGROUP",
    "CVT": "F2F F2I I2F F2FP I2FP FRND I2I UI2F UI2FP UF2I",
    "LDGL": "LDG LD LDGSTS UBLKCP UTMALDG LDTM",
    "STGL": "STG ST UTMASTG UBLKRED STAS",
    "LDSH": "LDS LDSM",
    "STSH": "STS STSM",
    "LOCAL": "LDL STL",
    "CONST": "LDC ULDC LDCU",
    "ATOM": "ATOM ATOMG ATOMS RED REDG UTMAREDG",
    "TEX": "TEX TLD TLD4 TXQ TMML TXD SULD SUST SUATOM SURED",
    "WARP": "SHFL VOTE VOTEU MATCH REDUX CREDUX ELECT",
    "BAR": "BAR SYNCS MEMBAR DEPBAR ERRBAR LDGDEPBAR CCTL CGAERRBAR WARPSYNC FENCE ARRIVES "
    "UCGABAR_WAIT UCGABAR_ARV YIELD NANOSLEEP CCTLL",
    "BRANCH": "BRA BRX BRXU BSSY BSYNC BREAK CALL RET EXIT JMP JMX BPT KILL",
    "OTHER": "",
    "UNK": "",
}
"""Group → mnemonics; OTHER is a known mnemonic of no group, UNK one that training did not know."""

GROUPS = tuple(MEMBERS)
GROUP_OF = {mnemonic: group for group, names in MEMBERS.items() for mnemonic in names.split()}

TRUTH_TABLES = {
    "xor3": 0x96, "xor2": 0x3C, "and": 0xC0, "or": 0xFC, "chi_d2": 0xD2, "b4": 0xB4, "78": 0x78,
    "maj": 0xE8, "ch_ca": 0xCA, "d8": 0xD8, "b8": 0xB8, "xor_and_6a": 0x6A, "f8": 0xF8, "1e": 0x1E,
    "xnor3": 0x69, "xnor2c3": 0xC3, "e2": 0xE2, "ac": 0xAC, "not33": 0x33, "a6": 0xA6, "9a": 0x9A,
    "2d": 0x2D, "87": 0x87,
}  # fmt: skip
"""Truth tables of LOP3 that have a column of their own: inputs a=0xf0, b=0xcc, c=0xaa."""


def _xor_like(table: int) -> bool:
    """Whether some input always flips the output, and at least two inputs matter."""
    flips = {
        line: [(table >> row & 1) != (table >> (row ^ line) & 1) for row in range(8)]
        for line in (1, 2, 4)
    }
    return any(map(all, flips.values())) and sum(map(any, flips.values())) >= 2


XOR_LIKE = np.array([_xor_like(table) for table in range(256)])

_FINER = (
    *("SHIFT:funnel", "SHIFT:rotate", "LEA:rotate", "PRMT:rotate", "LOGIC:xor", "LOGIC:plain"),
    *(f"LOGIC:{name}" for name in TRUTH_TABLES),
)
CODES = (*GROUPS, *_FINER)
CODE = {name: number for number, name in enumerate(CODES)}
WIDTH = 64
"""Codes fit in so many; a histogram has a row of this width."""

# What decoding has yet to look at more closely: it replaces these by codes.
IMAD, HFMA2, HFMA2_OR_IADD, LOP3, SHF, PRMT, LEA, NOP, BRA = range(WIDTH, WIDTH + 9)


def codes_where(*names: str) -> Mask:
    """A mask over codes: those of the given groups with all their parts, and the given codes."""
    mask = np.zeros(WIDTH, np.bool_)
    for number, name in enumerate(CODES):
        mask[number] = name in names or name.split(":")[0] in names
    return mask


IS_TABLE = codes_where(*(name for name in _FINER if name.startswith("LOGIC:")))
"""LOP3 and its uniform form, which carry a truth table."""
IS_XOR = codes_where("LOGIC:xor") | codes_where(
    *(f"LOGIC:{name}" for name, table in TRUTH_TABLES.items() if XOR_LIKE[table])
)
IS_FUNNEL = codes_where("SHIFT:funnel", "SHIFT:rotate", "LEA:rotate")
IS_ROTATE = codes_where("SHIFT:rotate", "LEA:rotate")
IS_BYTE_ROTATE = codes_where("PRMT:rotate")
IS_MIXING = IS_XOR | IS_FUNNEL | IS_BYTE_ROTATE
"""XOR, funnel shift, byte rotation: the bit work that ciphers and hashes are made of."""
IS_CORE = IS_MIXING | codes_where("IADD")
IS_INTEGER = codes_where(*"LOGIC SHIFT PRMT IADD IMUL LEA BIT".split())
IS_ALU = IS_INTEGER | codes_where("ICMP", "MOV")
IS_FLOAT = codes_where(*"FP32 MUFU FP16 FP64 TENSOR CVT".split())
IS_MEMORY = codes_where(*"LDGL STGL LDSH STSH LOCAL ATOM TEX".split())
IS_BREAK = IS_FLOAT | IS_MEMORY | codes_where("BRANCH", "BAR")

TABLE_CODE = np.array(
    [CODE["LOGIC:xor" if XOR_LIKE[table] else "LOGIC:plain"] for table in range(256)], np.uint8
)
for _name, _table in TRUTH_TABLES.items():
    TABLE_CODE[_table] = CODE[f"LOGIC:{_name}"]
"""Truth table → code."""
