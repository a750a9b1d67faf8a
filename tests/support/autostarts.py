"""Autostarts and processes in one line each, and how they are tied."""

from __future__ import annotations

from typing import Any

from gpuwarden.finding import Evidence
from gpuwarden.model import (
    Executable,
    NodeFacts,
    PersistenceEntry,
    Process,
    Snapshot,
    StartedProgram,
)
from gpuwarden.node import Node
from gpuwarden.rules.autostart_programs import taken_apart
from gpuwarden.rules.autostart_ties import Tie, runner_of, tie_of
from gpuwarden.rules.respawn import observe

PYTHON = Executable(path="/usr/bin/python3.11", device="0:1", inode=11, links_python=True)
SLEEP = Executable(path="/usr/bin/sleep", device="0:1", inode=12)
DASH = Executable(path="/usr/bin/dash", device="0:1", inode=13)
BUSYBOX = Executable(path="/bin/busybox", device="0:1", inode=14)
RIG = Executable(path="/home/alice/rig", device="0:1", inode=20)
FALSE_PYTHON = Executable(path="/opt/x/python3", device="0:1", inode=21, links_python=False)
FOUND = {
    "python3": PYTHON,
    "/usr/bin/python3": PYTHON,
    "/v/py": PYTHON,
    "sleep": SLEEP,
    "sh": DASH,
    "bash": DASH,
}


def process(exe: Executable | None, *arguments: str, **fields: Any) -> Process:
    name = exe.path if exe is not None else "?"
    values = {"pid": 500, "start_time_ticks": 1, "uid": 1000, "user": "alice", "ppid": 0}
    return Process(**{**values, "exe": exe, "argv": (name, *arguments), **fields})


def entry(
    command: str, found: dict[str, Executable] | None = None, kind: str = "cron", **fields: Any
) -> PersistenceEntry:
    """An entry with one command, whose programs were looked up as ``found`` says."""
    programs = tuple(
        StartedProgram(name=name, path=exe.path, device=exe.device, inode=exe.inode)
        for name, exe in (FOUND if found is None else found).items()
    )
    values = {"path": "/etc/cron.d/x", "line": 3, "text": command, "programs": programs}
    return PersistenceEntry(**{**values, "kind": kind, "commands": (command,), **fields})


def node_of(*processes: Process, entries: tuple[PersistenceEntry, ...] = ()) -> Node:
    facts = NodeFacts(hostname="here")
    return Node(Snapshot(taken_at_ns=0, node=facts, processes=processes, persistence=entries))


def tie(one: PersistenceEntry, runs: Process) -> Tie | None:
    return tie_of(taken_apart(one), runner_of(node_of(runs), runs))


def told(one: PersistenceEntry, runs: Process, *others: Process) -> list[Evidence]:
    return list(observe(node_of(runs, *others, entries=(one,)), runs))
