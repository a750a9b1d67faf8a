"""A finding is opened once, updated when it changes, resolved when gone; also over restarts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gpuwarden.finding import Evidence, Finding, Severity, Subject, finding_id
from gpuwarden.life import FindingLife, Transition, decode
from gpuwarden.store import Store

SECOND = 10**9
RULE = "rogue_container"
EVALUATED = frozenset({RULE})


def finding(pid: int = 7, rule: str = RULE, severity: Severity = "warning", **more: Any) -> Finding:
    subject = Subject(kind="process", pid=pid, start_time_ticks=pid * 10, boot_id="boot")
    return Finding(
        id=finding_id(rule, subject),
        rule=rule,
        severity=severity,
        title="A title",
        explanation="An explanation.",
        subject=subject,
        **more,
    )


def evidence(*texts: str) -> tuple[Evidence, ...]:
    return tuple(Evidence(text=text, source="test") for text in texts)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(str(tmp_path / "memory")) as opened:
        yield opened


def reopened(store: Store) -> tuple[Store, FindingLife]:
    store.close()
    again = Store(store.directory)
    return again, FindingLife(again)


def told(news: list[Finding]) -> list[tuple[str, int]]:
    return [(item.status, item.sequence) for item in news]


def test_a_finding_that_stays_is_told_once(store: Store) -> None:
    life = FindingLife(store, node="gpu-01")
    news = life.observe([finding()], 1 * SECOND, EVALUATED)
    assert told(news) == [("opened", 1)]
    for second in range(2, 200):
        assert life.observe([finding()], second * SECOND, EVALUATED) == []
    (kept,) = life.current()
    assert (kept.count, kept.first_seen_ns, kept.last_seen_ns) == (199, SECOND, 199 * SECOND)
    assert kept.node == "gpu-01"


def test_it_is_resolved_only_after_rounds_that_evaluated_its_rule(store: Store) -> None:
    life = FindingLife(store, rounds_to_resolve=3)
    life.observe([finding()], 0, EVALUATED)
    for second in range(1, 50):
        assert life.observe([], second * SECOND, frozenset({"another_rule"})) == []
    assert life.observe([], 50 * SECOND, EVALUATED) == []
    assert life.observe([], 51 * SECOND, EVALUATED) == []
    (gone,) = life.observe([], 52 * SECOND, EVALUATED)
    assert told([gone]) == [("resolved", 2)]
    assert isinstance(gone, Transition)
    assert gone.last_seen_ns == 0
    assert gone.at_ns == 52 * SECOND


def test_one_round_of_absence_resolves_nothing(store: Store) -> None:
    life = FindingLife(store, rounds_to_resolve=3)
    life.observe([finding()], 0, EVALUATED)
    for second in range(1, 30):
        here = [finding()] if second % 3 == 0 else []
        assert life.observe(here, second * SECOND, EVALUATED) == []


def test_an_update_waits_for_its_interval_and_a_graver_severity_does_not(store: Store) -> None:
    life = FindingLife(store, update_interval_ns=60 * SECOND)
    life.observe([finding(evidence=evidence("a"))], 0, EVALUATED)
    assert life.observe([finding(evidence=evidence("b"))], 10 * SECOND, EVALUATED) == []
    news = life.observe([finding(severity="critical")], 20 * SECOND, EVALUATED)
    assert told(news) == [("updated", 2)]
    flapping: list[Finding] = []
    for second in range(21, 80):
        now: Severity = "critical" if second % 2 else "warning"
        flapping += life.observe([finding(severity=now)], second * SECOND, EVALUATED)
    assert flapping == []
    news = life.observe([finding(owner="ada")], 81 * SECOND, EVALUATED)
    assert told(news) == [("updated", 3)]
    assert news[0].owner == "ada"


def test_measured_values_are_no_change_and_other_values_are(store: Store) -> None:
    life = FindingLife(store, update_interval_ns=0)
    life.observe([finding(evidence=evidence("keeps the GPU 97% busy, 1.5 GiB"))], 0, EVALUATED)
    same = finding(evidence=evidence("keeps the GPU 98% busy, 2.25 GiB"))
    assert life.observe([same], 1, EVALUATED) == []
    peer = evidence("keeps the GPU 98% busy, 2 GiB", "connected to 192.0.2.1:3333")
    assert told(life.observe([finding(evidence=peer)], 2, EVALUATED)) == [("updated", 2)]
    other = evidence("keeps the GPU 98% busy, 2 GiB", "connected to 192.0.2.7:3333")
    assert told(life.observe([finding(evidence=other)], 3, EVALUATED)) == [("updated", 3)]
    same_set = tuple(reversed(other))
    assert life.observe([finding(evidence=same_set)], 4, EVALUATED) == []


def test_a_flood_in_one_round_is_one_finding_with_a_count(store: Store) -> None:
    life = FindingLife(store)
    (opened,) = life.observe(
        [finding(), finding(severity="critical"), finding()] * 1000, 0, EVALUATED
    )
    assert isinstance(opened, Transition)
    assert (opened.count, opened.severity) == (3000, "critical")


def test_what_comes_back_is_opened_again(store: Store) -> None:
    life = FindingLife(store, rounds_to_resolve=1)
    life.observe([finding()], 0, EVALUATED)
    life.observe([], 1, EVALUATED)
    (again,) = life.observe([finding()], 2 * SECOND, EVALUATED)
    assert told([again]) == [("opened", 3)]
    assert isinstance(again, Transition)
    assert (again.count, again.first_seen_ns) == (1, 2 * SECOND)


def test_a_silenced_finding_is_none_and_resolves_what_was_open(store: Store) -> None:
    life = FindingLife(store)
    quiet = finding(silenced_by="known to us")
    assert life.observe([quiet], 0, EVALUATED) == []
    life.observe([finding()], 1, EVALUATED)
    (resolved,) = life.observe([quiet], 2, EVALUATED)
    assert told([resolved]) == [("resolved", 2)]
    assert resolved.silenced_by == "known to us"


def test_a_restart_repeats_nothing_and_goes_on_counting(store: Store) -> None:
    FindingLife(store).observe([finding(1), finding(2)], 0, EVALUATED)
    store, life = reopened(store)
    with store:
        assert life.observe([finding(1), finding(2)], SECOND, EVALUATED) == []
        assert told(life.observe([finding(1), finding(2), finding(3)], 2, EVALUATED)) == [
            ("opened", 3)
        ]
        assert {item.count for item in life.current()} == {1, 3}


def test_news_are_in_the_store_when_they_are_returned(store: Store) -> None:
    store.findings.register(["somewhere"])
    news = FindingLife(store, node="n").observe([finding(1), finding(2)], 5, EVALUATED)
    with Store(store.directory, read_only=True) as reader:
        rows = reader.findings._connection.execute("SELECT body FROM outbox").fetchall()
        assert [decode(body) for (body,) in rows] == news
        assert len(reader.findings.states()) == 2


def test_a_clock_that_goes_back_delays_no_update(store: Store) -> None:
    life = FindingLife(store, update_interval_ns=60 * SECOND)
    life.observe([finding()], 10_000 * SECOND, EVALUATED)
    assert told(life.observe([finding(owner="ada")], 5 * SECOND, EVALUATED)) == [("updated", 2)]


def test_more_open_findings_than_the_limit_are_counted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuwarden.life.MAX_OPEN", 2)
    life = FindingLife(store)
    assert len(life.observe([finding(pid) for pid in range(5)], 0, EVALUATED)) == 2
    assert life.overflowed == 3


def test_a_transition_is_a_documented_finding(store: Store) -> None:
    (news,) = FindingLife(store, node="gpu-01").observe([finding()], 0, EVALUATED)
    document = msgspec.json.decode(msgspec.json.encode(news))
    assert document["schema"] == "gpuwarden.finding"
    assert document["version"] == 1
    assert document["stream"] == store.findings.stream
    assert document["status"] == "opened"


class AnyRounds(RuleBasedStateMachine):
    """Any findings in any rounds, with restarts in between, against the promises of a life."""

    RULES = ("rule_a", "rule_b")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.store = Store(self.folder.name + "/memory")
        # Registered, so that the store keeps all news as for a sink that is down.
        self.store.findings.register(["down"])
        self.life = FindingLife(self.store, rounds_to_resolve=2, update_interval_ns=3)
        self.at = 0
        self.open: set[str] = set()
        self.all: list[Finding] = []

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    @rule(
        present=st.sets(st.tuples(st.integers(0, 3), st.sampled_from(RULES))),
        evaluated=st.sets(st.sampled_from(RULES)),
        severity=st.sampled_from(["warning", "critical"]),
        text=st.sampled_from(["x", "y"]),
    )
    def round(
        self, present: set[tuple[int, str]], evaluated: set[str], severity: Severity, text: str
    ) -> None:
        self.at += 1
        findings = [
            finding(pid, rule=name, severity=severity, evidence=evidence(text))
            for pid, name in sorted(present)
        ]
        here = {item.id for item in findings}
        news = self.life.observe(findings, self.at, frozenset(evaluated))
        for item in news:
            if item.status == "opened":
                assert item.id not in self.open
                self.open.add(item.id)
            else:
                assert item.id in self.open
            if item.status == "resolved":
                assert item.id not in here
                assert item.rule in evaluated
                self.open.remove(item.id)
        assert here <= self.open, "what was seen is open"
        assert len({item.id for item in news}) == len(news)
        self.all += news

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = Store(self.folder.name + "/memory")
        self.life = FindingLife(self.store, rounds_to_resolve=2, update_interval_ns=3)

    @invariant()
    def sequences_have_no_gap(self) -> None:
        assert [item.sequence for item in self.all] == list(range(1, len(self.all) + 1))

    @invariant()
    def the_spool_holds_all_news(self) -> None:
        waiting = self.store.findings.undelivered("down", limit=10_000)
        assert [decode(item.body) for item in waiting] == self.all

    @invariant()
    def it_knows_what_is_open(self) -> None:
        assert set(self.life.open) == self.open


TestAnyRounds = AnyRounds.TestCase
TestAnyRounds.settings = settings(
    max_examples=20,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
