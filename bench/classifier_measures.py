"""Calibration of left-out scores, and the figures that come of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from bench.classifier_data import HASHING_OTHER_VERSIONS, Mask, TrainingSet, generation_of
from gpuwarden.code.classify.model import GENERATIONS, Table

Scores = npt.NDArray[np.float64]
Raw = tuple[Scores, Scores]

GATE_SHARE = 0.1
"""The first trees turn away all but this share of benign kernels."""
HANDICAPS = {"whole": 0.0, "window": 0.3}
COUNTED_KERNELS = 50
MODULE_RATE = 1e-3
SET_RATE = 1e-2
NEVER = -1.0
LEAST_RANK = 10


@dataclass(frozen=True)
class Calibration:
    """What turns raw scores into answers, as the model file keeps it."""

    gates: dict[str, float]
    tables: dict[str, Table]
    generations: tuple[Table, ...]
    module_threshold: float = 0.0
    set_threshold: float = 0.0


def table_of(scores: Scores, benign: int) -> Table:
    """The share of ``benign`` kernels that score as high, from the scores of those that count.

    The ten highest say little of how far a score may go by chance: from the tenth on the curve
    goes on as straight as it ran from one in a hundred to there.
    """
    falling = np.sort(scores)[::-1]
    ranks = np.unique(np.round(LEAST_RANK * 1.12 ** np.arange(0, 200)).astype(int))
    values = np.unique(falling[ranks[ranks <= len(falling)] - 1])
    # Of equal scores the largest rank: a share may be told too large, never too small.
    as_high = len(falling) - np.searchsorted(falling[::-1], values, side="left")
    decades = -np.log10(as_high / (benign + 1))
    tail = decades >= min(2.0, decades[-1] - 0.5)
    slope = float(np.polyfit(values[tail], decades[tail], 1)[0])
    return Table(values, decades, slope)


def combined(raw: dict[str, Raw], calibration: Calibration) -> Scores:
    """The higher of the views' decades, before the generation is taken into account."""
    highest = np.zeros(len(raw["whole"][0]))
    for name, (first, full) in raw.items():
        decades = calibration.tables[name](full) - HANDICAPS[name]
        highest = np.maximum(highest, np.where(first >= calibration.gates[name], decades, 0.0))
    return highest


def scored(data: TrainingSet, highest: Scores, calibration: Calibration) -> Scores:
    """Scores of kernels on the scale of their generation."""
    result = np.zeros(len(highest))
    for number, table in enumerate(calibration.generations):
        rows = (generation_of(data.arch) == number) & (highest > 0)
        result[rows] = table(highest[rows])
    return result


def calibrated(data: TrainingSet, raw: dict[str, Raw]) -> tuple[Calibration, Scores]:
    """The calibration on protocol B's benign kernels, and all kernels' scores under it."""
    benign = data.negatives("B")
    times = data.count[benign]
    gates, tables = {}, {}
    for name, (first, full) in raw.items():
        mine = np.repeat(first[benign], times)
        gates[name] = float(np.quantile(mine, 1 - GATE_SHARE))
        passing = np.repeat(full[benign], times)[mine >= gates[name]]
        tables[name] = table_of(passing, len(mine))
    calibration = Calibration(gates, tables, ())
    highest = combined(raw, calibration)
    generations = []
    for number, _ in enumerate(GENERATIONS):
        rows = benign & (generation_of(data.arch) == number)
        mine = np.repeat(highest[rows], data.count[rows])
        generations.append(table_of(mine[mine > 0], len(mine)))
    calibration = replace(calibration, generations=tuple(generations))
    scores = scored(data, highest, calibration)
    modules = of_groups(data, scores, benign, "module")
    units = of_groups(data, scores, benign, "unit")
    return replace(
        calibration,
        module_threshold=threshold(modules, MODULE_RATE),
        set_threshold=threshold(units, SET_RATE),
    ), scores


def threshold(scores: Scores, rate: float) -> float:
    """The score that at most ``rate`` of ``scores`` reach, half-way to the next below."""
    falling = np.sort(scores)[::-1]
    allowed = int(rate * len(falling))
    below = falling[allowed]
    above = falling[allowed - 1] if allowed else below + 1.0
    return float((above + below) / 2) if above > below else float(np.nextafter(below, np.inf))


def grouped(numbers: npt.NDArray[np.int64], scores: Scores, count: npt.NDArray[np.int64]) -> Scores:
    """The score of each group: its highest kernel, less what so many tries would give anyway."""
    names, inverse = np.unique(numbers, return_inverse=True)
    highest = np.zeros(len(names))
    np.maximum.at(highest, inverse, scores)
    tries = np.minimum(np.bincount(inverse, count), COUNTED_KERNELS)
    result: Scores = np.maximum(highest - np.log10(tries), 0.0)
    return result


