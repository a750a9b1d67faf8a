"""Launches are counted exactly, by process and handle, whatever a process does to the tables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwarden.errors import Malformed, Unavailable
from gpuwarden.probes.cuda import launch_records
from gpuwarden.probes.cuda.functions import GRAPH_LAUNCHES, LAUNCHES
from gpuwarden.probes.cuda.launches import LaunchProbe, LaunchSettings
from gpuwarden.probes.cuda.library import FoundLibrary
from gpuwarden.probes.cuda.records import OTHER_HANDLES
from tests.support import text_pages
from tests.support.cuda_bed import CommandFailed, Program, bed, running
from tests.support.cuda_launching import (
    MODULE,
    counted,
    launch_probe,
    launching,
    opened_library,
)
from tests.support.idle import wait_for

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("built")]

NINTH = LaunchSettings(handles=90, processes=3)
"""One process gets at most 10 handles; there is room for three."""


@pytest.fixture
def library() -> Iterator[FoundLibrary]:
    with opened_library() as found:
        yield found


def start_time_ns(probe: LaunchProbe, pid: int) -> int:
    [start] = {one.start_time_ns for one in probe.counts() if one.pid == pid}
    return start


def make_up_handles(program: Program, count: int, times: int) -> None:
    """Launches each of ``count`` handles, by several lines so that each stays short."""
    for first in range(0, count, 100):
        some = range(first, min(first + 100, count))
        program.do(*(f"function F M k{i} ; launch cuLaunchKernel F {times}" for i in some))


# -------------------------------------------------------------------- counts


@pytest.mark.parametrize("function", LAUNCHES)
def test_each_launch_function_is_counted_by_its_kernel(function: str) -> None:
    with launch_probe() as probe, launching("a", "b") as (program, handles):
        program.do(f"launch {function} a 7", f"launch {function} b 1000")
        assert counted(probe.counts(), program.pid) == {handles["a"]: 7, handles["b"]: 1000}


@pytest.mark.parametrize("function", GRAPH_LAUNCHES)
def test_graphs_are_counted_without_their_kernels(function: str) -> None:
    with launch_probe() as probe, launching("a") as (program, handles):
        program.do("graph G a", f"launch {function} G 12", "launch cuLaunchKernel a 3")
        assert counted(probe.counts(), program.pid) == {0: 12, handles["a"]: 3}


def test_a_launch_of_no_function_is_no_graph() -> None:
    with launch_probe() as probe, launching() as (program, _):
        with pytest.raises(CommandFailed):
            program.do("launch cuLaunchKernel nothing 5")
        assert counted(probe.counts(), program.pid) == {OTHER_HANDLES: 5}


def test_processes_and_threads_are_counted_exactly() -> None:
    with (
        launch_probe() as probe,
        launching("a", "b") as (one, ones),
        launching("a") as (other, others),
    ):
        for thread in range(6):
            one.do(f"thread launch cuLaunchKernel {'ab'[thread % 2]} 2000")
        child = other.do("fork launch cuLaunchKernelEx a 500")
        other.do("launch cuLaunchKernel a 700")
        one.do("join")
        wait_for(lambda: counted(probe.counts(), child) == {others["a"]: 500}, "the child's")
        counts = probe.counts()
        assert counted(counts, one.pid) == {ones["a"]: 6000, ones["b"]: 6000}
        assert counted(counts, other.pid) == {others["a"]: 700}
        starts = {line.pid: line.start_time_ns for line in counts}
        assert len(set(starts.values())) == len(starts) == 3


def test_counts_stay_and_grow() -> None:
    with launch_probe() as probe, launching("a") as (program, handles):
        for total in (10, 20, 30):
            program.do("launch cuLaunchKernel a 10")
            assert counted(probe.counts(), program.pid) == {handles["a"]: total}


# -------------------------------------------------------------------- bounds


def test_a_process_that_makes_up_handles_takes_no_room_of_others() -> None:
    with launch_probe(NINTH) as probe, running(*MODULE) as greedy, launching("a", "b") as good:
        make_up_handles(greedy, 40, 3)
        launches = counted(probe.counts(), greedy.pid)
        assert launches.pop(OTHER_HANDLES) == 30 * 3
        assert list(launches.values()) == [3] * 10
        program, handles = good
        program.do("launch cuLaunchKernel a 5", "launch cuLaunchKernel b 6")
        assert counted(probe.counts(), program.pid) == {handles["a"]: 5, handles["b"]: 6}
        # What it has is counted on; what it makes up more is not.
        greedy.do("function F M k0 ; launch cuLaunchKernel F 1")
        greedy.do("graph G F ; launch cuGraphLaunch G 2")
        launches = counted(probe.counts(), greedy.pid)
        assert (launches[OTHER_HANDLES], launches[0]) == (90, 2)
        assert sorted(launches.values()) == [2, *[3] * 9, 4, 90]


def test_thousands_of_handles_are_read_at_once() -> None:
    with launch_probe() as probe, running(*MODULE) as program:
        make_up_handles(program, 3000, 1)
        launches = counted(probe.counts(), program.pid)
        assert len(launches) == 3000 and set(launches.values()) == {1}


def test_launches_of_processes_without_room_are_counted_together() -> None:
    settings = LaunchSettings(processes=1)
    with launch_probe(settings) as probe, launching("a") as (one, _), launching("a") as (two, _):
        one.do("launch cuLaunchKernel a 3")
        two.do("launch cuLaunchKernel a 40")
        assert counted(probe.counts(), two.pid) == {}
        assert probe.uncounted() == 40


# -------------------------------------------------------------------- processes that end


def test_what_is_forgotten_makes_room() -> None:
    with launch_probe(NINTH) as probe:
        for _ in range(12):
            with running(*MODULE) as program:
                make_up_handles(program, 12, 1)
                launches = counted(probe.counts(), program.pid)
                assert launches.pop(OTHER_HANDLES) == 2 and len(launches) == 10
                probe.forget(program.pid, start_time_ns(probe, program.pid))
                assert counted(probe.counts(), program.pid) == {}
        assert probe.counts() == []


def test_another_process_of_the_same_pid_is_not_forgotten() -> None:
    with launch_probe() as probe, launching("a") as (program, handles):
        program.do("launch cuLaunchKernel a 4")
        probe.forget(program.pid, start_time_ns(probe, program.pid) + 1)
        assert counted(probe.counts(), program.pid) == {handles["a"]: 4}


def test_one_that_is_forgotten_and_lives_is_counted_anew() -> None:
    with launch_probe() as probe, launching("a") as (program, handles):
        program.do("launch cuLaunchKernel a 4")
        probe.forget(program.pid, start_time_ns(probe, program.pid))
        probe.counts()
        program.do("launch cuLaunchKernel a 2")
        assert counted(probe.counts(), program.pid) == {handles["a"]: 2}


# -------------------------------------------------------------------- libraries


def test_what_is_attached_to_is_said() -> None:
    with launch_probe() as probe, opened_library(bed().library("push")) as found:
        attached = probe.attach(found)
        assert set(attached.probed) == {*LAUNCHES, *GRAPH_LAUNCHES}
        assert set(attached.at_start) == set(attached.probed)
        assert probe.attach(found) == attached


@pytest.mark.parametrize("variant", ["push", "endbr"])
def test_other_prologues_are_counted_too(variant: str) -> None:
    path = bed().library("push" if variant == "push" else "endbr")
    with opened_library(path) as found, launch_probe(None, found) as probe:
        probe.attach(found)  # a second time changes nothing
        with running(*MODULE, library=path) as program:
            handle = program.do("function a M a")
            program.do("launch cuLaunchKernel a 9")
            assert counted(probe.counts(), program.pid) == {handle: 9}


def test_two_names_of_one_function_are_counted_once(library: FoundLibrary) -> None:
    points = {
        **library.points,
        "cuLaunchKernel_ptsz": library.points["cuLaunchKernel"],
        "cuGraphLaunch": library.points["cuLaunchKernel"],
    }
    twice = library._replace(points=points)
    with launch_probe(None, twice) as probe, launching("a") as (program, handles):
        program.do("launch cuLaunchKernel a 9")
        assert counted(probe.counts(), program.pid) == {handles["a"]: 9}


def test_detached_it_counts_no_more_and_nothing_is_attached(library: FoundLibrary) -> None:
    places = [library.points[name].file_offset for name in (*LAUNCHES, *GRAPH_LAUNCHES)]

    before = text_pages.bpf_of(os.getpid())["link"]

    def links() -> set[int]:
        return text_pages.bpf_of(os.getpid())["link"] - before

    with launch_probe(None, library) as probe, launching("a") as (program, handles):
        program.do("launch cuLaunchKernel a 5")
        assert set(places) == set(text_pages.changed(program.pid, Path(library.path), places))
        assert links()
        probe.detach(library.key)
        probe.detach(library.key)
        # An agent that runs here may have its own probes there.
        assert not links()
        program.do("launch cuLaunchKernel a 5")
        assert counted(probe.counts(), program.pid) == {handles["a"]: 5}
        probe.attach(library)
        program.do("launch cuLaunchKernel a 1")
        assert counted(probe.counts(), program.pid) == {handles["a"]: 6}
        probe.close()
        assert not links()


def test_a_place_that_cannot_be_attached_to_is_a_problem_and_the_rest_is_counted(
    library: FoundLibrary,
) -> None:
    beyond = library.points["cuLaunchKernel"]._replace(file_offset=1 << 40)
    with launch_probe() as probe:
        attached = probe.attach(
            library._replace(key=(0, 0, 1), points={**library.points, "cuGraphLaunch": beyond})
        )
        assert set(attached.probed) == {*LAUNCHES, *GRAPH_LAUNCHES} - {"cuGraphLaunch"}
        assert [problem.partition(":")[0] for problem in attached.problems] == ["cuGraphLaunch"]


# -------------------------------------------------------------------- loading


def test_a_missing_object_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as error:
        LaunchProbe(object_path=str(tmp_path / "none.o")).__enter__()
    assert "build_probes" in error.value.remedy


def test_a_wrong_layout_is_refused_and_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = {**launch_records.LAYOUTS, "launch_sample": (("time_ns", "Q"),)}
    monkeypatch.setattr(launch_records, "LAYOUTS", layouts)
    before = text_pages.bpf_of(os.getpid())
    with pytest.raises(Malformed, match="struct launch_sample"):
        LaunchProbe().__enter__()
    assert text_pages.bpf_of(os.getpid()) == before


def test_closed_it_gives_nothing_and_leaves_nothing() -> None:
    before = text_pages.bpf_of(os.getpid())
    with launch_probe() as probe:
        probe.close()
        probe.close()
        with pytest.raises(Unavailable):
            probe.counts()
    assert text_pages.bpf_of(os.getpid()) == before
