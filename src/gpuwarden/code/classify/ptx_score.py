"""How hash-like a function of PTX text is: a logistic regression on six numbers.

There is less to go by than for machine code (docs/classifier.md): the weights come from public
libraries and from textbook hashes, by ``bench/ptx_score.py``.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuwarden.code.ptx_features import Function

COLUMNS = ("mixing", "rotate", "xor", "dense", "dense_wide", "dense_rotations")
LEAST_WORK = 60
"""Statements of work below which a function says too little."""
SCORE_FILE = Path(__file__).parent / "data/ptx_score.json"
_BEYOND = 0.2
"""Decades that a unit of score adds beyond the highest benign function: an order, no share."""

Values = npt.NDArray[np.float64]


def columns_of(function: Function) -> Values:
    """The numbers that are scored."""
    return np.array([getattr(function, name) for name in COLUMNS], np.float64)


@dataclass(frozen=True)
class PtxScore:
    """Weights over ``COLUMNS``, the last of them a constant, and what a score means.

    ``scores`` and ``decades`` are knots of a rising curve from a raw score to -log10 of the share
    of benign functions that score as high; from ``threshold`` decades on, a function is hash-like.
    """

    centre: tuple[float, ...]
    scale: tuple[float, ...]
    weights: tuple[float, ...]
    scores: tuple[float, ...]
    decades: tuple[float, ...]
    threshold: float

    def __call__(self, values: Values) -> float:
        """The decades of one function."""
        scaled = (values - np.array(self.centre)) / np.array(self.scale)
        raw = float(scaled @ np.array(self.weights[:-1])) + self.weights[-1]
        beyond = max(raw - self.scores[-1], 0.0)
        return float(np.interp(raw, self.scores, self.decades)) + _BEYOND * beyond

    def document(self) -> dict[str, Any]:
        """What the file holds."""
        return {"columns": COLUMNS, **asdict(self)}


@cache
def load_score() -> PtxScore:
    """The score that ships with this package."""
    held: dict[str, Any] = json.loads(SCORE_FILE.read_text())
    tuples = {
        key: tuple(value) for key, value in held.items() if key not in ("columns", "threshold")
    }
    return PtxScore(**tuples, threshold=float(held["threshold"]))
