"""A real `gpuwarden trace` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.packages import require_root
from tests.support.probes import build

SECONDS = 60.0


class Tracing:
    """The command, what it wrote so far, and its end."""

    def __init__(self, process: subprocess.Popen[bytes], told: Path, errors: Path) -> None:
        self.process = process
        self._told = told
        self._errors = errors

    @property
    def text(self) -> str:
        return self._told.read_text()

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def wait(self, condition: Callable[[str], object], what: str) -> None:
        """Polls what it wrote until the condition holds. Errors: AssertionError."""
        until = time.monotonic() + SECONDS
        while not condition(self.text):
            assert time.monotonic() < until, f"{what}: {self.text}\n{self.errors}"
            assert self.process.poll() is None, f"{what}: it ended\n{self.text}\n{self.errors}"
            time.sleep(0.02)

    def stop(self) -> int:
        """Interrupts it, as a person would; its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(SECONDS)


@contextmanager
def tracing(
    folder: Path, *arguments: str, program: Sequence[str] = ("gpuwarden",), columns: int = 140
) -> Iterator[Tracing]:
    """Runs it until the block ends; ``program`` is the module, with its arguments, that runs it."""
    require_root()
    build()
    told, errors = folder / "trace.txt", folder / "trace-errors.txt"
    with told.open("wb") as out, errors.open("wb") as complaints:
        process = subprocess.Popen(
            [sys.executable, "-m", *program, "trace", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=complaints,
            env={**os.environ, "PYTHONPATH": "src", "COLUMNS": str(columns)},
        )
    traced = Tracing(process, told, errors)
    try:
        yield traced
    finally:
        traced.stop()
