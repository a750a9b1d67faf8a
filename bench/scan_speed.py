"""Times `gpuwarden scan` against `nvitop -1` and `gpustat`, whole process against whole process.

Every program opens the same stand-in NVML library: 8 GPUs with 200 processes among 2,000 real
ones. Runs alternate, so that a busy moment of the machine hits all of them. A policy expects the
200, as on a node in order; one more scan goes without it and prints 200 findings.

    python bench/scan_speed.py [--rounds 9] [--processes 2000] [--gpu-processes 200] [--check]
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from tests.support.fakenvml import FakeNvml, build_library, library_directory  # noqa: E402

GPUS = 8
DESCRIPTORS = 12
FULL_SCAN_SECONDS = 1.0
PEAK_MEMORY_BYTES = 120 << 20
SCAN_CODES = (0, 1, 2)


@dataclass
class Program:
    """A command line and what its runs took."""

    name: str
    argv: list[str]
    codes: tuple[int, ...] = (0,)
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    """User and system time, with the children it waited for: what a busy machine does not bend."""
    peak_bytes: list[int] = field(default_factory=list)

    def run(self, pids: set[int]) -> None:
        """One timed run, whose output must show every one of ``pids``."""
        with tempfile.TemporaryFile() as output, Path(os.devnull).open("r+b") as null:
            files = ((null, 0), (output, 1), (output, 2))
            actions = [(os.POSIX_SPAWN_DUP2, file.fileno(), standard) for file, standard in files]
            started = time.perf_counter()
            pid = os.posix_spawn(self.argv[0], self.argv, os.environ, file_actions=actions)
            _, status, usage = os.wait4(pid, 0)
            self.seconds.append(time.perf_counter() - started)
            output.seek(0)
            said = output.read().decode("utf-8", "replace")
        self.cpu_seconds.append(usage.ru_utime + usage.ru_stime)
        self.peak_bytes.append(usage.ru_maxrss * 1024)
        code = os.waitstatus_to_exitcode(status)
        missing = pids - {int(word) for word in re.findall(r"\d+", said) if len(word) < 10}
        if code not in self.codes or missing:
            raise SystemExit(
                f"{' '.join(self.argv)} ended with {code} and shows {len(missing)} of {len(pids)} "
                f"processes not; it ends with\n{said[-2000:]}"
            )

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@contextmanager
def crowd(program: Path, count: int) -> Iterator[list[int]]:
    """Real processes that wait; all ended on leaving."""
    parent = subprocess.Popen(
        [program, str(count), str(DESCRIPTORS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout is not None
        pids: list[int] = []
        for line in parent.stdout:
            if line == "ready\n":
                break
            pids.append(int(line))
        if len(pids) != count:
            raise SystemExit(f"only {len(pids)} of {count} processes could be started")
        yield pids
    finally:
        parent.kill()
        parent.wait()


@contextmanager
def built() -> Iterator[tuple[Path, Path]]:
    """The crowd's program and a policy that expects it, outside any temporary directory."""
    folder = Path(tempfile.mkdtemp(prefix="crowd-", dir=library_directory()))
    try:
        folder.chmod(0o755)
        program, policy = folder / "trainer", folder / "policy.yaml"
        source = Path(__file__).with_name("crowd.c")
        subprocess.run(["gcc", "-O1", "-o", program, source], check=True)
        policy.write_text(
            "version: 1\nworkloads:\n  - name: trainer\n    owner: research\n"
            f"    match:\n      binary: {program}\n"
        )
        yield program, policy
    finally:
        shutil.rmtree(folder)


