"""How many modules are captured of processes that load one and end at once, and what a load pays.

    python bench/cuda_capture.py [--small 1000] [--mid 100] [--large 20] [--nice -10]

Needs root, gcc, and the CUDA compiler of the test environment. Programs load modules of their own
through the stand-in driver library; what was captured is compared with the files, byte by byte.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import os
import select
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
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "src")]

from gpuwarden.probes import uprobes  # noqa: E402
from gpuwarden.probes.cuda.calls import CallSettings, CudaCalls  # noqa: E402
from gpuwarden.probes.cuda.records import CapturedLoad, ContextCall, HandleNamed, LoadReturn  # noqa: E402
from gpuwarden.probes.cuda.stopped import boot_ns  # noqa: E402
from gpuwarden.probes.libbpf import library  # noqa: E402
from tests.support import cuda_bed, cuda_modules  # noqa: E402
from tests.support.cuda_probing import found_library  # noqa: E402

LOADER = """
import subprocess, sys
program, driver, *images = sys.argv[1:]
for image in images:
    subprocess.run([program, driver, f"image i map {image}", "load cuModuleLoadData m i", "exit 0"],
                   check=True, stdout=subprocess.DEVNULL)
"""
TIMER = """
import ctypes, sys, time
cuda = ctypes.CDLL(sys.argv[1])
cuda.cuInit(0)
data = open(sys.argv[2], "rb").read()
image, out, times = ctypes.create_string_buffer(data, len(data)), ctypes.c_void_p(), []
for _ in range(int(sys.argv[3])):
    began = time.perf_counter()
    cuda.cuModuleLoadData(ctypes.byref(out), image)
    times.append(time.perf_counter() - began)
    time.sleep(float(sys.argv[4]))
