"""A real `gpuwarden watch` in a process of its own, which takes char major 203 for a GPU's.

No machine for tests has a GPU's driver. /dev/cpu/N/cpuid (203:N) is a device that opens, so the
agent is shown a /proc/devices in which 203 is NVIDIA's: by a bind mount that it alone sees.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.packages import unavailable

GPU = (203, 0)
"""A number that opens."""
NOT_THERE = (195, 7)
"""A number that is watched and gives ENXIO."""
SECONDS = 30.0
READY = "device opens are seen by"
PATIENT = ("tests.support.patient_watch",)
"""A ``program`` that tells of nobody as unknown only because the machine is busy."""


class Watching:
    """The agent, what it told so far, and its end."""

    def __init__(
        self, process: subprocess.Popen[bytes], *, told: Path, errors: Path, state: Path
    ) -> None:
        self.process = process
        self.told = told
        self.state = state
        self._errors = errors
        self._read_bytes = 0
        self._lines: list[dict[str, Any]] = []

    @property
    def pid(self) -> int:
        return self.process.pid

    def lines(self) -> list[dict[str, Any]]:
        """Every whole JSON line that it wrote to its standard output."""
        # It only grows, and a test looks many times: what was read is not read again.
        with self.told.open("rb") as file:
            file.seek(self._read_bytes)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._lines += map(json.loads, whole.splitlines())
        self._read_bytes += len(whole)
        return list(self._lines)

    def findings(self, rule: str | None = None, pid: int | None = None) -> list[dict[str, Any]]:
        """Transitions, oldest first."""
        return [
            line
            for line in self.lines()
            if line["schema"] == "gpuwarden.finding"
            and (rule is None or line["rule"] == rule)
            and (pid is None or line["subject"].get("pid") == pid)
        ]

    def events(self, pid: int | None = None) -> list[dict[str, Any]]:
        return [
            line
            for line in self.lines()
            if line["schema"] == "gpuwarden.event"
            and (pid is None or line["process"]["pid"] == pid)
        ]

    def wait_for_events(self, pid: int) -> list[dict[str, Any]]:
        """The events of a process, once there are any."""
        self.wait(lambda: self.events(pid), f"an event of {pid}")
        return self.events(pid)

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def wait(self, condition: Callable[[], object], what: str, seconds: float = SECONDS) -> float:
        """Polls until the condition holds; how long that took. Errors: AssertionError."""
        begun = time.monotonic()
        while not condition():
            assert self.process.poll() is None, f"the agent ended: {self.errors}"
            if time.monotonic() - begun > seconds:
                shown = "\n".join(json.dumps(line)[:600] for line in self.lines()[-20:])
                raise AssertionError(
                    f"{what} did not happen within {seconds:g} s\n{self.errors}\n{shown}"
                )
            time.sleep(0.005)
        return time.monotonic() - begun

    def stop(self) -> int:
        """Ends it in order; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(SECONDS)

    def kill(self) -> None:
        """Ends it at once, as a crash would."""
        self.process.kill()
        self.process.wait()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Keeps a process from running."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def devices_file(directory: Path, extra: Sequence[str] = ()) -> Path:
    """A /proc/devices in which 203 and 195 are NVIDIA's."""
    text = Path("/proc/devices").read_text()
    kept = [line for line in text.splitlines() if not line.strip().startswith(("203 ", "195 "))]
    kept[1:1] = ["195 nvidia", "203 nvidia-frontend", *extra]
    path = directory / "devices"
    path.write_text("\n".join(kept) + "\n")
    return path


def _end_with_a_line(told: Path) -> None:
    """Takes back what a killed agent wrote of its last line; it comes again whole."""
    if told.exists():
        text = told.read_bytes()
        os.truncate(told, text.rfind(b"\n") + 1)


@contextmanager
def watching(
    directory: Path,
    *arguments: str,
    sinks: Sequence[str] = ("stdout",),
    ready: bool = True,
    state: Path | None = None,
    program: Sequence[str] = ("gpuwarden",),
    stdout: int | None = None,
) -> Iterator[Watching]:
    """Runs the agent until the block ends; ``directory`` keeps its state and what it says.

    ``state`` is another place for its state, ``program`` a module with its arguments that runs it,
    ``stdout`` a descriptor that it writes to in place of a file.
    """
    if os.geteuid() != 0:
        unavailable("the agent loads eBPF as root only")
    told, errors = directory / "told.jsonl", directory / "errors.txt"
    state = state or directory / "state"
    argv = [
        "unshare", "--mount", "--propagation", "private", "sh", "-c",
        f'mount --bind {devices_file(directory)} /proc/devices && exec "$@"', "sh",
        sys.executable, "-m", *program, "watch", "--state", str(state),
        *(word for sink in sinks for word in ("--sink", sink)), *arguments,
    ]  # fmt: skip
    before = errors.read_text().count(READY) if errors.exists() else 0
    _end_with_a_line(told)
    with told.open("ab") as out, errors.open("ab") as complaints:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out if stdout is None else stdout,
            stderr=complaints,
            env={**os.environ, "PYTHONPATH": "src"},
        )
    agent = Watching(process, told=told, errors=errors, state=state)
    try:
        if ready:
            agent.wait(lambda: agent.errors.count(READY) > before, "the start")
        yield agent
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
