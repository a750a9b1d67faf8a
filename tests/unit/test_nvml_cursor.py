"""Samples are given once, whatever happens to the clock and whenever they come."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpuwarden.errors import Malformed
from gpuwarden.model import Gpu, GpuClient, UtilisationSample
from gpuwarden.sensors.nvml.cursor import SampleCursor
from gpuwarden.sensors.nvml.lists import SAMPLE, parse_samples
from gpuwarden.sensors.nvml.message import FRAME_LENGTH, Message, encode_frame, take_frame

START_NS = 1_700_000_000 * 10**9
SECOND_NS = 10**9
PERIOD_NS = 166_667_000
RING_NS = 12 * SECOND_NS


class Machine:
    """A driver with one process that is always busy, and a clock that can be set."""

    def __init__(self, late_ns: int = 0) -> None:
        self.monotonic_ns = 50 * SECOND_NS
        self.offset_ns = START_NS
        self.late_ns = late_ns
        self.samples: list[tuple[int, int]] = []
        """When each was taken, by the clock that nobody sets, and its own time (µs)."""
        self.next_ns = self.monotonic_ns

    @property
    def now_ns(self) -> int:
        return self.monotonic_ns + self.offset_ns

    def run(self, ns: int, *, busy: bool = True) -> None:
        end_ns = self.monotonic_ns + ns
        while self.next_ns < end_ns:
            if busy:
                self.samples.append((self.next_ns, (self.next_ns + self.offset_ns) // 1000))
            self.next_ns += PERIOD_NS
        self.monotonic_ns = end_ns

    def look(self, cursor: SampleCursor) -> list[int]:
        cursor.begin(self.now_ns, self.monotonic_ns)
        kept = [
            at_us
            for number, (taken_ns, at_us) in enumerate(self.samples)
            if self.monotonic_ns - taken_ns <= RING_NS
            and taken_ns + (self.late_ns if number % 2 else 0) <= self.monotonic_ns
            and at_us > cursor.since_us
        ]
        raw = b"".join(SAMPLE.pack(5, at_us, 50, 0, 0, 0) for at_us in kept)
        found, _ = parse_samples(
            raw,
            len(kept),
            {5},
            self.now_ns,
            since_us=cursor.since_us,
            given_until_us=cursor.given_until_us,
            was_given=cursor.was_given,
            age_limit_ns=cursor.age_limit_ns,
            ahead_limit_ns=cursor.ahead_limit_ns,
        )
        cursor.gave(found, self.monotonic_ns)
        return [sample.at_ns // 1000 for sample in found.get(5, ())]


def all_given_once(machine: Machine, given_us: list[int], *, but_the_last: int = 0) -> bool:
    every = Counter(at_us for _, at_us in machine.samples)
    last = {at_us for _, at_us in machine.samples[len(machine.samples) - but_the_last :]}
    seen = Counter(given_us)
    return max(seen.values()) == 1 and every.keys() - seen.keys() <= last


@settings(deadline=None, max_examples=60)
@example(-100_000, 2 * SECOND_NS, [SECOND_NS] * 10)
@example(100_000, 2 * SECOND_NS, [SECOND_NS] * 10)
@given(
    st.one_of(st.integers(-20_000, 20_000), st.integers(-4_000_000, 4_000_000)),
    st.integers(0, 3 * SECOND_NS),
    st.lists(st.integers(50_000_000, 4 * SECOND_NS), min_size=6, max_size=30),
)
def test_a_clock_that_is_set_loses_and_repeats_nothing(
    step_ms: int, into_ns: int, pauses_ns: list[int]
) -> None:
    machine, cursor = Machine(), SampleCursor()
    given_us: list[int] = []
    for _ in range(15):
        machine.run(SECOND_NS)
        given_us += machine.look(cursor)
    machine.run(into_ns)
    # Never to a time that has been before to the microsecond: two samples would look the same.
    machine.offset_ns += step_ms * 1_000_000 + 7000
    for pause_ns in pauses_ns:
        machine.run(pause_ns)
        given_us += machine.look(cursor)
    assert all_given_once(machine, given_us)


@pytest.mark.parametrize("step_seconds", [-3600, -60, -13, -5, -1, -0.2, 0.2, 1, 60, 3600])
def test_samples_that_come_late_are_given_once_also_when_the_clock_is_set(
    step_seconds: float,
) -> None:
    machine, cursor = Machine(late_ns=250_000_000), SampleCursor()
    given_us: list[int] = []
    for number in range(60):
        machine.run(SECOND_NS)
        given_us += machine.look(cursor)
        if number == 20:
            machine.offset_ns += int(step_seconds * SECOND_NS) + 7000
    assert all_given_once(machine, given_us, but_the_last=2)


def test_after_an_idle_hour_everything_is_given_again() -> None:
    machine, cursor = Machine(), SampleCursor()
    given_us: list[int] = []
    for busy in (True, False, True):
        for _ in range(3600 if not busy else 20):
            machine.run(SECOND_NS, busy=busy)
            given_us += machine.look(cursor)
    assert all_given_once(machine, given_us)


def test_one_time_in_the_future_hides_nothing() -> None:
    machine, cursor = Machine(), SampleCursor()
    machine.run(SECOND_NS)
    given_us = machine.look(cursor)
    machine.samples.append((machine.monotonic_ns, machine.now_ns // 1000 + 4_900_000))
    for _ in range(10):
        machine.run(SECOND_NS)
        given_us += machine.look(cursor)
    assert all_given_once(machine, given_us)


def test_a_cursor_that_goes_on_for_another_starts_behind_it() -> None:
    machine, first = Machine(), SampleCursor()
    machine.run(5 * SECOND_NS)
    given_us = machine.look(first)
    second = SampleCursor(max(given_us))
    for _ in range(5):
        machine.run(SECOND_NS)
        given_us += machine.look(second)
    assert all_given_once(machine, given_us)


def test_what_is_remembered_is_bounded() -> None:
    cursor = SampleCursor()
    for second in range(2000):
        now_ns = START_NS + second * SECOND_NS
        cursor.begin(now_ns, second * SECOND_NS)
        samples = tuple(
            UtilisationSample(at_ns=now_ns + n * 1000, sm_percent=1) for n in range(100)
        )
        cursor.gave({5: samples}, second * SECOND_NS)
    kept = sum(cursor.was_given(5, (START_NS // 1000) + s * 1_000_000) for s in range(2000))
    assert 40 <= kept <= 90


# -------------------------------------------------------------------- frames


def test_frames_pass_in_any_pieces() -> None:
    messages = [
        Message(gpu_count=2, driver_version="x"),
        Message(gpus=(Gpu(id="GPU-x"),), accounted=None, unlisted=(GpuClient(gpu_id="x", pid=1),)),
        Message(done=True),
    ]
    pending, found = bytearray(), []
    for byte in b"".join(encode_frame(message) for message in messages):
        pending.append(byte)
        if (message := take_frame(pending)) is not None:
            found.append(message)
    assert (found, pending) == (messages, bytearray())


@pytest.mark.parametrize(
    "message",
    [
        Message(gpus=(Gpu(id="x" * 600),)),
        Message(gpus=(Gpu(id="x", unread={"a": "x" * 600}),)),
        Message(unlisted=(GpuClient(gpu_id="x", pid=1, reported_name="x" * 600),)),
        Message(unlisted=(GpuClient(gpu_id="x", pid=1),) * 20_000),
        Message(clients=(GpuClient(gpu_id="x", pid=1, engine_ns={str(n): 1 for n in range(99)}),)),
        Message(driver_version="x" * 600),
    ],
)
def test_a_frame_with_more_than_a_driver_says_is_refused(message: Message) -> None:
    with pytest.raises(Malformed):
        take_frame(bytearray(encode_frame(message)))


@given(st.binary(max_size=300))
def test_any_bytes_are_frames_or_malformed(data: bytes) -> None:
    for raw in (data, FRAME_LENGTH.pack(len(data)) + data):
        pending = bytearray(raw)
        try:
            while take_frame(pending) is not None:
                pass
        except Malformed:
            continue
        assert len(pending) <= len(raw)
