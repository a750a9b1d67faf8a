"""Times a kernel launch: bare, counted, sampled, counted at the function's first byte; who pays.

    python bench/cuda_launch_cost.py [--rounds 21] [--launches 20000] [--library FILE] [--check]

Needs root, clang and gcc. The library is the tests' stand-in with the drivers' own entries, or
``--library``, a driver's (it answers without a GPU, and refuses). Each way has a copy of it and a
process of its own, and their rounds alternate, so that a busy moment of the machine hits all.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "src"), str(REPOSITORY)]

from gpuwarden.cuda.driver_elf import examine  # noqa: E402
from gpuwarden.probes import uprobes  # noqa: E402
from gpuwarden.probes.cuda.launches import LaunchProbe  # noqa: E402
from gpuwarden.probes.cuda.library import EntryPoint, FoundLibrary  # noqa: E402
from gpuwarden.probes.cuda.object import UprobeObject  # noqa: E402
from gpuwarden.probes.libbpf import library  # noqa: E402
from tests.support import cuda_bed, text_pages  # noqa: E402

COUNTED_NS, SAMPLED_NS = 600, 1000
PAYS_NOTHING = 1.03
PROLOGUE_BYTES = 10
MOST = 4096
LAUNCH, UNPROBED = "cuLaunchKernel", "cuCtxSynchronize"
MANY_HANDLES = 5000


class Loop:
    """A process that calls functions of a library and tells how long they took."""

    def __init__(self, binary: Path, path: Path) -> None:
        self.process = subprocess.Popen(
            [binary, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        # Beside the measuring process, not in its way.
        os.sched_setaffinity(self.process.pid, {max(os.sched_getaffinity(0))})

    def tell(self, function: str, times: int, handles: int = 1) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{function} {times} {handles}\n")
        self.process.stdin.flush()

    def answer(self) -> float:
        assert self.process.stdout is not None
        return float(self.process.stdout.readline())

    def call(self, function: str, times: int, handles: int = 1) -> float:
        """Nanoseconds a call."""
        self.tell(function, times, handles)
        return self.answer()


@contextmanager
def looping(binary: Path, path: Path) -> Iterator[Loop]:
    loop = Loop(binary, path)
    try:
        yield loop
    finally:
        loop.process.kill()
        loop.process.communicate()


@contextmanager
def found(path: Path, *, at_start: bool = False) -> Iterator[FoundLibrary]:
    """A library as its finder gives it; ``at_start``: as if its prologue were unknown."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        elf = examine(
            lambda offset, size: os.pread(file.fileno(), size, offset),
            status.st_size,
            os.uname().machine,
            {},
        )
        points = dict(elf.points)
        if at_start:
            points = {name: EntryPoint(elf.offsets[name], at_start=True) for name in points}
        key = os.major(status.st_dev), os.minor(status.st_dev), status.st_ino
        yield FoundLibrary(key, file.fileno(), str(path), elf.build_id, elf.soname, points)


class Bench:
    """Copies of the library, one a way, and a loop on each."""

    def __init__(self, stack: ExitStack, folder: Path, original: Path) -> None:
        self._stack = stack
        self._folder = folder
        self._original = original
        self._loop = folder / "launch_loop"
        source = REPOSITORY / "bench/launch_loop.c"
        subprocess.run(["gcc", "-O2", "-o", self._loop, source, "-ldl"], check=True)

    def copy(self, name: str) -> Path:
        (self._folder / name).mkdir()
        return Path(shutil.copy(self._original, self._folder / name / "libcuda.so.1"))

    def library(self, name: str, *, at_start: bool = False) -> FoundLibrary:
        return self._stack.enter_context(found(self.copy(name), at_start=at_start))

    def loop(self, path: Path | str) -> Loop:
        return self._stack.enter_context(looping(self._loop, Path(path)))

    def trapped(self, name: str) -> Path:
        """A copy with a program on it that does nothing."""
        compiled = str(self._folder / "trap.bpf.o")
        clang = shutil.which("clang") or "clang-14"
        folders = f"-idirafter/usr/include/{os.uname().machine}-linux-gnu"
        source = REPOSITORY / "bench/trap.bpf.c"
        argv = [clang, "-g", "-O2", "-target", "bpf", folders, "-c", str(source), "-o", compiled]
        subprocess.run(argv, check=True)
        with library() as bpf:
            trap = UprobeObject(bpf, self._stack, compiled, among={}, programs=("nothing",))
        one = self.library(name)
        point = uprobes.Point(one.points[LAUNCH].file_offset, 0)
        links = uprobes.attach(bpf, trap.program("nothing"), one.descriptor, [point])
        self._stack.callback(uprobes.detach, bpf, links)
        return Path(one.path)


