"""Opens merged: what is news, what only counts, how an attempt is settled, what is forgotten."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.probes.events import OpenCount, OpenReturn
from gpuwarden.sensors.device_nodes import Majors
from gpuwarden.watch import opens
from gpuwarden.watch.opens import OpenBook, fact
from tests.support.opening import held, identity, opened

MAJORS = Majors({195: "nvidia", 226: "drm"})
NAMES = {(195, 0): {"/dev/nvidia0"}}


def test_a_repetition_counts_and_is_no_news() -> None:
    book = OpenBook()
    news = [len(list(book.opened(opened()))) for _ in range(1000)]
    assert news == [1] + [0] * 999
    (entry,) = book.entries().values()
    assert entry.count == 1000


def test_each_device_and_way_and_process_is_news_of_its_own() -> None:
    book = OpenBook()
    events = [
        opened(),
        opened(minor=1),
        opened(how="mknod"),
        opened(identity(101)),
        opened(denial="denied", state="denied"),
    ]
    assert [len(list(book.opened(event))) for event in events] == [1, 1, 1, 1, 1]


def test_an_attempt_becomes_opened_by_a_held_descriptor() -> None:
    book = OpenBook()
    book.held([], 1)
    (key,) = book.opened(opened())
    assert fact(book.entries()[key], MAJORS, NAMES).state == "attempted"
    news, changed = book.held([held()], 2)
    assert (news, changed) == ([key], True)
    assert fact(book.entries()[key], MAJORS, NAMES).state == "opened"
    assert book.held([held()], 3) == ([], False)
    assert book.holding() == {key[:2]}


def test_an_attempt_becomes_what_its_return_value_says() -> None:
    book = OpenBook(return_values=True)
    event = opened()
    (key,) = book.opened(event)
    how = OpenReturn(
        at_ns=1,
        attempt_since_boot_ns=event.since_boot_ns,
        pid=event.process.pid,
        thread_id=event.process.pid,
        start_time_ns=event.process.start_time_ns,
        major=195,
        minor=0,
        result=-13,
    )
    assert list(book.returned(how)) == [key]
    told = fact(book.entries()[key], MAJORS, NAMES)
    assert (told.state, told.error) == ("denied", 13)
    again = opened()
    list(book.opened(again))
    worked = OpenReturn(
        at_ns=1,
        attempt_since_boot_ns=again.since_boot_ns,
        pid=again.process.pid,
        thread_id=again.process.pid,
        start_time_ns=again.process.start_time_ns,
        major=195,
        minor=0,
        result=5,
    )
    assert list(book.returned(worked)) == [key]
    assert book.entries()[key].event.state == "opened"


def test_what_was_opened_once_stays_opened() -> None:
    book = OpenBook()
    book.held([], 1)
    (key,) = book.opened(opened())
    book.held([held()], 2)
    for _ in range(3):
        list(book.opened(opened()))
    assert list(book.expired(10**18)) == []
    assert book.entries()[key].event.state == "opened"


def test_a_lost_return_value_makes_it_unknown_not_refused() -> None:
    book = OpenBook(return_values=True)
    event = opened()
    (key,) = book.opened(event)
    assert list(book.expired(event.since_boot_ns + 3_000_000_000)) == [key]
    assert book.entries()[key].event.state == "unknown"


def test_a_holder_that_never_opened_is_news_unless_it_held_before() -> None:
    book = OpenBook()
    news, _ = book.held([held(identity(50))], 1)
    assert book.entries()[news[0]].at_start
    news, _ = book.held([held(identity(50)), held(identity(51))], 2)
    (entry,) = [book.entries()[key] for key in news]
    assert (entry.event.how, entry.event.state, entry.at_start) == ("held", "opened", False)
    assert entry.process.pid == 51
    assert book.has_opened(50, identity(50).start_time_ns, 195, 0)
    assert not book.has_opened(51, identity(51).start_time_ns, 195, 0)
    assert book.openers(195, 0) == {50, 51}


def test_who_opened_is_known_when_it_has_ended() -> None:
    book = OpenBook()
    book.held([], 1)
    list(book.opened(opened(identity(60))))
    list(book.opened(opened(identity(61), how="mknod")))
    list(book.opened(opened(identity(62), state="denied")))
    for pid in (60, 61, 62):
        book.forget(pid, identity(pid).start_time_ns)
    found = [book.has_opened(pid, identity(pid).start_time_ns, 195, 0) for pid in (60, 61, 62)]
    assert found == [True, False, False]


def test_after_a_loss_a_new_holder_is_nobodys_fault() -> None:
    book = OpenBook()
    book.held([], 1)
    news, changed = book.held([held(identity(51))], 2, after_loss=True)
    assert changed
    assert [book.entries()[key].at_start for key in news] == [True]
    news, _ = book.held([held(identity(51)), held(identity(52))], 3)
    assert [key[0] for key in news] == [52]
    assert not book.entries()[news[0]].at_start


def test_a_program_that_another_replaced_is_news() -> None:
    book = OpenBook()
    list(book.opened(opened(identity(100, exe_inode=1))))
    assert len(list(book.opened(opened(identity(100, exe_inode=2))))) == 1


def test_the_kernels_counts_hold_what_the_limiter_did_not_tell() -> None:
    book = OpenBook()
    event = opened(hits=1)
    (key,) = book.opened(event)
    list(book.opened(opened(hits=900)))
    assert book.entries()[key].count == 900
    process = event.process
    book.counted(
        [
            OpenCount(
                pid=process.pid,
                start_time_ns=process.start_time_ns,
                major=195,
                minor=0,
                how="open",
                hits=1_000_000,
            )
        ]
    )
    assert book.entries()[key].count == 1_000_000


def test_a_forgotten_process_is_new_again() -> None:
    book = OpenBook()
    (key,) = book.opened(opened())
    list(book.opened(opened(identity(101))))
    assert book.forget(key[0], key[1]) == [key]
    assert len(book) == 1
    assert len(list(book.opened(opened()))) == 1


def test_the_book_is_bounded_and_says_what_it_lost() -> None:
    limit = opens.ENTRIES_LIMIT
    opens.ENTRIES_LIMIT = 10
    try:
        book = OpenBook()
        for pid in range(25):
            list(book.opened(opened(identity(1000 + pid))))
        assert len(book) == 10
        assert book.crowded_out == 15
        assert len(book.keys_of(1024, identity(1024).start_time_ns)) == 1
        assert not book.keys_of(1000, identity(1000).start_time_ns)
    finally:
        opens.ENTRIES_LIMIT = limit


def test_another_name_is_told_and_a_relative_path_tells_nothing() -> None:
    book = OpenBook()
    (key,) = book.opened(opened(path="/tmp/notes.txt"))
    assert fact(book.entries()[key], MAJORS, NAMES).renamed is True
    (key,) = book.opened(opened(identity(101), path="nvidia0"))
    assert fact(book.entries()[key], MAJORS, NAMES).renamed is None
    (key,) = book.opened(opened(identity(102), path="/dev/nvidia0"))
    assert fact(book.entries()[key], MAJORS, NAMES).renamed is False
    (key,) = book.opened(opened(identity(103), minor=3, path="/dev/nvidia3"))
    assert fact(book.entries()[key], MAJORS, NAMES).renamed is False
    (key,) = book.opened(opened(identity(104), minor=3, path="/root/nvidia3"))
    assert fact(book.entries()[key], MAJORS, NAMES).renamed is True


@given(
    st.lists(
        st.tuples(
            st.integers(1, 4),
            st.integers(0, 2),
            st.sampled_from(["open", "mknod", "access", "other"]),
            st.sampled_from(["event", "held", "exit", "expire"]),
        ),
        max_size=60,
    )
)
def test_every_use_is_counted_once_whatever_the_order(
    steps: list[tuple[int, int, str, str]],
) -> None:
    book = OpenBook()
    book.held([], 0)
    expected = 0
    lost = 0
    for pid, minor, how, step in steps:
        if step == "event":
            list(book.opened(opened(identity(pid), minor=minor, how=how)))
            expected += 1
        elif step == "held":
            book.held([held(identity(pid), minor=minor)], 1)
        elif step == "exit":
            keys = book.keys_of(pid, identity(pid).start_time_ns)
            lost += sum(
                entry.count
                for key in keys
                if (entry := book.entry(key)) is not None and key[4] != "held"
            )
            book.forget(pid, identity(pid).start_time_ns)
        else:
            list(book.expired(10**18))
    counted = sum(entry.count for key, entry in book.entries().items() if key[4] != "held")
    assert counted + lost == expected


def test_an_open_that_takes_longer_than_it_is_waited_for_is_seen_when_it_is_held() -> None:
    book = OpenBook()
    book.held([], 1)
    (key,) = book.opened(opened())
    list(book.expired(10**18))
    assert book.held([held()], 2) == ([key], True)
    assert book.entries()[key].event.state == "opened"
    assert book.held([held()], 3) == ([], False)


def test_to_ask_or_to_be_refused_first_hides_nobody_who_was_passed_a_descriptor() -> None:
    refused: dict[str, Any] = {"state": "denied", "denial": "denied"}
    for fields in ({"how": "access"}, refused, {"how": "mknod"}):
        book = OpenBook()
        book.held([], 1)
        list(book.opened(opened(**fields)))
        (key,), _ = book.held([held()], 2)
        assert key[4] == "held"
