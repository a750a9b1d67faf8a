"""Keys, values and records of the launch probe: any bytes give launches or Malformed."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.errors import Malformed
from gpuwarden.probes.cuda import launch_records as records
from gpuwarden.probes.cuda.records import OTHER_HANDLES, LaunchCount, SampledLaunch

NUMBERS = st.integers(0, 2**64 - 1)
HALVES = st.integers(0, 2**32 - 1)
TRIPLES = st.tuples(HALVES, HALVES, HALVES)


@given(st.lists(st.tuples(NUMBERS, HALVES, NUMBERS, NUMBERS), max_size=20))
def test_counts_come_as_they_stand(lines: list[tuple[int, int, int, int]]) -> None:
    keys = b"".join(
        struct.pack("<QIIQ", start, tgid, 0, handle) for start, tgid, handle, _ in lines
    )
    values = b"".join(struct.pack("<Q", launches) for *_, launches in lines)
    assert list(records.counts(keys, values)) == [
        LaunchCount(tgid, start, handle, launches) for start, tgid, handle, launches in lines
    ]


def test_totals_are_lines_of_their_own_where_there_are_any() -> None:
    keys = struct.pack("<QIIQII", 7, 100, 0, 8, 200, 0)
    values = struct.pack("<6Q", 3, 0, 5, 1, 9, 5)
    assert list(records.totals(keys, values)) == [
        LaunchCount(100, 7, 0, 3),
        LaunchCount(200, 8, 0, 1),
        LaunchCount(200, 8, OTHER_HANDLES, 9),
    ]


def test_shares_of_another_stretch_are_none_of_this() -> None:
    keys = struct.pack("<QIIQIIQII", 7, 100, 4, 7, 100, 3, 9, 100, 4)
    values = struct.pack("<6Q", 10, 5, 77, 77, 1, 2)
    assert records.shares(keys, values, 4) == (11, {100: 7})


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_any_bytes_of_a_map_give_launches_or_malformed(keys: bytes, values: bytes) -> None:
    for parse in (records.counts, records.totals):
        try:
            assert all(isinstance(one, LaunchCount) for one in parse(keys, values))
        except Malformed:
            pass
    try:
        told, dropped = records.shares(keys, values, 1)
        assert told >= 0 and all(dropped.values())
    except Malformed:
        pass


def test_values_that_are_too_few_are_malformed() -> None:
    with pytest.raises(Malformed):
        list(records.counts(bytes(48), bytes(8)))
    with pytest.raises(Malformed):
        list(records.counts(bytes(47), bytes(8)))


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS, HALVES, HALVES, TRIPLES, TRIPLES)))
def test_samples_are_in_order_of_time(
    lines: list[tuple[int, int, int, int, int, int, tuple[int, int, int], tuple[int, int, int]]],
) -> None:
    found, malformed = records.samples(
        struct.pack("<4Q8I", *line[:6], *line[6], *line[7]) for line in lines
    )
    assert malformed == 0
    assert [one.at_ns for one in found] == sorted(line[0] for line in lines)
    wanted = [
        SampledLaunch(at_ns, tgid, start, thread, handle, stream, grid, block)
        for at_ns, start, handle, stream, tgid, thread, grid, block in lines
    ]
    assert sorted(found) == sorted(wanted)


@given(st.lists(st.binary(max_size=80)))
def test_any_bytes_of_the_ring_are_samples_or_counted(data: list[bytes]) -> None:
    found, malformed = records.samples(data)
    assert len(found) + malformed == len(data)
    assert malformed == sum(len(record) != records.SAMPLE.size for record in data)
