"""`gpuwarden watch` killed again and again while processes use a GPU, and what must agree after."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from gpuwarden.life import Transition, decode
from gpuwarden.model import Gap
from gpuwarden.store import Store
from tests.support.probes import node
from tests.support.receivers import Receiver
from tests.support.watching import GPU, Watching, watching

QUICK = ("tests.support.quick_watch", "0.3", "60")
"""Findings end soon after their processes: whole lives fit between two kills."""
ROUNDS = ("--interval", "0.1")
RULE = "accelerator_opened_by_other_name"


class Seen(NamedTuple):
    """What is left after the last run."""

    in_file: list[Transition]
    in_webhook: list[Transition]
    repeated: int
    """Deliveries that came twice."""
    open_ids: frozenset[str]
    resolved_ids: frozenset[str]
    last_sequence: int
    dropped: int
    troubles: Sequence[Gap]
    pids: frozenset[int]
    """Every process that opened the node."""
    kills_before_ready: int


class Users:
    """Processes that open a node: for a moment, for a while, and many thousand times."""

    def __init__(
        self, opener: Path, path: Path, dice: random.Random, *, pause_seconds: float = 0.3
    ) -> None:
        """One begins after a pause of up to ``pause_seconds``."""
        self._opener, self._path, self._dice = opener, path, dice
        self._pause_seconds = pause_seconds
        self._running: list[tuple[subprocess.Popen[bytes], float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self.pids: set[int] = set()

    def __enter__(self) -> Users:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._thread.join()
        for process, _ in self._running:
            process.kill()
            process.wait()

    def _begin(self, seconds: float, *argv: str) -> None:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, close_fds=False
        )
        self.pids.add(process.pid)
        self._running.append((process, time.monotonic() + seconds))

    def _work(self) -> None:
        opener, path = str(self._opener), str(self._path)
        turn = 0
        while not self._stop.is_set():
            turn += 1
            if turn % 20 == 5:
                self._begin(20, opener, "open", path, "30000")
            elif turn % 3 == 0:
                seconds = self._dice.uniform(0.2, 4)
                self._begin(seconds, "/bin/sh", "-c", 'exec 3<"$0"; exec sleep 20', path)
            else:
                self._begin(20, opener, "open", path)
            now = time.monotonic()
            for one in list(self._running):
                process, until = one
                if now >= until:
                    process.kill()
                if process.poll() is not None:
                    self._running.remove(one)
            self._stop.wait(self._dice.uniform(0.05, self._pause_seconds))


def distinct(bodies: Sequence[bytes]) -> list[Transition]:
    """What a sink got, by sequence; a repetition must be the same to the byte."""
    by_sequence: dict[int, bytes] = {}
    for body in bodies:
        sequence = decode(body).sequence
        assert by_sequence.setdefault(sequence, body) == body, f"{sequence} came in two versions"
    return [decode(by_sequence[sequence]) for sequence in sorted(by_sequence)]


def whole_lines(path: Path, cut: int) -> list[bytes]:
    """A file's lines but for those, ``cut`` at most, that a death cut off; each came again."""
    text = path.read_bytes()
    lines = text[: text.rfind(b"\n") + 1].splitlines()  # the last one may be half written now
    complete = []
    for line in lines:
        try:
            msgspec.json.decode(line)
        except msgspec.DecodeError:
            continue
        complete.append(line)
    known = set(complete)
    broken = [line for line in lines if line not in known]
    assert len(broken) <= cut
    for line in broken:
        assert any(other.startswith(line) for other in complete), line[:200]
    return complete


@contextmanager
def _killed_at_the_end(agent: Watching) -> Iterator[None]:
    try:
        yield
    finally:
        agent.kill()


