"""A running process that holds given files in its memory: ``code_holder.c``, built and started."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.support.fakenvml import library_directory

SOURCE = Path(__file__).with_name("code_holder.c")


@cache
def build() -> Path:
    """The program, compiled anew when its source is newer."""
    program = library_directory() / "code_holder"
    if not program.exists() or program.stat().st_mtime < SOURCE.stat().st_mtime:
        # Under its own name only once it is whole: who is killed meanwhile leaves no half program.
        fresh = program.with_suffix(f".{os.getpid()}")
        subprocess.run(
            ["gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-o", fresh, SOURCE],
            check=True,
        )
        fresh.chmod(0o755)
        fresh.rename(program)
    return program


@dataclass
class CodeHolder:
    """The process, and where it put what it was given: address and size by way, in order."""

    process: subprocess.Popen[str]
    held: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        return self.process.pid

    def counted(self) -> int:
        """How far it has counted: more each time, as long as it runs."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@contextmanager
def holding(*words: str, **options: object) -> Iterator[CodeHolder]:
    """A process that holds ``WAY:FILE`` each; ends on leaving. ``options`` are Popen's."""
    process = subprocess.Popen(  # type: ignore[call-overload]
        [build(), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )
    try:
        holder = CodeHolder(process)
        while (line := process.stdout.readline()) != "ready\n":
            assert line, "it ended before it was ready"
            way, address, size = line.split()
            holder.held[way] = (int(address), int(size))
        yield holder
    finally:
        process.kill()
        process.communicate()
