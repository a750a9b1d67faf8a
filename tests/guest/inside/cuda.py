"""The probes of the CUDA driver library on this kernel: loaded, attached, and what they tell."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from gpuwarden.cuda.driver_elf import examine
from gpuwarden.probes import uprobes
from gpuwarden.probes.cuda.calls import CallSettings, CudaCalls
from gpuwarden.probes.cuda.launches import LaunchProbe
from gpuwarden.probes.cuda.library import FoundLibrary
from gpuwarden.probes.cuda.records import CapturedLoad, ContextCall, HandleNamed, LoadReturn
from tests.guest.inside.report import Report

_FOLDER = "/opt/checks/cuda"
LIBRARY, PROGRAM = f"{_FOLDER}/libcuda.so.1", f"{_FOLDER}/program"
KERNELS = ("image I text kernels", "load cuModuleLoadData M I", "function a M a", "graph G a")


def run(report: Report) -> None:
    """Launches, then calls."""
    report.note("cuda", f"links of many points: {uprobes.together()}")
    report.check("cuda:launches", launches)
    report.check("cuda:calls", calls)


def launches() -> str:
    with LaunchProbe() as probe, _library() as found:
        attached = probe.attach(found)
        assert not attached.problems, attached.problems
        probe.sample(600.0, 100)
        with program(*KERNELS, "launch cuLaunchKernel a 150", "launch cuGraphLaunch G 7"):
            samples = probe.samples()
            counts = sorted(one.launches for one in probe.counts())
            assert counts == [7, 150], counts
            assert len(samples) == 100 and list(probe.dropped.values()) == [57], probe.dropped
        [process] = {(one.pid, one.start_time_ns) for one in probe.counts()}
        probe.forget(*process)
        assert probe.counts() == []
        probe.detach(found.key)
    return f"{len(attached.probed)} functions; counted and told of exactly"


class _Told:
    def __init__(self) -> None:
        self.loads: list[bytes] = []
        self.calls: list[str] = []

    def context(self, call: ContextCall) -> None:
        self.calls.append(call.call)

    def load(self, load: CapturedLoad) -> None:
        if load.descriptor is not None:
            self.loads.append(os.pread(load.descriptor, load.captured_bytes, 0))
            os.close(load.descriptor)

    def returned(self, load: LoadReturn) -> None:
        self.calls.append("returned")

    def named(self, handle: HandleNamed) -> None:
        self.calls.append(f"named {handle.name}")


def calls() -> str:
    told = _Told()
    with CudaCalls(CallSettings(), told) as probe, _library() as found:
        attached = probe.attach(found)
        assert not attached.problems, attached.problems
        with program(*KERNELS[:3]):
            for _ in range(20):
                probe.poll()
        assert told.loads and told.loads[0].startswith(b"kernels"), told.loads
        assert "named a" in told.calls, told.calls
    return f"{len(attached.probed)} functions; a load with its bytes, a kernel's name"


@contextmanager
def _library() -> Iterator[FoundLibrary]:
    with open(LIBRARY, "rb") as file:
        status = os.fstat(file.fileno())
        elf = examine(
            lambda offset, size: os.pread(file.fileno(), size, offset), status.st_size, "x86_64", {}
        )
        key = os.major(status.st_dev), os.minor(status.st_dev), status.st_ino
        yield FoundLibrary(key, file.fileno(), LIBRARY, None, None, elf.points)


@contextmanager
def program(*commands: str) -> Iterator[None]:
    """A program that has run its commands and waits."""
    process = subprocess.Popen(
        [PROGRAM, LIBRARY, *commands, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            assert not line.startswith("error"), line
            if line == "ready\n":
                break
        yield
    finally:
        process.kill()
        process.communicate()