def killed(folder: Path, opener: Path, receiver: Receiver, *, kills: int, seed: int) -> Seen:
    """Kills the agent ``kills`` times at random, lets it run quietly, and looks at what is left."""
    dice = random.Random(seed)
    lines = folder / "findings.jsonl"
    sinks = (f"file:{lines}", f"webhook:{receiver.url}/hook")
    path = node(folder / "cat.jpg", GPU)
    early = 0

    def agent(*, ready: bool) -> AbstractContextManager[Watching]:
        return watching(folder, *ROUNDS, sinks=sinks, ready=ready, program=QUICK)

    with Users(opener, path, random.Random(seed + 1)) as users:
        for number in range(kills):
            receiver.behaviour = 503 if number % 4 == 3 else 200
            is_early = number % 5 == 4
            with agent(ready=not is_early) as one, _killed_at_the_end(one):
                time.sleep(dice.uniform(0, 1.5 if is_early else 0.8))
                assert one.process.poll() is None, f"it ended by itself: {one.errors}"
            early += is_early
    receiver.behaviour = 200
    with agent(ready=True) as one:
        last = _use_once(opener, path)
        users.pids.add(last)
        one.wait(
            lambda: any(
                t.subject.pid == last and t.status == "resolved" for t in _in_file(lines, kills)
            ),
            "the end of the last finding",
        )
        one.wait(lambda: not _open_of(lines, kills, users.pids), "the end of all findings", 60)
        one.wait(
            lambda: (
                {decode(r.body).sequence for r in receiver.accepted}
                >= {t.sequence for t in _in_file(lines, kills)}
            ),
            "the webhook having all",
        )
        assert one.stop() == 0, one.errors
    with Store(str(one.state)) as store:
        states = store.findings.states(only_open=False)
        cursors = store.findings.cursors()
        assert len(cursors) == 2
        return Seen(
            in_file=_in_file(lines, kills),
            in_webhook=distinct([request.body for request in receiver.accepted]),
            repeated=len(receiver.accepted) - len({r.body for r in receiver.accepted}),
            open_ids=frozenset(state.id for state in states if state.open),
            resolved_ids=frozenset(state.id for state in states if not state.open),
            last_sequence=store.findings.last_sequence,
            dropped=sum(cursor.dropped for cursor in cursors.values()),
            troubles=store.troubles,
            pids=frozenset(users.pids),
            kills_before_ready=early,
        )


def _use_once(opener: Path, path: Path) -> int:
    process = subprocess.Popen([str(opener), "open", str(path)], stdout=subprocess.DEVNULL)
    process.wait()
    return process.pid


def _in_file(lines: Path, cut: int) -> list[Transition]:
    return distinct(whole_lines(lines, cut)) if lines.exists() else []


def _open_of(lines: Path, cut: int, pids: set[int]) -> set[str]:
    status = {t.id: t.status for t in _in_file(lines, cut) if t.subject.pid in pids}
    return {key for key, last in status.items() if last != "resolved"}


def check(seen: Seen) -> None:
    """That nothing was lost, doubled or renamed. Errors: AssertionError."""
    assert seen.troubles == []
    assert seen.dropped == 0
    for told in (seen.in_file, seen.in_webhook):
        assert [t.sequence for t in told] == list(range(1, seen.last_sequence + 1))
        assert len({t.stream for t in told}) == 1
    assert seen.in_file == seen.in_webhook
    now_open: set[str] = set()
    ids: dict[tuple[object, ...], set[str]] = {}
    for one in seen.in_file:
        assert (one.id not in now_open) == (one.status == "opened"), (one.sequence, one.status)
        now_open.add(one.id)
        if one.status == "resolved":
            now_open.remove(one.id)
        subject = one.subject
        name = subject.name if subject.pid is None else None
        key = (one.rule, subject.kind, subject.pid, subject.start_time_ticks, name)
        ids.setdefault(key, set()).add(one.id)
    assert not {key: found for key, found in ids.items() if len(found) > 1}
    assert len(ids) == len({t.id for t in seen.in_file})
    assert now_open == seen.open_ids
    assert {t.id for t in seen.in_file} == seen.open_ids | seen.resolved_ids


def told_processes(seen: Seen) -> int:
    """How many of the processes have a finding."""
    return len({t.subject.pid for t in seen.in_file if t.rule == RULE} & seen.pids)


def children_of_the_dead(folder: Path) -> list[int]:
    """Agents of this folder, and their children, that still run."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            command = Path(f"/proc/{name}/cmdline").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in command and b"--state" in command:
            found.append(int(name))
    return found
