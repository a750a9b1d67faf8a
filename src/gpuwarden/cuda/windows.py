"""Launches second by second: counted, sampled now and then, named a second later.

What names a kernel, and what says which module it is of, may be known a moment after its launch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from msgspec import Struct

from gpuwarden.cuda.options import TracerOptions
from gpuwarden.cuda.traced import Key, Processes
from gpuwarden.model import LaunchWindow
from gpuwarden.probes.cuda.launches import LaunchProbe
from gpuwarden.probes.cuda.records import LaunchCount, SampledLaunch

WINDOW_SECONDS = 1.0


class _Taken(Struct):
    """What one window held."""

    counts: list[LaunchCount]
    samples: list[SampledLaunch]
    dropped: dict[int, int]
    from_ns: int
    until_ns: int


class LaunchWindows:
    """Called once a second."""

    def __init__(self, probe: LaunchProbe, processes: Processes, options: TracerOptions) -> None:
        self._probe = probe
        self._processes = processes
        self._options = options
        self._last: _Taken | None = None
        self._from_ns = _now_ns()
        self._number = 0
        self._is_sampled = False

    @property
    def problem(self) -> str:
        """What is in no count; empty for nothing."""
        count = self._probe.uncounted()
        return f"{count} launches of processes beyond those there is room for" if count else ""

    def turn(self) -> Iterator[tuple[Key, LaunchWindow]]:
        """The windows of the second before the one that ends now."""
        last, self._last = self._last, self._taken()
        if last is not None:
            yield from self._processes.windows(
                last.counts, last.samples, last.dropped, last.from_ns, last.until_ns
            )

    def _taken(self) -> _Taken:
        probe, options = self._probe, self._options
        until_ns = _now_ns()
        samples = probe.samples() if self._is_sampled else []
        dropped = dict(probe.dropped) if self._is_sampled else {}
        taken = _Taken(probe.counts(), samples, dropped, self._from_ns, until_ns)
        self._from_ns = until_ns
        self._number += 1
        self._is_sampled = bool(options.sample_every) and self._number % options.sample_every == 0
        if self._is_sampled:
            probe.sample(WINDOW_SECONDS, options.sample_most)
        return taken


def _now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
