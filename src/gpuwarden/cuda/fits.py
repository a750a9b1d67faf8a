"""How launches of processes fit the launch profiles that the policy names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from gpuwarden.errors import GpuwardenError
from gpuwarden.model import LaunchFit, LaunchWindow
from gpuwarden.policy import Policy
from gpuwarden.probes.events import boot_offset_ns

if TYPE_CHECKING:
    from gpuwarden.cuda.launches.comparison import Comparison
    from gpuwarden.cuda.launches.profile import LaunchProfile

Key = tuple[int, int]
"""(pid, start time in ticks)."""


class Digests(NamedTuple):
    """Of loaded modules that a process's profile does not object to."""

    allowed: frozenset[str] = frozenset()
    """Known ones, and those of an allowed class."""
    jit: frozenset[str] = frozenset()
    """Those only of an allowed class."""


AskDigests = Callable[[], Digests]
"""Asked only where launches are compared: a process may have thousands of modules."""


class _Opened(Struct):
    stamp: tuple[int, int]
    profile: LaunchProfile | None
    problem: str = ""


class _Compared(Struct):
    comparison: Comparison
    profile: str
    until_ns: int = 0
    fit: LaunchFit | None = None

    def take(self, windows: Iterable[LaunchWindow], digests: AskDigests) -> None:
        """Takes up those of the windows that are new."""
        new = [window for window in windows if window.until_ns > self.until_ns]
        if not new:
            return
        known = digests()
        for window in new:
            self.until_ns = window.until_ns
            self.fit = self.comparison.add(window, known.allowed, jit_digests=known.jit)


class Fits:
    """One comparison a process, with the profile that its workload names."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._opened: dict[str, _Opened] = {}
        self._compared: dict[Key, _Compared] = {}

    @property
    def problems(self) -> tuple[str, ...]:
        """Launch profiles that could not be read."""
        return tuple(one.problem for one in self._opened.values() if one.problem)

    @property
    def counts(self) -> tuple[int, int]:
        """How many processes are compared now, and how many of them do not fit."""
        fits = [one.fit for one in self._compared.values()]
        return len(fits), sum(fit is not None and not _fits(fit) for fit in fits)

    def add(self, key: Key, profile: str, window: LaunchWindow, digests: AskDigests) -> bool:
        """Compares one more window; whether what is said of the process is another now."""
        compared = self._of(key, profile)
        if compared is None:
            return False
        before = compared.fit
        compared.take([window], digests)
        return _said(before) != _said(compared.fit)

    def of(
        self,
        key: Key,
        profile: str,
        windows: Iterable[LaunchWindow],
        digests: AskDigests,
    ) -> LaunchFit | None:
        """The fit as of the last window, earlier ones taken up first."""
        compared = self._of(key, profile) if profile else None
        if compared is None:
            return None
        compared.take(windows, digests)
        return compared.fit

    def _of(self, key: Key, profile: str) -> _Compared | None:
        known = self._compared.get(key)
        if known is not None and known.profile == profile:
            return known
        launches = self._profile(profile)
        if launches is None:
            return None
        from gpuwarden.cuda.launches.comparison import Comparison

        found = self._compared[key] = _Compared(
            Comparison(launches, wall_offset_ns=boot_offset_ns()), profile
        )
        return found

    def _profile(self, name: str) -> LaunchProfile | None:
        declared = self._policy.profile(name)
        path = None if declared is None else declared.launches
        if path is None:
            return None
        try:
            status = os.stat(path)
            stamp = (status.st_mtime_ns, status.st_size)
        except OSError as error:
            self._opened[path] = _Opened((0, 0), None, f"{path}: {error.strerror}")
            return None
        known = self._opened.get(path)
        if known is None or known.stamp != stamp:
            from gpuwarden.cuda.launches.profile import read_profile

            try:
                known = _Opened(stamp, read_profile(path))
            except GpuwardenError as error:
                known = _Opened(stamp, None, f"launch profile {path}: {error}")
            self._opened[path] = known
        return known.profile

    def forget(self, key: Key) -> None:
        self._compared.pop(key, None)


def _fits(fit: LaunchFit) -> bool:
    return not (fit.outside or fit.second_stream or fit.unexplained)


def _said(fit: LaunchFit | None) -> tuple[object, ...]:
    """What of a fit makes another finding: which kernels, not how many launches so far."""
    if fit is None:
        return ()
    outside = frozenset((one.name, one.digest) for one in fit.outside)
    second = frozenset((one.name, one.digest) for one in fit.second_stream)
    unexplained = frozenset((one.name, one.digest) for one in fit.unexplained)
    return outside, second, unexplained, round(fit.explained_share, 1)
