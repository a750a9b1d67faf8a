"""The eBPF probe under floods: exact counts, nobody hidden, drops counted."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gpuwarden.probes.events import (
    Event,
)
from gpuwarden.probes.settings import Settings
from tests.support.probes import (
    EVERYTHING,
    FULL,
    UNUSED,
    ZERO,
    by,
    drained,
    node,
    opens,
    probing,
    run,
)

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("built")]


# -------------------------------------------------------------------- floods


def test_a_flood_is_counted_exactly_and_hides_nobody(opener: Path, tmp_path: Path) -> None:
    path = node(tmp_path / "n", UNUSED)
    events: list[Event] = []
    with probing(Settings(limit_events=16), UNUSED) as probe:
        flood = subprocess.Popen([opener, "open", path, "200000"], stdout=subprocess.DEVNULL)
        others: list[int] = []
        # A quick machine, or one that halts here, may be through with the flood before the second.
        while flood.poll() is None or len(others) < 2:
            other = subprocess.Popen([opener, "open", path, "5"], stdout=subprocess.DEVNULL)
            other.wait()
            others.append(other.pid)
            events += drained(probe)
        events += drained(probe)
        counted = {(one.pid, one.how): one.hits for one in probe.counts()}
        counters = probe.counters()
        start = by(flood.pid, events)[0].process.start_time_ns
        probe.forget(others[1], 1, [(*UNUSED, "open")])
        probe.forget(flood.pid, start, [(*UNUSED, "access"), (*FULL, "open")])
        assert flood.pid in {one.pid for one in probe.counts()}
        probe.forget(flood.pid, start, [(*UNUSED, "open"), (*UNUSED, "access")])
        by_walking = by(others[1], events)[0].process.start_time_ns
        assert others[1] in {one.pid for one in probe.counts()}
        probe.forget(others[1], by_walking)
        left = {one.pid for one in probe.counts()}
    assert counted[(flood.pid, "open")] == 200_000
    assert {len(by(pid, events)) for pid in others} == {5}
    assert len(by(flood.pid, events)) < 20_000
    assert counters.dropped == 0 and counters.limiter_full == 0
    assert counters.limited == 200_000 - len(by(flood.pid, events))
    assert not {flood.pid, others[1]} & left and others[0] in left


def test_a_flood_of_access_does_not_hide_an_open(tmp_path: Path) -> None:
    path = node(tmp_path / "n", FULL)
    with probing(Settings(limit_events=4, limit_window_seconds=3600)) as probe:
        for _ in range(100):
            os.access(path, os.R_OK)
        os.close(os.open(path, os.O_RDONLY))
        mine = by(os.getpid(), drained(probe))
    assert [e.how for e in mine] == ["access"] * 4 + ["open"]


def test_without_the_limit_every_open_is_an_event(opener: Path, tmp_path: Path) -> None:
    paths = [node(tmp_path / "a", FULL), node(tmp_path / "b", ZERO)]
    events: list[Event] = []
    with probing(EVERYTHING, FULL, ZERO) as probe:
        storm = subprocess.Popen([opener, "storm", "20", "100", *paths])
        while storm.poll() is None:
            events += drained(probe)
        events += drained(probe)
        assert probe.counters().dropped == 0
    told = [e for e in opens(events) if e.process.exe_path == str(opener)]
    assert [sum((e.major, e.minor) == number for e in told) for number in (FULL, ZERO)] == [
        1000,
        1000,
    ]


def test_what_finds_no_room_is_counted(opener: Path, tmp_path: Path) -> None:
    path = node(tmp_path / "n", UNUSED)
    with probing(Settings(limit_events=0, ring_bytes=1 << 16), UNUSED) as probe:
        run(opener, "open", path, "1000")
        told = len(opens(drained(probe)))
        counters = probe.counters()
    assert counters.dropped_opens > 0
    assert told + counters.dropped_opens == counters.hits == 1000
