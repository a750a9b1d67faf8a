"""Makes the classifier's compact training set from the full table of kernel features.

The full table (one row a kernel, 242 numbers) is 32 MB and needs pandas; the compact set keeps what
the classifier learns from and is measured with: the columns that a first model used, each cut into
at most 63 steps at edges in raw units, and what a kernel belongs to as numbers. No names or hashes
of kernels or modules. Kernels of fewer than 150 instructions are not scored, so only their modules
are kept. Needs pandas and pyarrow, which nothing else here does.

    python bench/compact_training_set.py TABLE.parquet [--output bench/data/kernel_features.npz.xz]
"""

from __future__ import annotations

import argparse
import io
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd  # type: ignore[import-untyped,import-not-found,unused-ignore]

LEAST_INSTRUCTIONS = 150
STEPS = 63
SAMPLE_PER_LIBRARY = 1500
GROUP = ["cls", "set", "project", "family", "algorithm", "library", "module", "arch"]

# Chosen once: those that made up 99.35% of the gain of a first model of each view, trained on all.
SHARES = """xor_s xor_of_logic fun_s core_s bit_s int_s fp_s mem_s core_w bit_w fp_w int_w
bitwin_max corewin_max bitwin512_max corewin512_max intwin_max memwin_max int_mul_s ldg_per_int
lut_xor3 lut_and lut_or lut_f8 lut_e2 lut_not33"""
COUNTS = "log_n n_loops maxdepth n_rot_amt log_run"
HOT_256 = """fill bit core fun namt l_xor3 l_xor2 l_and l_or l_78 l_f8 g_LOGIC g_SHIFT g_IADD g_IMUL
g_ICMP g_BIT g_LDGL g_STGL g_LDSH g_STSH g_LOCAL g_ATOM g_WARP g_BAR g_BRANCH"""
HOT_1024 = """fill bit core xor fun namt l_xor3 l_xor2 l_and l_or l_78 l_f8 g_LOGIC g_SHIFT g_PRMT
g_IADD g_IMUL g_ICMP g_BIT g_MOV g_LDGL g_STGL g_LDSH g_STSH g_LOCAL g_ATOM g_WARP g_BAR
g_BRANCH"""
GROUPS = """g_LOGIC w_LOGIC g_SHIFT w_SHIFT g_IADD w_IADD g_ICMP w_ICMP g_BIT w_BIT w_MOV g_FP32
w_FP32 g_MUFU w_MUFU g_FP16 g_FP64 w_FP64 g_CVT g_LDGL w_LDGL g_STGL w_STGL g_LDSH w_LDSH g_STSH
w_STSH g_LOCAL w_CONST g_ATOM w_ATOM g_WARP w_WARP g_BAR w_BAR g_BRANCH w_BRANCH"""
COLUMNS = (
    (COUNTS + " " + SHARES).split()
    + [f"h1_{name}" for name in HOT_256.split()]
    + [f"h2_{name}" for name in HOT_1024.split()]
    + ["h_nwin", *GROUPS.split()]
)


def edges_of(values: npt.NDArray[np.float32], weights: npt.NDArray[np.float64]) -> Any:
    """Cut points of one column, half-way between neighbours, about equal weight between them."""
    distinct, inverse = np.unique(values, return_inverse=True)
    if len(distinct) < 2:
        return np.zeros(0, np.float32)
    share = np.cumsum(np.bincount(inverse, weights)) / weights.sum()
    between = (distinct[:-1].astype(np.float64) + distinct[1:]) / 2
    if len(between) > STEPS - 1:
        wanted = np.arange(1, STEPS) / STEPS
        between = between[np.unique(np.clip(np.searchsorted(share, wanted), 0, len(between) - 1))]
    return between.astype(np.float32)


def sampled(table: pd.DataFrame) -> npt.NDArray[np.float64]:
    """A weight a row for the edges: half on mining code (with its lowered copies), half benign."""
    weights = np.zeros(len(table))
    random = np.random.default_rng(0)
    main = table["set"] == "main"
    benign = (main & (table["cls"] == "benign")).to_numpy()
    library = table["library"].to_numpy()
    for name in sorted(set(library[benign])):
        rows = np.flatnonzero(benign & (library == name))
        chosen = random.choice(rows, min(len(rows), SAMPLE_PER_LIBRARY), replace=False)
        weights[chosen] = 1 / np.sqrt(len(chosen))
    weights[benign] /= weights[benign].sum()
    mining = (table["cls"] == "miner").to_numpy()
    for name, share in (("main", 0.7), ("mutated_miner:rotxor", 0.3)):
        part = mining & (table["set"] == name).to_numpy()
        weights[part] = share / part.sum()
    return weights


