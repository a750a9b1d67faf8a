"""The same events by the slow, plain path give the same findings.

The plain path judges every event by itself: a fresh look at its process, a snapshot with this one
open in the state that it ended in, nothing remembered and nothing merged. Its findings are put
together by id: the gravest severity, and how many events gave it.
"""

from __future__ import annotations

import errno
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import event as seen
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuwarden.finding import SEVERITIES, Finding, severity_rank
from gpuwarden.host import Host
from gpuwarden.policy import Policy
from gpuwarden.probes.events import OpenEvent, OpenReturn, ProcessIdentity
from gpuwarden.watch.examiner import Examination, Examined
from gpuwarden.watch.identity import Identities
from gpuwarden.watch.open_judge import Surroundings, device_names, findings_of, snapshot_of
from gpuwarden.watch.opens import Entry, fact
from tests.support.open_watching import (
    BOOT_TIME_NS,
    CLUSTER,
    LATER_NS,
    MAJORS,
    NODES,
    Watching,
    container,
    pod,
    surroundings,
    write_process,
)
from tests.support.opening import contained, held, identity, opened, returned

LOST = "lost"
"""The return value of an open that nobody told."""

GIVEN = pod("given")
KNOWN = (
    container("rogue"),
    container("given", pod_uid=GIVEN.pod_uid, pod_name="given", pod_namespace="research"),
    container("broker", privileged=True),
)
LATE = container("late")

SESSION = "/user.slice/user-1000.slice/session-3.scope"
PROCESSES = (
    identity(100),
    identity(101, cgroup_path=SESSION),
    identity(102, cgroup_path=SESSION, exe_path="/tmp/x", exe_inode=5, argv=("/tmp/x",)),
    contained(200, "rogue"),
    contained(201, "rogue", exe_path="/app/worker", exe_inode=6, argv=("worker",)),
    contained(202, "given"),
    contained(203, "broker"),
    contained(204, "nobody-knows"),
    contained(205, "late"),
    contained(206, "late", exe_path="/app/other", exe_inode=8),
)
ALIVE = (contained(300, "rogue"), identity(301, cgroup_path=SESSION))
"""Those that only hold a device: a descriptor alone says little, so /proc has to."""
OTHER_NAME = {102, 201, 206}
"""They open a node that they made elsewhere."""


class Move(NamedTuple):
    """What one process did with one device, and how each time ended."""

    process: ProcessIdentity
    minor: int
    how: str
    denial: str
    end: int | str
    times: int
    later: int
    """After how many other events its return value is told."""


class Hold(NamedTuple):
    """A process is found with a device that it did not open."""

    process: ProcessIdentity
    minor: int


HOLDS = st.builds(Hold, st.sampled_from(ALIVE), st.integers(0, 2))


def _moves(processes: list[ProcessIdentity]) -> st.SearchStrategy[list[Move | Hold]]:
    """A recording in which few processes do much: what comes together is what can go wrong."""
    moves = st.builds(
        Move,
        st.sampled_from(processes),
        st.sampled_from([0, 0, 0, 1]),
        st.sampled_from(["open", "open", "open", "open", "mknod", "access"]),
        st.sampled_from(["", "", "", "", "would deny", "denied"]),
        st.sampled_from([5, -errno.EACCES, -errno.ENXIO, LOST]),
        st.integers(1, 3),
        st.integers(0, 6),
    )
    return st.lists(st.one_of(moves, moves, moves, moves, HOLDS), min_size=8, max_size=16)


PAUSES = st.sampled_from([0.0, 0.0, 0.05, 0.3])
BETWEEN = st.sampled_from(["", "tick", "current", "poll"])


def events_of(move: Move) -> list[OpenEvent]:
    """What the probe tells of a move at once."""
    path = f"/tmp/n{move.minor}" if move.process.pid in OTHER_NAME else f"/dev/nvidia{move.minor}"
    return [
        opened(
            move.process,
            minor=move.minor,
            how=move.how,
            denial=move.denial,
            state="denied" if move.denial == "denied" else "attempted",
            path=path,
        )
        for _ in range(move.times)
    ]


def ended(move: Move, event: OpenEvent) -> OpenEvent:
    """The event as it ended, by what is known of it in the end."""
    if event.state == "denied" or move.how in ("mknod", "access"):
        return event
    if move.end == LOST:
        return replace(event, state="unknown")
    assert isinstance(move.end, int)
    if move.end >= 0:
        return replace(event, state="opened")
    refused = -move.end in (errno.EPERM, errno.EACCES)
    return replace(event, state="denied" if refused else "attempted", error=-move.end)


def held_event(hold: Hold) -> OpenEvent:
    """What a descriptor alone tells."""
    process = hold.process
    return opened(
        ProcessIdentity(
            pid=process.pid, start_time_ns=process.start_time_ns, uid=1000, comm=process.comm
        ),
        minor=hold.minor,
        how="held",
        state="opened",
        path=None,
    )


class Outcome(NamedTuple):
    severity: dict[str, int]
    times: Counter[str]


def plain(root: Path, around: Surroundings, every: Iterable[OpenEvent]) -> Outcome:
    """The slow path."""
    severity: dict[str, int] = {}
    times: Counter[str] = Counter()
    for event in every:
        fresh = Identities(Host(str(root)), boot_time_ns=BOOT_TIME_NS, same_pids=True)
        process = fresh.process(event.process)
        alone = Entry(event=event, first_ns=event.at_ns, last_ns=event.at_ns)
        snapshot = snapshot_of(
            around, LATER_NS, process, [], opens=[fact(alone, MAJORS, device_names(NODES))]
        )
        for finding in findings_of(snapshot, Policy(), None):
            rank = severity_rank(finding.severity)
            severity[finding.id] = max(severity.get(finding.id, rank), rank)
            times[finding.id] += 1
    return Outcome(severity, times)


