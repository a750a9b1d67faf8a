"""`history` reads what a real `gpuwarden watch` left, while it runs and after its death."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.sensors.process.stat_lines import parse_stat
from tests.support.fakenvml import FakeNvml
from tests.support.packages import require_root
from tests.support.probes import build, node
from tests.support.watching import GPU, Watching, watching

pytestmark = pytest.mark.real

UUID = "GPU-5ee00000-0000-4000-8000-000000000001"


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    require_root()
    build()


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    """A node of the GPU under a name that is not its own."""
    return node(tmp_path / "cat.jpg", GPU)


@pytest.fixture
def user(gpu: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the device until it is ended."""
    program = f"import os, sys; held = os.open({str(gpu)!r}, os.O_RDONLY); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def driver(*pids: int) -> FakeNvml:
    """One GPU, busy at 97 %, with these processes on it."""
    state = FakeNvml(live=1).gpu(uuid=UUID, name="Test GPU", total=80 << 30, used=9 << 30, util=97)
    for pid in pids:
        state.process(pid, memory=8 << 30, kinds="C")
        state.stream(pid, 97, period_us=166_000, keep_us=10_000_000)
    return state


def history(agent: Watching, *arguments: str) -> dict[str, Any]:
    """What the command says in JSON; its exit code must be 0."""
    answer = subprocess.run(
        [sys.executable, "-m", "gpuwarden", "history", "--format", "json", *arguments,
         "--state", str(agent.told.parent / "state")],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": "src"},
        check=False,
    )  # fmt: skip
    assert answer.returncode in (0, 2), answer.stderr.decode()
    told: dict[str, Any] = json.loads(answer.stdout)
    assert told["schema"] == "gpuwarden.history"
    return told


def test_a_process_is_told_while_it_runs_and_when_it_is_gone(
    tmp_path: Path, gpu: Path, user: subprocess.Popen[bytes]
) -> None:
    pid = user.pid
    ticks = parse_stat(Path(f"/proc/{pid}/stat").read_bytes()).start_time_ticks
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with (
        driver(pid).in_place() as library,
        watching(tmp_path, "--nvml-library", library) as agent,
    ):
        second = subprocess.Popen([sys.executable, "-c", f"open({str(gpu)!r}, 'rb')"])
        second.wait()
        agent.wait(
            lambda: agent.findings("accelerator_opened_by_other_name", second.pid), "the finding"
        )

        def known() -> dict[str, Any] | None:
            told = history(agent, str(pid), "--nvml-library", library)
            (past,) = told["pasts"] or [{"verdicts": [], "binary": None}]
            judged = any(one["verdict"] for one in past["verdicts"])
            return told if judged and past["binary"] else None

        agent.wait(known, "the samples with a verdict", 90)
        told = known()
        assert told is not None
        assert told["is_here"]
        (past,) = told["pasts"]
        assert (past["gpu_id"], past["gpu"]) == (UUID, "0")
        assert past["is_current"]
        assert (past["start_time_ticks"], past["boot_id"]) == (ticks, boot)
        assert past["binary"] == os.path.realpath(sys.executable)
        assert past["parents"][0] == os.path.realpath(sys.executable)
        assert past["sm_percent"]["max"] == 97
        assert past["memory_bytes"] == {"min": 8 << 30, "mean": 8 << 30, "max": 8 << 30}
        assert past["first_ns"] <= past["last_ns"] <= told["taken_at_ns"]

        # A process that lived a moment and is in no list was still told of.
        told = history(agent, str(second.pid))
        assert told["pasts"] == []
        assert "accelerator_opened_by_other_name" in {
            one["finding"]["rule"] for one in told["findings"]
        }
        os.kill(agent.pid, 9)
        agent.process.wait()
        user.kill()
        user.communicate()
        driver().replace()

        told = history(agent, str(pid), "--nvml-library", library)
        assert not told["is_here"]
        assert told["moments"] == []
        (gone,) = told["pasts"]
        assert not gone["is_current"]
        assert (gone["start_time_ticks"], gone["boot_id"]) == (ticks, boot)
        assert abs(gone["started_at_ns"] - past["started_at_ns"]) < 10**9

        told = history(agent, "--gpu", "0", "--since", "1h", "--nvml-library", library)
        assert {one["pid"] for one in told["pasts"]} == {None, pid}
        assert told["is_here"]
        # Without a driver there is no number, but the GPU's own name is remembered.
        without = history(agent, "--gpu", UUID)
        assert {one["pid"] for one in without["pasts"]} == {None, pid}
        assert not without["is_here"]


def test_it_writes_nothing_and_needs_no_agent(tmp_path: Path) -> None:
    with watching(tmp_path) as agent:
        pass
    state = tmp_path / "state"
    before = {path.name: path.read_bytes() for path in state.iterdir()}
    told = history(agent, "1")
    assert told["memory"]["state"] == "ok"
    assert told["pasts"] == []
    assert {path.name: path.read_bytes() for path in state.iterdir()} == before
