"""The launch profile of a traced run, which must be without signs."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Iterable, Sequence

from msgspec import Struct

from gpuwarden import __version__
from gpuwarden.cuda.fits import Digests
from gpuwarden.cuda.launches.learning import Learning
from gpuwarden.cuda.launches.merging import merge
from gpuwarden.cuda.launches.profile import LaunchProfile, Origin, read_profile, write_profile
from gpuwarden.cuda.launches.runs import WINDOWS_LIMIT
from gpuwarden.errors import UsageError
from gpuwarden.finding import Finding
from gpuwarden.model import LaunchWindow

LEAST_LAUNCHES = 100
"""Of a process, for it to be a part of the run: a loader of data launches none."""


class RunOfProcess(Struct, kw_only=True):
    """What was seen of one process by the end."""

    pid: int
    windows: list[LaunchWindow]
    digests: Digests = Digests()
    findings: Sequence[Finding] = ()
    workload: str = ""
    profile: str = ""

    def add(self, window: LaunchWindow) -> None:
        """Keeps one more window, up to as many as a run may have."""
        if len(self.windows) < WINDOWS_LIMIT:
            self.windows.append(window)

    @property
    def launches(self) -> int:
        return sum(kernel.launches for window in self.windows for kernel in window.kernels)


def learned(runs: Iterable[RunOfProcess], path: str, *, node: str, merged: bool) -> LaunchProfile:
    """Writes the profile of these processes to ``path``; with what is there already if ``merged``.

    Errors: UsageError with why nothing is learned; as ``read_profile`` and ``write_profile``.
    """
    parts = [_profile(run, path, node) for run in runs if run.launches >= LEAST_LAUNCHES]
    if not parts:
        raise UsageError(f"--learn: no process launched {LEAST_LAUNCHES} kernels")
    found = merge([*([read_profile(path)] if merged else []), *parts])
    write_profile(path, found)
    return found


def _profile(run: RunOfProcess, path: str, node: str) -> LaunchProfile:
    if not run.profile:
        raise UsageError(
            f"--learn: the workload of pid {run.pid} declares no code profile in the policy, so "
            "none of its modules is known",
            remedy="name a profile with the baselines of its code first: docs/policy.md",
        )
    learning = Learning()
    for window in run.windows:
        learning.add(window, run.digests.allowed, jit_digests=run.digests.jit)
    origin = Origin(
        node=node,
        by=_user(),
        workload=run.workload,
        policy_profile=run.profile,
        learned=int(time.time()),
    )
    signs = [f"{one.severity} {one.rule}: {one.title}" for one in run.findings]
    name = os.path.basename(path).partition(".")[0] or run.profile
    return learning.profile(name=name, origin=origin, tool=f"gpuwarden {__version__}", signs=signs)


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"uid {os.geteuid()}"
