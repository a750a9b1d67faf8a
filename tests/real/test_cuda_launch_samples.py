"""In a stretch launches are told one by one, in order of time; those that are not are counted."""

from __future__ import annotations

import select
import time

import pytest

from gpuwarden.probes.cuda import launches
from gpuwarden.probes.cuda.functions import GRAPH_LAUNCHES, LAUNCHES, OLD_LAUNCHES
from gpuwarden.probes.cuda.launches import LaunchSettings
from gpuwarden.probes.cuda.records import OTHER_HANDLES, SampledLaunch
from tests.support.cuda_launching import counted, launch_probe, launching

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("built")]

LONG = 600.0
MOST = 1 << 20


def boot_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def told_of(samples: list[SampledLaunch], pid: int) -> list[int]:
    """The handles of one process in their order."""
    return [one.handle for one in samples if one.pid == pid]


@pytest.mark.parametrize("function", LAUNCHES)
def test_a_sample_has_what_the_call_had(function: str) -> None:
    with launch_probe() as probe, launching("a") as (program, handles):
        probe.sample(LONG, MOST)
        before = boot_ns()
        program.do("shape 11 12 13 1024 2 3", f"launch {function} a 1 0x7f1234567890")
        after = boot_ns()
        [sample] = probe.samples()
        [count] = [one for one in probe.counts() if one.pid == program.pid]
    assert before < sample.at_ns < after
    # Those take their shape from calls before them.
    old = function in OLD_LAUNCHES
    assert sample == SampledLaunch(
        at_ns=sample.at_ns,
        pid=program.pid,
        start_time_ns=count.start_time_ns,
        thread_id=program.pid,
        handle=handles["a"],
        stream=0 if old else 0x7F1234567890,
        grid=(0, 0, 0) if old else (11, 12, 13),
        block=(0, 0, 0) if old else (1024, 2, 3),
    )


@pytest.mark.parametrize("function", GRAPH_LAUNCHES)
def test_a_graph_is_told_with_its_stream(function: str) -> None:
    with launch_probe() as probe, launching("a") as (program, _):
        program.do("graph G a")
        probe.sample(LONG, MOST)
        program.do(f"launch {function} G 1 4096")
        [sample] = probe.samples()
    assert (sample.handle, sample.stream, sample.grid) == (0, 4096, (0, 0, 0))


def test_only_what_is_launched_in_a_stretch_is_told() -> None:
    with launch_probe() as probe, launching("a", "b", "c") as (program, handles):
        program.do("launch cuLaunchKernel a 5")
        probe.sample(LONG, MOST)
        program.do("launch cuLaunchKernel b 5")
        samples = probe.samples()
        program.do("launch cuLaunchKernel c 5")
        assert told_of(samples, program.pid) == [handles["b"]] * 5
        assert probe.samples() == [] and probe.dropped == {}
        assert set(counted(probe.counts(), program.pid).values()) == {5}


def test_a_stretch_ends_by_itself() -> None:
    with launch_probe() as probe, launching("a", "b") as (program, handles):
        probe.sample(0.2, MOST)
        program.do("launch cuLaunchKernel a 1")
        time.sleep(0.3)
        program.do("launch cuLaunchKernel b 50")
        assert told_of(probe.samples(), program.pid) in ([handles["a"]], [])
        assert probe.dropped == {}


def test_a_new_stretch_gives_up_the_one_before() -> None:
    with launch_probe() as probe, launching("a", "b") as (program, handles):
        probe.sample(LONG, 3)
        program.do("launch cuLaunchKernel a 50")
        probe.sample(LONG, 3)
        program.do("launch cuLaunchKernel b 10")
        assert told_of(probe.samples(), program.pid) == [handles["b"]] * 3
        assert probe.dropped == {program.pid: 7}


# -------------------------------------------------------------------- order


def test_the_order_is_that_of_the_launches() -> None:
    with launch_probe() as probe, launching("a", "b", "c") as (program, handles):
        probe.sample(LONG, MOST)
        program.do("sequence 100 0 a,b*2,c")
        samples = probe.samples()
    a, b, c = (handles[name] for name in "abc")
    assert told_of(samples, program.pid) == [a, b, b, c] * 100
    assert len({one.stream for one in samples}) == 1