def costs(bench: Bench, probe: LaunchProbe, rounds: int, launches: int) -> dict[str, list[float]]:
    """Nanoseconds of CPU a launch by each way, of each round."""
    counted = bench.library("counted")
    at_start = bench.library("at-start", at_start=True)
    bare = bench.copy("bare")
    ways = {
        "bare": bench.loop(bare),
        "trap alone": bench.loop(bench.trapped("trap")),
        "counted": bench.loop(counted.path),
        "at its first byte": bench.loop(at_start.path),
    }
    for one in (counted, at_start):
        attached = probe.attach(one)
        assert LAUNCH in attached.probed, attached
    taken: dict[str, list[float]] = {}
    place = [counted.points[LAUNCH].file_offset]
    for _ in range(rounds):
        if text_pages.changed(ways["bare"].process.pid, bare, place):
            raise SystemExit("another program probes every driver library: figures mean nothing")
        for name, loop in ways.items():
            times = launches // 10 if name == "at its first byte" else launches
            taken.setdefault(name, []).append(loop.call(LAUNCH, times))
        probe.sample(60, launches)
        taken.setdefault("sampled", []).append(ways["counted"].call(LAUNCH, launches))
        assert len(probe.samples()) == launches and not probe.dropped
        probe.sample(60, 1)
        taken.setdefault("beyond", []).append(ways["counted"].call(LAUNCH, launches))
        assert len(probe.samples()) == 1
        for name in ("bare", "counted"):
            other = ways[name].call(UNPROBED, launches * 20)
            taken.setdefault(f"{name}, another function", []).append(other)
    return taken


def stretch(bench: Bench, probe: LaunchProbe) -> None:
    """One second of two processes that do nothing but launch."""
    one = bench.library("busy")
    probe.attach(one)
    loops = [bench.loop(one.path) for _ in range(2)]
    begun, cpu = time.perf_counter(), time.process_time()
    probe.sample(1.0, MOST)
    for loop in loops:
        loop.tell(LAUNCH, 300_000, 50)
    time.sleep(1.0)
    samples = probe.samples()
    counts = probe.counts()
    cpu, seconds = time.process_time() - cpu, time.perf_counter() - begun
    dropped = sum(probe.dropped.values())
    for loop in loops:
        loop.answer()
    print(
        f"a stretch of 1 s       two busy processes: {len(samples)} launches told in order, "
        f"{dropped} counted alone, {len(counts)} counts; reader {cpu / seconds:.1%} of a core"
    )
    assert len(samples) + dropped <= 600_000
    loops[0].call(LAUNCH, MANY_HANDLES, MANY_HANDLES)
    milliseconds = []
    for _ in range(2):
        begun = time.perf_counter()
        counts = probe.counts()
        milliseconds.append((time.perf_counter() - begun) * 1e3)
    first, again = milliseconds
    print(
        f"counts                 {len(counts)} in {first:.1f} ms, {again:.1f} ms when none is new"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--launches", type=int, default=20_000)
    parser.add_argument("--library", type=Path, help="a driver library instead of the stand-in")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is missed")
    options = parser.parse_args()
    subprocess.run([str(REPOSITORY / "scripts/build_probes")], check=True)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        original = options.library or cuda_bed.Bed(folder).library()
        bench = Bench(stack, folder, original)
        probe = stack.enter_context(LaunchProbe())
        rounds = costs(bench, probe, options.rounds, options.launches)
        taken = {name: statistics.median(values) for name, values in rounds.items()}
        trap, start = taken["trap alone"], taken["at its first byte"]
        for way in ("bare", "trap alone", "counted", "sampled", "beyond", "at its first byte"):
            nanoseconds = taken[way]
            print(
                f"{way:<22} {nanoseconds:7.1f} ns a launch (best {min(rounds[way]):.1f}), "
                f"{nanoseconds - trap:+6.0f} ns to the trap, {nanoseconds / start:.3f} of +0"
            )
        others = taken["counted, another function"] / taken["bare, another function"]
        print(f"functions not probed   {others:.3f} times what they take without probes")
        stretch(bench, probe)
    if trap > COUNTED_NS:
        print(f"here a program that does nothing costs {trap:.0f} ns, more than the first bar")
    bars = {
        f"counted under {COUNTED_NS} ns": taken["counted"] < COUNTED_NS,
        f"sampled under {SAMPLED_NS} ns": taken["sampled"] < SAMPLED_NS,
        "no cost for who does not launch": others < PAYS_NOTHING,
    }
    for bar, met in bars.items():
        print(f"{'met   ' if met else 'MISSED'} {bar}")
    return 1 if options.check and not all(bars.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
