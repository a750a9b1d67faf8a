"""The shipped systemd unit in a real systemd: started as it is, or with rights taken from it.

The machine sees the whole control group hierarchy, and a /proc/devices in which 203 is NVIDIA's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.guest.unit_text import INSTALLED, sandbox
from tests.support.probes import build
from tests.support.systemd import SystemdMachine, running_systemd
from tests.support.watching import GPU, devices_file

DEPLOY = Path(__file__).parents[2] / "deploy" / "systemd"
TOLD = "/run/told.jsonl"
SERVICE = "gpuwarden.service"
SECONDS = 30.0
USER = 1234
_DOCTOR = """[Unit]
DefaultDependencies=no
[Service]
Type=oneshot
RemainAfterExit=yes
SuccessExitStatus=1 2
StandardOutput=file:/run/{name}.json
ExecStart={program} doctor --format json
{sandbox}
"""
_OPEN = "import os, sys, time; os.open(sys.argv[1], os.O_RDONLY); time.sleep(1000)"


def shipped() -> str:
    """The unit as it ships."""
    return (DEPLOY / SERVICE).read_text()


@dataclass
class UnitBed:
    """The machine with the unit running."""

    machine: SystemdMachine

    def property(self, name: str, unit: str = SERVICE) -> str:
        return self.machine.run("systemctl", "show", "--property", name, "--value", unit).strip()

    def wait_for(self, unit: str) -> None:
        """Until it is up, or not to be had. Errors: AssertionError."""
        until = time.monotonic() + SECONDS
        while self.property("ActiveState", unit) not in ("active", "failed"):
            assert time.monotonic() < until, f"{unit} does not come up"
            time.sleep(0.05)

    def lines(self) -> list[dict[str, Any]]:
        """What the daemon told so far."""
        text = (Path(self.machine.root + TOLD)).read_bytes()
        return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]

    def doctor(self, name: str) -> dict[str, tuple[str, str]]:
        """Sensor or source → (state, reason), as the doctor of that name found."""
        answer = json.loads(Path(f"{self.machine.root}/run/{name}.json").read_text())
        rows = [*answer["sensors"], *answer["sources"], answer["opens"]]
        return {row["name"]: (row["state"], row.get("reason", "")) for row in rows}

    def wait(self, condition: Callable[[], Any], what: str, seconds: float = SECONDS) -> Any:
        """Polls until it holds, and gives what it gave. Errors: AssertionError."""
        until = time.monotonic() + seconds
        while not (found := condition()):
            status = self.property("StatusText")
            assert time.monotonic() < until, f"{what}: {status}\n{self.lines()[-5:]}"
            time.sleep(0.05)
        return found

    @contextmanager
    def opener(self, node: Path) -> Iterator[int]:
        """A user's process with the device open; its pid there."""
        words = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups")
        argv = [*words, sys.executable, "-c", _OPEN, str(node)]
        process = subprocess.Popen(self.machine.command(*argv))
        try:
            yield process.pid
        finally:
            process.kill()
            process.wait()

    def open_of(self, path: str) -> dict[str, Any] | None:
        """The first open of that path that was told."""
        return next(
            (
                line
                for line in self.lines()
                if line["schema"] == "gpuwarden.event"
                and line["how"] == "open"
                and line["device"]["path"] == path
            ),
            None,
        )


@contextmanager
def running_unit(folder: Path, unit: str) -> Iterator[UnitBed]:
    """A machine with ``unit`` started, and two doctors: ``free``, and ``held`` in its sandbox."""
    build()
    program = f"{sys.executable} -m gpuwarden"
    # A unit with mounts of its own has a /proc of its own.
    seen = f"BindReadOnlyPaths={devices_file(folder)}:/proc/devices"
    started = unit.replace("[Unit]", "[Unit]\nDefaultDependencies=no")
    # A machine that halts for some seconds is not to end it: a beat is due each third of this.
    started = started.replace("WatchdogSec=60", "WatchdogSec=12")
    started = started.replace(
        f"ExecStart={INSTALLED} watch",
        f"{seen}\nStandardOutput=truncate:{TOLD}\nStandardError=null\n"
        f"ExecStart={program} watch --events --sink stdout",
    )
    socket = (DEPLOY / "gpuwarden.socket").read_text()
    units = {
        SERVICE: started,
        "gpuwarden.socket": socket.replace("[Unit]", "[Unit]\nDefaultDependencies=no"),
        "free.service": _DOCTOR.format(name="free", program=program, sandbox=seen),
        "held.service": _DOCTOR.format(
            name="held", program=program, sandbox=f"{seen}\n{sandbox(unit)}"
        ),
    }
    with running_systemd(units, own_cgroups=False) as machine:
        bed = UnitBed(machine)
        for name in (SERVICE, "free.service", "held.service"):
            bed.wait_for(name)
        yield bed


def gpu_node(machine: SystemdMachine) -> Path:
    """A node of the GPU on that machine, as it is called there."""
    path = Path("/dev/nvidia0")
    there = f"{machine.root}{path}"
    os.unlink(there)
    os.mknod(there, 0o020666, os.makedev(*GPU))
    os.chmod(there, 0o666)
    return path
