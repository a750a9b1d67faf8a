"""What a kernel's instructions are like, in numbers: the columns that the classifier is trained on.

Shares are of the kernel's instructions without padding unless a name says otherwise:

- ``n``, ``log_n``: instructions, log2 of them. ``n_loops``: branches back; ``maxloop`` the longest,
  ``maxdepth`` the deepest nesting, up to three. ``unk``: opcodes that training did not know.
- ``g_X``, ``w_X``: share of group X; the same with a weight of eight for each loop around.
- ``xor_s``: XOR-like LOP3, ``fun_s`` funnel shifts, ``rot_s`` rotations, ``prot_s`` byte rotations,
  ``bit_s`` these together, ``core_s`` with additions; ``…_w`` weighted, ``…_abs`` counted.
- ``bitwin_max`` and its like: the densest window of 128 (or 512) instructions; ``…_frac``, ``…_n``
  how many are dense.
- ``lut_X``: share of truth table X among the ``logic_n`` LOP3.
- ``h1_X``, ``h2_X``: the densest 256 and 1,024 instructions of the stream without floating point;
  ``h_nwin``: how many such windows are dense.
- ``run``: most instructions in a row without float, memory, branch or barrier. ``n_rot_amt``:
  different constant amounts of rotations. ``nhi``: different random-looking numbers.
- ``c_X``, ``m_X``: words of family X in the instructions; in the module's constants.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gpuwarden.code import constants
from gpuwarden.code.bounds import DEFAULT, Bounds
from gpuwarden.code.sass import columns as names
from gpuwarden.code.sass import groups, immediates, opcodes, windows
from gpuwarden.code.sass.decode import Integers, Stream, chunks, decode, oversized
from gpuwarden.code.sass.loops import DEEPEST, Loops, find_loops
from gpuwarden.code.sass.sections import CubinSections, read_sections
from gpuwarden.errors import Malformed

Values = npt.NDArray[np.float64]
Columns = dict[str, npt.NDArray[np.generic]]

LOOP_WEIGHT = 8.0
LEAST_BANK = 2
BANK_FORMS = (3, 5)


class KernelTable(Struct, frozen=True):
    """Features of a module's kernels: ``values`` (a row a kernel, a column each, float32).

    ``kernels`` are their names, ``sections`` their numbers among ``read_sections(image).code``;
    ``unknown`` is the share of opcodes that no listing has. Kernels of under eight instructions are
    not there; ``oversized`` names those with more than are looked at.
    """

    arch: int
    columns: tuple[str, ...]
    values: npt.NDArray[np.float32]
    kernels: tuple[str, ...]
    sections: Integers
    instructions: Integers
    unknown: Values
    oversized: tuple[str, ...] = ()

    def column(self, name: str) -> npt.NDArray[np.float32]:
        """One feature of all kernels."""
        return self.values[:, self.columns.index(name)]


def kernel_features(
    image: bytes | memoryview,
    columns: Iterable[str] = names.COLUMNS,
    bounds: Bounds = DEFAULT,
) -> KernelTable:
    """The features of each kernel of a cubin; only what ``columns`` need is computed.

    Errors: Malformed, and so for an architecture outside sm_70 to sm_121, whose instructions are
    of another form or not known.
    """
    sections = read_sections(image, bounds)
    return features_of(image, sections, tuple(columns))


def features_of(
    image: bytes | memoryview, sections: CubinSections, columns: tuple[str, ...]
) -> KernelTable:
    """The features of a cubin whose sections were read before. Errors: Malformed."""
    if not opcodes.OLDEST <= sections.arch <= opcodes.NEWEST:
        raise Malformed(f"cubin: instructions of sm_{sections.arch}, which is not known here")
    parts = names.parts_of(columns)
    module = module_columns(image, sections) if "module" in parts else {}
    rows, numbers, counts, unknown = [], [], [], []
    for chunk in chunks(sections.code):
        stream = decode(image, sections.code, chunk, sections.arch)
        if not len(stream.kernels):
            continue
        found = {**module, **stream_columns(stream, sections.arch, parts)}
        kernels = len(stream.kernels)
        values = np.empty((len(columns), kernels), np.float32)
        for place, name in enumerate(columns):
            values[place] = found[name]
        rows.append(values.T)
        numbers.append(stream.kernels)
        counts.append(stream.starts[1:] - stream.starts[:-1])
        unknown.append(_unknown(stream) / counts[-1])
    order = np.concatenate(numbers) if numbers else np.zeros(0, np.int64)
    none = np.zeros(0, np.int64)
    return KernelTable(
        arch=sections.arch,
        columns=columns,
        values=np.concatenate(rows) if rows else np.zeros((0, len(columns)), np.float32),
        kernels=tuple(sections.code[number].name for number in order.tolist()),
        sections=order,
        instructions=np.concatenate(counts) if counts else none,
        unknown=np.concatenate(unknown) if unknown else none.astype(np.float64),
        oversized=oversized(sections.code),
    )


def stream_columns(stream: Stream, arch: int, parts: frozenset[str]) -> Columns:
    """The columns of all ``parts`` but the module's, a value for each kernel of the stream."""
    loops = find_loops(stream, arch)
    totals = loops.histogram.sum(axis=1).astype(np.float64)
    count = stream.starts[1:] - stream.starts[:-1]
    columns: Columns = {}
    if "histogram" in parts:
        columns |= _histogram_columns(loops, totals, count)
    if "windows" in parts:
        columns |= windows.plain_windows(stream)
    if "runs" in parts:
        run = windows.longest_runs(stream)
        columns |= {"run": run, "log_run": np.log2(run + 1)}
    amounts = immediates.Amounts(stream) if parts & {"amounts", "hot"} else None
    if amounts and "amounts" in parts:
        columns["n_rot_amt"] = amounts.different(stream.starts[:-1], stream.starts[1:])
    if amounts and "hot" in parts:
        columns |= _hot_columns(stream, totals, amounts)
    if "random numbers" in parts:
        random = immediates.random_numbers(stream)
        columns |= {"nhi": random, "nhi_s": random / count}
    if "banks" in parts:
        columns |= _bank_columns(stream, count)
    if "families" in parts:
        columns |= _family_columns(stream)
    return columns


