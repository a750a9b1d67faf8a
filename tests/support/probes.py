"""The eBPF probes in tests: built here, loaded, read, with nodes that open and programs that do."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from gpuwarden.errors import Unavailable
from gpuwarden.probes import loading
from gpuwarden.probes.events import Event, OpenEvent
from gpuwarden.probes.loader import DeviceOpenProbe
from gpuwarden.probes.settings import Number, Settings
from tests.support import containers
from tests.support.packages import require, require_root, unavailable

ROOT = Path(__file__).resolve().parents[2]
# Majors of drivers that this machine lacks give ENXIO; /dev/full and /dev/zero stand in for nodes
# that open. /dev/null is never watched.
NVIDIA = (195, None)
FULL = (1, 7)
ZERO = (1, 5)
UNUSED = (195, 100 + os.getpid() % 100)
RUN = f"{os.getpid()}-{secrets.token_hex(4)}"
"""In the names of what is made outside a test's own folder: a run that was killed left its own."""
OPENERS = f"/tmp/gpuwarden-openers-{RUN}"
EVERYTHING = Settings(limit_events=0)
DRAIN_SECONDS = 20.0
BUILD_SECONDS = 600


@cache
def build() -> None:
    """Builds the probes, once in a run; skips where this machine cannot."""
    require_root()
    require("clang", "llvm", "libbpf-dev", "libc6-dev", "libbpf1", "gcc")
    done = run(ROOT / "scripts/build_probes", seconds=BUILD_SECONDS)
    assert done.returncode == 0, done.stderr


@contextmanager
def openers() -> Iterator[Path]:
    """tests/support/openers.c, compiled."""
    binary = Path(OPENERS) / "opener"
    binary.parent.mkdir()
    try:
        run("gcc", "-O2", "-o", binary, ROOT / "tests/support/openers.c", check=True)
        yield binary
    finally:
        shutil.rmtree(OPENERS)


@contextmanager
def probing(
    settings: Settings = EVERYTHING, *numbers: Number, way: str = "cgroup/dev"
) -> Iterator[DeviceOpenProbe]:
    """A loaded probe; a skip, in CI a failure, where this kernel takes none."""
    probe = DeviceOpenProbe(numbers or (NVIDIA, FULL), settings, way=way)
    try:
        probe.__enter__()
    except Unavailable as error:
        unavailable(f"this kernel takes no such probe: {error}")
    try:
        yield probe
    finally:
        probe.close()


def node(path: Path, number: tuple[int, int]) -> Path:
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(*number))
    return path


def run(
    *argv: object, check: bool = False, env: dict[str, str] | None = None, seconds: float = 60
) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in argv]
    return subprocess.run(
        words, check=check, env=env, capture_output=True, text=True, timeout=seconds
    )


def drained(probe: DeviceOpenProbe) -> list[Event]:
    """What was told of this test's processes before now, whatever others add meanwhile.

    That a poll gives nothing does not say so: a record that another's open is about to write keeps
    those behind it back. Errors: AssertionError.
    """
    events: list[Event] = []
    end = time.monotonic() + DRAIN_SECONDS
    with _ring_positions(probe) as (taken, made):
        before = made()
        while True:
            batch = probe.poll(0)
            events += [one for one in batch if not isinstance(one, OpenEvent) or is_ours(one)]
            if taken() >= before:
                return events
            assert time.monotonic() < end, "the ring was not emptied"


@contextmanager
def _ring_positions(
    probe: DeviceOpenProbe,
) -> Iterator[tuple[Callable[[], int], Callable[[], int]]]:
    """How many bytes of the ring were taken so far, and how many were made."""
    ring, page = probe._loaded.map("records"), mmap.PAGESIZE
    with (
        mmap.mmap(ring, page, mmap.MAP_SHARED, mmap.PROT_READ) as consumer,
        mmap.mmap(ring, page, mmap.MAP_SHARED, mmap.PROT_READ, offset=page) as producer,
    ):
        yield (
            lambda: int.from_bytes(consumer[:8], "little"),
            lambda: int.from_bytes(producer[:8], "little"),
        )


def is_ours(event: OpenEvent) -> bool:
    """Other programs of the machine may use the stand-ins meanwhile."""
    who = event.process
    return (
        os.getpid() in (who.pid, who.ppid)
        or "gpuwarden-test" in (who.cgroup_path or "")
        or (who.exe_path or "").startswith(OPENERS)
    )


def opens(events: list[Event], **wanted: object) -> list[OpenEvent]:
    return [
        event
        for event in events
        if isinstance(event, OpenEvent)
        and all(getattr(event, name) == value for name, value in wanted.items())
    ]


def by(pid: int, events: list[Event]) -> list[OpenEvent]:
    return [event for event in opens(events) if event.process.pid == pid]


@contextmanager
def tracefs() -> Iterator[None]:
    """tracefs, mounted if it is not."""
    if any(map(os.path.isdir, loading.TRACEFS)):
        yield
        return
    run("mount", "-t", "tracefs", "tracefs", "/sys/kernel/tracing", check=True)
    yield
    run("umount", "-l", "/sys/kernel/tracing")


@contextmanager
def control_groups() -> Iterator[Callable[[str], Path]]:
    """Makes control groups in the hierarchy of a name ("" is version 2), and removes them."""
    made: list[Path] = []

    def make(hierarchy: str) -> Path:
        mounts = containers.cgroup_mounts()
        if hierarchy not in mounts:
            pytest.skip(f"no hierarchy {hierarchy or 'of version 2'} is mounted here")
        for path in (f"gpuwarden-test-{RUN}", f"gpuwarden-test-{RUN}/below"):
            made.append(mounts[hierarchy] / path)
            made[-1].mkdir()
        return made[-2]

    try:
        yield make
    finally:
        for path in made[::-1]:
            containers.wait_until(lambda group=path: _removed(group), f"{path} empty")  # type: ignore[misc]


def _removed(group: Path) -> bool:
    """Whether it is gone: one who has just ended may still be counted as in it."""
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


def opened_in(group: Path, opener: Path, path: Path) -> bool:
    script = 'echo $$ > "$1/cgroup.procs" && exec "$2" open "$3"'
    done = run("sh", "-c", script, "sh", group, opener, path)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip() == "1"
