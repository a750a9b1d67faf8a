"""Launch probes in tests, attached to the bed's library, and programs that launch kernels."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from gpuwarden.errors import Unavailable
from gpuwarden.probes.cuda.launches import LaunchProbe, LaunchSettings
from gpuwarden.probes.cuda.library import FoundLibrary
from gpuwarden.probes.cuda.records import LaunchCount
from tests.support.cuda_bed import Program, bed, running
from tests.support.cuda_probing import found_library
from tests.support.packages import unavailable

MODULE = ("image I text kernels", "load cuModuleLoadData M I")
"""What a program does before it can name kernels; the bed's driver takes any text for PTX."""


@contextmanager
def opened_library(path: Path | None = None) -> Iterator[FoundLibrary]:
    """A library of the bed, open while this lasts."""
    found = found_library(path or bed().library())
    try:
        yield found
    finally:
        os.close(found.descriptor)


@contextmanager
def launch_probe(
    settings: LaunchSettings | None = None, *libraries: FoundLibrary
) -> Iterator[LaunchProbe]:
    """A loaded probe, attached to ``libraries``, or to the bed's plain one."""
    probe = LaunchProbe(settings)
    with ExitStack() as stack:
        wanted = list(libraries) or [stack.enter_context(opened_library())]
        try:
            stack.enter_context(probe)
        except Unavailable as error:
            unavailable(f"this kernel takes no such probe: {error}")
        for library in wanted:
            attached = probe.attach(library)
            assert not attached.problems, attached.problems
        yield probe


@contextmanager
def launching(*names: str) -> Iterator[tuple[Program, dict[str, int]]]:
    """A program that knows kernels by these names, and their handles."""
    with running(*MODULE) as program:
        yield program, {name: program.do(f"function {name} M kernel_{name}") for name in names}


def counted(counts: Iterable[LaunchCount], pid: int) -> dict[int, int]:
    """Handle → launches of one process."""
    return {one.handle: one.launches for one in counts if one.pid == pid}
