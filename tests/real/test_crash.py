"""The agent is killed at any moment, or its disk is full: no alarm is lost, none comes twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gpuwarden.errors import GpuwardenError
from gpuwarden.life import FindingLife, Transition, decode
from gpuwarden.sinks.dispatcher import Backoff, Dispatcher
from gpuwarden.sinks.lines import FileSink
from gpuwarden.sinks.own_trouble import OwnTrouble
from gpuwarden.sinks.specs import parse_sink, parse_sinks
from gpuwarden.store import Sample, Store
from tests.support.receivers import Receiver, wait_until
from tests.support.small_agent import RULE, THINGS, thing

pytestmark = pytest.mark.real

KILLS = 50
SECRET = "a-path-that-is-a-secret"
RULES = frozenset({RULE})


def distinct(bodies: list[bytes]) -> list[Transition]:
    """What a sink got by sequence; a repetition must be the same to the byte."""
    by_sequence: dict[int, bytes] = {}
    for body in bodies:
        sequence = decode(body).sequence
        assert by_sequence.setdefault(sequence, body) == body
    return [decode(by_sequence[sequence]) for sequence in sorted(by_sequence)]


def whole(lines: list[bytes]) -> list[bytes]:
    """Lines without those that a kill cut off in the middle; each came again whole."""
    complete = []
    for line in lines:
        try:
            msgspec.json.decode(line)
        except msgspec.DecodeError:
            continue
        complete.append(line)
    for line in lines:
        assert line in complete or any(other.startswith(line) for other in complete)
    assert len(lines) - len(complete) <= KILLS
    return complete


def check_lives(transitions: list[Transition]) -> None:
    """Sequences without a gap; nothing is opened twice, or ends that was not open."""
    assert [t.sequence for t in transitions] == list(range(1, len(transitions) + 1))
    assert len({t.stream for t in transitions}) == 1
    now_open: set[str] = set()
    for transition in transitions:
        assert (transition.id not in now_open) == (transition.status == "opened")
        now_open.add(transition.id)
        if transition.status == "resolved":
            now_open.remove(transition.id)
    assert len({t.id for t in transitions}) <= THINGS


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as up:
        yield up


def test_killed_fifty_times_it_loses_nothing_and_repeats_no_alarm(
    tmp_path: Path, receiver: Receiver
) -> None:
    memory, lines, clock = tmp_path / "memory", tmp_path / "findings.jsonl", tmp_path / "clock"
    clock.touch()
    specs = [f"file:{lines}", f"webhook:{receiver.url}/{SECRET}"]
    command = [sys.executable, "-m", "tests.support.small_agent", str(memory), str(clock), *specs]
    # Compiled once, fifty starts are quick.
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path / "compiled")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    dice = random.Random(4711)
    reported: set[str] = set()
    # The receiver is away for a third of the time: then everything waits in the spool.
    for kill in range(KILLS):
        receiver.behaviour = 503 if kill % 3 == 2 else 200
        agent = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        assert agent.stdout is not None
        try:
            said = b""
            if kill % 5:
                # Let it work for a moment; else it is killed while it starts.
                said = agent.stdout.readline()
                assert said, "the agent ended by itself"
                time.sleep(dice.uniform(0, 0.08))
            else:
                time.sleep(dice.uniform(0, 0.3))
            assert agent.poll() is None, "the agent ended by itself"
        finally:
            agent.send_signal(signal.SIGKILL)
            rest, _ = agent.communicate(timeout=20)
        reported |= set((said + rest).rpartition(b"\n")[0].decode().splitlines())
    receiver.behaviour = 200

    with Store(str(memory)) as store:
        assert store.troubles == []
        specs_before = store.findings.cursors()
        assert len(specs_before) == 2
        assert all(sink.dropped == 0 for sink in specs_before.values())
        assert store.findings._connection.execute("PRAGMA quick_check").fetchone() == ("ok",)
        dispatcher = Dispatcher(store.findings, parse_sinks(specs), backoff=Backoff(0.01, 0.05))
        dispatcher.start()
        assert dispatcher.drain(30)
        assert dispatcher.stop(10)
        last = store.findings.last_sequence
        still_open = {state.id for state in store.findings.states()}
        assert store.series(pid=3)

    content = lines.read_bytes()
    assert content.endswith(b"\n")
    in_file = distinct(whole(content.splitlines()))
    in_webhook = distinct([request.body for request in receiver.accepted])
    assert len(in_file) == len(in_webhook) == last
    assert last > KILLS, "the agent had something to say"
    for transitions in (in_file, in_webhook):
        check_lives(transitions)
        told = {f"{t.sequence} {t.status} {t.id}" for t in transitions}
        assert reported <= told
    status = {t.id: t.status for t in in_file}
    assert still_open == {key for key, last_status in status.items() if last_status != "resolved"}
    assert SECRET.encode() not in Path(memory, "findings.sqlite").read_bytes()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=384k,mode=700", "tmpfs", str(path)], check=True
    )
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(path: Path) -> None:
    """Takes what is free on the small disk, to the last byte."""
    with open(path / "ballast", "ab", buffering=0) as file:
        for size in (4096, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                continue


def test_a_full_disk_is_survived_told_and_made_up_for(
    tmp_path: Path, small_disk: Path, receiver: Receiver
) -> None:
    lines = small_disk / "findings.jsonl"
    with Store(str(small_disk / "memory")) as store:
        life = FindingLife(store, rounds_to_resolve=1)
        sinks = [FileSink(str(lines)), parse_sink(f"webhook:{receiver.url}")]
        dispatcher = Dispatcher(store.findings, sinks, backoff=Backoff(0.01, 0.05))
        dispatcher.start()
        life.observe([thing(0, 0)], 0, RULES)
        assert dispatcher.drain(20)
        moment = 0
        while not store.findings.trouble or not dispatcher.health()[0].failures:
            moment += 1
            assert moment < 500, "the disk never was full"
            fill(small_disk)
            present = [thing(n, 0) for n in range(moment + 1)]
            life.observe(present, moment, RULES)
            store.samples.record(
                Sample(at_ns=n, gpu_id="GPU-0", pid=moment, sm_percent=n % 7) for n in range(500)
            )
            dispatcher.wake()
            # Who is not on that disk is told all the same, at once.
            wait_until(lambda: dispatcher.health()[1].waiting == 0)
        health = dispatcher.health()
        assert health[0].waiting > 0
        assert "space" in health[0].error
        told = OwnTrouble().findings(health, store.troubles, 10**18 * 9)
        assert {"memory_not_kept", "sink_not_answering"} <= {finding.rule for finding in told}
        assert "full" in " ".join(e.text for finding in told for e in finding.evidence)

        (small_disk / "ballast").unlink()
        life.observe(present, moment + 1, RULES)
        wait_until(lambda: store.findings.trouble is None)
        wait_until(lambda: store.samples.record([Sample(at_ns=1, gpu_id="GPU-0", pid=1)]) == 1)
        assert store.troubles == []
        dispatcher.wake()
        assert dispatcher.drain(20)
        assert dispatcher.stop(10)
        last = store.findings.last_sequence
    in_file = distinct(lines.read_bytes().splitlines())
    in_webhook = distinct([request.body for request in receiver.accepted])
    assert len(in_file) == len(in_webhook) == last
    check_order = [t.sequence for t in in_file]
    assert check_order == list(range(1, last + 1))
    # To be opened, a database needs more room than it did when it was closed.
    lines.unlink()
    with Store(str(small_disk / "memory")) as store:
        assert store.troubles == []
        assert len(FindingLife(store).open) == moment + 1


@pytest.mark.parametrize("begun", [False, True], ids=["new", "begun"])
def test_a_disk_that_is_full_at_the_start_gives_one_error_and_alarms_go_on(
    small_disk: Path, receiver: Receiver, begun: bool
) -> None:
    memory = str(small_disk / "memory")
    if begun:
        with Store(memory) as store:
            FindingLife(store).observe([thing(0, 0)], 0, RULES)
    before = sorted(os.listdir(memory)) if begun else []
    fill(small_disk)
    with pytest.raises(GpuwardenError) as caught:
        Store(memory)
    assert "full" in str(caught.value) or "No space" in str(caught.value)
    with Store.volatile(memory, caught.value) as store:
        assert "nothing is remembered" in store.troubles[0].reason
        dispatcher = Dispatcher(store.findings, [parse_sink(f"webhook:{receiver.url}")])
        dispatcher.start()
        FindingLife(store).observe([thing(1, 0)], 1, RULES)
        assert dispatcher.drain(20)
        assert dispatcher.stop(10)
    assert len(receiver.accepted) == 1
    if begun:
        (small_disk / "ballast").unlink()
        assert set(before) <= set(os.listdir(memory))
        with Store(memory) as store:
            assert store.troubles == []
            assert len(FindingLife(store).open) == 1


def test_a_transition_on_a_line_is_json_of_its_own(tmp_path: Path) -> None:
    with Store(str(tmp_path / "memory")) as store:
        sink = FileSink(str(tmp_path / "lines"))
        dispatcher = Dispatcher(store.findings, [sink])
        dispatcher.start()
        FindingLife(store).observe([thing(1, 1)], 1, RULES)
        assert dispatcher.drain(20)
        dispatcher.stop(10)
    (line,) = (tmp_path / "lines").read_text().splitlines()
    assert json.loads(line)["schema"] == "gpuwarden.finding"