print(*times)
"""


@dataclass
class Compared:
    """A sink that keeps what was captured, to be compared with the files when all is over."""

    images: list[bytes]
    loads: list[CapturedLoad] = field(default_factory=list)

    def load(self, load: CapturedLoad) -> None:
        self.loads.append(load)

    def context(self, call: ContextCall) -> None: ...
    def returned(self, load: LoadReturn) -> None: ...
    def named(self, handle: HandleNamed) -> None: ...

    def results(self) -> tuple[int, int, list[str]]:
        """How many are whole, how many other than their file, why bytes of others are missing."""
        whole = wrong = 0
        missed = [load.missed for load in self.loads if load.missed]
        for load in self.loads:
            if load.descriptor is None:
                continue
            if not load.missed:
                with mmap.mmap(load.descriptor, 0, prot=mmap.PROT_READ) as data:
                    same = any(len(one) == len(data) and data[:] == one for one in self.images)
                whole, wrong = whole + same, wrong + (not same)
            os.close(load.descriptor)
        return whole, wrong, missed


@contextmanager
def probing(settings: CallSettings, sink: Compared) -> Iterator[CudaCalls]:
    found = found_library(cuda_bed.bed().library())
    try:
        with CudaCalls(settings, sink) as calls:
            until = boot_ns() + 600_000_000_000
            with library() as bpf:
                bpf.checked(
                    "bpf_map_update_elem",
                    calls.stops_until,
                    bytes(4),
                    until.to_bytes(8, "little"),
                    0,
                )
            calls.attach(found)
            yield calls
    finally:
        os.close(found.descriptor)


def polled(calls: CudaCalls, process: subprocess.Popen[str]) -> None:
    """Takes what is told until the process has ended and nothing is left."""
    poll = select.epoll()
    poll.register(calls.fileno(), select.EPOLLIN)
    while process.poll() is None:
        poll.poll(0.05)
        calls.poll()
    while poll.poll(0):
        calls.poll()
    poll.close()
    calls.poll()


def captured(what: str, images: list[Path], count: int, settings: CallSettings, nice: int) -> None:
    """Has ``count`` processes load one image each, one after the other."""
    sink = Compared([path.read_bytes() for path in images])
    told = [str(images[number % len(images)]) for number in range(count)]
    bed = cuda_bed.bed()
    with probing(settings, sink) as calls:
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-c", LOADER, bed.program(), bed.library(), *told], text=True
        )
        os.setpriority(os.PRIO_PROCESS, 0, nice)
        polled(calls, process)
        os.setpriority(os.PRIO_PROCESS, 0, 0)
        seconds = time.monotonic() - began
        counters = calls.counters()
    whole, wrong, missed = sink.results()
    print(
        f"{what:34} {whole:4} of {count} whole, {len(missed)} told as missed, "
        f"{count - len(sink.loads)} not told, {wrong} wrong, {counters.stops} stops, "
        f"{counters.dropped} dropped; {seconds:.1f} s",
        flush=True,
    )
    for reason in sorted(set(missed)):
        print(f"{'':34}   {missed.count(reason)} x {reason}")


def load_times(image: Path, count: int, pause: float) -> list[float]:
    """Seconds of each call."""
    argv = [sys.executable, "-c", TIMER, str(cuda_bed.bed().library()), str(image)]
    process = subprocess.Popen([*argv, str(count), str(pause)], stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate()
    return [float(each) for each in output.split()]


def timed(what: str, image: Path, count: int, pause: float) -> None:
    """What a call of the load function takes, unprobed and probed."""
    bare = statistics.median(load_times(image, count, pause))
    sink = Compared([image.read_bytes()])
    bed = cuda_bed.bed()
    with probing(CallSettings(), sink) as calls:
        argv = [sys.executable, "-c", TIMER, str(bed.library()), str(image)]
        process = subprocess.Popen(
            [*argv, str(count), str(pause)], stdout=subprocess.PIPE, text=True
        )
        polled(calls, process)
        output, _ = process.communicate()
    times = sorted(float(each) for each in output.split())
    whole, _, _ = sink.results()
    print(
        f"{what:34} {bare * 1e6:8.1f} µs bare, {statistics.median(times) * 1e6:8.1f} µs probed "
        f"(least {times[0] * 1e6:.1f}, most {times[-1] * 1e6:.1f}); {whole} of {count} whole",
        flush=True,
    )


def attached(what: str, together: bool, processes: int) -> None:
    """What attaching to and detaching from a library takes that some processes have mapped."""
    asked = uprobes.together
    uprobes.together = lambda: together  # type: ignore[assignment]
    found = found_library(cuda_bed.bed().library())
    users = [cuda_bed.started("wait") for _ in range(processes)]
    try:
        times = [time.monotonic()]
        with CudaCalls(CallSettings(), Compared([])) as calls:
            times.append(time.monotonic())
            probed = calls.attach(found).probed
            times.append(time.monotonic())
            calls.detach(found.key)
            times.append(time.monotonic())
    finally:
        uprobes.together = asked
        os.close(found.descriptor)
        for user in users:
            user.kill()
            user.communicate()
    load, attach, detach = (after - before for before, after in itertools.pairwise(times))
    print(
        f"{what:34} {len(probed)} functions at both ends, {processes} processes: loaded in "
        f"{load * 1e3:.0f} ms, attached in {attach * 1e3:.0f} ms, gone in {detach * 1e3:.0f} ms",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", type=int, default=1000)
    parser.add_argument("--mid", type=int, default=100)
    parser.add_argument("--large", type=int, default=20)
    parser.add_argument("--nice", type=int, default=0, help="of who empties the ring")
    parser.add_argument("--wait-ms", type=int, default=CallSettings().wait_ms)
    options = parser.parse_args()
    for number in (1, 30):
        if uprobes.together():
            attached("one link a program", True, number)
        attached("one link a point", False, number)
    usual = CallSettings(wait_ms=options.wait_ms)
    stopping = CallSettings(wait_ms=options.wait_ms, may_stop=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = [cuda_modules.small(folder, seed) for seed in range(8)]
        mid = [cuda_modules.mid_size(folder, seed) for seed in range(4)]
        large = [cuda_modules.large(folder)]
        size = {path: f"{path.stat().st_size / 1024:.0f} KiB" for path in (*small, *mid, *large)}
        captured(f"small, {size[small[0]]}", small, options.small, usual, options.nice)
        captured(f"mid-size, {size[mid[0]]}", mid, options.mid, usual, options.nice)
        captured(f"large, {size[large[0]]}", large, options.large, usual, options.nice)
        no_wait = CallSettings(wait_ms=0)
        captured(
            f"large, {size[large[0]]}, no waiting", large, options.large, no_wait, options.nice
        )
        captured(f"large, {size[large[0]]}, may stop", large, options.large, stopping, options.nice)
        for path, count, pause in ((small[0], 300, 0.002), (mid[0], 60, 0.02), (large[0], 8, 0.5)):
            timed(f"a call, {size[path]}", path, count, pause)


if __name__ == "__main__":
    main()