def compact(table: pd.DataFrame) -> dict[str, npt.NDArray[Any]]:
    """The arrays of the compact set: codes of kernels, what they belong to, groups, edges."""
    table = table.assign(**{c: table[c].astype(str) for c in GROUP if c in table and c != "arch"})
    keys = [table[name].astype(str) for name in ("library", "set", "module_hash")]
    table["module"] = pd.factorize(keys[0] + "|" + keys[1] + "|" + keys[2])[0]
    table = table[~((table["cls"] == "miner") & (table["family"] == "helper"))]
    groups, index = np.unique(
        table[GROUP].astype({"module": str, "arch": str}).agg("|".join, axis=1),
        return_inverse=True,
    )
    fields = [text.split("|") for text in groups]
    scored = (table["n"] >= LEAST_INSTRUCTIONS).to_numpy()
    kept = table[scored].reset_index(drop=True)
    weights = sampled(kept)
    codes = np.empty((len(kept), len(COLUMNS)), np.uint8)
    edges, sizes = [], []
    for column, name in enumerate(COLUMNS):
        values = kept[name].to_numpy(np.float32)
        cuts = edges_of(values[weights > 0], weights[weights > 0])
        codes[:, column] = np.searchsorted(cuts, values, side="left")
        edges.append(cuts)
        sizes.append(len(cuts))
    group = index[scored].astype(np.uint32)
    # The first of its instruction sequence in its library: training takes each once.
    owner = kept["library"] + "|" + kept["set"] + "|" + kept["sass_hash"].astype(str)
    first = ~owner.duplicated().to_numpy()
    whole = np.column_stack([group.view(np.uint8).reshape(-1, 4), codes])
    _, place, inverse, count = np.unique(
        whole, axis=0, return_index=True, return_inverse=True, return_counts=True
    )
    firsts = np.zeros(len(place), np.int64)
    np.maximum.at(firsts, inverse.ravel(), first.astype(np.int64))
    # Kernels that look alike lie next to each other, whatever their architecture: it packs better.
    library = np.unique(kept["library"], return_inverse=True)[1][place]
    cls = np.unique(kept["cls"], return_inverse=True)[1][place]
    by = ["h2_bit", "bit_s", "int_s", "fp_s", "log_n"]
    order = np.lexsort([*(codes[place, COLUMNS.index(c)] for c in reversed(by)), library, cls])
    place, count, firsts = place[order], count[order], firsts[order]
    arrays: dict[str, npt.NDArray[Any]] = {
        "columns": np.array(COLUMNS),
        "edges": np.concatenate(edges),
        "edge_counts": np.array(sizes, np.uint8),
        "codes": np.ascontiguousarray(codes[place].T),
        "group": group[place],
        "count": count.astype(np.uint16),
        "first": np.packbits(firsts.astype(np.uint8)),
        "group_module": np.array([int(f[6]) for f in fields], np.uint32),
        "group_arch": np.array([int(f[7]) for f in fields], np.uint8),
    }
    for position, name in enumerate(GROUP[:6]):
        names, numbers = np.unique([f[position] for f in fields], return_inverse=True)
        arrays[f"{name}_names"] = names
        arrays[f"group_{name}"] = numbers.astype(np.uint8)
    return arrays


def main() -> None:
    """Reads the table, writes the compact set, says its size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("table", type=Path)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).resolve().parent / "data/kernel_features.npz.xz",
    )
    options = parser.parse_args()
    arrays = compact(pd.read_parquet(options.table))
    plain = io.BytesIO()
    np.savez(plain, allow_pickle=False, **arrays)
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_bytes(lzma.compress(plain.getvalue(), preset=9))
    print(
        f"{options.output}: {arrays['codes'].shape[1]:,} rows of {len(COLUMNS)} columns in"
        f" {len(arrays['group_arch']):,} groups, {options.output.stat().st_size:,} bytes"
    )


if __name__ == "__main__":
    main()
