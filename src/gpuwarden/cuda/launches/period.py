"""After which time the launches of a program repeat: the length of its step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpuwarden.cuda.launches.profile import Period, rounded
from gpuwarden.cuda.launches.sequences import Array

BINS = 64
SCALES_SECONDS = (0.0005, 0.002, 0.008, 0.032)
"""Width of a bin: each scale finds the periods of a few bins, and steps vary by as much as one."""
LEAST_BINS, MOST_BINS = 4, 26
KERNELS = 256
LAUNCHES = 3
"""Of a kernel in one stretch, for it to be asked."""
LONGER = 1.2
ALIKE, ALIKE_WINDOWS = 0.25, 0.35
FIRST = 0.8
"""The first peak of this share of the highest is the period: the others are its multiples."""
WINDOWS = 24
"""Windows in a row from which a period of seconds can be told."""

Floats = NDArray[np.float64]


class Periods:
    """Sums up how alike launches are after each time, stretch by stretch."""

    def __init__(self) -> None:
        self._sums = [np.zeros(BINS // 2) for _ in SCALES_SECONDS]
        self._weights = [np.zeros(BINS // 2) for _ in SCALES_SECONDS]

    def add(self, at_ns: Array, kernel: Array) -> None:
        """One sampled stretch in order of time."""
        for scale, width in enumerate(SCALES_SECONDS):
            place = ((at_ns - at_ns[:1]) // int(width * 1e9)).astype(np.int64)
            inside = (place < BINS) & (kernel >= 0)
            if not inside.any():
                continue
            # The last bin is not a whole one.
            bins = min(BINS, int(place.max()))
            inside &= place < bins
            numbers, counts = np.unique(kernel[inside], return_counts=True)
            numbers = numbers[counts >= LAUNCHES][:KERNELS]
            if bins < 4 * LEAST_BINS or not len(numbers):
                continue
            chosen = inside & np.isin(kernel, numbers)
            row = np.searchsorted(numbers, kernel[chosen])
            series = np.zeros((len(numbers), bins))
            np.add.at(series, (row, place[chosen]), 1.0)
            alike, weight = _alike(series, bins // 2)
            self._sums[scale][: len(alike)] += alike * weight
            self._weights[scale][: len(alike)] += weight

    def found(self, windows: Sequence[Floats] = ()) -> tuple[Period, ...]:
        """The periods: the longest in the samples first, which is the step, then parts of it, then
        that of the counts, which may be one of evaluations.

        ``windows``: launches by kernel of each second in a row, kernels in the same places.
        """
        periods = []
        for width, sums, weights in zip(SCALES_SECONDS, self._sums, self._weights, strict=True):
            with np.errstate(invalid="ignore", divide="ignore"):
                alike = np.where(weights > 0, sums / weights, 0.0)
            peak = _peak(alike[: MOST_BINS + 1])
            if peak is not None:
                periods.append(_period(peak[0] * width, peak[1]))
        periods = _steps(periods)
        if len(windows) >= WINDOWS:
            series = np.array(windows).T
            alike, _ = _alike(series[series.sum(axis=1) >= LAUNCHES], len(windows) // 3)
            peak = _peak(alike, least=2)
            if peak is not None and _repeats(alike, peak):
                periods.append(_period(float(peak[0]), peak[1]))
        return tuple(periods)


def _period(seconds: float, strength: float) -> Period:
    return Period(seconds=rounded(seconds), strength=rounded(min(max(strength, 0.0), 1.0)))


def _alike(series: Floats, lags: int) -> tuple[Floats, Floats]:
    """The mean correlation of the rows with themselves after each lag, and its weight."""
    bins = series.shape[1]
    centred = series - series.mean(axis=1, keepdims=True)
    varied = (centred**2).sum(axis=1)
    centred, varied = centred[varied > 0], varied[varied > 0]
    if not len(varied):
        return np.zeros(lags), np.zeros(lags)
    # Jitter spreads a launch over its neighbours: so do we.
    kernel = np.array([0.25, 0.5, 0.25])
    smooth = np.apply_along_axis(np.convolve, 1, centred, kernel, mode="same")
    power = np.abs(np.fft.rfft(smooth, 2 * bins, axis=1)) ** 2
    correlated = np.fft.irfft(power, axis=1)[:, :lags]
    pairs = bins - np.arange(lags)
    each = correlated / np.maximum(correlated[:, :1], 1e-9) * (bins / pairs)
    return each.mean(axis=0), np.full(lags, float(len(varied))) * pairs


def _steps(periods: Sequence[Period]) -> list[Period]:
    """The longest first, without those after which launches are less alike than after a shorter
    one: jitter makes every multiple of a period weaker."""
    kept: list[Period] = []
    for period in periods:
        if all(
            period.strength >= FIRST * one.strength and period.seconds > LONGER * one.seconds
            for one in kept
        ):
            kept.append(period)
    return kept[::-1]


def _repeats(alike: Floats, peak: tuple[float, float]) -> bool:
    """Whether launches are alike after twice the time too: of a few windows chance is seldom so."""
    twice = round(2 * peak[0])
    near = alike[twice - 1 : twice + 2]
    return peak[1] >= ALIKE_WINDOWS and bool(len(near)) and near.max() >= peak[1] / 3


def _peak(alike: Floats, least: int = LEAST_BINS) -> tuple[float, float] | None:
    """The first high peak, its place between the bins, and its height."""
    if len(alike) < least + 2:
        return None
    inner = alike[least:-1]
    tops = (inner >= alike[least - 1 : -2]) & (inner > alike[least + 1 :])
    tops &= inner >= max(ALIKE, FIRST * float(inner.max(initial=0.0)))
    places = np.flatnonzero(tops)
    if not len(places):
        return None
    at = int(places[0]) + least
    before, height, after = (float(alike[at + step]) for step in (-1, 0, 1))
    bend = before - 2 * height + after
    shift = 0.0 if bend >= 0 else 0.5 * (before - after) / bend
    return at + max(-0.5, min(0.5, shift)), height
