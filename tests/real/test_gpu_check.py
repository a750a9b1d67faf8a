"""The check for machines with a GPU, run upon the stand-in driver library."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.probes import ROOT, build

pytestmark = pytest.mark.real


def test_all_that_the_programs_do_is_seen() -> None:
    build()
    done = subprocess.run(
        [sys.executable, ROOT / "bench/gpu_check.py", "--stub"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "81 3d" in done.stdout and "all that was done was seen" in lines
    assert sum(line.startswith("seen ") for line in lines) > 30
    assert "NOT SEEN" not in done.stdout
    assert any("a launch costs" in line for line in lines)
