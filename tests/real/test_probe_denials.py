"""Denials by control group: what they hold against, when they end, what is pinned."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuwarden.errors import UsageError
from gpuwarden.probes.settings import Settings
from tests.support import containers
from tests.support.idle import wait_for
from tests.support.probes import (
    FULL,
    ROOT,
    drained,
    node,
    opened_in,
    opens,
    probing,
    run,
)

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("built")]


@pytest.mark.parametrize("hierarchy", ["", "devices", "pids"])
def test_a_denial_holds_for_one_group_and_ends_with_the_probe(
    hierarchy: str, groups: Callable[[str], Path], opener: Path, tmp_path: Path
) -> None:
    group, path = groups(hierarchy), node(tmp_path / "n", FULL)
    with probing(Settings(limit_events=1, limit_window_seconds=3600)) as probe:
        key = probe.deny(str(group))
        for where in (group, group / "below"):
            assert not opened_in(where, opener, path)
        assert run(opener, "open", path).stdout.strip() == "1"
        states = [(e.state, e.denial) for e in opens(drained(probe)) if e.path == str(path)]
        assert states == [("denied", "denied")] * 2 + [("attempted", "")]
        assert probe.counters().denied == 2
        probe.allow(key)
        assert opened_in(group, opener, path)
        probe.deny(str(group), dry_run=True)
        assert opened_in(group, opener, path)
        assert [e.denial for e in opens(drained(probe))][-1] == "would deny"
        probe.deny(str(group))
        assert not opened_in(group, opener, path)
        assert run("sh", "-c", "echo > /dev/null").returncode == 0
    assert opened_in(group, opener, path)


def test_a_flood_does_not_pass_a_denial(
    groups: Callable[[str], Path], opener: Path, tmp_path: Path
) -> None:
    group, path = groups(""), node(tmp_path / "n", FULL)
    with probing(Settings(limit_events=2, ring_bytes=1 << 16)) as probe:
        probe.deny(str(group))
        script = 'echo $$ > "$1/cgroup.procs" && exec "$2" open "$3" 20000'
        done = run("sh", "-c", script, "sh", group, opener, path)
        assert done.stdout.strip() == "0"
        assert probe.counters().denied == 20_000


def test_a_denial_ends_when_the_agent_is_killed(
    groups: Callable[[str], Path], opener: Path, tmp_path: Path
) -> None:
    group, path = groups(""), node(tmp_path / "n", FULL)
    code = (
        "import sys, time\n"
        "from gpuwarden.probes.loader import DeviceOpenProbe\n"
        "with DeviceOpenProbe([(1, 7)]) as probe:\n"
        "    probe.deny(sys.argv[1]); print('denying', flush=True); time.sleep(60)\n"
    )
    agent = subprocess.Popen(
        [sys.executable, "-c", code, str(group)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert agent.stdout is not None
    try:
        assert agent.stdout.readline() == "denying\n"
        assert not opened_in(group, opener, path)
    finally:
        agent.kill()
        agent.wait()
        agent.stdout.close()
    wait_for(lambda: opened_in(group, opener, path), "the end of the denial")


def test_the_root_group_is_not_denied() -> None:
    mounts = containers.cgroup_mounts()
    with probing() as probe:
        for root in {mounts[name] for name in ("", "devices", "pids") if name in mounts}:
            with pytest.raises(UsageError):
                probe.deny(str(root))
