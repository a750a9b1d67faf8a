"""NVIDIA's real driver library, found in a process that maps it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwarden.cuda.libraries import Libraries
from gpuwarden.host import Host
from gpuwarden.probes.cuda.library import FoundLibrary
from tests.support.cuda_bed import Program, running
from tests.support.driver_package import NotToBeHadError, driver_library
from tests.support.packages import require_root, unavailable
from tests.support.probes import build

FIND_SECONDS = 20.0


def nodes() -> set[Path]:
    return set(Path("/dev").glob("nvidia*"))


@pytest.fixture(scope="session")
def library() -> Iterator[Path]:
    """Its file. As root it makes device nodes, driver or not; they are taken away again."""
    require_root()
    before = nodes()
    try:
        yield driver_library()
    except NotToBeHadError as error:
        unavailable(f"the driver library cannot be had: {error}")
    finally:
        for made in nodes() - before:
            if made.is_char_device():
                made.unlink()


@pytest.fixture(scope="module")
def program(library: Path) -> Iterator[Program]:
    """A program that has the library open, in which there is no GPU."""
    with running(library=library) as program:
        yield program


@pytest.fixture(scope="module")
def found(library: Path, program: Program) -> Iterator[FoundLibrary]:
    """The library as the finder tells it."""
    build()
    finder = Libraries(Host("/"))
    try:
        end = time.monotonic() + FIND_SECONDS
        while time.monotonic() < end:
            for one in finder.look([program.pid]).found:
                if one.key[2] == library.stat().st_ino:
                    yield one
                    return
            time.sleep(0.05)
        pytest.fail("the library was not found")
    finally:
        finder.close()
