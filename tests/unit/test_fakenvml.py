"""Other NVML tools run against the stand-in library, so it is a fair one to be measured on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fakenvml import FakeNvml


@pytest.mark.parametrize("command", [("nvitop", "-1"), ("gpustat", "--no-color", "--show-pid")])
def test_other_tools_show_the_same_processes(command: tuple[str, ...]) -> None:
    program = Path(sys.executable).parent / command[0]
    if not program.exists():
        pytest.skip(f"{command[0]} is not installed (pip install --group bench)")
    fake = FakeNvml(driver="570.86.10").gpu(util=42).process(os.getpid(), memory=1 << 30)
    with fake.sample(os.getpid(), 42).in_place() as library:
        done = subprocess.run(
            [str(program), *command[1:]],
            env={**os.environ, "LD_LIBRARY_PATH": str(Path(library).parent)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0
    assert done.stderr == ""
    assert str(os.getpid()) in done.stdout
    assert "570.86.10" in done.stdout
