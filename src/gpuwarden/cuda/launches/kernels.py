"""Which kernel of a launch profile a launched one is, and how sure that is."""

from __future__ import annotations

import re
from collections.abc import Container
from enum import IntEnum
from typing import NamedTuple

from gpuwarden.cuda.launches.profile import NAME_LIMIT, LaunchProfile
from gpuwarden.model import KernelUse
from gpuwarden.pattern import pattern

_VARYING = pattern(r"(?=[a-f]*[0-9])[0-9a-f]{8,}|[0-9]+")
"""Numbers, and hashes in hexadecimal."""


def spelled(name: str) -> str:
    """A kernel's name as a profile keeps it: bounded, and nothing that UTF-8 cannot say."""
    return name[:NAME_LIMIT].encode("utf-8", "backslashreplace").decode()[:NAME_LIMIT]


def normalised(name: str) -> str:
    """A name of code made while the workload runs, without what differs from run to run.

    ``triton_poi_fused_add_12`` is ``triton_poi_fused_add_#``.
    """
    return _VARYING.sub(_mark, spelled(name))


def _mark(found: re.Match[str]) -> str:
    return "#"


class Standing(IntEnum):
    """What the profile says of a launched kernel."""

    KNOWN = 0
    """It has it, from a module that is known."""
    CLAIMED = 1
    """It has one of that name; the module is not known, or of a class that anyone can imitate."""
    NEW = 2
    """The module is known; the learned runs did not launch this kernel of it."""
    NEW_JIT = 3
    """The module is of an allowed class; the profile has no kernel of that name."""
    STRAY = 4
    """Neither is the module known nor has the profile a kernel of that name."""
    OUTSIDE = 5
    """The module is one that the profile does not have."""
    UNNAMED = 6
    """The call that named it was not seen."""


class Placed(NamedTuple):
    """A launched kernel's place."""

    standing: Standing
    number: int
    """Of the profile's kernel; -1 for none."""


class KernelIndex:
    """The kernels of a profile by name and by digest."""

    def __init__(self, profile: LaunchProfile) -> None:
        self._fixed: dict[str, int] = {}
        self._jit: dict[str, int] = {}
        digests: set[str] = set()
        jit_digests: set[str] = set()
        for number, kernel in enumerate(profile.kernels):
            (self._jit if kernel.jit else self._fixed)[kernel.name] = number
            (jit_digests if kernel.jit else digests).update(d for d in kernel.digests if d)
        self._digests = frozenset(digests)
        self._jit_digests = frozenset(jit_digests)

    def place(self, use: KernelUse, allowed: Container[str], jit: Container[str]) -> Placed:
        """The place of a kernel; ``allowed`` are digests that the workload's baselines know or its
        policy allows, ``jit`` those of them that are only of an allowed class."""
        if not use.name:
            return Placed(Standing.UNNAMED, -1)
        name, digest = spelled(use.name), use.digest
        if not digest:
            number = self._fixed.get(name)
            if number is None:
                number = self._jit.get(normalised(name), -1)
            return Placed(Standing.STRAY if number < 0 else Standing.CLAIMED, number)
        if digest in self._jit_digests:
            number = self._jit.get(normalised(name), -1)
            if number >= 0:
                return Placed(Standing.KNOWN, number)
        if digest in jit:
            number = self._jit.get(normalised(name), -1)
            return Placed(Standing.NEW_JIT if number < 0 else Standing.CLAIMED, number)
        if digest in self._digests or digest in allowed:
            number = self._fixed.get(name, -1)
            return Placed(Standing.NEW if number < 0 else Standing.KNOWN, number)
        return Placed(Standing.OUTSIDE, -1)
