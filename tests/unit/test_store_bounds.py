"""What the memory of findings costs at the most; sequences that are given anew are told apart."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuwarden.errors import Unavailable
from gpuwarden.finding import Finding, Subject, finding_id
from gpuwarden.life import FindingLife
from gpuwarden.sinks.dispatcher import Dispatcher
from gpuwarden.sinks.own_trouble import EVERY_SINK, OwnTrouble
from gpuwarden.sinks.sink import DELIVERED, Outcome
from gpuwarden.store import FindingState, LedgerLimits, News, Store
from tests.support.receivers import wait_until
from tests.unit.test_store import fill_disk

SECOND = 10**9
AT = 10**18


def finding(name: str, kind: str = "process") -> Finding:
    subject = Subject(kind=kind, name=name)  # type: ignore[arg-type]
    return Finding(
        id=finding_id("rule", subject),
        rule="rule",
        severity="warning",
        title="A title",
        explanation="An explanation",
        subject=subject,
    )


def test_states_that_cannot_be_written_are_bounded_and_no_ended_one_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuwarden.store_findings.UNWRITTEN_STATES", 10)
    with Store(str(tmp_path / "memory")) as store:
        ledger = store.findings
        ledger.commit(
            [FindingState("before", True, 1, b""), FindingState("lasts", True, 1, b"")], []
        )
        disk = fill_disk(ledger)
        ledger.commit([FindingState("before", False, 2, b"")], [])
        for number in range(500):
            ledger.commit([FindingState(f"f{number}", True, number, b"")], [])
            ledger.commit([FindingState(f"f{number}", False, number, b"")], [])
            assert len(ledger._unwritten.states) <= 11
        ledger.commit([FindingState("new", True, 9, b"")], [])
        disk.full = False
        assert ledger.commit([], [])
    with Store(str(tmp_path / "memory")) as store:
        assert {state.id for state in store.findings.states()} == {"lasts", "new"}


def test_resolved_findings_are_bounded_by_number(tmp_path: Path) -> None:
    limits = LedgerLimits(resolved_rows=100)
    with Store(str(tmp_path / "memory"), ledger_limits=limits) as store:
        states = [FindingState(f"{n:05}", False, AT + n, b"") for n in range(5000)]
        store.findings.commit([*states, FindingState("open", True, 0, b"")], [])
        assert [store.findings.trim(AT) for _ in range(3)] == [4000, 900, 0]
        left = [state.id for state in store.findings.states(only_open=False)]
        assert left == ["open", *(f"{n:05}" for n in range(4900, 5000))]


def test_a_memory_that_is_not_on_disk_keeps_nothing_that_is_over() -> None:
    with Store.volatile("/nowhere", Unavailable("it is not there")) as store:
        store.findings.commit([FindingState(f"{n}", n % 2 == 0, AT, b"") for n in range(100)], [])
        store.trim(AT)
        assert len(store.findings.states(only_open=False)) == 50


@pytest.mark.parametrize("died", [True, False], ids=["killed", "written in time"])
def test_numbers_that_were_told_and_not_written_are_given_anew_in_a_new_stream(
    tmp_path: Path, died: bool
) -> None:
    memory = tmp_path / "memory"
    with Store(str(memory)) as store:
        ledger = store.findings
        ledger.register(["a"])
        ledger.commit([], [News(1, AT, b"one")])
        stream = ledger.stream
        disk = fill_disk(ledger)
        ledger.commit([], [News(2, AT, b"two")])
        assert [news.sequence for news in ledger.undelivered("a")] == [1, 2]
        if not died:
            disk.full = False
            ledger.commit([], [])
            disk.full = True
        # It ends without a chance to write.
        os.close(store._held or -1)
        store._held = None
        ledger._unwritten.clear()
    for _ in range(2):
        with Store(str(memory)) as store:
            assert store.findings.last_sequence == (1 if died else 2)
            assert (store.findings.stream == stream) is not died
            if died:
                died, stream = False, store.findings.stream
                store.findings.commit([], [News(2, AT, b"another two")])


def test_a_crowd_keeps_no_own_trouble_from_being_told_and_is_told_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuwarden.life.MAX_OPEN", 2)
    own = OwnTrouble()
    with Store(str(tmp_path / "memory")) as store:
        life = FindingLife(store)
        life.observe([finding(f"{n}") for n in range(5)], AT, frozenset())
        trouble = own.findings([], [], AT, not_opened=life.overflowed, most_open=2)
        assert [(one.rule, one.subject.name) for one in trouble] == [("alarms_dropped", EVERY_SINK)]
        assert "3 times" in trouble[0].evidence[0].text
        (told,) = life.observe(trouble, AT, frozenset())
        assert told.rule == "alarms_dropped"
    assert own.findings([], [], AT + 3599 * SECOND, not_opened=3, most_open=2) == trouble
    assert own.findings([], [], AT + 3600 * SECOND, not_opened=3, most_open=2) == []


class Stuck:
    """A sink whose delivery does not end until it is let go."""

    repeat_seconds = None
    key = name = "stuck"

    def __init__(self, path: Path) -> None:
        self._pipe = path
        os.mkfifo(path)

    def deliver(self, finding_json: bytes) -> Outcome:
        self._pipe.read_bytes()
        return DELIVERED

    def close(self) -> None:
        pass


def test_a_delivery_that_does_not_end_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(str(tmp_path / "memory")) as store:
        sink = Stuck(tmp_path / "pipe")
        dispatcher = Dispatcher(store.findings, [sink])
        dispatcher.start()
        FindingLife(store).observe([finding("1")], AT, frozenset())
        dispatcher.wake()
        assert dispatcher.health()[0].failing_since_ns is None
        monkeypatch.setattr("gpuwarden.sinks.dispatcher.STUCK_NS", SECOND // 20)
        wait_until(lambda: dispatcher.health()[0].failing_since_ns is not None)
        (health,) = dispatcher.health()
        assert "does not end" in health.error
        since = health.failing_since_ns or 0
        (told,) = OwnTrouble().findings([health], [], since + 60 * SECOND)
        assert told.rule == "sink_not_answering"
        (tmp_path / "pipe").write_bytes(b"go")
        assert dispatcher.drain(20)
        assert dispatcher.health()[0].failing_since_ns is None
        assert dispatcher.stop(10)
