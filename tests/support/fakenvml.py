"""Builds the stand-in NVML library and writes the state that it answers from."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).with_name("fakenvml.c")
REPOSITORY = SOURCE.parents[2]
LIBRARY_NAME = "libnvidia-ml.so.1"
ENVIRONMENT = "FAKE_NVML_STATE"


def _is_roots_alone(directory: Path) -> bool:
    """Whether a library there passes the product's check, and nobody may enter (stated anew)."""
    for part in (directory, *directory.parents):
        status = part.stat()
        if status.st_uid != 0 or status.st_mode & 0o022 or not status.st_mode & 0o001:
            return False
    return True


@functools.cache
def library_directory() -> Path:
    """A directory of root's alone where things may be built, outside the checkout if need be."""
    inside = REPOSITORY / "build" / "fakenvml"
    if os.geteuid() != 0 or _is_roots_alone(REPOSITORY):
        inside.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            for part in (inside, inside.parent):
                part.chmod(0o755)
        return inside
    outside = Path(tempfile.mkdtemp(prefix="gpuwarden-fakenvml-", dir="/var/lib"))
    outside.chmod(0o755)
    atexit.register(shutil.rmtree, outside, ignore_errors=True)
    return outside


@functools.cache
def build_library() -> Path:
    """The built library, compiled anew when its source is newer."""
    library = library_directory() / LIBRARY_NAME
    if not library.exists() or library.stat().st_mtime < SOURCE.stat().st_mtime:
        fresh = library.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [
                *("gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-attributes", "-shared"),
                *("-fPIC", "-Wl,--build-id=0xfa4e0000000000000000000000000000000000aa"),
                *("-Wl,-soname," + LIBRARY_NAME, "-fvisibility=hidden", "-o"),
                *(str(fresh), str(SOURCE)),
            ],
            check=True,
        )
        fresh.chmod(0o755)
        fresh.rename(library)
    return library


class FakeNvml:
    """The records of a state file in the making; ``gpu``, ``mig``, ``process`` … add one each."""

    def __init__(self, **system: object) -> None:
        self._lines: list[str] = []
        self._record("system", **system)

    def _record(self, word: str, **fields: object) -> FakeNvml:
        self._lines.append("\t".join([word, *(f"{key}={value}" for key, value in fields.items())]))
        return self

    def gpu(self, **fields: object) -> FakeNvml:
        return self._record("gpu", **fields)

    def mig(self, **fields: object) -> FakeNvml:
        return self._record("mig", **fields)

    def process(self, pid: int, **fields: object) -> FakeNvml:
        return self._record("process", pid=pid, **fields)

    def sample(self, pid: int, sm: int, **fields: object) -> FakeNvml:
        return self._record("sample", pid=pid, sm=sm, **fields)

    def stream(self, pid: int, sm: int, **fields: object) -> FakeNvml:
        return self._record("stream", pid=pid, sm=sm, **fields)

    def accounted(self, pid: int, **fields: object) -> FakeNvml:
        return self._record("accounted", pid=pid, **fields)

    def answer(self, function: str, code: int | str, **fields: object) -> FakeNvml:
        return self._record("answer", function=function, **{"return": code}, **fields)

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def replace(self) -> None:
        """Puts this state where the one that is in place was."""
        state = Path(os.environ[ENVIRONMENT])
        fresh = state.with_suffix(".fresh")
        fresh.write_text(self.text(), errors="surrogateescape")
        fresh.chmod(0o644)
        fresh.rename(state)

    @contextmanager
    def in_place(self) -> Iterator[str]:
        """Sets the environment to this state and gives the library's path; undone on leaving."""
        library = build_library()
        with tempfile.NamedTemporaryFile(
            "w", dir=library_directory(), prefix="state-", errors="surrogateescape"
        ) as file:
            file.write(self.text())
            file.flush()
            Path(file.name).chmod(0o644)
            before = os.environ.get(ENVIRONMENT)
            os.environ[ENVIRONMENT] = file.name
            try:
                yield str(library)
            finally:
                if before is None:
                    del os.environ[ENVIRONMENT]
                else:
                    os.environ[ENVIRONMENT] = before
