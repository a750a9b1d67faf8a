"""Idle processes of every shape for tests, ended by pid when the test is over."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SLEEP = shutil.which("sleep") or "/bin/sleep"
PATIENCE_SECONDS = 20.0
PAUSE = "\nimport signal, sys\nsys.stdout.flush()\nsignal.pause()"


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """Polls until ``condition`` gives something true, and returns it."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.005)
    raise AssertionError(f"never happened: {what}")


class Idlers:
    """Starts processes that do nothing, and ends all of them."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def binary(self, path: str | Path, argv: list[str] | None = None, **kwargs: Any) -> int:
        """Runs ``path``, a copy of sleep(1), for an hour; ``argv`` holds the name it goes by."""
        words = argv or [str(path)]
        process = subprocess.Popen(
            [*words, "3600"] if len(words) == 1 else words,
            executable=str(path),
            stdin=subprocess.DEVNULL,
            text=True,
            **kwargs,
        )
        self._started.append(process)
        wait_for(lambda: _executes(process.pid, path), f"{path} is run")
        # The kernel shows the binary before the words and the environment: it sleeps after both.
        wait_for(lambda: _sleeps(process.pid), f"{path} sleeps")
        return process.pid

    def python(self, code: str, *arguments: str, **kwargs: Any) -> tuple[int, list[str]]:
        """Runs Python ``code`` that prints one line when ready, then waits: (pid, its words)."""
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code) + PAUSE, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            **kwargs,
        )
        self._started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the process ended before it was ready"
        return process.pid, line.split()

    def close(self) -> None:
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
        for process in self._started:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _executes(pid: int, path: str | Path) -> bool:
    try:
        return os.path.samefile(f"/proc/{pid}/exe", path)
    except OSError:
        return False


def _sleeps(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "S"


@contextlib.contextmanager
def idlers() -> Iterator[Idlers]:
    """An ``Idlers`` whose processes are ended on the way out."""
    made = Idlers()
    try:
        yield made
    finally:
        made.close()