def _matrix(masks: Iterable[groups.Mask]) -> Values:
    """A row a code, a column a mask, so that a histogram times it is a count for each mask."""
    return np.stack(list(masks), axis=1).astype(np.float64)


_SHARED = {
    "unk": groups.codes_where("UNK"), "xor_s": groups.IS_XOR, "fun_s": groups.IS_FUNNEL,
    "rot_s": groups.IS_ROTATE, "prot_s": groups.IS_BYTE_ROTATE, "core_s": groups.IS_CORE,
    "bit_s": groups.IS_MIXING, "int_s": groups.IS_INTEGER, "fp_s": groups.IS_FLOAT,
    "mem_s": groups.IS_MEMORY, "int_mul_s": groups.codes_where("IMUL"),
} | {f"g_{group}": groups.codes_where(group) for group in groups.GROUPS}  # fmt: skip
_WEIGHED = {
    "core_w": groups.IS_CORE, "bit_w": groups.IS_MIXING, "fp_w": groups.IS_FLOAT,
    "int_w": groups.IS_INTEGER,
} | {f"w_{group}": groups.codes_where(group) for group in groups.GROUPS}  # fmt: skip
_HOT = {
    "bit": groups.IS_MIXING, "core": groups.IS_CORE, "xor": groups.IS_XOR,
    "fun": groups.IS_FUNNEL, "rot": groups.IS_ROTATE, "prot": groups.IS_BYTE_ROTATE,
} | {f"g_{group}": groups.codes_where(group) for group in names.HOT_GROUPS}  # fmt: skip
_SHARED_MATRIX, _WEIGHED_MATRIX = _matrix(_SHARED.values()), _matrix(_WEIGHED.values())
_HOT_MATRIX = _matrix(_HOT.values())
_TABLES = [groups.CODE[f"LOGIC:{name}"] for name in groups.TRUTH_TABLES]
_HOT_TABLES = [groups.CODE[f"LOGIC:{name}"] for name in names.HOT_TABLES]
_HOT_NAMES = {
    window: (
        [f"{window}_{name}" for name in _HOT],
        [f"{window}_l_{name}" for name in names.HOT_TABLES],
    )
    for window in windows.HOT
}


