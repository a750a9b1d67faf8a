"""`code scan` reads large files in windows, in children: it finds what one pass over all finds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gpuwarden.code.examine import examine
from gpuwarden.code.module import Place, Problem
from tests.support.public_wheels import programs

LIBRARIES = ("nvidia-cublas==13.10.0.20", "nvidia-cusparse-cu12==12.5.10.65")


@pytest.mark.parametrize("library", LIBRARIES)
def test_windows_find_what_the_whole_file_holds(library: str) -> None:
    told = 0
    for file in programs(library):
        whole = set()
        for one in examine(file.read_bytes(), Place(target=file.name), known=lambda _: True):
            assert not isinstance(one, Problem), one
            whole.add(one.module.digest)
        scan = [sys.executable, "-m", "gpuwarden", "code", "scan", "--no-judge", "--no-starter"]
        done = subprocess.run(
            [*scan, "--format", "json", file], capture_output=True, check=False, timeout=900
        )
        document = json.loads(done.stdout)
        assert document["problems"] == []
        assert {one["module"]["digest"] for one in document["modules"]} == whole
        told += len(whole)
    assert told > 1000
