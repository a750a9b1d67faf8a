"""Mixes of kernels: how far one is from another, and a few that stand for many."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
ALIKE = 0.02
"""Mixes nearer than this are one."""


def shares(counts: Floats) -> Floats:
    """Counts in rows as shares of their row; a row of none stays none."""
    totals = counts.sum(axis=-1, keepdims=True)
    return np.asarray(counts / np.where(totals > 0, totals, 1.0))


def distances(mix: Floats, mixes: Floats) -> Floats:
    """Which share of the launches would have to be of other kernels, for each of the mixes."""
    return np.asarray(np.abs(mixes - mix).sum(axis=1) / 2)


def nearest(mix: Floats, mixes: Floats) -> float:
    """The distance to the nearest mix, or blend of it with another: phases change in between."""
    if not len(mixes):
        return 1.0
    apart = distances(mix, mixes)
    first = mixes[int(apart.argmin())]
    best = float(apart.min())
    for other in mixes:
        towards = other - first
        length = float((towards**2).sum())
        if length > 0:
            part = min(1.0, max(0.0, float((mix - first) @ towards) / length))
            best = min(best, float(np.abs(first + part * towards - mix).sum()) / 2)
    return best


def representatives(mixes: Floats, limit: int) -> list[int]:
    """Rows that stand for all of them: a middle one, then always the farthest."""
    if not len(mixes):
        return []
    middle = np.median(mixes, axis=0)
    chosen = [int(distances(middle, mixes).argmin())]
    apart = distances(mixes[chosen[0]], mixes)
    while len(chosen) < min(limit, len(mixes)) and float(apart.max()) > ALIKE:
        chosen.append(int(apart.argmax()))
        apart = np.minimum(apart, distances(mixes[chosen[-1]], mixes))
    return chosen


def unlike(mixes: Floats, chosen: Sequence[int]) -> Floats:
    """How far each row is from the other rows that stand for all, itself aside."""
    found = np.zeros(len(mixes))
    for row in range(len(mixes)):
        others = [one for one in chosen if one != row]
        found[row] = nearest(mixes[row], mixes[others])
    return found
