"""A reader who runs what docs/deploy.md says comes to an alarm."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.deploy_page import ROOT, commands
from tests.support.packages import require
from tests.support.slurm import PACKAGES as SLURM_PACKAGES
from tests.support.systemd import SystemdMachine, running_systemd

pytestmark = pytest.mark.real

CHECKOUT = "/srv/gpuwarden"
SECONDS = 600
MOST_COMMANDS = 10
ALARM = "Somebody makes a device node of an accelerator"
ALARM_SECONDS = 30.0
JOURNAL = ("systemd-journald.service", "systemd-journald.socket", "systemd-journald-dev-log.socket")


@pytest.fixture(scope="module")
def machine() -> Iterator[SystemdMachine]:
    """With a checkout as git has it, the package registries, and the journal."""
    require("clang", "llvm", "libbpf-dev", "libbpf1", "python3-venv")
    with running_systemd({}, own_cgroups=False, own_network=False, wanted=JOURNAL) as machine:
        files = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
        ).stdout
        place = Path(machine.root + CHECKOUT)
        place.mkdir(parents=True)
        packed = subprocess.Popen(
            ["tar", "--create", "--null", "--files-from=-"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        unpacked = subprocess.Popen(["tar", "--extract"], cwd=place, stdin=packed.stdout)
        assert packed.stdin is not None
        packed.stdin.write(files)
        packed.stdin.close()
        assert unpacked.wait(120) == 0
        packed.wait(120)
        yield machine


def run(machine: SystemdMachine, command: str) -> str:
    done = subprocess.run(
        machine.command("bash", "-c", f"cd {CHECKOUT} && {command}"),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    said = done.stdout + done.stderr
    # Where nothing could be judged for lack of a GPU, that is no failure of the command.
    assert done.returncode in ((0, 2) if "gpuwarden " in command else (0,)), f"{command}: {said}"
    return said


def test_bare_metal(machine: SystemdMachine) -> None:
    *told, last = commands("Bare metal")
    assert len(told) < MOST_COMMANDS
    for command in told:
        run(machine, command)
    until = time.monotonic() + ALARM_SECONDS
    while ALARM not in (said := run(machine, last)):
        assert time.monotonic() < until, said
        time.sleep(0.5)
    print(said)
    assert "mknod pid" in said
    status = run(machine, "systemctl show --property StatusText --value gpuwarden")
    assert "eBPF (cgroup/dev)" in status


def test_slurm(tmp_path: Path) -> None:
    assert len(commands("Slurm")) <= MOST_COMMANDS
    require(*SLURM_PACKAGES, "clang", "llvm", "libbpf-dev", "libbpf1", "python3-venv")
    done = subprocess.run(
        [
            *("unshare", "--mount", "--propagation", "private"),
            *(sys.executable, "-m", "tests.support.slurm_page", str(tmp_path)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=2 * SECONDS,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    assert "gpuwarden prolog: job " in done.stdout
    assert ": left: " in done.stdout
    assert "sleep" in done.stdout
