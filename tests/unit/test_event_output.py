"""Event lines never wait for their reader, and never mix with findings."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from gpuwarden.sinks.event_output import EventOutput
from gpuwarden.sinks.lines import StdoutSink
from gpuwarden.sinks.own_trouble import OwnTrouble
from tests.support.receivers import wait_until


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    ends = [reader, writer]
    yield reader, writer
    for end in ends:
        try:
            os.close(end)
        except OSError:
            pass


def read_all(reader: int) -> list[bytes]:
    with os.fdopen(os.dup(reader), "rb") as file:
        return file.read().splitlines()


def test_lines_come_in_order_and_all_of_them(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    output = EventOutput(writer)
    wanted = [b"%d" % number for number in range(5000)]
    for line in wanted:
        output.put(line)
    assert output.close(20)
    os.close(writer)
    assert read_all(reader) == wanted
    assert output.dropped == 0


def test_a_reader_that_does_not_read_costs_lines_that_are_counted_and_no_time(
    pipe: tuple[int, int],
) -> None:
    reader, writer = pipe
    output = EventOutput(writer, limit_bytes=1 << 20)
    for number in range(3000):
        output.put(b"%d " % number + b"x" * 1000)
    assert 1500 < output.dropped < 3000
    assert not output.close(0.05)
    (told,) = OwnTrouble().findings([], [], 10**18, unread_lines=output.dropped)
    assert told.rule == "alarms_dropped"
    assert f"{output.dropped} event lines" in told.evidence[0].text
    kept = 3000 - output.dropped
    with os.fdopen(os.dup(reader), "rb") as file:
        got = [file.readline() for _ in range(kept)]
    numbers = [int(line.split()[0]) for line in got]
    # The first ones are all there; of the others those for which room was made.
    assert numbers[:1000] == list(range(1000))
    assert numbers == sorted(set(numbers))
    assert output.close(20)


def test_without_a_reader_everything_is_counted_as_dropped(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.close(reader)
    output = EventOutput(writer)
    for _ in range(10):
        output.put(b"line")
    wait_until(lambda: output.dropped == 10)
    assert output.close(20)


def test_findings_and_events_do_not_mix(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    output, sink = EventOutput(writer), StdoutSink(writer)
    finding = b"f" * 200_000  # longer than a pipe holds

    def findings() -> None:
        for _ in range(20):
            sink.deliver(finding)

    teller = threading.Thread(target=findings)
    teller.start()
    for _ in range(2000):
        output.put(b"e" * 5000)

    def close() -> None:
        teller.join()
        output.close(20)
        os.close(writer)

    closer = threading.Thread(target=close)
    closer.start()
    lines = read_all(reader)
    closer.join()
    assert set(lines) == {finding, b"e" * 5000}
    assert lines.count(finding) == 20
    assert lines.count(b"e" * 5000) + output.dropped == 2000
