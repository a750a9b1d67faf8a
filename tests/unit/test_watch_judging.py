"""When the node is judged: changes come together, nothing is lost, and it costs 5% of a core."""

from __future__ import annotations

from typing import cast

import msgspec
import pytest

from gpuwarden.errors import GpuwardenError, TimedOut, Unavailable
from gpuwarden.finding import PolicyUse, Report
from gpuwarden.model import NodeFacts, Usage
from gpuwarden.watch.judgement import Judged, Memory
from gpuwarden.watch.judging import FOLLOW_UP_SECONDS, LEAST_SECONDS, SHARE, Judging
from gpuwarden.watch.workers import Worker
from tests.support.open_watching import Clock

INTERVAL = 300.0


class StandInJudge:
    """Has the methods of a ``Worker``; answers with a judgement that took ``seconds``."""

    def __init__(self) -> None:
        self.asked: list[Memory] = []
        self.seconds = 0.05
        self.fails: GpuwardenError | None = None
        self.refuses: GpuwardenError | bool = False
        self.busy = False
        self.stops = 0

    def stop(self) -> None:
        self.stops += 1

    def request(self, body: bytes) -> bool:
        if isinstance(self.refuses, GpuwardenError):
            raise self.refuses
        if self.refuses:
            return False
        self.asked.append(msgspec.msgpack.decode(body, type=Memory))
        self.busy = True
        return True

    def take(self) -> bytes | None:
        if not self.busy:
            return None
        self.busy = False
        if self.fails is not None:
            raise self.fails
        report = Report(
            tool_version="0", taken_at_ns=len(self.asked), node=NodeFacts(hostname="n"),
            policy=PolicyUse(), sensors=(), sources=(), rules=(), gaps=(), gpus=(), rows=(),
            findings=(),
        )  # fmt: skip
        return msgspec.msgpack.encode(Judged(report=report, seconds=self.seconds))

    def seconds_left(self) -> float | None:
        return 60.0 if self.busy else None


class Node:
    """Judging with a clock that is turned by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.judge = Clock(), StandInJudge()
        monkeypatch.setattr("gpuwarden.watch.judging.time", self.clock.module)
        self.judging = Judging(cast(Worker, self.judge), interval_seconds=INTERVAL)

    def turn(self) -> Judged | None:
        """As the agent's loop does."""
        if self.judging.is_due:
            self.judging.ask(Memory())
        return self.judging.take()

    def asked_after(self, seconds: float) -> float | None:
        """How long until the next question, if there is one within that time."""
        begun, before = self.clock.now, len(self.judge.asked)
        while self.clock.now - begun < seconds:
            self.turn()
            if len(self.judge.asked) > before:
                return self.clock.now - begun
            wait = self.judging.seconds_to_wait()
            assert wait > 0 or self.judging.is_due
            self.clock.now += max(min(wait, begun + seconds - self.clock.now), 0.001)
        return None


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(monkeypatch)


def test_the_first_is_asked_for_at_once_and_then_one_an_interval(node: Node) -> None:
    assert node.judging.is_due
    judged = node.turn()
    assert judged is not None
    assert node.judging.last == judged
    assert node.judging.count == 1
    assert not node.judging.is_due
    assert node.asked_after(INTERVAL - 1) is None
    assert node.asked_after(2) is not None


def test_what_is_remembered_goes_with_the_question(node: Node) -> None:
    memory = Memory(usage=(Usage(gpu_id="g", from_ns=1, until_ns=2, covered_seconds=1.0),))
    node.judging.ask(memory)
    assert node.judge.asked == [memory]


def test_changes_that_come_together_are_one_question(node: Node) -> None:
    node.turn()
    for _ in range(100):
        node.judging.changed()
    assert node.asked_after(10) == pytest.approx(LEAST_SECONDS, abs=0.01)
    assert node.asked_after(INTERVAL - 10) is None


def test_a_change_while_one_is_under_way_asks_for_another(node: Node) -> None:
    node.judging.ask(Memory())
    node.judging.changed()
    assert not node.judging.is_due  # one at a time
    node.judging.ask(Memory())
    assert len(node.judge.asked) == 1
    node.clock.now += 0.5
    assert node.judging.take() is not None
    assert node.asked_after(10) is not None


def test_a_long_judgement_is_followed_by_twenty_times_as_long_without(node: Node) -> None:
    node.judge.seconds = 1.5
    node.turn()
    node.judging.changed()
    assert node.asked_after(100) == pytest.approx(SHARE * 1.5, abs=0.01)
    node.judging.changed()
    node.judging.follow_up()
    assert node.asked_after(100) == pytest.approx(SHARE * 1.5, abs=0.01)


def test_one_that_takes_longer_than_its_share_of_the_interval_makes_it_longer(node: Node) -> None:
    node.judge.seconds = 30.0
    node.turn()
    assert node.asked_after(2 * SHARE * 30) == pytest.approx(SHARE * 30, abs=0.01)


def test_it_looks_again_soon_whether_a_finding_is_over(node: Node) -> None:
    node.turn()
    node.judging.follow_up()
    assert node.asked_after(60) == pytest.approx(FOLLOW_UP_SECONDS, abs=0.01)


@pytest.mark.parametrize("error", [TimedOut("no answer in 60 s"), Unavailable("it ended")])
def test_a_failure_is_told_of_when_it_comes_twice(node: Node, error: GpuwardenError) -> None:
    node.turn()
    kept = node.judging.last
    node.judge.fails = error
    node.judging.changed()
    node.asked_after(10)
    assert (node.judging.failures, node.judging.error) == (1, "")
    assert node.asked_after(60) == pytest.approx(FOLLOW_UP_SECONDS, abs=0.01)
    assert (node.judging.failures, node.judging.error) == (2, str(error))
    assert node.judging.last == kept
    assert node.judging.count == 1
    node.judge.fails = None
    assert node.asked_after(60) is not None
    assert node.judging.error == ""
    assert node.judging.count == 2
    node.judge.fails = error
    node.judging.changed()
    node.asked_after(60)
    assert node.judging.error == ""  # the first in a row again


def test_a_change_does_not_make_it_hammer_a_judge_that_fails(node: Node) -> None:
    node.judge.fails = Unavailable("it ended")
    node.turn()
    node.judging.changed()
    assert node.asked_after(60) == pytest.approx(FOLLOW_UP_SECONDS, abs=0.01)


def test_no_child_to_be_had_is_a_failure_and_the_loop_does_not_spin(node: Node) -> None:
    node.judge.refuses = Unavailable("no process for the judge")
    for _ in range(3):
        node.turn()
        assert node.judging.seconds_to_wait() >= LEAST_SECONDS - 0.01
        node.clock.now += node.judging.seconds_to_wait()
    assert node.judging.failures == 3
    assert node.judging.error == "no process for the judge"
    node.judge.refuses = True  # the worker waits before it starts another child
    node.turn()
    assert not node.judging.is_due
    node.judge.refuses = False
    assert node.asked_after(60) is not None


def test_it_waits_for_a_judge_at_work_as_long_as_that_has(node: Node) -> None:
    node.judging.ask(Memory())
    assert node.judging.seconds_to_wait() == pytest.approx(60.0, abs=0.1)


def test_a_judge_with_nothing_to_judge_for_a_while_is_let_go(node: Node) -> None:
    node.judging.ask(Memory())
    node.judging.changed()
    assert node.judging.take() is not None
    assert node.judge.stops == 0, "another judgement is due soon"
    assert node.asked_after(60) is not None
    assert node.judge.stops == 1
    assert node.asked_after(2 * INTERVAL) is not None
