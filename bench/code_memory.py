"""Times a look at the GPU code in a running process: 400 MB of memory that is in use.

    python bench/code_memory.py [--megabytes 400] [--rounds 5] [--workers 2] [--check]

The process holds numbers as tensors are (random), what programs are (this machine's libraries) and
text, among them a cubin, a fatbin and PTX on its heap. Timed is all of it: the process is opened,
its pages are looked for, two confined children are forked, read, search, hash and describe, and the
report is made. CPU seconds are those of parent and children together.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from gpuwarden.code.report import CodeReport  # noqa: E402
from gpuwarden.codescan.processes import Processes  # noqa: E402
from gpuwarden.codescan.scan import Options, scan_code  # noqa: E402
from gpuwarden.host import Host  # noqa: E402
from tests.support import nvcc  # noqa: E402
from tests.support.code_holder import holding  # noqa: E402

BAR_SECONDS = 1.5
MEGABYTE = 10**6
LIBRARIES = Path("/usr/lib")


def filler(path: Path, size: int) -> None:
    """A third each of random numbers, of libraries and of text."""
    with path.open("wb") as file:
        for source in (_random(), _files("*/*.so*"), _files("python3*/*.py")):
            left = size // 3
            while left > 0:
                block = next(source)[:left]
                file.write(block)
                left -= len(block)


def _random() -> itertools.cycle[bytes]:
    return itertools.cycle([os.urandom(64 << 20)])


def _files(names: str) -> itertools.cycle[bytes]:
    found = [path for path in sorted(LIBRARIES.glob(names)) if path.is_file()]
    read = [path.read_bytes() for path in found[:400]]
    return itertools.cycle([data for data in read if data] or [b"text " * 1000])


def look(pid: int, workers: int) -> CodeReport:
    numbers = itertools.count()
    processes = Processes(Host(), numbers, shares=workers)
    target = processes.target(pid)
    return processes.finished(scan_code([target], numbers, None, Options(workers=workers)))


def cpu_seconds() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--check", action="store_true", help="exit 1 above the bar")
    arguments = parser.parse_args()
    samples = (
        nvcc.cubin("gemm"),
        nvcc.fatbin("sha256", ["sm_80", "sm_90", "compute_90"]),
        nvcc.ptx("reduction"),
    )
    with tempfile.NamedTemporaryFile() as file:
        path = Path(file.name)
        filler(path, arguments.megabytes * MEGABYTE)
        words = [f"mmap:{path}", *(f"heap:{sample}" for sample in samples)]
        with holding(*words) as holder:
            seconds, cpu = [], []
            for _ in range(arguments.rounds):
                began, used = time.perf_counter(), cpu_seconds()
                report = look(holder.pid, arguments.workers)
                seconds.append(time.perf_counter() - began)
                cpu.append(cpu_seconds() - used)
            counted = holder.counted()
    (process,) = (target.process for target in report.targets)
    on_heap = {
        found.module.digest
        for found in report.modules
        if any(sighting.place.mapping == "[heap]" for sighting in found.sightings)
    }
    read = process.memory_bytes if process is not None else 0
    typical, busy = median(seconds), median(cpu)
    print(
        f"{read / MEGABYTE:.0f} MB of memory: {typical:.2f} s ({min(seconds):.2f} to "
        f"{max(seconds):.2f}), {read / MEGABYTE / typical:.0f} MB/s; {busy:.2f} CPU seconds on "
        f"{arguments.workers} workers\n{len(on_heap)} modules on the heap found, "
        f"{len(report.problems)} problems; the process counted to {counted} meanwhile"
    )
    found = len(on_heap) >= 4 and counted > 0
    print(f"bar: {BAR_SECONDS} s: {'met' if min(seconds) <= BAR_SECONDS else 'MISSED'}")
    return 0 if found and (not arguments.check or min(seconds) <= BAR_SECONDS) else 1


if __name__ == "__main__":
    sys.exit(main())
