"""The eBPF probes in tests: built here, loaded, read, with nodes that open and programs that do."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
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
OPENERS = f"/tmp/gpuwarden-openers-{os.getpid()}"
EVERYTHING = Settings(limit_events=0)


@cache
def build() -> None:
    """Builds the probes, once in a run; skips where this machine cannot."""
    require_root()
    require("clang", "llvm", "libbpf-dev", "libc6-dev", "libbpf1", "gcc")
    done = run(ROOT / "scripts/build_probes")
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
    *argv: object, check: bool = False, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in argv]
    return subprocess.run(words, check=check, env=env, capture_output=True, text=True, timeout=60)


def drained(probe: DeviceOpenProbe) -> list[Event]:
    """What was told of this test's processes before now: the ring is empty after the last batch."""
    events: list[Event] = []
    while batch := probe.poll(0):
        events += [event for event in batch if not isinstance(event, OpenEvent) or is_ours(event)]
    return events


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
        for path in ("gpuwarden-test-denied", "gpuwarden-test-denied/below"):
            made.append(mounts[hierarchy] / path)
            made[-1].mkdir(exist_ok=True)
        return made[-2]

    try:
        yield make
    finally:
        for path in made[::-1]:
            path.rmdir()


def opened_in(group: Path, opener: Path, path: Path) -> bool:
    script = 'echo $$ > "$1/cgroup.procs" && exec "$2" open "$3"'
    done = run("sh", "-c", script, "sh", group, opener, path)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip() == "1"
