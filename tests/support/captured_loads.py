"""Loads as the probes capture them, with any bytes, and what an examiner makes of them."""

from __future__ import annotations

import fcntl
import os
import select
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from gpuwarden.code.module import Module
from gpuwarden.codescan.known_code import Trust
from gpuwarden.codescan.tasks import Assess, Buffer, Said
from gpuwarden.cuda.load_queue import SMALL_BYTES
from gpuwarden.cuda.modules import ExaminedLoad, ModuleExaminer
from gpuwarden.cuda.open_profiles import OpenProfile
from gpuwarden.model import ModuleLoad
from gpuwarden.probes.cuda.records import CapturedLoad
from gpuwarden.probes.events import ProcessIdentity
from tests.support.code_scans import code

UNSIGNED = Trust(frozenset(), allow_unsigned=True)
WAIT_SECONDS = 60.0
_ALL_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def captured(data: bytes, number: int = 1, *, missed: str = "") -> CapturedLoad:
    """A load of these bytes, in a sealed file of memory."""
    descriptor = os.memfd_create("module", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _ALL_SEALS)
    return CapturedLoad(
        number=number,
        at_ns=number,
        process=ProcessIdentity(pid=7, start_time_ns=1),
        thread_id=7,
        function="cuModuleLoadData",
        address=0x1000,
        path=None,
        image_bytes=len(data),
        captured_bytes=len(data),
        missed=missed,
        stopped=False,
        descriptor=descriptor,
    )


def answers(examiner: ModuleExaminer, count: int = 1) -> list[ExaminedLoad]:
    """The next answers, at least ``count``; waits for them as the tracer does."""
    found: list[ExaminedLoad] = []
    deadline = time.monotonic() + WAIT_SECONDS
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} answers of {count}"
        select.select([examiner], [], [], 0.05)
        found += examiner.take()
    return found


def examined(examiner: ModuleExaminer, data: bytes, number: int = 1) -> ExaminedLoad:
    """The answer to one load."""
    examiner.submit(captured(data, number))
    [answer] = answers(examiner)
    assert answer.number == number
    return answer


def assessing(said: Callable[[Module], object]) -> Callable[[tuple[OpenProfile, ...]], Assess]:
    """What children call for each module instead of looking it up; it knows none."""

    def assess(module: Module, image: Buffer) -> Said:
        said(module)
        return "unknown", "", None

    return lambda profiles: assess


def loads_of(examined: Iterable[ExaminedLoad], *, pid: int = 7) -> list[ModuleLoad]:
    """The facts of loads, as the tracer makes them of the answers."""
    return [
        ModuleLoad(
            pid=pid,
            start_time_ticks=1,
            number=one.number,
            at_ns=1000 + one.number,
            thread_id=pid,
            function="cuModuleLoadData",
            modules=one.modules,
            problems=one.problems,
        )
        for one in examined
    ]


def large(name: str) -> bytes:
    """A module that is no small one."""
    return code(name) + bytes(SMALL_BYTES)


def replace_file(path: Path, data: bytes) -> None:
    """Puts a file in another's place at once."""
    beside = path.with_suffix(".new")
    beside.write_bytes(data)
    beside.replace(path)
