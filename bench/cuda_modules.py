"""Milliseconds from a captured load to its answer, for modules of three sizes.

    bench/cuda_modules.py [--rounds 5] [FILE]

``new``: bytes that were never seen, in children that have examined others before; ``again``: bytes
that have been. ``beside``: a small module that is new while four of 70 MB wait. A FILE, such as a
library of a wheel, is examined as it is. Exits with 1 when a small module takes over 100 ms, which
leaves most of the two seconds that a finding may take to everything else.
"""

from __future__ import annotations

import argparse
import select
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gpuwarden.cuda.modules import ExaminedLoad, ModuleExaminer  # noqa: E402
from gpuwarden.policy import Policy  # noqa: E402
from tests.support import cuda_modules, nvcc  # noqa: E402
from tests.support.captured_loads import captured  # noqa: E402

BAR_MS = 100.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    began = time.perf_counter()
    with (
        ModuleExaminer(Policy()) as examiner,
        tempfile.TemporaryDirectory(prefix="cuda-modules-") as scratch,
    ):
        print(f"two children are up after {(time.perf_counter() - began) * 1e3:.0f} ms")
        timing = Timing(examiner)
        first = timing.one(nvcc.cubin("sha256").read_bytes())
        print(f"the very first module, 26 KB with a hash in it: {first:.1f} ms")
        if options.file is not None:
            data = options.file.read_bytes()
            print(f"{options.file.name}, {len(data) / 1e6:.1f} MB: {timing.one(data):.0f} ms")
            print(f"  again: {timing.one(data):.1f} ms; {timing.told}")
            return 0
        small = compare(timing, options.rounds, Path(scratch))
        beside = timing.beside(Path(scratch))
        print(f"{'a small one beside four large':32} new {beside:8.1f} ms")
    return 1 if max(small, beside) > BAR_MS else 0


class Timing:
    """Loads given one after the other, each waited for."""

    def __init__(self, examiner: ModuleExaminer) -> None:
        self._examiner = examiner
        self._number = 0
        self.told = ""

    def one(self, data: bytes) -> float:
        """Milliseconds until this load is answered."""
        load = captured(data, self._next())
        began = time.perf_counter()
        self._examiner.submit(load)
        answer = self._wait(load.number)
        spent = (time.perf_counter() - began) * 1e3
        self.told = f"{len(answer.modules)} modules, {len(answer.problems)} problems"
        return spent

    def beside(self, folder: Path) -> float:
        """The same for a small module that comes when four large ones wait."""
        for seed in range(4):
            data = cuda_modules.large(folder, 100 + seed).read_bytes()
            self._examiner.submit(captured(data, self._next()))
        spent = self.one(cuda_modules.small(folder, 9999).read_bytes())
        for number in range(self._number - 4, self._number):
            self._wait(number)
        return spent

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _wait(self, number: int) -> ExaminedLoad:
        while True:
            select.select([self._examiner], [], [], 0.5)
            for answer in self._examiner.take():
                self._early[answer.number] = answer
            if number in self._early:
                return self._early.pop(number)

    @property
    def _early(self) -> dict[int, ExaminedLoad]:
        found: dict[int, ExaminedLoad] = self.__dict__.setdefault("early", {})
        return found


def compare(timing: Timing, rounds: int, folder: Path) -> float:
    """Prints each size; milliseconds of a small one that is new."""
    made: dict[str, tuple[Callable[[Path, int], Path], int]] = {
        "7 KB": (cuda_modules.small, rounds * 4),
        "3 MiB": (cuda_modules.mid_size, rounds),
        "70 MiB, 24 modules": (cuda_modules.large, max(rounds // 2, 1)),
    }
    smallest = 0.0
    for name, (make, count) in made.items():
        images = [make(folder, seed).read_bytes() for seed in range(count)]
        new, again = (median(timing.one(data) for data in images) for _ in range(2))
        print(f"{name:32} new {new:8.1f} ms   again {again:8.2f} ms   ({timing.told})")
        smallest = smallest or new
    return smallest


if __name__ == "__main__":
    raise SystemExit(main())