def _histogram_columns(loops: Loops, totals: Values, count: Integers) -> Columns:
    weights = LOOP_WEIGHT ** np.arange(DEEPEST + 1)
    weighted = loops.histogram.transpose(0, 2, 1) @ weights
    all_weight = np.maximum(weighted.sum(axis=1), 1)
    logic = np.maximum(totals[:, groups.IS_TABLE].sum(axis=1), 1)
    counted = (totals @ _SHARED_MATRIX).T
    by_name = dict(zip(_SHARED, counted, strict=True))
    columns: Columns = dict(zip(_SHARED, counted / count, strict=True))
    columns |= zip(_WEIGHED, (weighted @ _WEIGHED_MATRIX).T / all_weight, strict=True)
    columns |= zip(names.TABLE_SHARES, totals[:, _TABLES].T / logic, strict=True)
    return columns | {
        "n": count,
        "log_n": np.log2(count),
        "n_loops": loops.count,
        "maxloop": loops.longest,
        "maxdepth": loops.deepest,
        "xor_of_logic": by_name["xor_s"] / logic,
        "logic_n": logic,
        "bit_abs": by_name["bit_s"],
        "rot_abs": by_name["rot_s"] + by_name["prot_s"],
        "ldg_per_int": by_name["g_LDGL"] / (by_name["int_s"] + 1),
    }


def _hot_columns(stream: Stream, totals: Values, amounts: immediates.Amounts) -> Columns:
    found, dense = windows.hot_windows(stream, totals)
    columns: Columns = {"h_nwin": dense}
    for name, hot in found.items():
        size = np.maximum(hot.sizes, 1)
        logic = np.maximum(hot.histogram[:, groups.IS_TABLE].sum(axis=1), 1)
        share_names, table_names = _HOT_NAMES[name]
        columns |= zip(share_names, (hot.histogram @ _HOT_MATRIX).T / size, strict=True)
        columns |= zip(table_names, hot.histogram[:, _HOT_TABLES].T / logic, strict=True)
        columns[f"{name}_fill"] = hot.sizes / windows.HOT[name]
        columns[f"{name}_namt"] = amounts.different(hot.first, hot.last)
    return columns


def _bank_columns(stream: Stream, count: Integers) -> Columns:
    """Operands in, and loads from, constant banks that the compiler fills with tables."""
    forms = stream.words[stream.places, 0] >> 9 & 7
    banks = stream.words[stream.places, 1] >> 22 & 31
    table = banks >= LEAST_BANK
    operand = table & np.isin(forms, BANK_FORMS) & groups.IS_ALU.take(stream.codes)
    load = table & groups.codes_where("CONST").take(stream.codes)
    starts = stream.starts[:-1]
    return {
        "usesC3": np.add.reduceat(operand, starts, dtype=np.int64) / count,
        "ldc3": np.add.reduceat(load, starts, dtype=np.int64) / count,
    }


def _family_columns(stream: Stream) -> Columns:
    kernels, words = immediates.numbers_in(stream)
    known = constants.known_words(words)
    kernels, words = immediates.distinct(kernels[known], words[known])
    index, family = constants.memberships(words)
    count, width = len(stream.kernels), len(constants.families())
    table = np.bincount(kernels[index] * width + family, minlength=count * width)
    by_family = table.reshape(count, width)
    keys = [one.key for one in constants.families()]
    return {f"c_{key}": by_family[:, keys.index(key)] for key in names.IN_INSTRUCTIONS}


def module_columns(image: bytes | memoryview, sections: CubinSections) -> Columns:
    """What a module's constants hold: the same for all its kernels."""
    words = module_words(image, sections)
    _, family = constants.memberships(words[constants.known_words(words)])
    counts = np.bincount(family, minlength=len(constants.families()))
    keys = [one.key for one in constants.families()]
    found: Columns = {f"m_{key}": counts[keys.index(key)] for key in names.IN_CONSTANTS}
    random = immediates.looks_random(words).sum()
    return {"modconst_n": np.array(len(words)), "modconst_hi": np.array(random), **found}


def module_words(image: bytes | memoryview, sections: CubinSections) -> immediates.Words:
    """The different 32-bit words of a module's constants, in order."""
    parts = [np.frombuffer(image, np.uint32, size // 4, at) for at, size in sections.constants]
    return np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.uint32)


def _unknown(stream: Stream) -> Integers:
    """For each kernel, its opcodes that no listing has."""
    strange = np.flatnonzero(stream.codes == groups.CODE["UNK"])
    opcode = stream.words[stream.places[strange], 0] & np.uint32(0xFFF)
    strange = strange[~opcodes.known_opcodes()[opcode]]
    return np.bincount(stream.kernel_of(strange), minlength=len(stream.kernels))
