"""The systemd unit that ships: everything works in its sandbox, and what each capability is for."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.guest.inside import cuda, place
from tests.guest.inside.report import Report
from tests.guest.inside.systemd import run_of
from tests.guest.unit_text import INSTALLED, capabilities, sandbox, without

SHIPPED = "/opt/checks/deploy"
PYTHON = "/usr/bin/python3 -m gpuwarden"
UNITS = "/run/systemd/system"
TOLD, LOOKED = "/run/unit-told.jsonl", "/run/unit-looked.json"
ERRORS = "/run/unit-errors.txt"
CRONTAB = "/var/spool/cron/crontabs/alice"
IMPLIED = ("CAP_SYSLOG",)
"""What a newer kernel asks for beside CAP_SYS_ADMIN, and an older one does not."""
PATIENCE_SECONDS = 20.0
UP_SECONDS = 120.0
HOLD = (
    "import os, sys, time; os.open(sys.argv[1], os.O_RDONLY); print(flush=True); time.sleep(9999)"
)
_ENVIRONMENT = "Environment=PYTHONPATH=/opt/site:/opt/checks PATH=/bin:/usr/bin"
Works = dict[str, object]


def run(report: Report) -> None:
    """The whole unit first: without it, nothing is learned from less."""
    with open(f"{SHIPPED}/gpuwarden.service", encoding="utf-8") as file:
        unit = file.read()
    make_crontab()
    whole: Works = {}

    def everything() -> str:
        free = looked("")
        whole.update(works(unit))
        found = whole.pop("doctor")
        assert found == free["doctor"], f"{found} instead of {free['doctor']}"
        whole["doctor"] = found
        wrong = [name for name, holds in whole.items() if not holds]
        assert not wrong, f"{wrong}: {told_of_cuda()}"
        return ", ".join(whole)

    report.check("unit:exposure", exposure)
    if not report.check("unit:whole", everything):
        return
    for capability in capabilities(unit):

        def less(capability: str = capability) -> str:
            lost = differences(whole, works(without(unit, capability)))
            if not lost and capability in IMPLIED:
                return "without it: nothing on this kernel, where CAP_SYS_ADMIN implies it"
            assert lost, "nothing stops working: it is not needed"
            return f"without it: {'; '.join(lost)}"

        report.check(f"unit:{capability}", less)


def exposure() -> str:
    """As systemd itself judges it."""
    lines = run_of("systemd-analyze", "security", "--offline=true", f"{SHIPPED}/gpuwarden.service")
    found = float(lines.split("exposure level")[1].split(": ")[1].split()[0])
    assert found <= 3.0, found
    return str(found)


def differences(whole: Works, less: Works) -> list[str]:
    """What does not work any longer, in words."""
    found = []
    for name, before in whole.items():
        now = less.get(name)
        if isinstance(before, dict):
            assert isinstance(now, dict), now
            found += [
                f"{part} {now.get(part)}" for part, state in before.items() if now[part] != state
            ]
        elif now != before:
            found.append(f"not so: {name}")
    return found


def make_crontab() -> None:
    """A file that its owner alone may read."""
    os.makedirs(os.path.dirname(CRONTAB), exist_ok=True)
    with open(CRONTAB, "w", encoding="ascii") as file:
        file.write("* * * * * /bin/true\n")
    os.chown(CRONTAB, place.ALICE, place.ALICE)
    os.chmod(CRONTAB, 0o600)


# -------------------------------------------------------------------- what works


def works(unit: str) -> Works:
    """What works with a unit like this one."""
    with held_by_alice():
        found = looked(sandbox(unit))
        with started(unit) as told:
            found["ready, by eBPF"] = show("StatusText").startswith("device opens are seen by eBPF")
            found["a user's open is seen"] = seen(
                lambda: place.opened(place.GPU, None, place.ALICE), told, an_open
            )
            # A library that somebody maps is attached to; then a load is seen.
            with cuda.program():
                found["a driver library is attached to"] = seen(lambda: None, told, a_library)
                found["a module load is captured"] = seen(a_load, told, a_captured_load)
    found["it ends in order"] = show("Result") == "success"
    return found


@contextlib.contextmanager
def held_by_alice() -> Iterator[None]:
    child = place.started(["/usr/bin/python3", "-c", HOLD, place.GPU], None, place.ALICE)
    assert child.stdout is not None
    child.stdout.readline()
    try:
        yield
    finally:
        child.kill()
        child.communicate()


def looked(lines: str) -> Works:
    """What unit_look says with these lines of a sandbox."""
    write(
        "unit-look.service",
        f"[Unit]\nDefaultDependencies=no\n[Service]\nType=oneshot\n{_ENVIRONMENT}\n"
        f"StandardOutput=truncate:{LOOKED}\nStandardError=truncate:/run/unit-look.err\n"
        f"ExecStart=/usr/bin/python3 -m tests.guest.inside.unit_look\n{lines}\n",
    )
    done = subprocess.run(["systemctl", "start", "unit-look.service"], check=False)
    if done.returncode != 0:
        shown = subprocess.run(
            ["systemctl", "status", "--no-pager", "--full", "unit-look.service"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        with open("/run/unit-look.err", encoding="utf-8") as file:
            raise AssertionError(file.read()[-300:] or shown)
    with open(LOOKED, encoding="utf-8") as file:
        found: Works = json.load(file)
    return found


@contextlib.contextmanager
def started(unit: str) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """The daemon in a unit like this one; what it told so far."""
    text = unit.replace("[Unit]", "[Unit]\nDefaultDependencies=no").replace(
        f"ExecStart={INSTALLED}",
        f"{_ENVIRONMENT}\nTimeoutStartSec={UP_SECONDS:.0f}\nStandardOutput=truncate:{TOLD}\n"
        f"StandardError=truncate:{ERRORS}\nExecStart={PYTHON}",
    )
    write("gpuwarden.service", text.replace(" watch ", " watch --events --sink stdout "))
    with open(f"{SHIPPED}/gpuwarden.socket", encoding="utf-8") as file:
        write("gpuwarden.socket", file.read().replace("[Unit]", "[Unit]\nDefaultDependencies=no"))
    subprocess.run(["systemctl", "start", "gpuwarden.service"], capture_output=True, check=False)

    def told() -> list[dict[str, Any]]:
        with open(TOLD, encoding="utf-8") as file:
            text = file.read()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    try:
        yield told
    finally:
        run_of("systemctl", "stop", "gpuwarden.service")
        subprocess.run(["systemctl", "reset-failed"], capture_output=True, check=False)


def seen(
    happens: Callable[[], object],
    told: Callable[[], list[dict[str, Any]]],
    wanted: Callable[[dict[str, Any]], bool],
) -> bool:
    """Whether what happens is told of in time."""
    if show("ActiveState") != "active":
        return False
    happens()
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        if any(wanted(line) for line in told()):
            return True
        time.sleep(0.2)
    return False


def told_of_cuda() -> str:
    """Why calls are not seen, for a check that failed."""
    with open(TOLD, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file.read().splitlines()]
    unseen = [line for line in lines if line.get("rule") == "cuda_calls_unseen"]
    texts = [one["text"] for line in unseen for one in line["evidence"]]
    kinds = sorted({str(line.get("kind") or line.get("rule")) for line in lines})
    with open(ERRORS, encoding="utf-8") as file:
        return f"{texts} {kinds} {file.read()[-200:]}"


def an_open(line: dict[str, Any]) -> bool:
    return bool(
        line["schema"] == "gpuwarden.event"
        and line["how"] == "open"
        and line["process"]["exe"] == place.OPENER
        and line["process"]["uid"] == place.ALICE
    )


def a_load() -> None:
    with cuda.program(*cuda.KERNELS):
        time.sleep(3.0)


def a_library(line: dict[str, Any]) -> bool:
    return line.get("kind") == "cuda_library" and bool(line["library"]["probed"])


def a_captured_load(line: dict[str, Any]) -> bool:
    return line.get("kind") == "module_load" and bool(line["load"]["captured_bytes"])


def show(name: str) -> str:
    return run_of("systemctl", "show", "--property", name, "--value", "gpuwarden.service").strip()


def write(name: str, text: str) -> None:
    os.makedirs(UNITS, exist_ok=True)
    with open(f"{UNITS}/{name}", "w", encoding="utf-8") as file:
        file.write(text)
    run_of("systemctl", "daemon-reload")
