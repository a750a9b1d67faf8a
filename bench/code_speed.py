"""Extraction with hashing against NVIDIA's extractor without, on a library of theirs, in one run.

    bench/code_speed.py [--small] [--rounds 5] [--realtime] [FILE]

``cuobjdump -xelf all`` writes out the cubins of the toolkit's sections. Ours finds every module of
the file, PTX and LTO-IR too, decompresses and hashes it: once as if every digest were in a
baseline, of which `code scan` tells no more, and once as if none were, with code digests and
kernels. They take turns, on one core and on two, and medians of wall time are compared.

FILE is cuSPARSE's library (cuRAND's with --small) from its wheel, which pip downloads to
build/corpus unless it is there. With --realtime (root) a pass runs before all else on a busy
machine.
"""

from __future__ import annotations

import argparse
import mmap
import os
import resource
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gpuwarden.code.examine import examine  # noqa: E402
from gpuwarden.code.module import Place, Problem  # noqa: E402
from tests.support.cuobjdump import CUOBJDUMP  # noqa: E402
from tests.support.public_wheels import wheel_of  # noqa: E402

LARGE = ("nvidia-cusparse-cu12==12.5.10.65", "libcusparse.so.12")
SMALL = ("nvidia-curand==10.4.5.25", "libcurand.so.10")
BAR = 4.0
NOTHING_KNOWN, ALL_KNOWN = "nothing known", "all known"


class Cost(NamedTuple):
    """Seconds of one pass."""

    wall: float
    cpu: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--realtime", action="store_true")
    parser.add_argument(
        "--pass-of-ours", choices=[NOTHING_KNOWN, ALL_KNOWN], help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.pass_of_ours:
        one_pass(options.file, options.pass_of_ours == ALL_KNOWN)
        return 0
    with tempfile.TemporaryDirectory(prefix="code-speed-") as scratch:
        file = options.file or library(*(SMALL if options.small else LARGE), Path(scratch))
        return compare(Passes(file, Path(scratch), options.realtime), options.rounds)


def library(requirement: str, name: str, scratch: Path) -> Path:
    """The library of that name in a wheel, taken out into ``scratch``."""
    with zipfile.ZipFile(wheel_of(requirement)) as archive:
        (member,) = (each for each in archive.namelist() if each.endswith(f"/{name}"))
        return Path(archive.extract(member, scratch))


class Passes:
    """Programs that go through one file, each in a process of its own whose start counts."""

    def __init__(self, file: Path, scratch: Path, realtime: bool) -> None:
        self.file, self.scratch = file.absolute(), scratch
        self.ahead = ["chrt", "--fifo", "10"] if realtime else []

    def cuobjdump(self, cores: list[int]) -> Cost:
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            return self._timed([str(CUOBJDUMP), "-xelf", "all", str(self.file)], cores, folder)

    def ours(self, cores: list[int], known: str) -> Cost:
        told = [sys.executable, __file__, "--pass-of-ours", known, str(self.file)]
        return self._timed(told, cores, None)

    def _timed(self, command: list[str], cores: list[int], folder: str | None) -> Cost:
        on = ["taskset", "--cpu-list", ",".join(map(str, cores))]
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(
            [*self.ahead, *on, *command], cwd=folder, stdout=subprocess.DEVNULL, check=True
        )
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        return Cost(wall, cpu)


def compare(passes: Passes, rounds: int) -> int:
    available = sorted(os.sched_getaffinity(0))
    size = len(passes.file.read_bytes())  # which also puts it into the page cache
    print(f"{passes.file.name}, {size / 1e6:.0f} MB; {rounds} rounds, medians")
    best = 0.0
    for count in (1, 2):
        cores = available[:count]
        if len(cores) < count:
            print(f"{count} cores: not measured, there are {len(available)}")
            continue
        costs: dict[str, list[Cost]] = {"cuobjdump": [], NOTHING_KNOWN: [], ALL_KNOWN: []}
        for _ in range(rounds):
            costs["cuobjdump"].append(passes.cuobjdump(cores))
            for known in (NOTHING_KNOWN, ALL_KNOWN):
                costs[known].append(passes.ours(cores, known))
        print(f"on {count} core{'s' * (count > 1)}")
        theirs = median(each.wall for each in costs["cuobjdump"])
        for name, each in costs.items():
            wall, cpu = (median(part) for part in zip(*each, strict=True))
            spread = f"{min(each).wall:.2f} to {max(each).wall:.2f}"
            times = "" if name == "cuobjdump" else f", {theirs / wall:.1f} times as fast"
            print(f"  {name:16} {wall:6.2f} s ({spread}), {cpu:5.2f} s of CPU{times}")
        best = max(best, theirs / median(each.wall for each in costs[NOTHING_KNOWN]))
    print(f"bar: {BAR:.0f} times with nothing known; {'met' if best >= BAR else 'NOT met'}")
    return 0 if best >= BAR else 1


def one_pass(file: Path, all_known: bool) -> None:
    threads = len(os.sched_getaffinity(0))
    with file.open("rb") as opened:
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        known = (lambda _: True) if all_known else None
        place = Place(target=file.name)
        for each in examine(data, place, threads=threads, known=known, kernels=not all_known):
            if isinstance(each, Problem):
                raise SystemExit(f"{each.what}: {each.reason}")


if __name__ == "__main__":
    sys.exit(main())
