"""The program as a whole on a machine with cgroup version 2 only."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys

from gpuwarden.probes import choose
from tests.guest.inside import place
from tests.guest.inside.report import Report

SNAPSHOT = "/tmp/node.json"


def run(report: Report) -> None:
    report.check("choice", the_first_way_is_chosen)
    report.check("scan", a_scan_names_the_holder)


def only_version_2() -> str:
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        mounts = [line.split(" - ")[1].split()[0] for line in file]
    kinds = [kind for kind in mounts if kind.startswith("cgroup")]
    assert kinds == ["cgroup2"], kinds
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        (line,) = file.read().splitlines()
    assert line.startswith("0::"), line
    assert os.path.exists("/sys/kernel/btf/vmlinux"), "the kernel does not describe its types"
    return "version 2 only"


def a_device_that_opens() -> str:
    place.make_device()
    assert place.opened(place.GPU) and not place.opened(place.ABSENT)
    return "195:0 opens, 195:9 has no device"


def the_first_way_is_chosen() -> str:
    with choose.chosen([(place.MAJOR, None)]) as choice:
        assert choice.probe is not None and not choice.refused, choice
        return str(choice)


def a_scan_names_the_holder() -> str:
    where = place.group("scan")
    child = place.started([place.OPENER, "inherit", "/dev/nvidia0"], where, place.ALICE)
    assert child.stdout is not None
    holder = int(child.stdout.readline().split()[1])
    try:
        gpuwarden("snapshot", SNAPSHOT)
        scan = gpuwarden("scan", "--format", "json")
    finally:
        os.kill(holder, signal.SIGKILL)
    with gzip.open(SNAPSHOT) as file:
        recorded = json.load(file)
    (process,) = [one for one in recorded["processes"] if one["pid"] == holder]
    assert process["cgroup_lines"] == ["0::/gpuwarden-test/scan"], process
    assert [one["path"] for one in recorded["holders"] if one["pid"] == holder] == ["/dev/nvidia0"]
    (row,) = [one for one in json.loads(scan)["rows"] if one["pid"] == holder]
    assert (row["user"], row["binary"]) == ("alice", place.OPENER), row
    return f"verdict {row['verdict']}"


def gpuwarden(*words: str) -> str:
    """What the command prints; 1 and 2 are answers too."""
    done = subprocess.run(
        [sys.executable, "-m", "gpuwarden.cli", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (0, 1, 2), done.stderr
    return done.stdout
