"""Slots and records of the launch probe: whatever is in them gives launches."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager

from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.probes.cuda import launch_records as records
from gpuwarden.probes.cuda.launch_tables import Launches, LaunchingProcesses
from gpuwarden.probes.cuda.records import OTHER_HANDLES, LaunchCount, SampledLaunch

NUMBERS = st.integers(0, 2**64 - 1)
HALVES = st.integers(0, 2**32 - 1)
TRIPLES = st.tuples(HALVES, HALVES, HALVES)


WORDS = st.lists(NUMBERS, min_size=64, max_size=64)


@contextmanager
def memory(words: list[int]) -> Iterator[int]:
    """A descriptor of memory with these words, as a map's would be."""
    descriptor = os.memfd_create("table")
    try:
        os.write(descriptor, struct.pack(f"<{len(words)}Q", *words))
        yield descriptor
    finally:
        os.close(descriptor)


def owner(pid: int, number: int) -> int:
    return number << 32 | pid


def test_slots_give_counts_and_two_of_one_handle_are_added() -> None:
    free = [0, 0, 0, 0]
    slots = [7, 0xF0, 3, owner(100, 1), *free, 7, 0xF1, 1, owner(100, 1), 7, 0xF0, 2, owner(100, 2)]
    with memory(slots) as descriptor, closing(Launches(descriptor, 4)) as table:
        table.look(3)
        assert table.counts() == [LaunchCount(100, 7, 0xF0, 5), LaunchCount(100, 7, 0xF1, 1)]


def test_slots_are_looked_for_when_some_were_taken_since() -> None:
    slots = [0, 0, 0, 0, 7, 0xF1, 1, owner(100, 1)]
    with memory(slots) as descriptor, closing(Launches(descriptor, 2)) as table:
        table.look(0)
        assert table.counts() == []
        table.look(1)
        assert table.counts() == [LaunchCount(100, 7, 0xF1, 1)]
        os.pwrite(descriptor, struct.pack("<4Q", 8, 0xF2, 4, owner(200, 1)), 0)
        table.look(1)
        assert len(table.counts()) == 1
        table.look(2)
        assert len(table.counts()) == 2


def test_the_slots_of_who_has_ended_are_freed_and_no_others() -> None:
    slots = [7, 0xF0, 3, owner(100, 1), 8, 0xF0, 2, owner(100, 2), 7, 0xF1, 1, owner(100, 1)]
    with memory(slots) as descriptor, closing(Launches(descriptor, 3)) as table:
        table.look(3)
        table.free({(100, 7), (9, 9)})
        assert table.freed == 2
        assert table.counts() == [LaunchCount(100, 8, 0xF0, 2)]
        left = struct.unpack("<12Q", os.pread(descriptor, 96, 0))
        assert left == (0, 0, 0, 0, 8, 0xF0, 2, owner(100, 2), 0, 0, 0, 0)


def test_processes_have_lines_of_their_own_where_there_is_something_to_say() -> None:
    slots = [7, owner(100, 5), 3, 0, 1, 0, 0, 0, 8, owner(200, 5), 1, 9, 5, 30, 40, 10]
    with memory(slots) as descriptor, closing(LaunchingProcesses(descriptor, 2)) as table:
        table.look(2)
        assert list(table.counts()) == [
            LaunchCount(100, 7, 0, 3),
            LaunchCount(200, 8, 0, 1),
            LaunchCount(200, 8, OTHER_HANDLES, 9),
        ]
        assert table.told() == 20 and table.untold() == {(100, 7): 0, (200, 8): 40}
        table.begin_stretch()
        assert table.told() == 0


@given(WORDS)
def test_any_words_give_launches(words: list[int]) -> None:
    with memory(words) as descriptor:
        with closing(Launches(descriptor, 16)) as launches:
            launches.look(1)
            assert all(0 <= one.pid < 1 << 32 for one in launches.counts())
        with closing(LaunchingProcesses(descriptor, 8)) as processes:
            processes.look(1)
            assert len(list(processes.counts())) <= 16
            processes.begin_stretch()
            assert processes.told() == 0
            processes.free(set(processes.untold()))
            assert list(processes.counts()) == []


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
