"""Findings about what the agent itself does not see."""

from __future__ import annotations

from typing import Any

import pytest

from gpuwarden.finding import Finding
from gpuwarden.watch.own_sight import (
    BLIND_NS,
    GREW_STAYS_NS,
    SIGHT_ADVISORIES,
    SIGHT_RULES,
    OwnSight,
    Sight,
)

S = 10**9
NOW = 1_700_000_000 * S
RING = "opens, no room in the ring"


def rules(found: list[Finding]) -> list[str]:
    return [one.rule for one in found]


def test_who_sees_everything_says_nothing() -> None:
    sight = Sight(dropped={RING: 0}, way="watching by cgroup/dev", refused=("not by lsm: EPERM",))
    assert OwnSight().findings(sight, NOW) == []


def test_a_dropped_event_is_told_with_its_cause_and_for_an_hour_after_the_last() -> None:
    own = OwnSight()
    assert own.findings(Sight(dropped={RING: 0, "queue full": 0}), NOW) == []
    (finding,) = own.findings(Sight(dropped={RING: 3, "queue full": 0}), NOW + S)
    assert (finding.rule, finding.severity) == ("device_events_dropped", "error")
    assert [one.text for one in finding.evidence] == [f"3 lost since the start: {RING}"]
    still = Sight(dropped={RING: 3, "queue full": 0})
    assert rules(own.findings(still, NOW + S + GREW_STAYS_NS - 1)) == ["device_events_dropped"]
    assert own.findings(still, NOW + S + GREW_STAYS_NS) == []
    (again,) = own.findings(Sight(dropped={RING: 3, "queue full": 1}), NOW + 2 * GREW_STAYS_NS)
    assert again.id == finding.id
    assert len(again.evidence) == 2


def test_what_was_lost_before_the_first_look_is_lost_as_well() -> None:
    assert rules(OwnSight().findings(Sight(dropped={RING: 1}), NOW)) == ["device_events_dropped"]


def test_a_count_that_begins_anew_is_no_loss() -> None:
    own = OwnSight()
    own.findings(Sight(dropped={RING: 5}), NOW)
    later = NOW + 2 * GREW_STAYS_NS
    assert own.findings(Sight(dropped={RING: 0}), later) == []
    assert rules(own.findings(Sight(dropped={RING: 1}), later)) == ["device_events_dropped"]


def test_a_poll_says_that_it_is_one_and_why() -> None:
    sight = Sight(way="watching by proc poll", polled=True, refused=("not by lsm: EPERM",))
    (finding,) = OwnSight().findings(sight, NOW)
    assert (finding.rule, finding.severity) == ("device_opens_polled", "warning")
    texts = [one.text for one in finding.evidence]
    assert texts == ["watching by proc poll", "not by lsm: EPERM"]


def test_a_driver_that_is_silent_for_a_moment_is_not_told_of() -> None:
    own = OwnSight()
    sight = Sight(sampling_error="no answer in 5 s", sampling_failing_since_ns=NOW)
    assert own.findings(sight, NOW + BLIND_NS - 1) == []
    (finding,) = own.findings(sight, NOW + BLIND_NS)
    assert finding.rule == "sampling_blind"
    assert [one.text for one in finding.evidence] == ["no answer in 5 s"]
    assert own.findings(Sight(), NOW + BLIND_NS) == []


def test_a_judgement_that_fails_is_told_of() -> None:
    (finding,) = OwnSight().findings(Sight(judgement_error="it ended"), NOW)
    assert (finding.rule, finding.severity) == ("judgement_failed", "error")
    assert [one.text for one in finding.evidence] == ["it ended"]


@pytest.mark.parametrize("advisory", SIGHT_ADVISORIES, ids=lambda one: str(one.id))
def test_every_one_has_its_text_and_one_id_for_all_time(advisory: Any) -> None:
    everything = Sight(
        dropped={RING: 1},
        polled=True,
        way="w",
        sampling_error="e",
        sampling_failing_since_ns=NOW - BLIND_NS,
        judgement_error="e",
    )
    found = OwnSight().findings(everything, NOW)
    assert set(rules(found)) == SIGHT_RULES
    one, other = (
        next(f for f in told if f.rule == advisory.id)
        for told in (found, OwnSight().findings(everything, NOW + S))
    )
    assert one.id == other.id
    assert (one.title, one.explanation) == (advisory.title, advisory.explanation)
    assert one.advice == advisory.steps
    assert one.subject.pid is None
