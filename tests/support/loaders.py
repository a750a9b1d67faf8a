"""Many programs that load modules at once, again and again, and notice what goes wrong."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from tests.support import cuda_bed
from tests.support.cuda_bed import CommandFailed, Program

ROUND = (
    "load cuModuleLoadData m i",
    "unload m",
    "sleep 40000",
    "load cuLibraryLoadData l i",
    "unload-library l",
    "sleep 20000",
)


def image(path: Path, size_bytes: int) -> Path:
    """A fatbin by its header, with bytes that are no module."""
    body = os.urandom(size_bytes)
    path.write_bytes(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body)
    return path


class Loaders:
    """A context manager: the programs, begun on entering; ``end`` waits for all."""

    def __init__(self, count: int, library: Path, image: Path) -> None:
        self._count = count
        self._library = library
        self._image = image
        self._stack = ExitStack()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._programs: list[Program] = []
        self.rounds = 0
        self.troubles: list[str] = []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for _ in range(self._count):
                commands = f"image i heap {self._image}"
                program = cuda_bed.running(commands, library=self._library)
                self._programs.append(stack.enter_context(program))
            self._stack = stack.pop_all()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._stack.close()

    @property
    def pids(self) -> list[int]:
        return [program.pid for program in self._programs]

    def _work(self) -> None:
        while not self._stop.is_set():
            self._all(" ; ".join(ROUND))
            # A child has the probes of its parent's pages. Nobody waits for it: a few are enough.
            if self.rounds % 50 == 0:
                self._all(f"fork {' ; '.join(ROUND)}", self._programs[:5])
            self.rounds += 1

    def _all(self, commands: str, programs: Sequence[Program] | None = None) -> None:
        wanted = self._programs if programs is None else programs
        try:
            for program in wanted:
                program.tell(commands)
            for program in wanted:
                program.answer()
        except (CommandFailed, OSError) as error:
            self.troubles.append(f"{commands[:40]}: {error}")
            self._stop.set()

    def end(self) -> list[int]:
        """Ends the programs in order; their exit codes."""
        self._stop.set()
        self._thread.join()
        return [program.end() for program in self._programs]