def state(pids: list[int]) -> FakeNvml:
    fake = FakeNvml(driver="570.86.10", cuda=12080)
    for gpu in range(GPUS):
        mine = pids[gpu::GPUS]
        fake.gpu(used=len(mine) << 30, reserved=600 << 20, util=90, memutil=40)
        for pid in mine:
            fake.process(pid, memory=1 << 30)
            for age_us in (1_000, 170_000, 340_000):
                fake.sample(pid, 100 // max(1, len(mine)), age_us=age_us)
    return fake


def installed(name: str) -> str | None:
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def programs(library: str, policy: Path) -> list[Program]:
    gpuwarden = installed("gpuwarden")
    if gpuwarden is None:
        raise SystemExit("gpuwarden is not installed beside this Python")
    plain = [gpuwarden, "scan", "--nvml-library", library]
    scan = [*plain, "--policy", str(policy)]
    found = [
        Program("scan nvml,processes", [*scan, "--sensors", "nvml,processes"], SCAN_CODES),
        Program("scan, all sensors", scan, SCAN_CODES),
        Program("the same, 200 findings", plain, SCAN_CODES),
    ]
    for name, argv in (
        ("nvitop -1", ["nvitop", "-1"]),
        ("gpustat", ["gpustat", "--no-color", "--show-pid"]),
    ):
        path = installed(argv[0])
        if path is None:
            print(f"{name}: not installed, left out (pip install --group bench)")
        else:
            found.append(Program(name, [path, *argv[1:]]))
    return found


def report(library: str, policy: Path, wanted: set[int]) -> None:
    """One scan as JSON: whether it saw every process, and what each sensor took."""
    argv = [str(installed("gpuwarden")), "scan", "--nvml-library", library, "--format", "json"]
    argv += ["--policy", str(policy)]
    done = subprocess.run(argv, capture_output=True, check=False)
    if done.returncode not in SCAN_CODES:
        raise SystemExit(done.stderr.decode(errors="replace"))
    document = json.loads(done.stdout)
    missing = wanted - {row["pid"] for row in document["rows"] if row.get("pid")}
    if missing:
        raise SystemExit(f"the scan does not show {len(missing)} of {len(wanted)} GPU processes")
    print(f"\nsensor seconds in one full scan ({len(wanted)} GPU processes, all of them shown)")
    for run in document["sensors"]:
        print(f"  {run['name']:<14}{run.get('seconds', 0):8.3f}  {run['state']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--processes", type=int, default=2000)
    parser.add_argument("--gpu-processes", type=int, default=200)
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar is missed")
    options = parser.parse_args()
    # An installed program has its bytecode, as the peers have; an editable one may lack it.
    compileall.compile_dir(str(REPOSITORY / "src" / "gpuwarden"), quiet=2)
    library = str(build_library())
    os.environ["LD_LIBRARY_PATH"] = str(Path(library).parent)
    with built() as (program, policy), crowd(program, options.processes) as pids:
        busy = pids[:: max(1, len(pids) // max(1, options.gpu_processes))][: options.gpu_processes]
        with state(busy).in_place():
            ranked = programs(library, policy)
            for entry in ranked:
                entry.run(set(busy))
                for kept in (entry.seconds, entry.cpu_seconds, entry.peak_bytes):
                    kept.clear()
            for _ in range(options.rounds):
                for entry in ranked:
                    entry.run(set(busy))
            report(library, policy, set(busy))
    return summary(ranked, check=options.check)


def summary(ranked: list[Program], *, check: bool) -> int:
    base, full, findings, *others = ranked
    columns = "".join(f"{name:>8}" for name in ("min", "median", "max", "cpu"))
    print(f"\n{'seconds, whole process':<24}{columns}{'peak MB':>9}  ratio")
    for program in ranked:
        ratio = program.median / base.median
        print(
            f"{program.name:<24}{min(program.seconds):8.3f}{program.median:8.3f}"
            f"{max(program.seconds):8.3f}{statistics.median(program.cpu_seconds):8.3f}"
            f"{max(program.peak_bytes) / 1e6:9.1f}  {ratio:.2f}"
        )
    bars = [(f"{base.name} is as fast as {o.name}", base.median <= o.median) for o in others]
    bars.append(
        (f"the full scan ends within {FULL_SCAN_SECONDS:g} s", full.median <= FULL_SCAN_SECONDS)
    )
    bars.append(
        (
            "peak memory is under 120 MB",
            max(base.peak_bytes + full.peak_bytes + findings.peak_bytes) < PEAK_MEMORY_BYTES,
        )
    )
    print()
    for text, met in bars:
        print(f"{'met   ' if met else 'MISSED'}  {text}")
    return 1 if check and not all(met for _, met in bars) else 0


if __name__ == "__main__":
    raise SystemExit(main())
