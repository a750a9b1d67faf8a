"""Names of the features, in the order of the training set, and what each takes to compute."""

from __future__ import annotations

import functools

from gpuwarden.code.sass.groups import GROUPS, TRUTH_TABLES

HOT_TABLES = tuple("xor3 xor2 and or 78 b4 chi_d2 maj ch_ca f8 xor_and_6a".split())
HOT_GROUPS = tuple(
    "LOGIC SHIFT PRMT IADD IMUL LEA ICMP BIT MOV LDGL STGL LDSH STSH LOCAL CONST ATOM WARP BAR "
    "BRANCH".split()
)
HOT_SHARES = tuple("bit core xor fun rot prot".split())
IN_INSTRUCTIONS = tuple(
    "sha256 iv256 sha512 iv512 md5 sha1rmd keccak pi aesT skein fnv kiss99 cubehash sm3 lcg64_rx "
    "murmur_xx philox crc32 xorwow_mrg splitmix".split()
)
"""Families of words that are counted in a kernel's instructions; the set has no others."""
IN_CONSTANTS = tuple(
    "sha256 iv256 sha512 iv512 md5 sha1rmd keccak pi aesT aesS skein kiss99 cubehash luffa "
    "murmur_xx philox crc32".split()
)
"""Families that are counted in a module's constants."""

SHAPE = tuple("n log_n n_loops maxloop maxdepth unk".split())
SHARES = tuple(
    "xor_s xor_of_logic logic_n fun_s rot_s prot_s core_s bit_s int_s fp_s mem_s core_w bit_w fp_w "
    "int_w bit_abs rot_abs int_mul_s ldg_per_int".split()
)
GROUP_SHARES = tuple(f"{view}_{group}" for group in GROUPS for view in "gw")
TABLE_SHARES = tuple(f"lut_{name}" for name in TRUTH_TABLES)
WINDOWS = tuple(
    "bitwin_max corewin_max bitwin512_max corewin512_max rotwin_max intwin_max memwin_max "
    "bitwin_frac30 corewin_frac50 bitwin_n30".split()
)
RUNS = ("run", "log_run")
AMOUNTS = ("n_rot_amt",)
RANDOM_NUMBERS = ("nhi", "nhi_s")
BANKS = ("usesC3", "ldc3")
MODULE = ("modconst_n", "modconst_hi", *(f"m_{family}" for family in IN_CONSTANTS))
FAMILIES = tuple(f"c_{family}" for family in IN_INSTRUCTIONS)
HOT = (
    *(
        f"{window}_{name}"
        for window in ("h1", "h2")
        for name in (
            "fill", *HOT_SHARES, "namt", *(f"l_{table}" for table in HOT_TABLES),
            *(f"g_{group}" for group in HOT_GROUPS),
        )
    ),
    "h_nwin",
)  # fmt: skip

PARTS: dict[str, tuple[str, ...]] = {
    "histogram": (*SHAPE, *SHARES, *GROUP_SHARES, *TABLE_SHARES),
    "windows": WINDOWS,
    "runs": RUNS,
    "amounts": AMOUNTS,
    "random numbers": RANDOM_NUMBERS,
    "hot": HOT,
    "banks": BANKS,
    "families": FAMILIES,
    "module": MODULE,
}
"""What is computed together; ``module`` costs the most where a module holds large tables."""

COLUMNS = tuple(column for columns in PARTS.values() for column in columns)


@functools.cache
def parts_of(columns: tuple[str, ...]) -> frozenset[str]:
    """The parts that have to be computed for these columns. Errors: KeyError, unknown column."""
    part_of = {column: part for part, names in PARTS.items() for column in names}
    return frozenset(part_of[column] for column in columns)