def told(findings: Iterable[Finding]) -> Outcome:
    """The same of what an open watch told."""
    severity: dict[str, int] = {}
    times: Counter[str] = Counter()
    for finding in findings:
        rank = severity_rank(finding.severity)
        severity[finding.id] = max(severity.get(finding.id, rank), rank)
        times[finding.id] += finding.occurrences
    return Outcome(severity, times)


def fed(moves: Sequence[Move | Hold], batches: Sequence[int]) -> list[list[Any]]:
    """The recording as the probe's batches: events, and return values some events later."""
    stream: list[tuple[float, Any]] = []
    at = 0.0
    for move in moves:
        if isinstance(move, Hold):
            at += 1
            stream.append((at, move))
            continue
        for event in events_of(move):
            at += 1
            stream.append((at, (move, event)))
            if event.state == "attempted" and move.how == "open" and isinstance(move.end, int):
                stream.append((at + move.later + 0.5, returned(event, move.end)))
    stream.sort(key=lambda one: one[0])
    found: list[list[Any]] = []
    rest = [one for _, one in stream]
    sizes = iter(batches)
    while rest:
        size = next(sizes, len(rest))
        found.append(rest[:size])
        rest = rest[size:]
    return found


@settings(deadline=None, max_examples=70)
@given(
    st.lists(st.sampled_from(PROCESSES), min_size=1, max_size=3).flatmap(_moves),
    st.lists(st.integers(1, 8), min_size=4, max_size=16),
    st.lists(st.tuples(PAUSES, BETWEEN), min_size=4, max_size=16),
)
def test_the_plain_path_finds_the_same(
    moves: list[Move | Hold], batches: list[int], between: list[tuple[float, str]]
) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        watching = Watching(root, patch, around=_around(), answer=_answer, return_values=True)
        for process in ALIVE:
            write_process(root, process)
        watching.know(*KNOWN)
        every: list[OpenEvent] = []
        holding: dict[tuple[int, int], Hold] = {}
        for batch, (pause, what) in zip(fed(moves, batches), cycle(between), strict=False):
            for one in batch:
                if isinstance(one, Hold):
                    if (one.process.pid, one.minor) not in holding:
                        every.append(held_event(one))
                    holding[one.process.pid, one.minor] = one
                    _poll(watching, holding)
                elif isinstance(one, OpenReturn):
                    watching.watch.events([one])
                else:
                    move, event = one
                    every.append(ended(move, event))
                    watching.watch.events([event])
            watching.turn(pause)
            match what:
                case "tick":
                    watching.watch.tick(watching.clock.time_ns())
                case "current":
                    watching.rounds.append(watching.watch.current(watching.clock.time_ns()))
                case "poll":
                    _poll(watching, holding)
        watching.watch.expired(10**18)
        watching.wait(2.5)
        assert watching.watch.idle
        watching.watch.tick(watching.clock.time_ns())
        watching.rounds.append(watching.watch.current(watching.clock.time_ns()))

        fast = told(watching.findings)
        around = _around()
        around.keep((*KNOWN, LATE), LATER_NS)
        slow = plain(root, around, every)
        seen(f"findings: {min(len(slow.severity), 5)}")
        assert fast.severity == slow.severity
        # A finding's count is that of all uses of its process from when it is told of.
        uses = Counter(one.process.pid for one in every)
        subjects = {one.id: one.subject.pid for one in watching.findings}
        for finding_id, times in slow.times.items():
            total = uses[subjects[finding_id] or 0]
            if times == total:
                assert fast.times[finding_id] == total
            else:
                assert times <= fast.times[finding_id] <= total


def _around() -> Surroundings:
    return surroundings(workloads=(GIVEN,))


def _answer(question: Examination) -> Examined:
    asked = {process.pid for process in question.processes}
    found = (LATE,) if asked & {205, 206} else ()
    return Examined(
        containers=found,
        asked_at_ns=LATER_NS,
        sources=CLUSTER,
        workloads=(GIVEN,),
        sources_at_ns=LATER_NS,
    )


def _poll(watching: Watching, holding: dict[tuple[int, int], Hold]) -> None:
    found = [held(one.process, minor=one.minor) for one in holding.values()]
    watching.watch.held(found, watching.clock.time_ns())


def test_the_plain_path_tells_the_kinds_of_findings_apart(tmp_path: Path) -> None:
    """The recordings above are about something: what the plain path says of each kind of move."""
    for process in ALIVE:
        write_process(tmp_path, process)
    around = _around()
    around.keep((*KNOWN, LATE), LATER_NS)

    def rank(pid: int, how: str = "open", denial: str = "", end: int | str = 5) -> list[int]:
        process = next(one for one in PROCESSES if one.pid == pid)
        move = Move(process, 0, how, denial, end, 1, 0)
        events = [ended(move, event) for event in events_of(move)]
        return sorted(plain(tmp_path, around, events).severity.values())

    critical, error, warning = (SEVERITIES.index(s) for s in ("critical", "error", "warning"))
    assert rank(100) == [warning]
    assert rank(101) == [error]
    assert rank(102) == [warning, error]  # by another name, too
    assert rank(200) == [critical]
    assert rank(201) == [error, critical]
    assert rank(202) == []
    assert rank(204) == [error]
    assert rank(205) == [critical]
    assert rank(200, end=-errno.EACCES) == rank(200, end=LOST) == [warning]
    assert rank(200, denial="denied") == [warning]
    assert rank(200, "mknod") == [warning, error]
    assert rank(200, "access") == [warning]
    for hold in (Hold(ALIVE[0], 0), Hold(ALIVE[1], 0)):
        assert len(plain(tmp_path, around, [held_event(hold)]).severity) == 2
