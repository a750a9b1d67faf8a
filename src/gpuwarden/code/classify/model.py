"""The trained model of what hash-like GPU code looks like, evaluated with numpy alone.

Two ensembles of boosted trees (``trees.py``), one over a whole kernel and one over its densest
windows, each asked as far as its first trees unless these leave the matter open. Their raw scores
become shares of benign kernels that score as high, overall and then for the generation of the
architecture. ``bench/train_classifier.py`` writes the data; docs/classifier.md tells how well it
does and where it fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuwarden.code.classify.trees import Trees

Scores = npt.NDArray[np.float64]

MODEL_FILE = Path(__file__).parent / "data/model.npz"
VIEWS = ("whole", "window")
GENERATIONS = ("sm_70", "sm_90", "sm_100")
"""The first architecture of each generation: instructions are encoded differently."""
_FIRST_ARCHITECTURES = (90, 100)


@dataclass(frozen=True)
class Table:
    """A rising curve through knots: from a score to decades (-log10 of a share)."""

    scores: Scores
    decades: Scores
    slope: float
    """Decades a unit of score beyond the last knot, where benign kernels are too few to count."""

    def __call__(self, scores: Scores) -> Scores:
        """Decades of ``scores``."""
        beyond = np.maximum(scores - self.scores[-1], 0.0)
        result: Scores = np.interp(scores, self.scores, self.decades) + self.slope * beyond
        return result


@dataclass(frozen=True)
class View:
    """One ensemble; ``columns`` are places in the model's, ``gate`` is what the first trees ask."""

    columns: npt.NDArray[np.intp]
    trees: Trees
    gate_trees: int
    gate: float
    handicap: float
    """Decades that this view must show more than the other."""
    table: Table

    def decades(self, values: npt.NDArray[np.float32]) -> Scores:
        """How far each kernel stands out, in decades; 0 for what the first trees turn away."""
        mine = np.ascontiguousarray(values[:, self.columns])
        first = self.trees.sums(mine, 0, self.gate_trees)
        result = np.zeros(len(values))
        (open_,) = np.nonzero(first >= self.gate)
        if len(open_):
            rest = self.trees.sums(mine[open_], self.gate_trees, len(self.trees.roots))
            result[open_] = np.maximum(self.table(first[open_] + rest) - self.handicap, 0.0)
        return result


@dataclass(frozen=True)
class Model:
    """Scores of kernels, and what these make of a module or of all code of a process.

    A score is -log10 of the share of benign kernels of that generation that score as high: 3 is
    one in a thousand. Kernels of fewer than ``least_instructions`` say too little: leave them out.
    """

    columns: tuple[str, ...]
    """Of the matrix that ``scores`` takes, in this order."""
    least_instructions: int
    counted_kernels: int
    """At most so many kernels of a module or a set count as tries."""
    module_threshold: float
    set_threshold: float
    views: tuple[View, ...]
    generations: tuple[Table, ...]

    def scores(self, values: npt.NDArray[np.float32], arch: int) -> Scores:
        """Scores of kernels: ``values`` (kernels, columns) in raw units, ``arch`` as 90 of sm_90.

        Each row is judged by itself; not a number counts as 0.
        """
        clean = np.nan_to_num(np.asarray(values, np.float32), nan=0.0)
        if not len(clean):
            return np.zeros(0)
        highest: Scores = np.max([view.decades(clean) for view in self.views], axis=0)
        generation = int(np.digitize(arch, _FIRST_ARCHITECTURES))
        return np.where(highest > 0, self.generations[generation](highest), 0.0)

    def module_answer(self, scores: Scores) -> tuple[float, bool]:
        """The score of a module from those of all its kernels, and whether it is hash-like."""
        score = self._of_many(scores)
        return score, score >= self.module_threshold

    def set_answer(self, modules: Sequence[Scores]) -> tuple[float, bool]:
        """The same of all unknown modules of a process or a file, an array of scores each."""
        score = self._of_many(np.concatenate(modules) if modules else np.zeros(0))
        return score, score >= self.set_threshold

    def _of_many(self, scores: Scores) -> float:
        """The highest score less what so many tries would give anyway (Bonferroni, bounded).

        Bounded because whoever hides a kernel may add any number of others.
        """
        if not len(scores):
            return 0.0
        tries = min(len(scores), self.counted_kernels)
        return max(float(np.max(scores)) - float(np.log10(tries)), 0.0)


def model_of(arrays: dict[str, npt.NDArray[Any]]) -> Model:
    """The model that ``arrays`` hold, as ``bench/train_classifier.py`` lays them out."""
    views = tuple(
        View(
            columns=arrays[f"{name}_columns"].astype(np.intp),
            trees=Trees.of(
                roots=arrays[f"{name}_roots"],
                features=arrays[f"{name}_features"],
                thresholds=arrays[f"{name}_thresholds"],
                children=arrays[f"{name}_children"],
                values=arrays[f"{name}_values"],
            ),
            gate_trees=int(arrays[f"{name}_gate_trees"]),
            gate=float(arrays[f"{name}_gate"]),
            handicap=float(arrays[f"{name}_handicap"]),
            table=_table(arrays, name),
        )
        for name in VIEWS
    )
    return Model(
        columns=tuple(str(name) for name in arrays["columns"]),
        least_instructions=int(arrays["least_instructions"]),
        counted_kernels=int(arrays["counted_kernels"]),
        module_threshold=float(arrays["module_threshold"]),
        set_threshold=float(arrays["set_threshold"]),
        views=views,
        generations=tuple(_table(arrays, name) for name in GENERATIONS),
    )


def _table(arrays: dict[str, npt.NDArray[Any]], name: str) -> Table:
    return Table(
        arrays[f"{name}_table_scores"].astype(np.float64),
        arrays[f"{name}_table_decades"].astype(np.float64),
        float(arrays[f"{name}_table_slope"]),
    )


@cache
def load_model() -> Model:
    """The model that ships with this package."""
    with np.load(MODEL_FILE, allow_pickle=False) as file:
        return model_of({name: file[name] for name in file.files})
