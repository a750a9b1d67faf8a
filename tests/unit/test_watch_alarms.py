"""How long a finding of device opens holds, what it counts, and that there is a limit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.finding import Finding, Subject, finding_id
from gpuwarden.watch import alarms as module
from gpuwarden.watch.alarms import ENDED_NS, QUIET_NS, Alarms

KEY, OTHER = (100, 800), (101, 801)
S = 10**9
NOW = 1_700_000_000 * S


def finding(
    key: tuple[int, int] = KEY, rule: str = "holder_without_open", **fields: Any
) -> Finding:
    """A finding about one process."""
    values: dict[str, Any] = {
        "id": f"{rule}-{key[0]}-{key[1]}",
        "rule": rule,
        "severity": "error",
        "title": "",
        "explanation": "",
        "subject": Subject(kind="process", name="x", pid=key[0], start_time_ticks=key[1]),
    }
    return Finding(**{**values, **fields})


def times(found: list[Finding]) -> list[int]:
    return [one.occurrences for one in found]


def test_each_use_is_told_once() -> None:
    alarms = Alarms()
    assert times(alarms.put(KEY, [finding()], 3, NOW)) == [3]
    assert times(alarms.current(NOW, [])) == [0]
    alarms.used(KEY, 5, NOW)
    alarms.used(KEY, 2, NOW)
    assert times(alarms.current(NOW, [])) == [7]
    assert times(alarms.current(NOW, [])) == [0]
    alarms.used(KEY, 4, NOW)
    assert times(alarms.put(KEY, [finding(severity="critical")], 1, NOW)) == [5]
    (now,) = alarms.current(NOW, [])
    assert (now.severity, now.occurrences) == ("critical", 0)


def test_it_holds_while_the_device_is_held() -> None:
    alarms = Alarms()
    alarms.put(KEY, [finding()], 1, NOW)
    assert len(alarms.current(NOW + 100 * QUIET_NS, [KEY])) == 1
    assert alarms.current(NOW + 100 * QUIET_NS, [OTHER]) == []
    assert len(alarms) == 0


def test_of_a_living_process_that_holds_nothing_it_holds_for_ten_minutes_from_the_last_use() -> (
    None
):
    alarms = Alarms()
    alarms.put(KEY, [finding()], 1, NOW)
    alarms.used(KEY, 1, NOW + 300 * S)
    assert len(alarms.current(NOW + 300 * S + QUIET_NS - 1, [])) == 1
    assert alarms.current(NOW + 300 * S + QUIET_NS, []) == []


def test_of_a_process_that_has_ended_it_holds_for_half_a_minute() -> None:
    alarms = Alarms()
    alarms.put(KEY, [finding()], 1, NOW)
    alarms.ended(KEY, NOW + S)
    assert alarms.living() == []
    # Even if a descriptor of it is still seen, and however often its end is told.
    alarms.ended(KEY, NOW + 20 * S)
    assert len(alarms.current(NOW + S + ENDED_NS - 1, [])) == 1
    assert alarms.current(NOW + S + ENDED_NS, [KEY]) == []


def test_one_that_is_judged_after_its_end_does_not_live_again() -> None:
    alarms = Alarms()
    alarms.put(KEY, [finding()], 1, NOW)
    alarms.ended(KEY, NOW)
    alarms.put(KEY, [finding(severity="critical")], 0, NOW + 5 * S)
    assert alarms.current(NOW + ENDED_NS, []) == []


def test_what_is_counted_last_is_told_before_it_is_over() -> None:
    alarms = Alarms()
    alarms.put(KEY, [finding()], 1, NOW)
    alarms.ended(KEY, NOW)
    alarms.used(KEY, 41, NOW)
    assert times(alarms.current(NOW + ENDED_NS - 1, [])) == [41]


def test_what_is_counted_when_it_is_over_already_is_told_all_the_same() -> None:
    """As after a standstill of the agent, or of its machine."""
    alarms = Alarms()
    alarms.put(KEY, [finding()], 1, NOW)
    alarms.ended(KEY, NOW)
    alarms.used(KEY, 41, NOW)
    assert times(alarms.current(NOW + 2 * ENDED_NS, [])) == [41]
    assert alarms.current(NOW + 2 * ENDED_NS + 1, []) == []


def test_without_findings_it_is_over_at_once() -> None:
    alarms = Alarms()
    alarms.put(KEY, [finding(), finding(rule="another")], 1, NOW)
    assert len(alarms.current(NOW, [])) == 2
    assert alarms.put(KEY, [], 1, NOW) == []
    assert alarms.current(NOW, [KEY]) == []
    alarms.used(KEY, 1, NOW)  # of one that nobody minds
    alarms.ended(KEY, NOW)
    assert len(alarms) == 0


def test_what_an_earlier_run_told_is_taken_up_and_not_told_again() -> None:
    alarms = Alarms()
    about_a_gpu = finding(subject=Subject(kind="gpu", name="GPU 0"))
    alarms.restore(
        [finding(occurrences=9), finding(rule="another"), finding(OTHER), about_a_gpu], NOW
    )
    assert sorted(alarms.living()) == [KEY, OTHER]
    assert times(alarms.current(NOW, [])) == [0, 0, 0]
    alarms.ended(OTHER, NOW)
    assert alarms.living() == [KEY]
    assert len(alarms.current(NOW + ENDED_NS, [])) == 2
    assert alarms.current(NOW + QUIET_NS, []) == []


def test_there_is_a_limit_and_who_was_quiet_for_longest_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LIMIT", 3)
    alarms = Alarms()
    keys = [(n, 1) for n in range(5)]
    for key in keys[:3]:
        alarms.put(key, [finding(key)], 1, NOW)
    alarms.put(keys[0], [finding(keys[0])], 1, NOW)
    for key in keys[3:]:
        alarms.put(key, [finding(key)], 1, NOW)
    assert alarms.crowded_out == 2
    assert sorted(one.subject.pid or 0 for one in alarms.current(NOW, [])) == [0, 3, 4]


STEPS = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 9)),
    st.tuples(st.just("used"), st.integers(0, 9)),
    st.tuples(st.just("current"), st.just(0)),
)


@given(st.lists(STEPS, min_size=3, max_size=30))
def test_what_is_told_adds_up_to_what_was_used(steps: list[tuple[str, int]]) -> None:
    alarms = Alarms()
    alarms.put(KEY, [finding()], 0, NOW)
    told = used = 0
    for kind, count in [*steps, ("current", 0)]:
        found: list[Finding] = []
        if kind == "put":
            found = alarms.put(KEY, [finding()], count, NOW)
        elif kind == "used":
            alarms.used(KEY, count, NOW)
        else:
            found = alarms.current(NOW, [])
        used += count
        told += sum(times(found))
    assert told == used


def test_a_crowd_that_is_alike_is_told_of_together() -> None:
    alarms = Alarms()
    told = [
        alarms.put((pid, 1), [crowd_finding(pid)], 1, NOW, "/usr/bin/x in docker:1")
        for pid in range(1000)
    ]
    ids = {one.id for findings in told for one in findings}
    assert len(ids) == module.ALIKE + 1
    last = told[-1][0]
    assert last.subject.kind == "node"
    assert "pid 999" in last.evidence[0].text
    assert sum(one.occurrences for findings in told for one in findings) == 1000
    # Somewhere else, and another rule, are told of by themselves.
    (other,) = alarms.put((5000, 1), [crowd_finding(5000)], 1, NOW, "/usr/bin/x in docker:2")
    assert other.subject.pid == 5000


def test_a_crowd_that_has_gone_makes_room_for_single_findings() -> None:
    alarms = Alarms()
    place = "/usr/bin/x in docker:1"
    for pid in range(50):
        alarms.put((pid, 1), [crowd_finding(pid)], 1, NOW, place)
        alarms.ended((pid, 1), NOW)
    later = NOW + module.QUIET_NS
    assert alarms.current(later, ()) == []
    (alone,) = alarms.put((60, 1), [crowd_finding(60)], 1, later, place)
    assert alone.subject.pid == 60


def test_who_was_told_of_alone_stays_so_in_a_crowd_and_a_restart_keeps_the_crowd() -> None:
    alarms = Alarms()
    place = "/usr/bin/x in docker:1"
    for pid in range(50):
        alarms.put((pid, 1), [crowd_finding(pid)], 1, NOW, place)
    (again,) = alarms.put((3, 1), [crowd_finding(3)], 1, NOW, place)
    assert again.subject.pid == 3
    left = alarms.current(NOW, ())
    after = Alarms()
    after.restore(left, NOW)
    assert {one.id for one in after.current(NOW, ())} == {one.id for one in left}
    assert all(key[0] >= 0 for key in after.living())


def crowd_finding(pid: int) -> Finding:
    subject = Subject(kind="process", name="x", pid=pid, start_time_ticks=1, boot_id="b")
    return Finding(
        id=finding_id("container_opens_accelerator", subject),
        rule="container_opens_accelerator",
        severity="critical",
        title="t",
        explanation="e",
        subject=subject,
    )
