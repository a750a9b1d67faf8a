"""Which utilisation samples of one GPU were given already, so that each is given once.

The driver keeps the newest ones of a GPU in a ring and gives those that are later than a time; the
open kernel module's ring has 72 places, older ones 100. Two things make "later than the last" too
little: a sample can come late, and its time is the wall clock's, which can be set back. So each
look goes back a little further than the last sample, or all the way, and leaves out what was given.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpuwarden.model import UtilisationSample
from gpuwarden.sensors.nvml.lists import SAMPLE_AGE_LIMIT_NS, SAMPLE_AHEAD_LIMIT_NS

OVERLAP_US = 350_000
"""Two of the driver's sampling periods."""
STEP_NS = 100 * 10**6
"""The clock was set when it moved by this against the one that nobody can set."""
EMPTY_LOOKS = 3
"""After so many without anything new, one goes all the way back: the driver's own clock may have
been set."""
GENERATION_NS = SAMPLE_AGE_LIMIT_NS
GENERATION_LIMIT = 4096
"""What was given is remembered for one to two generations: by time, or by so many samples."""


class SampleCursor:
    """Where the reading of one GPU's samples stands."""

    def __init__(self, given_until_us: int = 0) -> None:
        self._recent: dict[int, set[int]] = {}
        self._older: dict[int, set[int]] = {}
        """By pid: the times (ns) of what was given."""
        self._recent_since_ns: int | None = None
        self._recent_count = 0
        self._offset_ns: int | None = None
        self._newest_us = given_until_us
        self._floor_us = given_until_us
        """Nothing up to here: another process gave it."""
        self._empty_looks = 0
        self.since_us = 0
        self.given_until_us = -1
        """Nothing later than this was given yet."""
        self.age_limit_ns = SAMPLE_AGE_LIMIT_NS
        self.ahead_limit_ns = SAMPLE_AHEAD_LIMIT_NS
        self._look_us = 0

    def was_given(self, pid: int, at_us: int) -> bool:
        """Whether this sample was given by an earlier look."""
        at_ns = at_us * 1000
        return at_ns in self._recent.get(pid, ()) or at_ns in self._older.get(pid, ())

    def begin(self, now_ns: int, monotonic_ns: int) -> None:
        """Sets ``since_us`` (exclusive) and the limits of age for the next look.

        In the look after the clock was set they let in what was measured by the old time.
        """
        offset_ns = now_ns - monotonic_ns
        step_ns = 0 if self._offset_ns is None else offset_ns - self._offset_ns
        self._offset_ns = offset_ns
        was_set = abs(step_ns) > STEP_NS
        now_us = now_ns // 1000
        if was_set and step_ns < 0:
            self._floor_us = 0
        self._floor_us = min(self._floor_us, now_us)
        back_to_us = min(self._newest_us, now_us) - OVERLAP_US
        oldest_us = now_us - SAMPLE_AGE_LIMIT_NS // 1000
        if was_set or self._empty_looks >= EMPTY_LOOKS:
            self._empty_looks = 0
            back_to_us = min(back_to_us, oldest_us)
        if not was_set:
            back_to_us = max(back_to_us, oldest_us)
        self.since_us = max(0, back_to_us, self._floor_us)
        self.age_limit_ns = SAMPLE_AGE_LIMIT_NS + max(0, step_ns)
        self.ahead_limit_ns = SAMPLE_AHEAD_LIMIT_NS + max(0, -step_ns)
        self._look_us = now_us
        self._turn(monotonic_ns)

    def gave(self, samples: Mapping[int, tuple[UtilisationSample, ...]], monotonic_ns: int) -> None:
        """Keeps what a look gave, by pid."""
        if not samples:
            self._empty_looks += 1
            return
        self._empty_looks = 0
        newest_us = max(found[-1].at_ns for found in samples.values()) // 1000
        # Never ahead of the clock: one wrong time must not hide the samples after it.
        self._newest_us = min(newest_us, self._look_us)
        self.given_until_us = max(self.given_until_us, newest_us)
        if self._recent_since_ns is None:
            self._recent_since_ns = monotonic_ns
        for pid, found in samples.items():
            self._recent.setdefault(pid, set()).update([sample.at_ns for sample in found])
            self._recent_count += len(found)

    def _turn(self, monotonic_ns: int) -> None:
        if self._recent_since_ns is None:
            return
        is_old = monotonic_ns - self._recent_since_ns > GENERATION_NS
        if is_old or self._recent_count > GENERATION_LIMIT:
            self._older, self._recent = self._recent, {}
            self._recent_since_ns, self._recent_count = None, 0
