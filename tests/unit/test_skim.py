"""A look at a record counts what decoding it would: the fast path against the plain one."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.probes.decoder import Decoder
from gpuwarden.probes.events import HeldDescriptor, OpenEvent
from gpuwarden.probes.skim import FIELDS, HEAD, PATH_AT
from gpuwarden.sensors.device_nodes import Majors
from gpuwarden.watch.opens import OpenBook, fact
from tests.support.records import identity, record

OPENS = st.fixed_dictionaries(
    {
        "tgid": st.integers(100, 102),
        "exe_inode": st.sampled_from([5, 5, 5, 6]),
        "minor": st.integers(0, 1),
        "how": st.integers(0, 4),
        "denial": st.integers(0, 2),
        "hits": st.integers(0, 30),
        "traits": st.sampled_from([0, 0, 1]),
        "gap_ns": st.sampled_from([1_000, 2_000_000]),
        "path": st.sampled_from([b"", b"/dev/nvidia0", b"/dev/nvidia0", b"/tmp/x", b"\xff"]),
    }
)
STEPS = st.lists(
    st.one_of(
        OPENS,
        st.tuples(st.just("held"), st.integers(100, 102), st.integers(0, 1)),
        st.tuples(st.just("exit"), st.integers(100, 102), st.just(0)),
        st.just("expire"),
    ),
    max_size=60,
)


def opened(time_ns: int, fields: dict[str, Any]) -> bytes:
    return record(
        "open_record",
        time_ns=time_ns,
        hits=fields["hits"],
        kind=1,
        major=195,
        minor=fields["minor"],
        how=fields["how"],
        denial=fields["denial"],
        path_length=len(fields["path"]) + 1 if fields["path"] else 0,
        # What lies behind the end is whatever was there before.
        path=fields["path"] + b"\0/old" if fields["path"] else b"/old",
        process=identity(
            tgid=fields["tgid"],
            pid=fields["tgid"],
            exe_inode=fields["exe_inode"],
            traits=fields["traits"],
        ),
    )


def look(book: OpenBook, data: bytes) -> bool:
    return book.skim(HEAD.unpack(data[: HEAD.size]), data[PATH_AT:])


def held(pid: int, minor: int) -> HeldDescriptor:
    return HeldDescriptor(
        pid=pid,
        start_time_ns=identity()["start_ns"],
        thread_id=pid,
        descriptor=3,
        major=195,
        minor=minor,
        inode=1,
        open_flags=0,
        uid=0,
        comm="x",
    )


def told(book: OpenBook) -> dict[Any, Any]:
    return {
        key: (
            entry.count,
            entry.event.state,
            entry.last_ns,
            entry.waits,
            entry.at_start,
            entry.paths,
        )
        for key, entry in book.entries().items()
    }


@given(STEPS)
def test_looking_counts_as_decoding_does(steps: list[Any]) -> None:
    plain, fast = OpenBook(), OpenBook()
    decoder = Decoder(boot_offset_ns=17)
    fast.boot_offset_ns = 17
    now = 1_000_000_000
    for book in (plain, fast):
        book.held([], now)
    news: tuple[list[Any], list[Any]] = ([], [])
    for step in steps:
        if isinstance(step, dict):
            now += step["gap_ns"]
            data = opened(now, step)
            event = decoder.decode(data)
            assert isinstance(event, OpenEvent)
            news[0].extend(plain.opened(event))
            if not look(fast, data):
                news[1].extend(fast.opened(event))
        elif step == "expire":
            now += 3_000_000_000
            for index, book in enumerate((plain, fast)):
                news[index].extend(book.expired(now))
        elif step[0] == "held":
            for index, book in enumerate((plain, fast)):
                news[index].extend(book.held([held(step[1], step[2])], now)[0])
        else:
            for book in (plain, fast):
                book.forget(step[1], identity()["start_ns"])
        assert told(plain) == told(fast)
    assert news[0] == news[1]


def test_the_fields_are_where_the_record_has_them() -> None:
    values: dict[str, Any] = {"time_ns": 1, "hits": 2, "major": 3, "minor": 4, "how": 1}
    values |= {"denial": 2, "path_length": -14}
    inside = {"start_ns": 5, "exe_inode": 6, "tgid": 7, "traits": 8}
    data = record("open_record", kind=1, process=inside, **values)
    found = dict(zip([name for name, _, _ in FIELDS], HEAD.unpack(data[: HEAD.size]), strict=True))
    assert found == {**values, **inside}


def test_an_open_that_may_be_news_is_not_skipped() -> None:
    book = OpenBook()
    plain = {"tgid": 100, "exe_inode": 5, "minor": 0, "how": 1, "denial": 0, "hits": 1,
             "traits": 0, "path": b"/dev/nvidia0"}  # fmt: skip
    first = opened(1, plain)
    assert not look(book, first)
    event = Decoder().decode(first)
    assert isinstance(event, OpenEvent)
    list(book.opened(event))
    assert look(book, first)
    assert not look(book, opened(2, {**plain, "exe_inode": 6}))
    assert not look(book, opened(2, {**plain, "path": b"/tmp/nvidia0"}))
    list(book.expired(10**12))
    assert not look(book, first)


def test_the_name_that_is_not_its_own_is_told_whichever_came_first() -> None:
    for paths in (("/dev/nvidia0", "/tmp/x"), ("/tmp/x", "/dev/nvidia0")):
        book = OpenBook()
        news: list[Any] = []
        for number, path in enumerate(paths):
            event = Decoder().decode(
                opened(
                    number + 1,
                    {
                        "tgid": 100,
                        "exe_inode": 5,
                        "minor": 0,
                        "how": 1,
                        "denial": 0,
                        "hits": 0,
                        "traits": 0,
                        "path": path.encode(),
                    },
                )
            )
            assert isinstance(event, OpenEvent)
            news += book.opened(event)
        assert len(news) == 2
        told = fact(book.entries()[news[0]], Majors({195: "nvidia"}), {(195, 0): {"/dev/nvidia0"}})
        assert (told.path, told.renamed, told.count) == ("/tmp/x", True, 2)
