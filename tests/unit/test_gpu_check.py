"""The comparison with nvidia-smi agrees with a faithful one and notices one that differs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fakenvml import FakeNvml

BENCH = Path(__file__).parents[2] / "bench" / "gpu_check.py"
UUID = "GPU-00000000-0000-4000-8000-000000000000"
MIB = 1 << 20


def dump(pid: int, *, process_mib: int = 300, bus: str = "00000000:01:00.0") -> str:
    return f"""<?xml version="1.0" ?>
<nvidia_smi_log><driver_version>550.54.15</driver_version>
<gpu id="{bus}"><product_name>NVIDIA H100 80GB HBM3</product_name><uuid>{UUID}</uuid>
<mig_mode><current_mig>Disabled</current_mig></mig_mode>
<fb_memory_usage><total>81920 MiB</total><reserved>600 MiB</reserved><used>301 MiB</used>
</fb_memory_usage>
<utilization><gpu_util>50 %</gpu_util></utilization>
<temperature><gpu_temp>36 C</gpu_temp></temperature>
<processes><process_info><pid>{pid}</pid><type>C</type><process_name>x</process_name>
<used_memory>{process_mib} MiB</used_memory></process_info></processes>
</gpu></nvidia_smi_log>
"""


def check(folder: Path, xml: str) -> subprocess.CompletedProcess[str]:
    """Runs the comparison against an nvidia-smi that prints ``xml``."""
    (folder / "dump.xml").write_text(xml)
    program = folder / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\ncase "$*" in\n"-q -x") cat {folder}/dump.xml;;\n'
        f'"-L") echo "GPU 0: NVIDIA H100 (UUID: {UUID})";;\nesac\n'
    )
    program.chmod(0o755)
    mine = os.getpid()
    fake = FakeNvml().gpu(used=301 * MIB, reserved=600 * MIB, util=55, temp=35)
    with fake.process(mine, memory=300 * MIB).in_place() as library:
        return subprocess.run(
            [sys.executable, str(BENCH), "--nvml-library", library],
            env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a library that is root's alone")
def test_it_tells_agreement_from_difference(tmp_path: Path) -> None:
    done = check(tmp_path, dump(os.getpid()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DIFFER" not in done.stdout
    for xml, what in (
        (dump(1), "steady processes"),
        (dump(os.getpid(), process_mib=9000), "memory"),
        (dump(os.getpid(), bus="00000000:09:00.0"), "PCI address"),
    ):
        done = check(tmp_path, xml)
        assert done.returncode == 1, done.stdout + done.stderr
        assert any("DIFFER" in line and what in line for line in done.stdout.splitlines())


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has nvidia-smi")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([sys.executable, str(BENCH)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no GPU" in done.stdout
