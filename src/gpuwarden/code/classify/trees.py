"""An ensemble of decision trees, walked for many rows and trees at once.

Nodes of all trees lie in one table. The children of a node lie next to each other: the first for
values at most the threshold, the second for those above. A leaf is its own child, below an
infinite threshold, so that every walk may take as many steps as the deepest tree needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_WALKS = 1 << 15
"""Walks at a time: their state stays in the processor's second cache."""


@dataclass(frozen=True)
class Trees:
    """The trees of one ensemble; ``steps`` is the depth of each."""

    roots: npt.NDArray[np.intp]
    features: npt.NDArray[np.intp]
    thresholds: npt.NDArray[np.float32]
    children: npt.NDArray[np.intp]
    values: npt.NDArray[np.float64]
    steps: npt.NDArray[np.intp]

    @classmethod
    def of(
        cls,
        roots: npt.NDArray[Any],
        features: npt.NDArray[Any],
        thresholds: npt.NDArray[Any],
        children: npt.NDArray[Any],
        values: npt.NDArray[Any],
    ) -> Trees:
        """The ensemble of these tables, each tree's depth found by walking down from its root."""
        roots, children = roots.astype(np.intp), children.astype(np.intp)
        steps = np.zeros(len(roots), np.intp)
        level, owner, depth = roots, np.arange(len(roots)), 0
        while True:
            inner = children[level] != level
            level, owner, depth = children[level[inner]], owner[inner], depth + 1
            if not len(level):
                break
            steps[owner] = depth
            level, owner = np.concatenate([level, level + 1]), np.concatenate([owner, owner])
        return cls(
            roots=roots,
            features=features.astype(np.intp),
            thresholds=thresholds.astype(np.float32),
            children=children,
            values=values.astype(np.float64),
            steps=steps,
        )

    def sums(self, rows: npt.NDArray[np.float32], start: int, stop: int) -> npt.NDArray[np.float64]:
        """The sum over trees ``start`` to ``stop`` of the leaf that each row comes to.

        ``rows`` (rows, columns) are contiguous float32 without NaN.
        """
        result = np.zeros(len(rows))
        roots = self.roots[start:stop]
        if not len(roots) or not len(rows):
            return result
        steps = int(self.steps[start:stop].max())
        width = rows.shape[1]
        flat = rows.ravel()
        height = max(_WALKS // len(roots), 1)
        for begin in range(0, len(rows), height):
            end = min(begin + height, len(rows))
            at = np.tile(roots, (end - begin, 1))
            base = np.arange(begin * width, end * width, width)[:, None]
            for _ in range(steps):
                above = flat.take(self.features.take(at) + base) > self.thresholds.take(at)
                at = self.children.take(at) + above
            result[begin:end] = self.values.take(at).sum(axis=1)
        return result
