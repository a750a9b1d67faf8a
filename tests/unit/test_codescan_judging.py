"""Unknown modules are judged in the confined child, where nothing can be loaded any more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from gpuwarden.code.judgement import Answer

FIXTURES = Path(__file__).parents[1] / "fixtures/jit"
TOLD: set[Answer] = {"not hash-like", "not enough code"}


def test_a_new_process_judges_cubins_and_ptx() -> None:
    # A process of its own: in this one, a test before may have loaded what is needed.
    done = subprocess.run(
        [sys.executable, "-m", "gpuwarden", "code", "scan", "--no-starter", "--format", "json",
         str(FIXTURES)],
        capture_output=True,
        check=False,
        timeout=120,
    )  # fmt: skip
    document = json.loads(done.stdout)
    assert document["problems"] == []
    answers = {one["module"]["kind"]: one["judgement"]["answer"] for one in document["modules"]}
    assert set(answers) == {"cubin", "ptx"}
    assert set(answers.values()) <= TOLD
    assert done.returncode == 0
