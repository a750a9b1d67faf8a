"""How the classifier is trained: which kernels, with what weight, two views of boosted trees.

The whole view sees all columns of a kernel and, with little weight, copies of mining kernels whose
XORs and rotates were lowered to other instructions. The window view sees only the densest windows
with floating point removed, which padding does not change.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightgbm
import numpy as np
import numpy.typing as npt

from bench.classifier_data import LOWERED, Mask, TrainingSet

Scores = npt.NDArray[np.float64]
Boosters = tuple[lightgbm.Booster, ...]

SEEDS = (1, 2)
"""An ensemble is the mean of one for each: what chance gives to one, the other need not have."""
GATE_TREES = 20
"""So many trees are asked first; most kernels need no more."""
HARDEST = 400
OTHERS = 500
LOWERED_WEIGHT = 0.05
WORDS = ("int_s", "h1_core", "bitwin_max")
FIXED: dict[str, Any] = {
    "objective": "binary",
    "feature_fraction": 0.5,
    "bagging_fraction": 0.7,
    "bagging_freq": 1,
    "lambda_l2": 5,
    "max_bin": 63,
    "min_data_in_bin": 1,
    "verbose": -1,
    "num_threads": 1,
    "deterministic": True,
    "force_row_wise": True,
}


@dataclass(frozen=True)
class View:
    """One ensemble: what it sees of a kernel and how it grows."""

    name: str
    columns: tuple[str, ...]
    trees: int
    parameters: dict[str, Any]
    lowered: bool


def views(columns: tuple[str, ...]) -> tuple[View, View]:
    """The two views over ``columns``."""
    window = tuple(name for name in columns if name.startswith(("h1_", "h2_", "h_")))
    shallow = {"learning_rate": 0.1, "num_leaves": 12, "max_depth": 5, "min_data_in_leaf": 15}
    deep = {"learning_rate": 0.07, "num_leaves": 24, "max_depth": 9, "min_data_in_leaf": 30}
    return (
        View("whole", columns, 160, shallow, lowered=True),
        View("window", window, 160, deep, lowered=False),
    )


def training_rows(data: TrainingSet) -> tuple[Mask, Scores]:
    """Benign kernels to learn from, and how many each stands for.

    Of a library: each instruction sequence once, the most hash-like by a plain sum of shares, and
    a random part of the rest.
    """
    column = {name: place for place, name in enumerate(data.columns)}
    random = np.random.default_rng(0)
    plain = data.codes[:, [column[name] for name in WORDS]].sum(axis=1, dtype=np.int64)
    plain -= data.codes[:, column["fp_s"]]
    chosen = np.zeros(len(data.codes), bool)
    stands_for = np.ones(len(data.codes))
    for library in np.unique(data.library[data.benign]):
        rows = np.flatnonzero(data.benign & data.first & (data.library == library))
        rows = rows[np.argsort(-plain[rows], kind="stable")]
        chosen[rows[:HARDEST]] = True
        rest = rows[HARDEST:]
        if len(rest):
            part = random.choice(rest, min(len(rest), OTHERS), replace=False)
            chosen[part] = True
            stands_for[part] = min(len(rest) / len(part), 4)
    return chosen, stands_for


def weights_of(data: TrainingSet, benign: Mask, stands_for: Scores, lowered: bool) -> Scores:
    """Half the weight is benign, half mining; a library or family counts by its square root."""
    weights = np.zeros(len(data.codes))
    copies = (data.part == LOWERED) & (data.kind == "miner")
    parts = [(benign, data.library, 1.0), (data.mining, data.family, 1.0)]
    if lowered:
        parts.append((copies, data.family, LOWERED_WEIGHT))
    for rows, owner, share in parts:
        _, inverse, sizes = np.unique(owner[rows], return_inverse=True, return_counts=True)
        weights[rows] = share / np.sqrt(sizes[inverse])
        weights[rows] *= share / weights[rows].sum()
    weights[benign] *= stands_for[benign]
    return weights * 1e4


class Trainer:
    """Trains one view on the rows that a fold leaves in."""

    def __init__(self, data: TrainingSet, view: View) -> None:
        benign, stands_for = training_rows(data)
        weights = weights_of(data, benign, stands_for, view.lowered)
        self.view = view
        self.rows = np.flatnonzero(weights > 0)
        places = [data.columns.index(name) for name in view.columns]
        self.matrix = np.ascontiguousarray(data.codes[:, places], np.float32)
        self.parameters = {**FIXED, **view.parameters}
        self.full = lightgbm.Dataset(
            self.matrix[self.rows],
            (data.kind == "miner")[self.rows].astype(int),
            weight=weights[self.rows],
            params=self.parameters,
            free_raw_data=False,
        ).construct()

    def model(self, kept: Mask) -> Boosters:
        """Trained on the rows of ``kept`` among those that the view learns from."""
        part = self.full.subset(np.flatnonzero(kept[self.rows]).tolist())
        return tuple(
            lightgbm.train({**self.parameters, "seed": seed}, part, self.view.trees)
            for seed in SEEDS
        )

    def predicted(self, model: Boosters, rows: Mask) -> tuple[Scores, Scores]:
        """Raw scores of ``rows``: after the first trees, and after all; means over the seeds."""
        asked: dict[str, Any] = {"raw_score": True, "num_threads": 1}
        part = self.matrix[rows]
        first = np.asarray(model[0].predict(part, num_iteration=GATE_TREES, **asked))
        full = [np.asarray(booster.predict(part, **asked)) for booster in model]
        return first / len(model), np.mean(full, axis=0)


def left_out(
    data: TrainingSet, trainer: Trainer, folds: int, say: Callable[[str], None]
) -> tuple[Scores, Scores]:
    """Raw scores (first trees, all trees) of every row by a model that never saw its like.

    A fold leaves out some whole libraries and some whole families (with the simulated evasions
    and other toolchains of these) at once; 0 folds: as many as there are families or libraries,
    one of each. Other versions, crackers and plotters are scored by a model of everything else.
    """
    libraries = np.unique(data.library[data.benign])
    families = np.unique(data.family[data.mining])
    folds = folds or max(len(libraries), len(families))
    first, full = np.full(len(data.codes), np.nan), np.full(len(data.codes), np.nan)
    began = time.monotonic()
    miners = data.kind == "miner"
    for fold in range(folds):
        gone = data.benign & np.isin(data.library, libraries[fold::folds])
        gone |= miners & np.isin(data.family, families[fold::folds])
        first[gone], full[gone] = trainer.predicted(trainer.model(~gone), gone)
    rest = np.isnan(full)
    first[rest], full[rest] = trainer.predicted(trainer.model(np.ones(len(rest), bool)), rest)
    say(f"{trainer.view.name} view: {folds} folds in {time.monotonic() - began:.0f} s")
    return first, full
