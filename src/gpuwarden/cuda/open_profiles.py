"""The profiles of a policy with their baselines open, and whether those have been replaced."""

from __future__ import annotations

import os
from collections.abc import Callable

from msgspec import Struct

from gpuwarden.code.baseline.known import Baselines
from gpuwarden.code.baseline.reader import Baseline
from gpuwarden.code.baseline.starter import PATH as STARTER_PATH
from gpuwarden.code.standing import JitRule
from gpuwarden.codescan.known_code import KEY_DIRECTORY, Trust, jit_rules, open_named, trust
from gpuwarden.errors import GpuwardenError
from gpuwarden.policy import STARTER, Policy

UNDECLARED = ""
"""The profile of processes that declare none: the installed baseline."""

Stamp = tuple[tuple[int, int, int, int] | None, ...]
"""Of each file: device, inode, size and time of change; None where there is none."""


class OpenProfile(Struct, frozen=True, kw_only=True):
    """What modules are compared with for one profile."""

    name: str
    baselines: Baselines = Baselines()
    jit: dict[str, JitRule] = {}
    failed: str = ""
    """Why its baselines could not be opened."""


class Opener:
    """Opens the profiles of one policy, each baseline file once."""

    def __init__(self, policy: Policy, trusted: Trust | None = None) -> None:
        """``trusted`` is whose signatures hold, by default those of the keys installed."""
        self._policy = policy
        self._trusted = trusted
        named = {path for profile in policy.profiles for path in profile.baselines}
        self._paths = [STARTER_PATH, *sorted(named - {STARTER})]
        if trusted is None:
            self._paths.append(KEY_DIRECTORY)

    def stamp(self) -> Stamp:
        """Another than before when a file was replaced, changed, or came or went."""
        return tuple(map(_stamp, self._paths))

    def open(self) -> tuple[OpenProfile, ...]:
        """All profiles, that of undeclared processes first; what fails is told in each."""
        opened: dict[str, Baseline | GpuwardenError] = {}
        try:
            trusted = self._trusted or trust()
        except GpuwardenError as error:
            return tuple(
                OpenProfile(name=name, failed=str(error))
                for name in (UNDECLARED, *(one.name for one in self._policy.profiles))
            )

        def baseline(path: str) -> Baseline:
            if path not in opened:
                try:
                    [opened[path]] = open_named([path], trusted)
                except GpuwardenError as error:
                    opened[path] = error
            found = opened[path]
            if isinstance(found, GpuwardenError):
                raise found
            return found

        return (
            _opened(UNDECLARED, [STARTER], {}, baseline),
            *(
                _opened(profile.name, profile.baselines, jit_rules(profile), baseline)
                for profile in self._policy.profiles
            ),
        )


def _opened(
    name: str, paths: list[str], jit: dict[str, JitRule], baseline: Callable[[str], Baseline]
) -> OpenProfile:
    try:
        baselines = Baselines([baseline(path) for path in paths])
    except GpuwardenError as error:
        return OpenProfile(name=name, jit=jit, failed=str(error))
    return OpenProfile(name=name, baselines=baselines, jit=jit)


def _stamp(path: str) -> tuple[int, int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
