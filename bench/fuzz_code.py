"""Mutants of GPU code of every form through extraction and description: ``make fuzz-code``.

    python bench/fuzz_code.py [--mutants 1000000] [--seed N] [SAMPLE...]

Prints how many a second, the longest, and the first that raised anything with its seed; exit status
1 for any exception, or for one that took over a second of CPU time.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from multiprocessing import Pool
from pathlib import Path

from tests.support.gpu_modules import SAMPLES, modules, mutants

ROUND = 500
"""Mutants of one sample by one seed."""
LONGEST_SECONDS = 1.0


def _round(task: tuple[str, bytes, int]) -> tuple[int, float, str]:
    """How many were read, the longest in seconds, and what went wrong with the first that did."""
    name, data, seed = task
    longest, done = 0.0, 0
    for number, mutant in enumerate(mutants(data, ROUND, seed)):
        start = time.process_time()
        try:
            modules(mutant)
        except Exception:
            return done, longest, f"{name}, seed {seed}, mutant {number}\n{traceback.format_exc()}"
        longest = max(longest, time.process_time() - start)
        done += 1
    return done, longest, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("samples", nargs="*", type=Path, help="files to mutate too")
    arguments = parser.parse_args()
    samples = {**SAMPLES, **{str(path): path.read_bytes() for path in arguments.samples}}
    names = list(samples)
    tasks = [
        (names[number % len(names)], samples[names[number % len(names)]], arguments.seed + number)
        for number in range(-(-arguments.mutants // ROUND))
    ]
    start, done, longest, wrong = time.perf_counter(), 0, 0.0, []
    with Pool(arguments.processes) as pool:
        for count, seconds, failure in pool.imap_unordered(_round, tasks):
            done += count
            longest = max(longest, seconds)
            if failure:
                wrong.append(failure)
    seconds = time.perf_counter() - start
    print(
        f"{done} mutants of {len(samples)} samples, seed {arguments.seed}: {seconds:.0f} s, "
        f"{done / seconds:.0f} a second, the longest {longest * 1000:.0f} ms of CPU time, "
        f"{len(wrong)} rounds ended by an exception"
    )
    print("\n".join(wrong[:3]), end="")
    return 1 if wrong or longest > LONGEST_SECONDS else 0


if __name__ == "__main__":
    sys.exit(main())
