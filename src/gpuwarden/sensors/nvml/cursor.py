"""Which utilisation samples of one GPU were given already, so that each is given once.

The driver keeps the newest ones of a GPU in a ring and gives those that are later than a time; the
open kernel module's ring has 72 places, older ones 100. Two things make "later than the last" too
little: a sample can come late, and its time is the wall clock's, which can be set back. So each
look goes back a little further than the last sample, or all the way, and leaves out what was given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from gpuwarden.model import UtilisationSample
from gpuwarden.sensors.nvml.lists import PID_BITS, SAMPLE_AGE_LIMIT_NS, sample_key

OVERLAP_US = 350_000
"""Two of the driver's sampling periods."""
STEP_NS = 100 * 10**6
"""The clock was set when it moved by this against the one that nobody can set."""
EMPTY_LOOKS = 3
"""After so many without anything new, one goes all the way back: the driver's own clock may have
been set."""
REMEMBER_NS = SAMPLE_AGE_LIMIT_NS + 10 * 10**9
REMEMBER_LIMIT = 4096


class SampleCursor:
    """Where the reading of one GPU's samples stands."""

    def __init__(self, given_until_us: int = 0) -> None:
        self._given: set[int] = set()
        self._looks: deque[tuple[int, set[int]]] = deque()
        """When, by the clock that nobody sets, and what it gave."""
        self._offset_ns: int | None = None
        self._newest_us = given_until_us
        self._floor_us = given_until_us
        """Nothing up to here: another process gave it."""
        self._empty_looks = 0
        self.since_us = 0
        self.age_limit_ns = SAMPLE_AGE_LIMIT_NS

    @property
    def given(self) -> set[int]:
        """The keys (``lists.sample_key``) of the samples that the driver may still have."""
        return self._given

    def begin(self, now_ns: int, monotonic_ns: int) -> None:
        """Sets ``since_us`` (exclusive) and ``age_limit_ns`` for the next look."""
        offset_ns = now_ns - monotonic_ns
        step_ns = 0 if self._offset_ns is None else offset_ns - self._offset_ns
        self._offset_ns = offset_ns
        was_set = abs(step_ns) > STEP_NS
        now_us = now_ns // 1000
        if was_set and step_ns < 0:
            self._floor_us = 0
        self._floor_us = min(self._floor_us, now_us)
        # Never ahead of the clock: one wrong time must not hide the samples after it.
        back_to_us = min(self._newest_us, now_us) - OVERLAP_US
        oldest_us = now_us - SAMPLE_AGE_LIMIT_NS // 1000
        if was_set or self._empty_looks >= EMPTY_LOOKS:
            self._empty_looks = 0
            back_to_us = min(back_to_us, oldest_us)
        self.since_us = max(0, back_to_us, self._floor_us)
        if not was_set:
            self.since_us = max(self.since_us, oldest_us)
        self.age_limit_ns = SAMPLE_AGE_LIMIT_NS + max(0, step_ns)
        while self._looks and (
            monotonic_ns - self._looks[0][0] > REMEMBER_NS or len(self._given) > REMEMBER_LIMIT
        ):
            self._given -= self._looks.popleft()[1]

    def gave(self, samples: Mapping[int, tuple[UtilisationSample, ...]], monotonic_ns: int) -> None:
        """Keeps what a look gave, by pid."""
        fresh = {
            sample_key(pid, sample.at_ns // 1000)
            for pid, found in samples.items()
            for sample in found
        }
        if not fresh:
            self._empty_looks += 1
            return
        self._empty_looks = 0
        self._newest_us = max(fresh) >> PID_BITS
        self._given |= fresh
        self._looks.append((monotonic_ns, fresh))