def of_groups(data: TrainingSet, scores: Scores, rows: Mask, unit: str) -> Scores:
    """Scores of the modules or sets that ``rows`` belong to.

    Benign ones count even where no kernel was long enough; a set of mining code has one.
    """
    numbers = data.module if unit == "module" else data.unit
    found = grouped(numbers[rows], scores[rows], data.count[rows])
    every = data.every_module if unit == "module" else data.every_unit
    homes = np.unique(np.char.add(np.char.add(data.library[rows], "|"), data.part[rows]))
    if not (data.kind[rows] == "benign").all():
        return found
    there = sum(len(every[home]) for home in homes)
    return np.concatenate([found, np.full(there - len(found), NEVER)])


def rate_at(data: TrainingSet, scores: Scores, rows: Mask, least: float, unit: str) -> float:
    """The share of modules, sets or kernels of ``rows`` that reach ``least``."""
    if not rows.any():
        return float("nan")
    if unit == "kernel":
        return float(np.average(scores[rows] >= least, weights=data.count[rows]))
    return float((of_groups(data, scores, rows, unit) >= least).mean())


def caught(
    data: TrainingSet, scores: Scores, protocol: str, rates: tuple[float, ...], unit: str
) -> list[float]:
    """The share of mining kernels, modules or sets above what ``rates`` of benign ones reach."""
    benign = data.negatives(protocol)
    if unit == "kernel":
        negatives = np.repeat(scores[benign], data.count[benign])
    else:
        negatives = of_groups(data, scores, benign, unit)
    return [rate_at(data, scores, data.mining, threshold(negatives, r), unit) for r in rates]


def interval(
    owners: npt.NDArray[np.str_], hits: Mask, statistic: Callable[[Mask], float] | None = None
) -> tuple[float, float]:
    """A 95% interval of the mean of ``hits``, whole owners (libraries, families) drawn again."""
    random = np.random.default_rng(0)
    names, inverse = np.unique(owners, return_inverse=True)
    total = np.bincount(inverse)
    good = np.bincount(inverse, hits)
    draws = random.integers(0, len(names), (2000, len(names)))
    means = good[draws].sum(axis=1) / total[draws].sum(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def owners_of_groups(data: TrainingSet, rows: Mask, unit: str, owner: str) -> npt.NDArray[np.str_]:
    """Library, family or project of each module or set among ``rows``, in ``grouped``'s order."""
    numbers = data.module if unit == "module" else data.unit
    names: npt.NDArray[np.str_] = getattr(data, owner)
    _, place = np.unique(numbers[rows], return_index=True)
    return names[rows][place]


def alarm_rate_without(data: TrainingSet, scores: Scores, unit: str, rate: float) -> float:
    """Alarmed benign modules or sets when each library is judged by the threshold of the others."""
    benign = data.negatives("B")
    alarmed = there = 0.0
    for library in np.unique(data.library[benign]):
        mine = benign & (data.library == library)
        least = threshold(of_groups(data, scores, benign & ~mine, unit), rate)
        own = of_groups(data, scores, mine, unit)
        alarmed += float((own >= least).sum())
        there += len(own)
    return alarmed / there


def caught_without(
    data: TrainingSet, scores: Scores, unit: str, rate: float
) -> tuple[float, float]:
    """Least and greatest share caught when any one library is left out of the threshold."""
    benign = data.negatives("B")
    shares = []
    for library in np.unique(data.library[benign]):
        rest = benign & (data.library != library)
        least = threshold(of_groups(data, scores, rest, unit), rate)
        shares.append(rate_at(data, scores, data.mining, least, unit))
    return min(shares), max(shares)


def small_benign_sets(data: TrainingSet, scores: Scores, kernels: int, least: float) -> float:
    """The share alarmed of random sets of so many kernels of one library and architecture."""
    random = np.random.default_rng(0)
    benign = data.negatives("B")
    alarmed = tried = 0
    for unit in np.unique(data.unit[benign]):
        rows = np.flatnonzero(benign & (data.unit == unit))
        for _ in range(50):
            drawn = random.choice(rows, min(kernels, len(rows)), replace=False)
            score = scores[drawn].max() - np.log10(min(len(drawn), COUNTED_KERNELS))
            alarmed += int(score >= least)
            tried += 1
    return alarmed / tried


def hidden_mining_sets(data: TrainingSet, scores: Scores, least: float) -> float:
    """The share caught of mining sets that are loaded together with a whole benign library."""
    rows = np.flatnonzero(data.mining)
    names, inverse = np.unique(data.unit[rows], return_inverse=True)
    highest = np.zeros(len(names))
    np.maximum.at(highest, inverse, scores[rows])
    return float((highest - np.log10(COUNTED_KERNELS) >= least).mean())


def other_versions_of_the_rest(data: TrainingSet) -> Mask:
    """Other versions of libraries that do not hash: the model has seen their main versions."""
    return data.other_versions & ~np.isin(data.library, HASHING_OTHER_VERSIONS)
