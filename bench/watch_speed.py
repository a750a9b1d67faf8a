"""Measures a running `gpuwarden watch`: latency, floods, its cost at rest, its growth.

    python bench/watch_speed.py [latency] [storm] [flood] [unrelated] [rest] [--seconds 60]
                                [--minutes 0] [--check]

Needs root, clang and gcc. Without a name all parts run; --minutes N lets `rest` watch for growth
for N minutes. The agent runs as a user would run it; what it told is read from its output and its
metrics endpoint. A stand-in NVML library shows 8 GPUs with 200 real processes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import stat
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from bench.scan_speed import GPUS, built, crowd, state  # noqa: E402
from tests.support.fakenvml import build_library  # noqa: E402
from tests.support.watching import GPU, Watching, watching  # noqa: E402

DEVICES = 8
PROCESSES = 200
A_SECOND = 20_000
FLOOD = 1_000_000
NAMES = 30
LATENCY_MS = 5.0
REST_SHARE = 0.02
REST_BYTES = 100 << 20
SLOWER = 1.02
SETTLE_SECONDS = 45
"""After the first judgement come those of what changed since."""
TICKS = os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    found, pending = [], [pid]
    while pending:
        one = pending.pop()
        found.append(one)
        try:
            children = Path(f"/proc/{one}/task/{one}/children").read_text().split()
        except OSError:
            continue
        pending += map(int, children)
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, those below it, and those that it waited for."""
    total = 0
    for one in tree(pid):
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15]))
    return total / TICKS


