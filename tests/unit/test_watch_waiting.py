"""Who waits for what a runtime or a scheduler says, and what is judged without."""

from __future__ import annotations

from gpuwarden.watch import waiting
from gpuwarden.watch.waiting import HELD_SECONDS, Waiting

ONE, OTHER = (100, 7), (200, 8)


def test_one_is_held_once_and_asked_about_at_once() -> None:
    waits = Waiting()
    assert waits.hold(ONE, 10.0)
    assert not waits.hold(ONE, 10.1)
    assert waits.due(10.1) == [ONE]
    assert (len(waits), waits.holds(ONE), waits.gave_up(ONE)) == (1, True, False)


def test_an_answer_that_did_not_help_is_asked_for_again_a_little_later_each_time() -> None:
    waits, now = Waiting(), 10.0
    waits.hold(ONE, now)
    pauses = []
    for _ in range(5):
        waits.asking(waits.due(now))
        assert waits.answered() == [ONE]
        waits.hold(ONE, now)
        assert waits.due(now) == []
        at = waits.next_time(busy=False)
        assert at is not None
        pauses.append(round(at - now, 3))
        now = at
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.4]


def test_another_event_meanwhile_asks_no_sooner() -> None:
    waits = Waiting()
    waits.hold(ONE, 10.0)
    waits.asking([ONE])
    waits.answered()
    waits.hold(ONE, 10.0)
    waits.hold(ONE, 10.01)
    assert waits.due(10.04) == []
    assert waits.due(10.06) == [ONE]


def test_its_time_is_up_while_it_is_being_asked_about() -> None:
    waits = Waiting()
    waits.hold(ONE, 10.0)
    waits.asking([ONE])
    assert waits.next_time(busy=True) == 10.0 + HELD_SECONDS
    assert waits.overdue(10.0 + HELD_SECONDS - 0.01) == []
    assert waits.overdue(10.0 + HELD_SECONDS) == [ONE]
    assert waits.overdue(10.0 + HELD_SECONDS) == []
    assert waits.gave_up(ONE)
    assert len(waits) == 0
    # The answer that comes late still counts.
    assert waits.answered() == [ONE]


def test_who_was_judged_without_is_asked_about_ever_more_seldom_and_after_the_others() -> None:
    waits, now = Waiting(), 10.0
    waits.hold(ONE, now - HELD_SECONDS)
    assert waits.overdue(now) == [ONE]
    times = []
    for _ in range(8):
        waits.later(ONE, now)
        at = waits.next_time(busy=False)
        assert at is not None
        times.append(at - now)
        now = at
    assert times == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 64.0, 64.0]
    waits.hold(OTHER, now)
    assert waits.due(now) == [OTHER, ONE]
    assert waits.unanswered() == [ONE]


def test_what_is_known_is_forgotten() -> None:
    waits = Waiting()
    waits.hold(ONE, 10.0)
    waits.hold(OTHER, 10.0)
    waits.overdue(10.0 + HELD_SECONDS)
    waits.hold(ONE, 13.0)
    waits.forget(ONE)
    waits.forget(OTHER)
    assert waits.due(99.0) == []
    assert waits.next_time(busy=False) is None
    assert waits.unanswered() == []


def test_a_question_that_could_not_be_asked_is_no_busy_loop() -> None:
    waits = Waiting()
    waits.hold(ONE, 10.0)
    waits.refused([ONE, OTHER], 10.0)
    assert waits.due(10.0) == []
    assert waits.due(10.5) == [ONE]


def test_those_that_are_judged_without_are_bounded() -> None:
    waits = Waiting()
    for number in range(waiting.LIMIT + 10):
        waits.hold((number, 1), 0.0)
    waits.overdue(HELD_SECONDS)
    assert len(waits.unanswered()) == waiting.LIMIT
