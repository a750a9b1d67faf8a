"""Process lists and samples as bytes: the right stride, and nothing but believable entries."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.sensors.nvml.lists import (
    FILL,
    LONGEST_STRIDE_BYTES,
    PROCESS_V1,
    PROCESS_V2,
    SAMPLE,
    Entry,
    parse_processes,
    parse_samples,
)

NO_INSTANCE = 0xFFFFFFFF
NOT_AVAILABLE = (1 << 64) - 1
WIDE = struct.Struct("=I4xQIIQ")
NOW_NS = 1_700_000_000 * 10**9
NOW_US = NOW_NS // 1000


def buffer(written: bytes, capacity: int = 256) -> bytes:
    return written + bytes((FILL,)) * (capacity * LONGEST_STRIDE_BYTES - len(written))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 17, 200])
@pytest.mark.parametrize("extra", [0, NOT_AVAILABLE, 1 << 30])
def test_entries_that_are_longer_than_their_version_says_are_read_right(
    count: int, extra: int
) -> None:
    pids = range(1000, 1000 + count)
    wide = b"".join(WIDE.pack(p, p << 20, NO_INSTANCE, NO_INSTANCE, extra) for p in pids)
    usual = b"".join(PROCESS_V2.pack(p, p << 20, NO_INSTANCE, NO_INSTANCE) for p in pids)
    expected = tuple(Entry(p, p << 20) for p in pids)
    for written in (wide, usual):
        found = parse_processes(buffer(written), count, PROCESS_V2)
        assert found.entries == expected
        assert found.implausible == 0


def test_entries_without_instances_are_read() -> None:
    written = PROCESS_V1.pack(7, NOT_AVAILABLE) + PROCESS_V1.pack(8, 5)
    found = parse_processes(buffer(written), 2, PROCESS_V1)
    assert found.entries == (Entry(7, None), Entry(8, 5))


def test_instances_are_kept() -> None:
    written = PROCESS_V2.pack(7, 1, 3, 0)
    assert parse_processes(buffer(written), 1, PROCESS_V2).entries == (Entry(7, 1, 3, 0),)


@pytest.mark.parametrize(
    "entry",
    [
        (0, 1, NO_INSTANCE, NO_INSTANCE),
        (1 << 23, 1, NO_INSTANCE, NO_INSTANCE),
        (5, 1 << 60, NO_INSTANCE, NO_INSTANCE),
        (5, 1, 123456, NO_INSTANCE),
    ],
)
def test_what_no_process_can_have_is_dropped_and_counted(entry: tuple[int, ...]) -> None:
    written = PROCESS_V2.pack(9, 1, NO_INSTANCE, NO_INSTANCE) + PROCESS_V2.pack(*entry)
    found = parse_processes(buffer(written), 2, PROCESS_V2)
    assert [e.pid for e in found.entries] == [9]
    assert found.implausible == 1


def test_a_count_above_what_was_written_makes_up_no_entry() -> None:
    written = PROCESS_V2.pack(9, 1, NO_INSTANCE, NO_INSTANCE)
    assert len(parse_processes(buffer(written), 100, PROCESS_V2).entries) == 1


def sample(pid: int = 5, age_us: int = 0, sm: int = 50, memory: int = 3) -> bytes:
    return SAMPLE.pack(pid, NOW_US - age_us, sm, memory, 0, 0)


def test_every_believable_sample_is_kept_oldest_first() -> None:
    raw = sample(age_us=10, sm=90) + sample(age_us=400_000, sm=20) + sample(pid=6)
    samples, garbage = parse_samples(raw, 3, {5, 6}, NOW_NS)
    assert [s.sm_percent for s in samples[5]] == [20, 90]
    assert samples[5][0].at_ns == (NOW_US - 400_000) * 1000
    assert (len(samples[6]), garbage) == (1, set())


@pytest.mark.parametrize(
    "raw",
    [
        sample(sm=37100),
        sample(memory=101),
        sample(age_us=3_600_000_000),
        sample(age_us=-3_600_000_000),
        SAMPLE.pack(5, 0, 50, 3, 0, 0),
    ],
)
def test_garbage_is_no_utilisation_and_is_told_from_idle(raw: bytes) -> None:
    assert parse_samples(raw, 1, {5}, NOW_NS) == ({}, {5})
    assert parse_samples(b"", 0, {5}, NOW_NS) == ({}, set())


def test_a_pid_that_is_not_listed_has_no_sample() -> None:
    assert parse_samples(sample(pid=77), 1, {5}, NOW_NS) == ({}, set())


@given(
    st.binary(max_size=2000), st.integers(-5, 1 << 33), st.sampled_from([PROCESS_V1, PROCESS_V2])
)
def test_any_bytes_are_a_list(raw: bytes, count: int, layout: struct.Struct) -> None:
    found = parse_processes(raw, count, layout)
    assert all(0 < entry.pid <= 1 << 22 for entry in found.entries)
    assert found.implausible >= 0


@given(st.binary(max_size=2000), st.integers(-5, 1 << 33), st.sets(st.integers(0, 300)))
def test_any_bytes_are_samples(raw: bytes, count: int, pids: set[int]) -> None:
    samples, garbage = parse_samples(raw, count, pids, NOW_NS)
    assert samples.keys() | garbage <= pids
    assert all(s.sm_percent <= 100 for kept in samples.values() for s in kept)
