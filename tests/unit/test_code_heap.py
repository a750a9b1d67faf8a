"""Memory that decompressed images are put into again and again."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from gpuwarden.code.codecs import decompress
from gpuwarden.code.heap import keep_freed
from tests.support.gpu_images import compress
if sys.argv[1] == "kept":
    keep_freed()
stored = compress("lz4", bytes(4 << 20))
decompress("lz4", stored, 4 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    decompress("lz4", stored, 4 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize(("how", "is_cleared_anew"), [("kept", False), ("given back", True)])
def test_an_image_gets_pages_that_are_there(how: str, is_cleared_anew: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True
    )
    faults, pages = int(done.stdout), 50 * (4 << 20) // 4096
    assert (faults > pages // 4) is is_cleared_anew
