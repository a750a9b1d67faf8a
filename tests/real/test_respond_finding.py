"""From a finding of a running daemon to a step; one of an earlier exec gives no leave to act."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from gpuwarden.host import Host
from gpuwarden.sensors.process import stat_lines
from tests.support.packages import require_root
from tests.support.probes import build, node
from tests.support.respond_commands import respond
from tests.support.watching import GPU, watching

pytestmark = pytest.mark.real


def state_of(pid: int) -> str:
    return stat_lines.read_line(Host(), pid).state


def test_the_finding_of_this_exec_is_acted_on_and_that_of_the_one_before_is_not(
    tmp_path: Path,
) -> None:
    require_root()
    build()
    gpu = node(tmp_path / "gpu", GPU)
    program = tmp_path / ".x/kworker"
    program.parent.mkdir()
    program.write_bytes(Path("/bin/sleep").read_bytes())
    program.chmod(0o755)
    with watching(tmp_path, "--scan-interval", "5") as agent:
        script = f"exec 3<{gpu}; exec {program} 1000"
        process = subprocess.Popen(["sh", "-c", script], start_new_session=True)
        pid = process.pid
        try:
            # The shell opened the device; what it became is what holds it.
            by_shell, by_program = "accelerator_opened_by_other_name", "gpu_process_suspicious"
            agent.wait(lambda: agent.findings(by_shell, pid), "the finding of the open")
            agent.wait(lambda: agent.findings(by_program, pid), "the finding of the scan")
            before = agent.findings(by_shell, pid)[-1]["id"]
            now = agent.findings(by_program, pid)[-1]["id"]

            done = respond(tmp_path, before, "--do", "freeze", "--yes", check=1)
            assert "Judged again: its binary is another one" in " ".join(done.stdout.split())
            assert state_of(pid) == "S" and not (tmp_path / "evidence").exists()

            respond(tmp_path, now, "--do", "freeze", "--yes", check=0)
            assert state_of(pid) == "T"
            respond(tmp_path, now, "--do", "thaw", "--yes", check=0)
            assert state_of(pid) == "S"
        finally:
            process.kill()
            process.wait()
    lines = (tmp_path / "state/journal").read_text().splitlines()
    entries = [(one["action"], one["stage"]) for one in map(json.loads, lines)]
    assert entries[0] == ("judged-again", "fact")
    assert [one for one in entries if one[0] in ("freeze", "thaw")] == [
        ("freeze", "intent"), ("freeze", "done"), ("thaw", "intent"), ("thaw", "done"),
    ]  # fmt: skip
