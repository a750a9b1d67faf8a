"""Beside a real systemd, whose units have device rules of their own."""

from __future__ import annotations

import os
import subprocess

from gpuwarden.probes import loader, ways
from gpuwarden.probes.loader import DeviceOpenProbe
from tests.guest.inside import place
from tests.guest.inside.report import Report
from tests.guest.inside.ways import EVERYTHING, GPUS, drained, expected, opens


def run(report: Report) -> None:
    report.check("systemd:first", it_is_process_1)
    for way in loader.WAYS:
        UnitChecks(way, report).run()


def it_is_process_1() -> str:
    with open("/proc/1/comm", encoding="ascii") as file:
        assert file.read() == "systemd\n"
    return run_of("systemctl", "--version").splitlines()[0]


class UnitChecks:
    """The checks of one way."""

    def __init__(self, way: str, report: Report) -> None:
        self.way = ways.BY_NAME[way]
        self.probe = DeviceOpenProbe(GPUS, EVERYTHING, way=way)
        self.report = report

    def run(self) -> None:
        """Only the first if it does not load."""
        checks = {"closed-unit": self.a_closed_unit, "allowed-unit": self.an_allowed_unit}
        if self.way.can_deny:
            checks["denied-unit"] = self.a_denied_unit
        try:
            if self.report.check(f"{self.way.name}:load", self.loads):
                for name, check in checks.items():
                    self.report.check(f"{self.way.name}:{name}", check)
        finally:
            self.probe.close()

    def loads(self) -> str:
        self.probe.__enter__()
        return "beside systemd's own programs"

    def a_closed_unit(self) -> str:
        """DevicePolicy=closed: systemd's program refuses it, ours sees the attempt if it can."""
        drained(self.probe)
        assert started("closed") == "0", "systemd's rules do not hold"
        found = opens(drained(self.probe), place.GPU)
        for event in found:
            assert event.process.cgroup_path == "/system.slice/closed.service", event
            assert (event.process.uid, event.state) == (place.ALICE, "attempted"), event
        return expected(len(found) == 1, self.way.sees_refused)

    def an_allowed_unit(self) -> str:
        assert started("allowed") == "1"
        (event,) = opens(drained(self.probe), place.GPU)
        assert event.process.cgroup_path == "/system.slice/allowed.service", event
        return "seen"

    def a_denied_unit(self) -> str:
        """Our denial and systemd's permission: denied."""
        key = self.probe.deny("/sys/fs/cgroup/system.slice")
        try:
            assert started("allowed") == "0", "it opened in spite of the denial"
            (event,) = opens(drained(self.probe), place.GPU)
            assert event.denial == "denied", event
        finally:
            self.probe.allow(key)
        assert started("allowed") == "1", "denied after it was allowed again"
        return "what systemd allows is denied, and allowed again after it"


def started(unit: str) -> str:
    """What the unit's opener said."""
    path = f"/run/{unit}"
    if os.path.exists(path):
        os.unlink(path)
    run_of("systemctl", "start", f"{unit}.service")
    with open(path, encoding="ascii") as file:
        return file.read().strip()


def run_of(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
