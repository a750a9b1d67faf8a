"""Times the eBPF probe: open → decoded event, watched opens without a drop, what others pay.

    python bench/probe_speed.py [--rounds 15] [--seconds 5] [--check]

Needs root, clang and gcc. The cost of unrelated opens is a ratio: runs with and without the probe
alternate, so that a busy moment of the machine hits both.
"""

from __future__ import annotations

import argparse
import os
import resource
import stat
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "src"))

from gpuwarden.probes.events import OpenEvent  # noqa: E402
from gpuwarden.probes.loader import DeviceOpenProbe  # noqa: E402
from gpuwarden.probes.settings import Settings  # noqa: E402

MAJOR = 195
DEVICES = 8
PROCESSES = 200
LATENCY_MS = 5.0
WATCHED_A_SECOND = 20_000
SLOWER = 1.02


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def latency(path: Path) -> list[float]:
    """Milliseconds from just before an open to its decoded event, one at a time."""
    found: list[float] = []
    events: list[tuple[int, int]] = []
    got = threading.Event()
    with DeviceOpenProbe([(MAJOR, None)], Settings(limit_events=0)) as probe:
        ended = False

        def listen() -> None:
            while not ended:
                for event in probe.poll(100):
                    if isinstance(event, OpenEvent) and event.process.pid == os.getpid():
                        events.append((event.since_boot_ns, time.perf_counter_ns()))
                        got.set()

        listener = threading.Thread(target=listen)
        listener.start()
        for _ in range(1000):
            got.clear()
            begun = time.perf_counter_ns()
            try:
                os.close(os.open(path, os.O_RDONLY))
            except OSError:
                pass  # no driver behind this major: the open is told of all the same
            if got.wait(2):
                found.append((events[-1][1] - begun) / 1e6)
            time.sleep(0.001)
        ended = True
        listener.join()
    return found


def storm(opener: Path, paths: list[Path], opens: int) -> tuple[float, int, int, float]:
    """(opens a second, events, dropped, our CPU share) of a storm read and decoded meanwhile."""
    each = opens // PROCESSES
    told = 0
    with DeviceOpenProbe([(MAJOR, None)], Settings(limit_events=0)) as probe:
        cpu = time.process_time()
        begun = time.perf_counter()
        argv = [str(opener), "storm", str(PROCESSES), str(each), *map(str, paths)]
        running = subprocess.Popen(argv)
        while running.poll() is None:
            told += sum(isinstance(event, OpenEvent) for event in probe.poll(20))
        seconds = time.perf_counter() - begun
        while batch := probe.poll(0):
            told += sum(isinstance(event, OpenEvent) for event in batch)
        cpu = time.process_time() - cpu
        counters = probe.counters()
    assert told + counters.dropped_opens == each * PROCESSES, (told, counters)
    return each * PROCESSES / seconds, told, counters.dropped, cpu / seconds


def steady(path: Path, a_second: int, seconds: float) -> tuple[int, int, int, float]:
    """(opens, events, dropped, CPU share): a given rate of opens from processes of their own."""
    code = (
        "import os,sys,time\n"
        "path,rate,seconds=sys.argv[1],float(sys.argv[2]),float(sys.argv[3])\n"
        "begun=time.perf_counter();done=0\n"
        "while (now:=time.perf_counter()-begun)<seconds:\n"
        "  while done<now*rate:\n"
        "    done+=1\n"
        "    try: os.close(os.open(path,os.O_RDONLY))\n"
        "    except OSError: pass\n"
        "  time.sleep(0.001)\n"
        "print(done)"
    )
    told = 0
    with DeviceOpenProbe([(MAJOR, None)], Settings(limit_events=0)) as probe:
        argv = [sys.executable, "-S", "-c", code, str(path), str(a_second), str(seconds)]
        running = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        cpu, begun = time.process_time(), time.perf_counter()
        while running.poll() is None:
            told += sum(isinstance(event, OpenEvent) for event in probe.poll(20))
        share = (time.process_time() - cpu) / (time.perf_counter() - begun)
        while batch := probe.poll(0):
            told += sum(isinstance(event, OpenEvent) for event in batch)
        output, _ = running.communicate()
        return int(output), told, probe.counters().dropped, share


def unrelated(opener: Path, path: Path, rounds: int, settings: Settings) -> float:
    """How much more CPU an open of an ordinary file takes with the probe: the median of pairs."""

    def rate() -> float:
        done = subprocess.run(
            [str(opener), "rate", "0.2", str(path)], capture_output=True, text=True, check=True
        )
        return float(done.stdout)

    ratios = []
    for turn in range(rounds):
        if turn % 2:
            without = rate()
        with DeviceOpenProbe([(MAJOR, None)], settings):
            attached = rate()
        if not turn % 2:
            without = rate()
        ratios.append(without / attached)
    return statistics.median(ratios)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is missed")
    options = parser.parse_args()
    subprocess.run([str(REPOSITORY / "scripts/build_probes")], check=True)
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        opener = Path(folder) / "opener"
        source = REPOSITORY / "tests/support/openers.c"
        subprocess.run(["gcc", "-O2", "-o", str(opener), str(source)], check=True)
        paths = [Path(folder) / f"n{minor}" for minor in range(DEVICES)]
        for minor, path in enumerate(paths):
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(MAJOR, minor))
        plain = Path(folder) / "plain"
        plain.write_text("x")

        taken = latency(paths[0])
        p99 = percentile(taken, 0.99)
        print(
            f"open → decoded event   p50 {percentile(taken, 0.5) * 1e3:.0f} µs, "
            f"p99 {p99 * 1e3:.0f} µs, {len(taken)} of 1000 seen"
        )
        if p99 > LATENCY_MS or len(taken) < 1000:
            missed.append("latency")
        done, told, dropped, share = steady(paths[0], WATCHED_A_SECOND, options.seconds)
        print(
            f"steady                 {done / options.seconds:.0f} opens/s for "
            f"{options.seconds:g} s: {told} of {done} events, {dropped} dropped, "
            f"{share:.0%} of a core"
        )
        if dropped or told != done:
            missed.append("steady")
        a_second, told, dropped, share = storm(opener, paths, 100_000)
        print(
            f"storm                  {PROCESSES} processes on {DEVICES} devices, at full speed: "
            f"{a_second:.0f} opens/s, {told} events, {dropped} dropped, {share:.0%} of a core"
        )
        ratio = unrelated(opener, plain, options.rounds, Settings())
        print(f"unrelated opens        {ratio:.3f} times the CPU with the probe")
        if ratio > SLOWER:
            missed.append("unrelated opens")
        if Path("/sys/kernel/tracing/events").is_dir():
            ratio = unrelated(opener, plain, options.rounds, Settings(return_values=True))
            print(f"… with return values   {ratio:.3f} times the CPU")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"peak memory            {peak / 1024:.0f} MB")
    if missed and options.check:
        print("missed: " + ", ".join(missed), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
