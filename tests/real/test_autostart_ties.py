"""Autostarts that start running processes, and others that only have a name in common with them.

The crontab is a file of its own; everything else is this machine: its files, links and processes.
"""

from __future__ import annotations

import os
import pwd
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpuwarden.finding import Evidence
from gpuwarden.host import Host
from gpuwarden.model import NodeFacts, PersistenceEntry, Process, Snapshot
from gpuwarden.node import Node
from gpuwarden.rules.respawn import observe
from gpuwarden.sensors import persistence
from gpuwarden.sensors.process import details
from gpuwarden.sensors.seen import Seen
from tests.support.acted_on import children, running, wait_for_words
from tests.support.containers import wait_until

pytestmark = pytest.mark.real

TABLE = "/etc/crontab"
USER = pwd.getpwuid(os.geteuid()).pw_name


class _WithCrontab(Host):
    """This machine, but for its crontab."""

    def __init__(self, table: Path) -> None:
        super().__init__()
        self._table = str(table)

    def path(self, path: str) -> str:
        return self._table if path == TABLE else super().path(path)


def _told(tmp_path: Path, table: str, pid: int, *others: int) -> list[Evidence]:
    """What is said of a process, of this crontab alone."""
    file = tmp_path / "crontab"
    file.write_text(table)
    host, seen = _WithCrontab(file), Seen()
    for fact in details.read(host, seen, [pid, *others]):
        assert isinstance(fact, Process)
        seen.add(fact)
    entries = tuple(
        fact
        for fact in persistence.read(host, seen)
        if isinstance(fact, PersistenceEntry) and fact.path == TABLE
    )
    processes = tuple(seen.processes.values())
    facts = NodeFacts(hostname="here")
    node = Node(Snapshot(taken_at_ns=0, node=facts, processes=processes, persistence=entries))
    return list(observe(node, seen.processes[pid]))


def _copy_of_sleep(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(shutil.which("sleep") or "/bin/sleep", path)
    return path


def test_a_miner_that_is_called_like_an_interpreter_is_found_through_the_path(
    tmp_path: Path,
) -> None:
    miner = _copy_of_sleep(tmp_path / "bin/python3")
    with running(str(miner), "611") as process:
        table = f"PATH={tmp_path}/bin:/usr/bin:/bin\n* * * * * {USER} python3 -o pool\n"
        (evidence,) = _told(tmp_path, table, process.pid)
        assert "tied by its file" in evidence.text and evidence.text.startswith("started again")
        # The same line under the usual PATH is the distribution's python3.
        table = f"* * * * * {USER} python3 -o pool\n"
        assert _told(tmp_path, table, process.pid) == []


def test_a_program_behind_a_link_is_known_by_its_inode(tmp_path: Path) -> None:
    program = _copy_of_sleep(tmp_path / "releases/7/serve")
    (tmp_path / "current").symlink_to("releases/7")
    with running(str(program), "612") as process:
        table = f"* * * * * {USER} cd {tmp_path}/current && ./serve 612\n"
        (evidence,) = _told(tmp_path, table, process.pid)
        assert "tied by its file" in evidence.text
        moved = program.with_name("moved")
        program.rename(moved)
        _copy_of_sleep(program)
        # Another file has its name now: what cron starts is not what runs.
        assert _told(tmp_path, table, process.pid) == []


def test_an_interpreter_is_tied_by_its_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(613)\n")
    other = tmp_path / "other.py"
    other.write_text(script.read_text())
    python = os.path.realpath(sys.executable)
    with ExitStack() as stack:
        runs, else_ = (
            stack.enter_context(running(python, "-S", str(path))).pid for path in (script, other)
        )
        for table in (
            f"* * * * * {USER} {python} {script} --lr 1\n",
            f"* * * * * {USER} cd {tmp_path}; {python} -u train.py\n",
            f"* * * * * {USER} {script}\n",
        ):
            (evidence,) = _told(tmp_path, table, runs)
            assert f"tied by its script {script}" in evidence.text
            assert _told(tmp_path, table, else_) == []


def test_what_has_only_a_name_in_common_is_not_said(tmp_path: Path) -> None:
    table = (
        f"* * * * * {USER} sleep $DELAY; sleep 5; /usr/bin/sleep 6\n"
        f"* * * * * {USER} sh -c 'sleep 7'\n* * * * * {USER} tail -f /var/log/x | sh\n"
    )
    with running("sleep", "614") as one, running("sh", "-c", "read x; :") as shell:
        assert _told(tmp_path, table, one.pid) == []
        assert _told(tmp_path, table, shell.pid) == []
        (evidence,) = _told(tmp_path, f"* * * * * {USER} sleep 614\n", one.pid)
        assert evidence.text.startswith("perhaps started again") and evidence.strength == "weak"


def test_what_cron_itself_starts_is_tied_by_its_shell(tmp_path: Path) -> None:
    line = "sleep 615; true"
    with running("/bin/sh", "-c", line) as shell:
        wait_until(lambda: bool(children(shell.pid)), "the shell's child")
        (child,) = children(shell.pid)
        wait_for_words(child, ("sleep", "615"))
        (evidence,) = _told(tmp_path, f"* * * * * {USER} {line}\n", child, shell.pid)
        assert "the command line of a process above it" in evidence.text
        assert _told(tmp_path, f"* * * * * {USER} {line}; x\n", shell.pid) == []


def test_a_script_that_starts_a_process_again_is_named_above_it(tmp_path: Path) -> None:
    script = tmp_path / "watchdog.sh"
    script.write_text("#!/bin/sh\nwhile :; do sleep 616; done\n")
    script.chmod(0o755)
    with running(str(script), as_argv=("/bin/sh", str(script))) as watchdog:
        wait_until(lambda: bool(children(watchdog.pid)), "the watchdog's child")
        (child,) = children(watchdog.pid)
        wait_for_words(child, ("sleep", "616"))
        (evidence,) = _told(tmp_path, f"@reboot {USER} {script}\n", child, watchdog.pid)
        assert f"the script {script} of a process above it" in evidence.text


def test_a_line_of_another_user_starts_nothing_of_ours(tmp_path: Path) -> None:
    program = _copy_of_sleep(tmp_path / "serve")
    with running(str(program), "617") as process:
        for user, said in ((USER, 1), ("daemon", 0)):
            table = f"* * * * * {user} {program}\n"
            assert len(_told(tmp_path, table, process.pid)) == said
