"""What `gpuwarden trace` sees of programs that use CUDA, put beside what they did.

    python bench/cuda_check.py [--stub]

The programs are those of bench/cuda_work.py: a raw one, one by the tables that runtime libraries
use, one that only launches, and one with PyTorch where that can be imported. ``--stub`` takes the
stand-in library of the tests instead of the machine's driver, to try this script itself. It takes
one to two minutes. Exit codes: 0 all was seen, 1 something was not, 2 there is no GPU, or not root.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "src")]

from gpuwarden.code.examine import Examined, examine  # noqa: E402
from gpuwarden.code.module import Place  # noqa: E402

WORK = Path(__file__).with_name("cuda_work.py")
DRIVER = "libcuda.so.1"
APPEAR_SECONDS = 30.0
SETTLE_SECONDS = 3.0
WORK_SECONDS = 90.0
COST_ROUNDS = 10

Document = dict[str, Any]


def gpuwarden() -> list[str]:
    """How the program is run here."""
    beside = Path(sys.executable).parent / "gpuwarden"
    program = str(beside) if beside.exists() else shutil.which("gpuwarden")
    return [program] if program else [sys.executable, "-m", "gpuwarden"]


class Lines:
    """Lines of JSON that a process prints, gathered by a thread as they come."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.told: list[Document] = []
        self._thread = threading.Thread(target=self._gather, daemon=True)
        self._thread.start()

    def _gather(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.told.append(json.loads(line))

    def wait(self, key: str, seconds: float, count: int = 1) -> Document | None:
        """The ``count``th line with ``key`` or with ``failed``; None when it did not come."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            alive = self._thread.is_alive()
            found = [one for one in list(self.told) if key in one or "failed" in one]
            if len(found) >= count:
                return found[count - 1]
            if not alive:
                break
            time.sleep(0.02)
        return None

    def end(self) -> None:
        self._thread.join(timeout=5)


@contextmanager
def working(kind: str, library: str, folder: Path) -> Iterator[Lines]:
    """A program that waits for its first line of input; killed on leaving."""
    process = subprocess.Popen(
        [sys.executable, WORK, kind, library, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Lines(process)
    finally:
        process.kill()
        process.wait()


def go(lines: Lines) -> None:
    stdin = lines.process.stdin
    assert stdin is not None
    stdin.write("go\n")
    stdin.flush()


@contextmanager
def tracing() -> Iterator[Lines]:
    """`gpuwarden trace` of every process."""
    process = subprocess.Popen(
        [*gpuwarden(), "trace", "--all", "--events", "--launches"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = Lines(process)
    try:
        yield lines
    finally:
        process.terminate()
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        lines.end()


# -------------------------------------------------------------------- the table


class Table:
    """Prints what was done and what was seen of it, and counts what was not."""

    def __init__(self, *, stub: bool) -> None:
        self.missing = 0
        self.stub = stub
        print(f"\n{'':10}{'what':52} {'done':>7} {'seen':>7}  ")

    def row(self, what: str, done: int, seen: int, said: str = "", *, agrees: bool = True) -> None:
        fits = agrees and done == seen
        self.missing += not fits
        print(f"{'seen' if fits else 'NOT SEEN':10}{what:52} {done:>7} {seen:>7}  {said}")

    def note(self, what: str, said: str) -> None:
        print(f"{'note':10}{what:52} {said}")


def of(pid: int, kind: str, told: list[Document]) -> list[Document]:
    return [
        one for one in told if one.get("kind") == kind and one.get("process", {}).get("pid") == pid
    ]


def digests(image: bytes) -> list[str]:
    """Of the modules in an image, as `gpuwarden code scan` tells them."""
    found = examine(image, Place(target="image"))
    return sorted(one.module.digest for one in found if isinstance(one, Examined))


def compare(table: Table, worker: Lines, told: list[Document]) -> None:
    """Rows of all that one program did."""
    pid = worker.process.pid
    done = [one for one in worker.told if "did" in one]
    for one in done:
        if one.get("missing"):
            table.note(one["function"], "this driver does not have it")
        elif one.get("result"):
            table.note(one["function"], f"gave {one['result']}")
    _contexts(table, done, of(pid, "cuda_context", told))
    _loads(table, done, of(pid, "module_load", told))
    _launches(table, done, of(pid, "launches", told))
    for one in done:
        if one["did"] == "result":
            if table.stub:
                table.note("sums on the GPU", "the stand-in computes nothing")
            else:
                table.row("sums on the GPU that are right", 1, int(one["right"]))


def _contexts(table: Table, done: list[Document], seen: list[Document]) -> None:
    made = Counter(
        one["function"] for one in done if one["did"] == "context" and not one.get("missing")
    )
    by = Counter(one["context"]["function"] for one in seen)
    for function, times in made.items():
        handles = {
            f"{one['handle']:#x}"
            for one in done
            if one.get("function") == function and one.get("handle")
        }
        of_it = [one["context"] for one in seen if one["context"]["function"] == function]
        same = handles <= {one["handle"] for one in of_it}
        table.row(function, times, by[function], "" if same else "another handle", agrees=same)


def _loads(table: Table, done: list[Document], seen: list[Document]) -> None:
    left = list(seen)
    for one in done:
        if one["did"] != "load" or one.get("missing") or "image" not in one:
            continue
        wanted = digests(Path(one["image"]).read_bytes())
        what = f"{one['function']} {one['kernel']}"
        match = next(
            (
                each
                for each in left
                if each["load"]["function"] == one["function"]
                and sorted(module["digest"] for module in each["modules"]) == wanted
            ),
            None,
        )
        if match is not None:
            left.remove(match)
            load = match["load"]
            said = f"{load['captured_bytes']} bytes, {wanted[0][:12] if wanted else 'no module'}"
            table.row(what, 1, 1, f"{said} {load['missed']}", agrees=not load["missed"])
            continue
        near = [each["load"] for each in left if each["load"]["function"] == one["function"]]
        table.row(what, 1, 0, "; ".join(filter(None, (each["missed"] for each in near)))[:60])
    for each in left:
        load = each["load"]
        kernels = [name for module in each["modules"] for name in module["kernels"]][:3]
        table.note(load["function"], f"besides: {load['captured_bytes']} bytes, {kernels}")


def _launches(table: Table, done: list[Document], seen: list[Document]) -> None:
    by_kernel: Counter[str] = Counter()
    graphs = 0
    for one in seen:
        graphs += one["window"]["graph_launches"]
        for kernel in one["window"]["kernels"]:
            by_kernel[kernel["name"]] += kernel["launches"]
    for one in done:
        if one["did"] == "launch" and not one.get("missing"):
            what = f"{one['function']} {one['kernel']}"
            table.row(what[:52], one["times"], by_kernel[one["kernel"]])
        elif one["did"] == "graph":
            table.row(one["function"], one["times"], graphs)
        elif one["did"] == "torch":
            total = sum(by_kernel.values())
            table.row("PyTorch's launches, by its profiler", one["launches"], total)
            for name, count in by_kernel.most_common(5):
                table.note(f"  {count} of", name[:80] or "a kernel without a name")


# -------------------------------------------------------------------- the run


def inodes(pid: int) -> set[int]:
    """Of all files that a process maps."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines}


def costs(worker: Lines, first: int) -> float | None:
    """The least of some rounds, nanoseconds a launch; ``first``: how many it told before."""
    for number in range(COST_ROUNDS):
        go(worker)
        if worker.wait("ns", WORK_SECONDS, first + number + 1) is None:
            return None
    told = [one["ns"] for one in worker.told if "ns" in one]
    return float(min(told[first:]))


def run(library: str, folder: Path, *, stub: bool) -> int:
    """Everything, against one driver library."""
    with working("cost", library, folder) as cost:
        ready = cost.wait("ready", APPEAR_SECONDS)
        if ready is None or "failed" in ready:
            print(f"no GPU to check on: {(ready or {}).get('failed', 'the program ended')}")
            return 2
        print(f"{ready['gpu']}, driver for CUDA {ready['driver']}")
        for function, code in ready["prologues"].items():
            print(f"{'':10}{function:52} {code}")
        bare = costs(cost, 0)
        with tracing() as trace:
            missing = _traced(trace, library, folder, Table(stub=stub))
            beside = costs(cost, COST_ROUNDS)
            mapped = inodes(cost.process.pid)
        for one in (line["library"] for line in trace.told if line.get("kind") == "cuda_library"):
            if one["state"] == "found" and one["inode"] in mapped:
                print(
                    f"{'':10}{one['path']}: {len(one['probed'])} functions probed, at +0: "
                    f"{', '.join(one['at_start']) or 'none'}"
                )
                print("".join(f"{'':10}  {problem}\n" for problem in one["problems"]), end="")
    if bare is not None and beside is not None:
        print(
            f"{'':10}a launch costs {bare:.0f} ns, with the probes {beside:.0f} ns: "
            f"{beside - bare:+.0f} ns"
        )
    print(f"\n{'all that was done was seen' if not missing else f'{missing} rows were not seen'}")
    return 1 if missing else 0


def _traced(trace: Lines, library: str, folder: Path, table: Table) -> int:
    for kind in ("calls", "slots", "torch"):
        with working(kind, library, folder) as worker:
            ready = worker.wait("ready", APPEAR_SECONDS)
            if ready is None or "failed" in ready:
                table.note(kind, (ready or {}).get("failed", "the program ended"))
                continue
            if not _is_attached(trace):
                table.row("the driver library", 1, 0, "gpuwarden trace did not attach to it")
                break
            go(worker)
            if worker.wait("done", WORK_SECONDS) is None:
                table.row(f"the program {kind!r} to its end", 1, 0, "it ended before")
            time.sleep(SETTLE_SECONDS)
            compare(table, worker, list(trace.told))
    return table.missing


def _is_attached(trace: Lines) -> bool:
    """Waits until the tracer tells of a library, and a moment for the process that maps it."""
    end = time.monotonic() + APPEAR_SECONDS
    while time.monotonic() < end and trace.process.poll() is None:
        if any(line.get("kind") == "cuda_library" for line in list(trace.told)):
            time.sleep(SETTLE_SECONDS)
            return True
        time.sleep(0.05)
    return False


@contextmanager
def stand_in() -> Iterator[str]:
    """The library of the tests, where root alone may write, as drivers are installed."""
    from tests.support.cuda_bed import build
    from tests.support.fakenvml import library_directory

    with tempfile.TemporaryDirectory(dir=library_directory()) as name:
        Path(name).chmod(0o755)
        yield str(build(Path(name)).library())


def check(*, stub: bool) -> int:
    """Runs all; the exit code."""
    if os.geteuid() != 0:
        print("uprobes need root")
        return 2
    with tempfile.TemporaryDirectory(prefix="gpuwarden-check-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "images").mkdir()
        if not stub:
            return run(DRIVER, folder / "images", stub=False)
        with stand_in() as library:
            return run(library, folder / "images", stub=True)


if __name__ == "__main__":
    raise SystemExit(check(stub="--stub" in sys.argv[1:]))
