"""The guest under qemu's own emulation (no KVM): boots it, shows what it says, judges its end."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path
from typing import NamedTuple

GUESTS = {
    "small": "rdinit=/init",
    "systemd": "rdinit=/lib/systemd/systemd systemd.unit=guest.target systemd.show_status=no",
    "unit": "rdinit=/lib/systemd/systemd systemd.unit=guest.target systemd.show_status=no "
    "checks=unit",
}
"""Guest → what its kernel is told of its first process."""
LIMIT_SECONDS = 1800.0
"""Of one guest; it is far below a minute a way on a machine that does nothing else."""
MEMORY_MIB = 1024
PROCESSORS = 2
_KERNEL = (
    "console=ttyS0 quiet loglevel=3 lsm=lockdown,capability,bpf mitigations=off panic=-1 "
    "systemd.log_level=err systemd.unified_cgroup_hierarchy=1"
)
_LINE_WORDS = ("ok", "FAILED", "#")
_LAST_LINES = 40


class Result(NamedTuple):
    """How a guest's checks went; ``complete``: it said itself that all were run."""

    guest: str
    passed: int
    failed: int
    complete: bool
    booted_seconds: float
    seconds: float

    @property
    def is_good(self) -> bool:
        return self.complete and self.failed == 0 and self.passed > 0

    def __str__(self) -> str:
        text = f"{self.guest}: {self.passed} ok, {self.failed} failed"
        if not self.complete:
            text += ", and it did not come to its end"
        return f"{text}; booted in {self.booted_seconds:.1f} s, {self.seconds:.1f} s in all"


def command(guest: str, kernel: Path, archive: Path) -> list[str]:
    """The emulator's command line: two processors, a serial line, and nothing else."""
    return [
        "qemu-system-x86_64",
        *("-accel", "tcg,thread=multi", "-cpu", "max"),
        *("-smp", str(PROCESSORS), "-m", str(MEMORY_MIB)),
        *("-nodefaults", "-no-user-config", "-display", "none", "-nic", "none", "-no-reboot"),
        *("-kernel", str(kernel), "-initrd", str(archive), "-serial", "stdio"),
        *("-append", f"{_KERNEL} {GUESTS[guest]}"),
    ]


def boot(guest: str, kernel: Path, archive: Path, work: Path) -> Result:
    """Boots it and prints each check as it comes; all of its console goes to ``work``."""
    begun = time.monotonic()
    passed = failed = 0
    booted = 0.0
    complete = False
    said: list[str] = []
    with (
        (work / f"{guest}.log").open("w") as log,
        subprocess.Popen(
            command(guest, kernel, archive),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="backslashreplace",
        ) as emulator,
    ):
        limit = threading.Timer(LIMIT_SECONDS, emulator.kill)
        limit.start()
        try:
            assert emulator.stdout is not None
            for raw in emulator.stdout:
                log.write(raw)
                line = raw.strip()
                said.append(line)
                word, _, rest = line.partition(" ")
                if word == "BOOTED":
                    booted = time.monotonic() - begun
                elif word == "DONE":
                    complete = rest == f"{passed} {failed}"
                elif word in _LINE_WORDS:
                    passed += word == "ok"
                    failed += word == "FAILED"
                    print(f"{guest:8}{line}", flush=True)
        finally:
            limit.cancel()
            emulator.kill()
    if not complete:
        print("\n".join(said[-_LAST_LINES:]))
    return Result(guest, passed, failed, complete, booted, time.monotonic() - begun)
