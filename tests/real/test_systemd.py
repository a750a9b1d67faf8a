"""systemd as a source, against a real systemd in namespaces of its own, asked in both ways.

``local``: gpuwarden runs on that machine and asks ``systemctl``. ``mounted``: gpuwarden runs
outside and reads what systemd left under the machine's root, as with --root.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gpuwarden.model import SourceRun, Workload
from tests.support.containers import wait_until
from tests.support.systemd import SystemdMachine, running_systemd

pytestmark = pytest.mark.real

SLEEP = "[Unit]\nDefaultDependencies=no\n[Service]\nExecStart=/bin/sleep infinity\n"
UNITS = {
    "allotted.service": f"{SLEEP}User=nobody\nDeviceAllow=/dev/nvidia1 rw\n",
    "each@.service": f"{SLEEP}DeviceAllow=/dev/nvidia%i rw\nDeviceAllow=/dev/nvidiactl rw\n",
    "each@0.service": f"{SLEEP}DeviceAllow=/dev/nvidia%i rw\nDeviceAllow=/dev/nvidiactl rw\n",
    "taken-back.service": f"{SLEEP}DeviceAllow=/dev/nvidia0 rw\n",
    "taken-back.service.d/later.conf": "[Service]\nDeviceAllow=\n",
    "plain.service": SLEEP,
    "loose.service": f"{SLEEP}DeviceAllow=/dev/nvidia0 rw\n",
}
TRANSIENT = "transient.service"
INVENTED = "invented.service"

# Reads all processes of the machine as a scan sees them, and prints the source's answer.
PROGRAM = """
import sys, msgspec
from gpuwarden.expected import systemd
from gpuwarden.host import Host
from gpuwarden.model import Process
from gpuwarden.sensors import cgroup
from gpuwarden.sensors.seen import Seen
host, seen = Host(sys.argv[1]), Seen()
for pid in host.pids():
    lines = tuple(host.read_text(f"/proc/{pid}/cgroup").splitlines())
    seen.add(Process(pid=pid, start_time_ticks=1, cgroup_lines=lines, cgroup=cgroup.place(lines)))
print(msgspec.json.encode(systemd.read(host, seen)).decode())
"""


@pytest.fixture(scope="module")
def machine() -> Iterator[SystemdMachine]:
    with running_systemd(UNITS) as running:
        Path(f"{running.root}/etc/systemd/system/loose.service").chmod(0o666)
        running.run(
            "systemd-run",
            f"--unit={TRANSIENT}",
            "--property=DefaultDependencies=no",
            "--property=DeviceAllow=/dev/nvidia0 rw",
            "/bin/sleep",
            "infinity",
        )
        # Root can name a cgroup as it likes; systemd has no such unit.
        running.run(
            "sh",
            "-c",
            f"mkdir /sys/fs/cgroup/system.slice/{INVENTED} && setsid sh -c 'echo $$ > "
            f"/sys/fs/cgroup/system.slice/{INVENTED}/cgroup.procs; exec sleep infinity' "
            "< /dev/null > /dev/null 2>&1 &",
        )
        members = f"{running.root}/sys/fs/cgroup/system.slice/{INVENTED}/cgroup.procs"
        wait_until(lambda: os.path.exists(members) and bool(Path(members).read_text()), INVENTED)
        yield running


@pytest.fixture(params=["local", "mounted"])
def answer(
    request: pytest.FixtureRequest, machine: SystemdMachine
) -> tuple[SourceRun, dict[str, Workload]]:
    argv = [sys.executable, "-c", PROGRAM]
    command = machine.command(*argv, "/")
    if request.param == "mounted":
        # Cgroup paths are shown relative to the reader's cgroup namespace: the host's, here too.
        command = ["nsenter", f"--target={machine.init_pid}", "--cgroup", *argv, machine.root]
    source = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        command,
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr.decode()
    run, workloads = msgspec.json.decode(done.stdout, type=tuple[SourceRun, list[Workload]])
    return run, {workload.name: workload for workload in workloads}


def test_only_units_that_roots_files_allot_gpus_are_workloads(
    answer: tuple[SourceRun, dict[str, Workload]],
) -> None:
    run, workloads = answer
    assert run.state == "ok"
    # Each way was really taken: a systemctl that fails says so before the files are read.
    assert "instead" not in run.reason
    assert set(workloads) == {"allotted.service", "each@0.service"}
    allotted = workloads["allotted.service"]
    assert allotted.gpus == ("minor:1",)
    assert allotted.user == "nobody"
    assert allotted.cgroup_path == "/system.slice/allotted.service"
    assert allotted.unit == "allotted.service"
    assert workloads["each@0.service"].gpus == ("minor:0",)
    assert (workloads["each@0.service"].user, workloads["each@0.service"].uid) == ("root", 0)
    assert not run.scheduled


def test_confirmed_units_without_an_allotment_are_running(
    answer: tuple[SourceRun, dict[str, Workload]],
) -> None:
    run, _ = answer
    assert {"plain.service", "taken-back.service", TRANSIENT, "loose.service"} <= set(run.running)
    assert "allotted.service" not in run.running


def test_a_file_that_others_can_write_allots_nothing_and_says_so(
    answer: tuple[SourceRun, dict[str, Workload]],
) -> None:
    assert "loose.service can be written by others than root" in answer[0].reason


def test_a_cgroup_with_an_invented_name_is_confirmed_by_nobody(
    answer: tuple[SourceRun, dict[str, Workload]],
) -> None:
    run, workloads = answer
    assert INVENTED not in run.running
    assert INVENTED not in workloads
    assert INVENTED in run.reason
