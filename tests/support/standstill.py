"""How long processes stood still, as another process sees it every 20 ms."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import NamedTuple, Self

from gpuwarden.errors import Malformed
from gpuwarden.sensors.process.stat_lines import parse_stat

EVERY_SECONDS = 0.02
PAUSE_LIMIT_SECONDS = 0.1
"""Of a pause of the watcher's own no more counts: when the whole machine stands still, nobody can
continue anybody."""


class Longest(NamedTuple):
    """Of one process."""

    seconds: float
    """The longest stretch in which it was stopped every time and had not run in between."""
    stretches: int
    ended: bool
    """It was gone at the last look."""


class Standstill:
    """A context manager that watches processes; ``longest`` is there afterwards."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = list(pids)
        self.longest: dict[int, Longest] = {}
        self.looks = 0
        self.longest_pause = 0.0
        """Between two looks: the machine was too busy to look more often."""

    def __enter__(self) -> Self:
        argv = [sys.executable, "-m", "tests.support.standstill", *map(str, self._pids)]
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "watching\n"
        return self

    def __exit__(self, *_: object) -> None:
        said, _rest = self._process.communicate(timeout=20)
        found = json.loads(said)
        self.looks, self.longest_pause = found["looks"], found["pause"]
        self.longest = {int(pid): Longest(*seen) for pid, seen in found["longest"].items()}


def _seen(pid: int) -> tuple[str, int] | None:
    """Its state, and for how long it has run so far, in nanoseconds."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = parse_stat(file.read()).state
        with open(f"/proc/{pid}/schedstat", "rb") as file:
            return state, int(file.read().split()[0])
    except (OSError, Malformed, ValueError, IndexError):
        return None


def main() -> None:
    """Watches the pids of the command line until its input ends, then says what it saw."""
    pids = [int(word) for word in sys.argv[1:]]
    ended = False

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_blocking(0, False)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    since: dict[int, tuple[float, int]] = {}
    longest = dict.fromkeys(pids, 0.0)
    stretches = dict.fromkeys(pids, 0)
    gone: set[int] = set()
    looks, pause, last = 0, 0.0, time.monotonic()
    watched = 0.0
    print("watching", flush=True)
    while not ended:
        now = time.monotonic()
        watched += min(now - last, PAUSE_LIMIT_SECONDS)
        looks, pause, last = looks + 1, max(pause, now - last), now
        for pid in pids:
            seen = _seen(pid)
            if seen is None or seen[0] != "T":
                since.pop(pid, None)
                if seen is None:
                    gone.add(pid)
                continue
            if pid not in since or since[pid][1] != seen[1]:
                since[pid] = (watched, seen[1])
                stretches[pid] += 1
            longest[pid] = max(longest[pid], watched - since[pid][0])
        time.sleep(max(0.0, EVERY_SECONDS - (time.monotonic() - now)))
        with contextlib.suppress(BlockingIOError):
            ended = os.read(0, 1) == b""
    found = {str(pid): (longest[pid], stretches[pid], pid in gone) for pid in pids}
    print(json.dumps({"looks": looks, "pause": pause, "longest": found}), flush=True)


if __name__ == "__main__":
    main()
