"""What finding CUDA driver libraries costs: reading all maps, and being told of mappings.

    python -m bench.cuda_finder

Root is needed. A few seconds long; figures are of this machine as it is loaded now.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuwarden.cuda.libraries import Libraries
from gpuwarden.cuda.mapped_files import read_executables
from gpuwarden.host import Host

PROCESSES = 100
EXECS_A_SECOND = 200
SECONDS = 10.0
_LOOP = """
n=0
while [ $n -lt {count} ]; do
  for i in 1 2 3 4 5 6 7 8 9 10; do /bin/true & done; wait
  n=$((n + 10)); sleep {pause}
done
"""


@contextmanager
def processes(count: int) -> Iterator[list[int]]:
    """Processes that have what a Python program with a few extension modules has mapped."""
    program = "import ctypes, hashlib, json, socket, ssl, sqlite3, time; time.sleep(600)"
    started = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(count)]
    try:
        time.sleep(count / 20)
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def rescan() -> None:
    """All maps of a thousand processes, files known already."""
    host = Host()
    libraries = Libraries(host, side_band=False)
    try:
        with processes(PROCESSES) as pids:
            libraries.look(pids)
            lines = sum(len(read_executables(host, pid)) for pid in pids) / len(pids)
            began = time.process_time()
            for _ in range(3):
                libraries._to_read.update(pids)
                libraries._files.begin(time.monotonic())
                libraries._read_those()
            took = (time.process_time() - began) / 3 / len(pids)
            print(f"a process's maps ({lines:.0f} files): {took * 1e6:.0f} us")
            print(f"all maps of 1,000 such processes: {took * 1e3:.3f} s of CPU")
            libraries.close()
            began = time.process_time()
            libraries = Libraries(host)
            libraries.look()
            count = len(host.kernel_pids())
            print(f"the first look ({count} processes): {time.process_time() - began:.3f} s of CPU")
    finally:
        libraries.close()


def processes_made() -> int:
    """Processes and threads made on this machine since it was started."""
    lines = Path("/proc/stat").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("processes "))


def side_band() -> None:
    """CPU while programs start all the time, and while the machine is as it is."""
    libraries = Libraries(Host())
    try:
        libraries.look()
        for execs in (0, EXECS_A_SECOND):
            pause = 10 / execs if execs else 0
            loop = _LOOP.format(count=int(execs * SECONDS), pause=max(pause - 0.02, 0.001))
            shell = subprocess.Popen(["sh", "-c", loop if execs else "sleep 3"])
            poll = select.epoll()
            poll.register(libraries.fileno(), select.EPOLLIN)
            began, cpu, looks, made = time.monotonic(), time.process_time(), 0, processes_made()
            while shell.poll() is None:
                poll.poll(1.0)
                libraries.look()
                looks += 1
            wall = time.monotonic() - began
            share = (time.process_time() - cpu) / wall
            made = processes_made() - made
            print(
                f"{execs * SECONDS / wall:.0f} execs/s of ours, {made / wall:.0f} processes/s "
                f"in all: {share:.2%} of a CPU, {looks / wall:.0f} looks/s"
            )
            poll.close()
    finally:
        libraries.close()


if __name__ == "__main__":
    if os.geteuid():
        sys.exit("root is needed")
    rescan()
    side_band()
