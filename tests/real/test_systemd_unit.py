"""The unit that ships, in a real systemd: it comes up, sees, is scraped, turns, ends; its exposure.

What needs the host's own pid namespace (CUDA, and each capability taken away) is in the guest.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guest.unit_text import capabilities, without
from tests.support.packages import require
from tests.support.unit_bed import (
    DEPLOY,
    SERVICE,
    USER,
    UnitBed,
    gpu_node,
    running_unit,
    shipped,
)

pytestmark = pytest.mark.real

MOST_EXPOSURE = 3.0


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UnitBed]:
    folder = tmp_path_factory.mktemp("unit")
    for above in (folder, *folder.parents):
        if above.stat().st_uid == 0 and above != Path("/"):
            above.chmod(above.stat().st_mode | 0o055)
    with running_unit(folder, shipped()) as bed:
        yield bed


def exposure(path: Path) -> float:
    require("systemd")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.search(r"exposure level for \S+: ([\d.]+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    return float(found[1])


def test_its_exposure_is_small_and_grows_without_the_sandbox(tmp_path: Path) -> None:
    found = exposure(DEPLOY / SERVICE)
    print(f"exposure {found}")
    assert found <= MOST_EXPOSURE
    looser = tmp_path / SERVICE
    looser.write_text(shipped().replace("PrivateNetwork=yes\n", ""))
    assert exposure(looser) > found


def test_systemd_finds_no_fault_with_the_units() -> None:
    units = [str(DEPLOY / SERVICE), str(DEPLOY / "gpuwarden.socket")]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units],
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if "gpuwarden" in line]
    # It is not installed on this machine.
    assert [line for line in said if "/opt/gpuwarden/bin/gpuwarden" not in line] == []


def test_it_is_ready_once_it_sees_and_by_the_best_way(bed: UnitBed) -> None:
    assert bed.property("ActiveState") == "active"
    assert bed.property("StatusText") == "device opens are seen by eBPF (cgroup/dev)"


def test_its_sandbox_takes_no_sensor_away(bed: UnitBed) -> None:
    free, held = bed.doctor("free"), bed.doctor("held")
    assert held == free
    states = {name: state for name, (state, _) in held.items()}
    for name in ("device_nodes", "processes", "holders", "kernel_log", "opens"):
        assert states[name] == "ok", held[name]


def test_a_users_open_is_seen_with_its_program_and_what_it_was_told(bed: UnitBed) -> None:
    node = gpu_node(bed.machine)
    with bed.opener(node):
        found = bed.wait(lambda: bed.open_of(str(node)), "the open")
    process = found["process"]
    assert (found["state"], process["uid"]) == ("opened", USER)
    assert "python" in process["exe"]
    assert process["argv"][-1] == str(node)


def test_metrics_come_over_the_socket_though_it_has_no_network(bed: UnitBed) -> None:
    script = (
        "import urllib.request as r; "
        "print(r.urlopen('http://127.0.0.1:9835/healthz', timeout=20).read().decode())"
    )
    assert '"status":"ok"' in bed.machine.run("python3", "-c", script)
    pid = bed.property("MainPID")
    links = bed.machine.run("nsenter", f"--net=/proc/{pid}/ns/net", "cat", "/proc/net/dev")
    assert re.findall(r"^\s*(\w+):", links, re.M) == ["lo"]


def test_the_policy_is_read_again_and_it_ends_in_order(bed: UnitBed) -> None:
    before = bed.property("MainPID")
    bed.machine.run("systemctl", "reload", SERVICE)
    # The watchdog would have ended it by a missed beat.
    stamp = bed.property("WatchdogTimestampMonotonic")
    bed.wait(lambda: bed.property("WatchdogTimestampMonotonic") != stamp, "a beat")
    assert bed.property("MainPID") == before
    group = Path(f"{bed.machine.root}/sys/fs/cgroup{bed.property('ControlGroup')}/cgroup.procs")
    bed.machine.run("systemctl", "stop", SERVICE)
    assert (bed.property("Result"), bed.property("ExecMainStatus")) == ("success", "0")
    until = time.monotonic() + 10
    while group.exists():
        assert time.monotonic() < until, group.read_text()
        time.sleep(0.05)


def test_a_unit_with_a_capability_less_is_one() -> None:
    unit = shipped()
    for capability in capabilities(unit):
        left = capabilities(without(unit, capability))
        assert left == [one for one in capabilities(unit) if one != capability]
