"""A baseline of a million digests: writing it, opening it, asking it."""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time

from gpuwarden.code.baseline.entries import Entries
from gpuwarden.code.baseline.file_writer import write_baseline
from gpuwarden.code.baseline.provenance import Provenance
from gpuwarden.code.baseline.reader import Baseline, open_baseline
from gpuwarden.keys import make_key, read_private

OPENINGS, ROUNDS = 20, 20
IN_A_NEW_PROCESS = """
import sys, time
from gpuwarden.code.baseline.reader import open_baseline
start = time.perf_counter()
open_baseline(sys.argv[1], trusted=frozenset([bytes.fromhex(sys.argv[2])]))
print((time.perf_counter() - start) * 1e3)
"""


def microseconds(baseline: Baseline, digests: list[str], rounds: int = 1) -> float:
    """A lookup's time, the best round of several: others may use the machine too."""
    times = []
    for number in range(rounds):
        some = digests[number::rounds]
        start = time.perf_counter()
        for digest in some:
            baseline.lookup(digest)
        times.append((time.perf_counter() - start) / len(some) * 1e6)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--digests", type=int, default=1_000_000)
    count = parser.parse_args().digests
    digests = [hashlib.sha256(b"%d" % n).digest() for n in range(count)]
    origins = [
        Provenance(package=f"package-{n}", version="1.0", file=f"lib/lib{n}.so")
        for n in range(2000)
    ]
    key = read_private(make_key()[0], "key")
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/million.baseline"
        start = time.perf_counter()
        entries = Entries()
        for n, digest in enumerate(digests):
            entries.add(digest, hashlib.sha256(digest).digest(), origins[n % len(origins)])
        added = time.perf_counter()
        write_baseline(path, entries, name="million", key=key)
        written = time.perf_counter()
        print(
            f"build: {added - start:.1f} s to collect, {written - added:.1f} s to write; "
            f"{os.path.getsize(path) / 1e6:.1f} MB for {count:,} digests and as many code digests"
        )
        trusted = frozenset([key.public_key().public_bytes_raw()])
        times = []
        for _ in range(OPENINGS):
            start = time.perf_counter()
            baseline = open_baseline(path, trusted=trusted)
            times.append((time.perf_counter() - start) * 1e3)
        print(f"open, signature checked: {min(times):.1f} to {max(times):.1f} ms")
        fresh = subprocess.run(
            [sys.executable, "-c", IN_A_NEW_PROCESS, path, *(one.hex() for one in trusted)],
            capture_output=True,
            text=True,
            check=True,
        )
        print(f"the first in a new process, loading cryptography: {float(fresh.stdout):.1f} ms")
        asked = [digest.hex() for digest in digests[:: max(1, count // 20_000)]]
        missing = [hashlib.sha256(b"miss %d" % n).hexdigest() for n in range(len(asked))]
        print(f"first lookup, its chunk checked: {microseconds(baseline, asked[:2000]):.1f} µs")
        microseconds(baseline, asked)
        print(f"hit: {microseconds(baseline, asked, ROUNDS):.1f} µs")
        microseconds(baseline, missing)
        print(f"miss: {microseconds(baseline, missing, ROUNDS):.1f} µs")
        start = time.perf_counter()
        baseline.verify()
        print(f"verify, every chunk: {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
