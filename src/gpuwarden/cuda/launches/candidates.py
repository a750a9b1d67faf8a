"""Kernels that may be a second stream of launches beside the workload's own."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct, field

from gpuwarden.cuda.launches.kernels import Placed, Standing, normalised, spelled
from gpuwarden.cuda.launches.novelty import Seen
from gpuwarden.cuda.launches.profile import LaunchProfile
from gpuwarden.cuda.launches.rhythm import Rhythm
from gpuwarden.cuda.launches.sequences import Mask
from gpuwarden.model import KernelUse, LaunchWindow

CANDIDATES_LIMIT = 32
FORGOTTEN_SECONDS = 300.0
FASTER = 3.0
"""So much faster than learned, a kernel with a rhythm of its own is another one."""
NEAR = 0.35
"""How far the usual interval may be from the mean one to be told as its period."""

Key = tuple[int, str, str]
"""(standing, name, digest) of what was launched; for a kernel that is known by name, its name."""


class Candidate(Struct):
    """One kernel that the profile does not explain."""

    use: KernelUse
    number: int
    """Of the profile's kernel whose name it has; -1: it has none."""
    rhythm: Rhythm = field(default_factory=Rhythm)
    launches: int = 0
    """Counted, or of a kernel that is known by name those sampled ones that are not explained."""
    seconds: float = 0.0
    """In which they were launched: of the windows, or of the sampled stretches."""
    first_ns: int = 0
    last_ns: int = 0
    apart: bool = True
    """On threads or streams of its own, whenever it was sampled."""

    @property
    def hz(self) -> float:
        """Launches a second."""
        return self.launches / self.seconds if self.seconds > 0 else 0.0


class Second(NamedTuple):
    """A kernel that comes out of step with the workload."""

    candidate: Candidate
    period_seconds: float | None
    """None when it comes evenly in its own time, but not one by one."""


class Candidates:
    """The candidates of one process; bounded."""

    def __init__(self, profile: LaunchProfile) -> None:
        self._own_rhythm_hz = [kernel.own_rhythm_hz for kernel in profile.kernels]
        self._found: dict[Key, Candidate] = {}

    def add(self, window: LaunchWindow, places: Sequence[Placed], seen: Seen | None) -> None:
        """One window, its kernels with their places, and its samples told apart, if it has any."""
        seconds = max(0.0, (window.until_ns - window.from_ns) / 1e9)
        keys = [_key(use, placed) for use, placed in zip(window.kernels, places, strict=True)]
        launched: dict[Key, int] = {}
        for use, key, placed in zip(window.kernels, keys, places, strict=True):
            if key is not None and placed.standing != Standing.CLAIMED:
                launched[key] = launched.get(key, 0) + use.launches
                self._of(key, use, placed, window)
        for key, candidate in list(self._found.items()):
            if key[0] != Standing.CLAIMED:
                count = launched.get(key, 0)
                candidate.launches += count
                candidate.seconds += seconds
                candidate.rhythm.counted(count)
                if count:
                    candidate.last_ns = window.until_ns
        self._settle(window, places, keys)
        if seen is not None:
            self._sample(window, places, keys, seen)
        self._forget(window.until_ns)

    def _settle(
        self, window: LaunchWindow, places: Sequence[Placed], keys: Sequence[Key | None]
    ) -> None:
        """Drops kernels whose module was not seen so far, and is known now."""
        still = set(keys)
        for use, placed in zip(window.kernels, places, strict=True):
            if use.digest:
                for key in (
                    (Standing.STRAY, spelled(use.name), ""),
                    (Standing.CLAIMED, str(placed.number), ""),
                ):
                    if key in self._found and key not in still:
                        del self._found[key]

    def _of(
        self, key: Key, use: KernelUse, placed: Placed, window: LaunchWindow
    ) -> Candidate | None:
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= CANDIDATES_LIMIT:
                slowest = min(self._found, key=lambda one: self._found[one].launches)
                if self._found[slowest].launches >= use.launches:
                    return None
                del self._found[slowest]
            found = self._found[key] = Candidate(use, placed.number, first_ns=window.from_ns)
        return found

    def _sample(
        self,
        window: LaunchWindow,
        places: Sequence[Placed],
        keys: Sequence[Key | None],
        seen: Seen,
    ) -> None:
        samples = seen.samples
        others = seen.ordinary
        asked = seen.novel | seen.strange
        masks: dict[Key, Mask] = {}
        for index in np.unique(seen.place[asked]).tolist():
            key = keys[index]
            if key is not None:
                mine = asked & (seen.place == index)
                masks[key] = masks[key] | mine if key in masks else mine
                self._of(key, window.kernels[index], places[index], window)
        for key, candidate in self._found.items():
            mask = masks.get(key)
            if key[0] == Standing.CLAIMED:
                candidate.seconds += samples.seconds
                candidate.launches += 0 if mask is None else int(mask.sum())
            if mask is None:
                continue
            candidate.last_ns = window.until_ns
            candidate.apart &= not np.isin(samples.lane[mask], samples.lane[others]).any()
            candidate.rhythm.add(samples, mask, others)

    def forgive(self, allowed: Container[str]) -> None:
        """A module that is known by now was launched from before it was examined."""
        for key in [k for k in self._found if k[0] == Standing.OUTSIDE and k[2] in allowed]:
            del self._found[key]

    def _forget(self, now_ns: int) -> None:
        old = now_ns - int(FORGOTTEN_SECONDS * 1e9)
        for key in [key for key, one in self._found.items() if 0 < one.last_ns < old]:
            del self._found[key]

    def second_stream(self, *, usual: bool) -> Iterator[Second]:
        """Those that come steadily and out of step with everything else, the fastest first.

        ``usual``: everything else is as it was learned. Where it is not, the workload itself is
        another one, and a new kernel among its own launches is likely a part of that.
        """
        for key, candidate in sorted(self._found.items(), key=lambda one: -one[1].hz):
            verdict = candidate.rhythm.verdict
            if verdict is None or not (verdict.out_of_step and verdict.steady):
                continue
            if not (usual or candidate.apart or key[0] == Standing.OUTSIDE):
                continue
            learned = self._own_rhythm_hz[candidate.number] if candidate.number >= 0 else 0.0
            if learned and candidate.hz <= FASTER * learned:
                continue
            mean = 1 / candidate.hz if candidate.hz else 0.0
            near = abs(verdict.interval_seconds - mean) <= NEAR * mean
            seldom = verdict.interval_seconds == 0.0
            yield Second(candidate, mean if mean and (near or seldom) else None)


def _key(use: KernelUse, placed: Placed) -> Key | None:
    standing = placed.standing
    if standing == Standing.CLAIMED:
        return (standing, str(placed.number), "")
    if standing == Standing.NEW_JIT:
        return (standing, normalised(use.name), "")
    if standing in (Standing.STRAY, Standing.OUTSIDE):
        return (standing, spelled(use.name), use.digest)
    return None