def test_threads_and_processes_are_put_in_order_of_time() -> None:
    with launch_probe() as probe, launching("a", "b") as (one, ones), launching("c") as (two, _):
        probe.sample(LONG, MOST)
        one.tell("sequence 300 10 a,a 200 10 b,b,b")
        two.do("sequence 200 10 c")
        one.answer()
        samples = probe.samples()
    assert probe.dropped == {} and len(samples) == 600 + 600 + 200
    times = [sample.at_ns for sample in samples]
    assert times == sorted(times)
    by_thread: dict[int, set[int]] = {}
    for sample in samples:
        if sample.pid == one.pid:
            by_thread.setdefault(sample.thread_id, set()).add(sample.handle)
    assert sorted(by_thread.values(), key=min) == sorted(({ones["a"]}, {ones["b"]}), key=min)
    # Both ran at once: neither stream is all before the other.
    of_one = told_of(samples, one.pid)
    assert {of_one.index(ones["a"]), of_one.index(ones["b"])} != {0, 600}


# -------------------------------------------------------------------- bounds


def test_no_process_is_told_of_more_than_was_asked() -> None:
    with launch_probe() as probe, launching("a") as (one, _), launching("b") as (two, _):
        probe.sample(LONG, 100)
        one.tell("launch cuLaunchKernel a 5000")
        two.do("launch cuLaunchKernel b 90")
        one.answer()
        samples = probe.samples()
        assert len(told_of(samples, one.pid)) == 100
        assert len(told_of(samples, two.pid)) == 90
        assert probe.dropped == {one.pid: 4900}


def test_what_threads_launch_at_once_is_told_or_dropped() -> None:
    with launch_probe() as probe, launching("a") as (program, _):
        probe.sample(LONG, 1500)
        for _ in range(4):
            program.do("thread launch cuLaunchKernel a 1000")
        program.do("join")
        samples = told_of(probe.samples(), program.pid)
        assert len(samples) + probe.dropped[program.pid] == 4000
        # Threads that look at the same moment may each take the last one.
        assert 1500 <= len(samples) <= 1500 + 4


def test_what_finds_no_room_in_the_ring_is_dropped_and_counted() -> None:
    with launch_probe(LaunchSettings(ring_bytes=1 << 13)) as probe, launching("a") as (program, _):
        probe.sample(LONG, MOST)
        program.do("launch cuLaunchKernel a 1000")
        samples = told_of(probe.samples(), program.pid)
        assert 50 < len(samples) < 120
        assert probe.dropped == {program.pid: 1000 - len(samples)}


def test_a_ring_that_fills_is_heard_of_and_can_be_drained() -> None:
    with launch_probe(LaunchSettings(ring_bytes=1 << 16)) as probe, launching("a") as (program, _):
        poll = select.poll()
        poll.register(probe.fileno(), select.POLLIN)
        probe.sample(LONG, MOST)
        program.do("launch cuLaunchKernel a 10")
        probe.drain()
        assert not poll.poll(0)
        for _ in range(4):
            program.do("launch cuLaunchKernel a 800")
            assert poll.poll(5000)
            probe.drain()
        assert len(probe.samples()) == 3210 and probe.dropped == {}


def test_each_stretch_has_its_own_bound() -> None:
    with launch_probe() as probe, launching("a") as (program, _):
        for _ in range(3):
            probe.sample(LONG, 30)
            program.do("launch cuLaunchKernel a 50")
            assert len(probe.samples()) == 30 and probe.dropped == {program.pid: 20}
            program.do("launch cuLaunchKernel a 7")


def test_handles_without_room_are_told_of_all_the_same() -> None:
    with launch_probe(LaunchSettings(handles=9)) as probe, launching(*"abc") as (program, handles):
        probe.sample(LONG, MOST)
        program.do(*(f"launch cuLaunchKernel {name} 2" for name in "abcabc"))
        wanted = [handles[name] for name in "aabbccaabbcc"]
        assert told_of(probe.samples(), program.pid) == wanted
        assert OTHER_HANDLES in counted(probe.counts(), program.pid)


def test_no_more_are_kept_than_is_meant_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "KEPT_LIMIT", 300)
    with launch_probe() as probe, launching("a") as (program, _):
        probe.sample(LONG, 600)
        program.do("launch cuLaunchKernel a 1000")
        probe.drain()
        assert len(probe.samples()) == 300 and probe.dropped == {program.pid: 700}
        probe.sample(LONG, MOST)
        program.do("launch cuLaunchKernel a 10")
        assert len(probe.samples()) == 10 and probe.dropped == {}