def memory_bytes(pid: int) -> int:
    """Proportional set size of a process and those below it: shared pages count once."""
    total = 0
    for one in tree(pid):
        try:
            text = Path(f"/proc/{one}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return total << 10


def metric(agent: Watching, start: str) -> float:
    """The sum of all series that begin so."""
    url = agent.errors.split("metrics at ")[1].split()[0]
    text = urllib.request.urlopen(url, timeout=10).read().decode()
    lines = [line for line in text.splitlines() if line.startswith(start)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@contextmanager
def agent_with(*arguments: str) -> Iterator[Watching]:
    with (
        tempfile.TemporaryDirectory(prefix="watch-") as folder,
        watching(Path(folder), "--metrics", "127.0.0.1:0", *arguments) as agent,
    ):
        agent.wait(lambda: "metrics at" in agent.errors, "the endpoint")
        yield agent


def node(path: Path, minor: int, major: int = GPU[0]) -> Path:
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(major, minor))
    return path


class Bench:
    """What the parts share, and what missed its bar."""

    def __init__(self, folder: Path, opener: Path, options: argparse.Namespace) -> None:
        self.folder = folder
        self.opener = opener
        self.options = options
        self.missed: list[str] = []

    def bar(self, name: str, met: bool) -> None:
        if not met:
            self.missed.append(name)

    # -------------------------------------------------------------- open → finding

    def latency(self) -> None:
        """From just before an open to its finding, and to the finding's line at its reader."""
        path = node(self.folder / "renamed", 0)
        rule = b"accelerator_opened_by_other_name"
        openers = self._openers()
        with agent_with() as agent, agent.told.open("rb") as told:
            raised: list[float] = []
            read: list[float] = []
            told.seek(0, os.SEEK_END)
            time.sleep(8)
            for _ in range(300):
                process = subprocess.Popen(
                    [str(next(openers)), "stamp", str(path)], stdout=subprocess.PIPE
                )
                wanted = b'"pid":%d,' % process.pid
                end = time.perf_counter() + 2
                arrived, line = None, b""
                while time.perf_counter() < end:
                    line += told.readline()
                    if not line.endswith(b"\n"):
                        time.sleep(0.0002)
                        continue
                    if rule in line and wanted in line:
                        arrived = time.time_ns()
                        break
                    line = b""
                out, _ = process.communicate()
                if arrived is not None:
                    raised.append((json.loads(line)["first_seen_ns"] - int(out)) / 1e6)
                    read.append((arrived - int(out)) / 1e6)
                time.sleep(0.02)
        for what, taken in (("finding", raised), ("its line at a reader, on disk", read)):
            p50, p99 = (sorted(taken)[int(len(taken) * share)] for share in (0.5, 0.99))
            print(f"open → {what}   p50 {p50:.1f} ms, p99 {p99:.1f} ms, {len(taken)} of 300")
        p99 = sorted(raised)[int(len(raised) * 0.99)]
        self.bar("latency", p99 < LATENCY_MS and len(raised) == 300)

    def _openers(self) -> Iterator[Path]:
        """One program under many names, in turn: a crowd under one name is told of together."""
        for number in range(NAMES):
            with suppress(FileExistsError):
                (self.folder / f"opener{number}").hardlink_to(self.opener)
        return itertools.cycle(self.folder / f"opener{number}" for number in range(NAMES))

    # -------------------------------------------------------------- floods

    def storm(self) -> None:
        """Many processes at a given rate, every event told: none may be lost."""
        paths = [str(node(self.folder / f"gpu{minor}", minor)) for minor in range(DEVICES)]
        seconds = self.options.seconds
        with agent_with("--limit", "0") as agent:
            before = memory_bytes(agent.pid)
            events = metric(agent, 'gpuwarden_events_total{kind="open"')
            cpu = cpu_seconds(agent.pid)
            begun = time.perf_counter()
            argv = [str(self.opener), "pace", str(PROCESSES), str(A_SECOND), str(seconds), *paths]
            running = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
            peak = before
            while running.poll() is None:
                peak = max(peak, memory_bytes(agent.pid))
                time.sleep(0.5)
            took = time.perf_counter() - begun
            done = int(running.communicate()[0])
            time.sleep(3)
            share = (cpu_seconds(agent.pid) - cpu) / took
            events = metric(agent, 'gpuwarden_events_total{kind="open"') - events
            dropped = metric(agent, "gpuwarden_events_dropped_total")
            after = memory_bytes(agent.pid)
        print(
            f"storm   {done / took:.0f} opens/s for {took:.0f} s from {PROCESSES} processes on "
            f"{DEVICES} devices: {events:.0f} of {done} events, {dropped:.0f} dropped, "
            f"{share:.0%} of a core, memory {before >> 20} → {after >> 20} MB (peak {peak >> 20})"
        )
        self.bar("storm", not dropped and events == done)

    def flood(self) -> None:
        """One process floods, the limiter on: the count is exact, others' events are all there."""
        path = node(self.folder / "flooded", 0)
        rule = "accelerator_opened_by_other_name"
        with agent_with() as agent:
            begun = time.perf_counter()
            flood = subprocess.Popen(
                [self.opener, "open", path, str(FLOOD)], stdout=subprocess.PIPE, text=True
            )
            others = []
            openers = self._openers()
            while flood.poll() is None:
                other = subprocess.Popen([next(openers), "open", path], stdout=subprocess.DEVNULL)
                other.wait()
                others.append(other.pid)
                time.sleep(0.05)
            took = time.perf_counter() - begun
            agent.wait(
                lambda: any(one["status"] == "resolved" for one in agent.findings(rule, flood.pid)),
                "the end of the finding",
                90,
            )
            told = agent.findings(rule)
            mine = [one for one in told if one["subject"].get("pid") == flood.pid]
            seen = {one["subject"].get("pid") for one in told} & set(others)
            ids = {one["id"] for one in mine}
            counted = mine[-1]["count"]
        print(
            f"flood   {FLOOD} opens by one process in {took:.1f} s: {len(ids)} finding, count "
            f"{counted}; {len(seen)} of {len(others)} other processes told of"
        )
        self.bar("flood", (len(ids), counted, len(seen)) == (1, FLOOD, len(others)))

    def unrelated(self) -> None:
        """What opens of ordinary files pay while the agent runs: CPU of the same loop, in turn."""
        plain = self.folder / "plain"
        plain.write_text("x")

        def rate() -> float:
            argv = [str(self.opener), "rate", "0.3", str(plain)]
            done = subprocess.run(argv, capture_output=True, text=True, check=True)
            return float(done.stdout)

        ratios = []
        for _ in range(9):
            without = rate()
            with agent_with() as agent:
                time.sleep(4)
                with_agent = rate()
                del agent
            ratios.append(without / with_agent)
        ratio = statistics.median(ratios)
        print(f"unrelated opens   {ratio:.3f} times the CPU while watched")
        self.bar("unrelated", ratio < SLOWER)

    # -------------------------------------------------------------- at rest

    def rest(self) -> None:
        """CPU and memory with 8 GPUs and 200 processes, a sample a second."""
        library = str(build_library())
        with ExitStack() as stack:
            program, policy = stack.enter_context(built())
            pids = stack.enter_context(crowd(program, PROCESSES))
            stack.enter_context(state(pids).in_place())
            agent = stack.enter_context(
                agent_with("--nvml-library", library, "--policy", str(policy))
            )
            agent.wait(lambda: metric(agent, "gpuwarden_judgements_total") >= 1, "a judgement")
            time.sleep(SETTLE_SECONDS)
            judgements = metric(agent, "gpuwarden_judgements_total")
            begun, cpu = time.perf_counter(), cpu_seconds(agent.pid)
            first = memory_bytes(agent.pid)
            marks = []
            for _ in range(max(1, self.options.minutes)):
                time.sleep(60)
                marks.append(memory_bytes(agent.pid))
                if self.options.minutes > 1:
                    print(f"  after {len(marks)} min  {marks[-1] / (1 << 20):.1f} MB", flush=True)
            share = (cpu_seconds(agent.pid) - cpu) / (time.perf_counter() - begun)
            judgements = metric(agent, "gpuwarden_judgements_total") - judgements
        print(
            f"at rest   {GPUS} GPUs, {PROCESSES} processes, 1 s: {share:.2%} of a core, memory "
            f"{first / (1 << 20):.1f} → {marks[-1] / (1 << 20):.1f} MB in {len(marks)} min "
            f"({judgements:.0f} judgements)"
        )
        self.bar("at rest", share < REST_SHARE and max(marks) < REST_BYTES)


def main() -> int:
    parts: dict[str, Callable[[Bench], None]] = {
        name: getattr(Bench, name) for name in ("latency", "storm", "flood", "unrelated", "rest")
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("parts", nargs="*", choices=[*parts, []], metavar="PART")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the storm")
    parser.add_argument("--minutes", type=int, default=1, help="of the time at rest")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is missed")
    options = parser.parse_args()
    subprocess.run([str(REPOSITORY / "scripts/build_probes")], check=True)
    with tempfile.TemporaryDirectory() as folder:
        opener = Path(folder) / "opener"
        source = REPOSITORY / "tests/support/openers.c"
        subprocess.run(["gcc", "-O2", "-o", str(opener), str(source)], check=True)
        bench = Bench(Path(folder), opener, options)
        for name in options.parts or parts:
            parts[name](bench)
            sys.stdout.flush()
    if bench.missed:
        print("missed: " + ", ".join(bench.missed), file=sys.stderr)
    return int(bool(bench.missed) and options.check)


if __name__ == "__main__":
    raise SystemExit(main())
