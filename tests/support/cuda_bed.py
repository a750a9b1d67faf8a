"""A stand-in CUDA driver library, and programs that call it as a script says, for tests and bench.

What a script can say is told at the top of ``cuda_stub/program*.c``.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

SOURCES = Path(__file__).with_name("cuda_stub")
FILE_NAME = "libcuda.so.535.99.01"
SONAME = "libcuda.so.1"
BUILD_ID = "c0da00000000000000000000000000000000b1d1"
OTHER_BUILD_ID = "c0da00000000000000000000000000000000b1d2"

Variant = Literal[
    "plain", "push", "endbr", "nested", "other build-id", "no build-id", "no soname", "renamed"
]

_WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-strict-prototypes")
_SONAME = f"-Wl,-soname,{SONAME}"
_IDENTITY = f"-Wl,--build-id=0x{BUILD_ID}"
_VARIANTS: dict[Variant, tuple[str, ...]] = {
    "plain": (_SONAME, _IDENTITY),
    "push": ("-DPROLOGUE_PUSH", _SONAME, f"-Wl,--build-id=0x{OTHER_BUILD_ID}"),
    "endbr": ("-DLAUNCH_ENDBR", _SONAME, _IDENTITY),
    "nested": ("-DNESTED", _SONAME, _IDENTITY),
    "other build-id": (_SONAME, f"-Wl,--build-id=0x{OTHER_BUILD_ID}"),
    "no build-id": (_SONAME, "-Wl,--build-id=none"),
    "no soname": (_IDENTITY,),
    "renamed": (_SONAME, _IDENTITY),
}
"""How each differs: the rest is the same in all."""


@dataclass(frozen=True)
class Bed:
    """Where it is built; what is asked for is built once."""

    folder: Path

    def library(self, variant: Variant = "plain") -> Path:
        """The file of a variant; beside it, but for ``renamed``, is its link of the SONAME."""
        place = self.folder / variant.replace(" ", "-")
        name = "libaccelerate.so" if variant == "renamed" else FILE_NAME
        if not (place / name).exists():
            place.mkdir(mode=0o755)
            sources = [SOURCES / each for each in ("entries.S", "driver.c", "code.c")]
            options = ("-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-Bsymbolic", "-Wl,-z,defs")
            _compile(place / name, sources, *options, *_VARIANTS[variant])
            if variant != "renamed":
                (place / SONAME).symlink_to(name)
        return place / name

    def copied(self, name: str, variant: Variant = "plain") -> Path:
        """A new file with the same bytes: another inode, whatever ``name`` it is given."""
        place = Path(tempfile.mkdtemp(dir=self.folder))
        place.chmod(0o755)
        return Path(shutil.copy(self.library(variant), place / name))

    def program(self, *, linked: bool = False) -> Path:
        """The program; ``linked``: with the library as one that it needs, found by its SONAME."""
        made = self.folder / f"cuda_program{'_linked' * linked}"
        if not made.exists():
            needs = ("-Wl,--no-as-needed", str(self.library())) if linked else ()
            _compile(made, sorted(SOURCES.glob("program*.c")), *needs, "-ldl")
        return made


def _compile(made: Path, sources: Sequence[Path], *options: str) -> None:
    argv = ["gcc", "-O2", "-pthread", *_WARNINGS, "-o", *map(str, (made, *sources)), *options]
    subprocess.run(argv, check=True)
    made.chmod(0o755)


def build(folder: Path) -> Bed:
    """The plain library and its program, built in a folder that must not be used for other things.

    Errors: subprocess.CalledProcessError, FileNotFoundError where there is no gcc.
    """
    bed = Bed(folder)
    bed.library()
    bed.program()
    return bed


@cache
def bed() -> Bed:
    """The test run's own, gone with it."""
    # Here alone, for bench/ has no pytest.
    from tests.support.packages import require

    require("gcc", "libc6-dev")
    folder = Path(tempfile.mkdtemp(prefix="gpuwarden-cuda-"))
    folder.chmod(0o755)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return build(folder)


class CommandFailed(AssertionError):
    """The program answered a command with an error."""


@dataclass
class Program:
    """A program that waits for commands."""

    process: subprocess.Popen[str]
    pid: int = 0
    said: list[str] = field(default_factory=list)

    def do(self, *commands: str) -> int:
        """Runs commands, one right after the other; what the last one answered.

        Errors: CommandFailed, with the function and its result.
        """
        self.tell(*commands)
        return self.answer()

    def tell(self, *commands: str) -> None:
        """Gives it commands without waiting for them; ``answer`` waits."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ; ".join(commands) + "\n")
        self.process.stdin.flush()

    def answer(self) -> int:
        """What the commands that it was last told came to; what it says meanwhile is kept."""
        while True:
            word, _, rest = self._line().partition(" ")
            if word == "ok":
                return int(rest)
            if word == "error":
                raise CommandFailed(rest)
            self.said.append(f"{word} {rest}".strip())

    def wait_ready(self) -> None:
        """Until it has run what was in its arguments."""
        while (line := self._line()) != "ready":
            if line.startswith("error "):
                raise CommandFailed(line.removeprefix("error "))

    def end(self) -> int:
        """Ends its input, at which it exits; its status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(timeout=20)

    def close(self) -> None:
        """Kills it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise CommandFailed(f"the program ended with status {self.process.wait(timeout=20)}")
        return line.rstrip("\n")


@contextmanager
def running(
    *commands: str,
    library: Path | str | None = None,
    linked: bool = False,
    environment: Mapping[str, str] | None = None,
    of: Bed | None = None,
) -> Iterator[Program]:
    """A program that has run ``commands`` and waits for more; killed on leaving.

    ``library``: what it opens, the plain one unless it is given; ``"-"`` none.
    """
    argv, env = _how(of or bed(), commands, library, linked, environment)
    process = subprocess.Popen(
        [*argv, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    program = Program(process, process.pid)
    try:
        program.wait_ready()
        yield program
    finally:
        program.close()


def started(
    *commands: str,
    library: Path | str | None = None,
    linked: bool = False,
    environment: Mapping[str, str] | None = None,
    of: Bed | None = None,
) -> subprocess.Popen[str]:
    """A program that runs ``commands`` and ends, started; its caller waits for it."""
    argv, env = _how(of or bed(), commands, library, linked, environment)
    return subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=env
    )


def ran(*commands: str, library: Path | str | None = None, of: Bed | None = None) -> list[int]:
    """What each of ``commands`` answered in a program that then ended. Errors: CommandFailed."""
    process = started(*commands, library=library, of=of)
    output, _ = process.communicate(timeout=60)
    answers = [line for line in output.splitlines() if line.startswith(("ok ", "error "))]
    for line in answers:
        if line.startswith("error "):
            raise CommandFailed(line.removeprefix("error "))
    return [int(line.removeprefix("ok ")) for line in answers]


def _how(
    bed: Bed,
    commands: Sequence[str],
    library: Path | str | None,
    linked: bool,
    environment: Mapping[str, str] | None,
) -> tuple[list[str], dict[str, str]]:
    env = {**os.environ, **(environment or {})}
    if linked:
        env["LD_LIBRARY_PATH"] = str(Path(library or bed.library()).parent)
        return [str(bed.program(linked=True)), "linked", *commands], env
    return [str(bed.program()), str(library or bed.library()), *commands], env
