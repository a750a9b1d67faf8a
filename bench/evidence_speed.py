"""Times an evidence archive: a process with 2 GB of memory in use and 1,000 GPU modules.

    python bench/evidence_speed.py [--megabytes 2000] [--modules 1000] [--rounds 5] [--check]

Timed is the whole command, `python -m gpuwarden evidence PID -o DIR`, from the start of Python to
the sealed archive. The memory holds numbers as tensors are (random), what programs are and text, as
in `code_memory.py`; nvcc built the modules, and each has another number in an instruction that
does nothing, so that no two have code in common. For scale the same memory is read as a core dump
would read it, nothing looked at.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from statistics import median

import zstandard

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from bench.code_memory import MEGABYTE, filler  # noqa: E402
from gpuwarden.codescan.process_memory import ProcessMemory  # noqa: E402
from gpuwarden.host import Host  # noqa: E402
from tests.support import nvcc  # noqa: E402
from tests.support.code_holder import holding  # noqa: E402

BAR_SECONDS = 5.0
KERNELS = ("gemm", "reduction", "elementwise", "sha256")
CHUNK_BYTES = 1 << 20
NO_OPERATION = bytes((0x18, 0x79, 0, 0, 0, 0, 0, 0))
"""Volta and later; its bytes 4 to 8 are of no use to it."""


def modules(path: Path, count: int) -> None:
    """That many cubins, one behind the other, all different."""
    built = [nvcc.cubin(name).read_bytes() for name in KERNELS]
    with path.open("wb") as file:
        for number in range(count):
            image = bytearray(built[number % len(built)])
            at = image.rindex(NO_OPERATION)
            image[at + 4 : at + 8] = number.to_bytes(4, "little")
            file.write(image + bytes(-len(image) % 16))


def read_plainly(pid: int) -> tuple[float, int]:
    """Seconds and bytes of reading all its memory in order."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    total = 0
    with ProcessMemory(Host(), pid) as process:
        began = time.perf_counter()
        for span in process.pages.presence(process.memory_regions()).spans:
            for at in range(span.start, span.start + span.size, CHUNK_BYTES):
                size = min(CHUNK_BYTES, span.start + span.size - at)
                total += os.preadv(process.memory, [buffer[:size]], at)
        return time.perf_counter() - began, total


def collect(pid: int, directory: str) -> tuple[float, float, Path]:
    """Wall and CPU seconds of the command, and the archive."""
    used = cpu_seconds()
    began = time.perf_counter()
    words = ["evidence", str(pid), "-o", directory, "--state", f"{directory}/none"]
    done = subprocess.run(
        [sys.executable, "-m", "gpuwarden", *words], capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"gpuwarden evidence: {done.returncode}\n{done.stdout}{done.stderr}")
    newest = max(Path(directory).glob("*.tar"), key=lambda path: path.stat().st_mtime)
    return seconds, cpu_seconds() - used, newest


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def inside(archive: Path) -> tuple[dict[str, float], int, int]:
    """Where the time went, and how many modules are told of and kept."""
    with tarfile.open(archive) as tar:
        names = tar.getnames()
        phases = json.loads(_member(tar, "node/seconds.json"))
        told = json.loads(_member(tar, "modules/modules.json"))
    return phases, told["count"], sum(name.startswith("modules/images/") for name in names)


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    """What a member holds, which is compressed if it is long."""
    squeezed = f"{name}.zst" in tar.getnames()
    file = tar.extractfile(f"{name}.zst" if squeezed else name)
    data = file.read() if file is not None else b""
    return zstandard.ZstdDecompressor().decompressobj().decompress(data) if squeezed else data


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--modules", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="exit 1 above the bar")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        memory, code = Path(folder, "memory"), Path(folder, "modules")
        filler(memory, arguments.megabytes * MEGABYTE)
        modules(code, arguments.modules)
        with holding(f"mmap:{memory}", f"heap:{code}") as holder:
            memory.unlink()
            plain, size = read_plainly(holder.pid)
            rounds = []
            for _ in range(arguments.rounds):
                rounds.append(collect(holder.pid, f"{folder}/evidence"))
                phases, told, kept = inside(rounds[-1][2])
                archived = rounds[-1][2].stat().st_size
                rounds[-1][2].unlink()
    seconds = [one[0] for one in rounds]
    typical = median(seconds)
    named = sum(phases.values())
    where = ", ".join(f"{name} {spent:.2f}" for name, spent in phases.items())
    print(
        f"{size / MEGABYTE:.0f} MB of memory, {told} modules, {kept} kept whole, archive "
        f"{archived / MEGABYTE:.0f} MB: {typical:.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"
        f", {median(one[1] for one in rounds):.2f} CPU seconds\n"
        f"last round: {where}, start and seal {seconds[-1] - named:.2f}\n"
        f"reading that memory alone takes {plain:.2f} s: {typical / plain:.1f} times as long"
    )
    print(f"bar: {BAR_SECONDS:.0f} s: {'met' if typical <= BAR_SECONDS else 'MISSED'}")
    whole = told >= arguments.modules and kept >= arguments.modules
    return 0 if whole and (not arguments.check or typical <= BAR_SECONDS) else 1


if __name__ == "__main__":
    sys.exit(main())
