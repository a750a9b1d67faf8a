"""What comes back after a kill is told from what its starter runs besides."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from gpuwarden.host import Host
from gpuwarden.model import NodeFacts, PersistenceEntry, Process, Snapshot
from gpuwarden.respond.returning import Watcher, remember
from gpuwarden.sensors.process import details
from gpuwarden.sensors.seen import Seen
from tests.support.acted_on import children, running, words
from tests.support.containers import wait_until

pytestmark = pytest.mark.real

HOST = Host()


def _wait_for_child(pid: int, argv: tuple[str, ...]) -> int:
    def is_there() -> bool:
        return [words(child) for child in children(pid)] == [list(argv)]

    wait_until(is_there, f"{argv} below process {pid}")
    return children(pid)[0]


def test_another_variant_by_the_same_script_came_back_and_its_sleep_did_not(
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "kworkerd", tmp_path / "rcud"
    sleep = Path(shutil.which("sleep") or "/bin/sleep").read_bytes()
    # No two are alike by file, content, name or words.
    for path, mark in ((first, b"one"), (second, b"another")):
        path.write_bytes(sleep + mark)
        path.chmod(0o755)
    script = tmp_path / "watchdog.sh"
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    script.write_text(f"{first} 621\nsleep 622\nread line < {gate}\n{second} 623\n:\n")
    entry = PersistenceEntry(
        kind="cron", path="/etc/cron.d/x", commands=(f"/bin/sh {script}",), text="a line"
    )
    with running("/bin/sh", str(script)) as watchdog:
        miner = _wait_for_child(watchdog.pid, (str(first), "621"))
        shell, process = (
            next(fact for fact in details.read(HOST, Seen(), [pid]) if isinstance(fact, Process))
            for pid in (watchdog.pid, miner)
        )
        snapshot = Snapshot(
            taken_at_ns=0,
            node=NodeFacts(hostname="here"),
            processes=(shell, process),
            persistence=(entry,),
        )
        former = remember(HOST, miner, process)
        try:
            watcher = Watcher(HOST, former, snapshot)
            os.kill(miner, signal.SIGKILL)
            between = _wait_for_child(watchdog.pid, ("sleep", "622"))
            assert watcher.look() == []
            os.kill(between, signal.SIGKILL)
            gate.write_text("go\n")
            variant = _wait_for_child(watchdog.pid, (str(second), "623"))
            assert [one.pid for one in watcher.look()] == [variant]
        finally:
            former.close()
