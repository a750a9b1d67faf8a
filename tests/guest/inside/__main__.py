"""Runs the checks of one guest: ``small`` (busybox), ``systemd`` or, with it, those of the unit."""

from __future__ import annotations

import os
import sys

from gpuwarden.probes import loader
from tests.guest.inside import cuda, systemd, unit, whole
from tests.guest.inside.report import Report
from tests.guest.inside.ways import WayChecks


def is_for_the_unit() -> bool:
    with open("/proc/cmdline", encoding="ascii") as file:
        return "checks=unit" in file.read().split()


def main() -> None:
    report = Report()
    with open("/proc/uptime", encoding="ascii") as file:
        print(f"BOOTED {file.read().split()[0]}", flush=True)
    report.note("kernel", os.uname().release)
    with open("/sys/kernel/security/lsm", encoding="ascii") as file:
        report.note("security modules", file.read())
    if report.check("guest:cgroups", whole.only_version_2) and report.check(
        "guest:device", whole.a_device_that_opens
    ):
        if sys.argv[1] == "systemd":
            (unit if is_for_the_unit() else systemd).run(report)
        else:
            for way in loader.WAYS:
                WayChecks(way, report).run()
            whole.run(report)
            cuda.run(report)
    report.end()


main()
