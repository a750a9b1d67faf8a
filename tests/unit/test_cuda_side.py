"""The agent's side of the CUDA layer: what it counts, what it tells of itself, whom it follows."""

from __future__ import annotations

from typing import cast

import pytest

from gpuwarden.cuda.book import CudaBook
from gpuwarden.cuda.messages import LibrarySeen, LoadCame, LoadSeen, Message, TracerState
from gpuwarden.finding import Finding, Subject
from gpuwarden.model import (
    CudaLibrary,
    GpuModule,
    LoadedModule,
    ModuleLoad,
    ProfileStanding,
)
from gpuwarden.probes.cuda.records import CallCounters
from gpuwarden.probes.events import ProcessIdentity
from gpuwarden.watch.accused import Accused
from gpuwarden.watch.cuda_counts import CudaCounts, cuda_state
from gpuwarden.watch.cuda_side import CudaSide
from gpuwarden.watch.cuda_sight import CudaSight
from gpuwarden.watch.judgement import Kin
from gpuwarden.watch.library_less import LOOKS, LibraryLess

HOUR_NS = 3600 * 10**9
KEY = (42, 500)
START = (42, 5_000_000_000)


def _load(number: int = 1, *digests: str, missed: str = "") -> LoadSeen:
    standings = (ProfileStanding(profile="p", standing="known"),)
    return LoadSeen(
        process=ProcessIdentity(pid=42, start_time_ns=START[1]),
        load=ModuleLoad(
            pid=42,
            start_time_ticks=500,
            number=number,
            at_ns=1,
            thread_id=42,
            function="cuModuleLoadData",
            missed=missed,
            modules=tuple(
                LoadedModule(digest=digest, kind="cubin", standings=standings) for digest in digests
            ),
        ),
    )


def _finding(rule: str, severity: str, pid: int = 42) -> Finding:
    return Finding(
        id="1",
        rule=rule,
        severity=severity,  # type: ignore[arg-type]
        title="",
        subject=Subject(kind="process", name="", pid=pid, start_time_ticks=500),
        explanation="",
        advice=(),
    )


# ------------------------------------------------------------------ counts


def test_counters_of_tracers_that_are_gone_are_kept() -> None:
    counts = CudaCounts()
    counts.state(TracerState(counters=CallCounters(loads=5, copied_bytes=100, dropped=1)))
    counts.state(TracerState(counters=CallCounters(loads=7, copied_bytes=150, dropped=2)))
    counts.state(TracerState(counters=CallCounters(loads=1, copied_bytes=10)))
    assert (counts.calls.loads, counts.calls.copied_bytes, counts.dropped) == (8, 160, 2)


def test_modules_are_counted_by_standing_once_a_process() -> None:
    counts = CudaCounts()
    load = _load(1, "aa", "bb").load
    hash_like = GpuModule(
        pid=42, start_time_ticks=500, digest="bb", kind="cubin", answer="hash-like"
    )
    counts.judged(load, "p", (hash_like,))
    counts.judged(load, "p", (hash_like,))
    counts.judged(_load(2, "cc").load, "another profile", ())
    assert dict(counts.modules) == {"known": 1, "hash-like": 1, "not-compared": 1}


def test_the_state_tells_of_what_is_mapped_and_what_is_dear() -> None:
    counts, book = CudaCounts(), CudaBook()
    library = CudaLibrary(device="8:1", inode=1, path="/l", probed=("a", "b", "c"), at_start=("c",))
    book.take(LibrarySeen(key=(8, 1, 1), library=library))
    for message in (_load(1, "aa"), _load(2, missed="the ring was full")):
        counts.take(cast(Message, message))
        book.take(message)
    state = cuda_state(counts, book, restarts=2, error="", unfit=(3, 1))
    assert (state.libraries, state.entry_points, state.dear_entry_points) == (1, 3, 1)
    assert (state.loads, dict(state.missed)) == (2, {"the ring was full": 1})
    assert (state.tracer_restarts, state.compared_processes, state.unfit_processes) == (2, 3, 1)


# ------------------------------------------------------------------ sight


class _Child:
    error = ""


class _Side:
    """What CudaSight asks of a side."""

    def __init__(self) -> None:
        self.child = _Child()
        self.book = CudaBook()
        self.state = TracerState()
        self.launch_problems: tuple[str, ...] = ()
        self.untold_dropped = 0

    def rules(self, sight: CudaSight, at_ns: int = 0) -> list[str]:
        return [one.rule for one in sight.findings(cast(CudaSide, self), at_ns)]


def test_nothing_is_told_of_a_node_without_a_library() -> None:
    side = _Side()
    side.state = TracerState(problems=("calls are not seen: no libbpf.so.1",))
    assert side.rules(CudaSight()) == []


def test_calls_that_are_not_seen_are_told() -> None:
    side, sight = _Side(), CudaSight()
    side.state = TracerState(problems=("calls are not seen: no libbpf.so.1",))
    library = CudaLibrary(device="8:1", inode=1, path="/l", problems=("not attached: EPERM",))
    side.book.take(LibrarySeen(key=(8, 1, 1), library=library))
    [finding] = sight.findings(cast(CudaSide, side), 0)
    assert finding.rule == "cuda_calls_unseen"
    assert [one.text for one in finding.evidence] == [
        "calls are not seen: no libbpf.so.1",
        "/l: not attached: EPERM",
    ]


def test_a_tracer_that_is_not_there_is_told() -> None:
    side = _Side()
    side.child.error = "it has ended"
    assert side.rules(CudaSight()) == ["cuda_calls_unseen"]


def test_missed_modules_are_told_for_an_hour() -> None:
    side, sight = _Side(), CudaSight()
    assert side.rules(sight) == []
    side.book.take(_load(1, missed="the ring was full"))
    assert side.rules(sight, 10) == ["module_bytes_missed"]
    assert side.rules(sight, HOUR_NS) == ["module_bytes_missed"]
    assert side.rules(sight, HOUR_NS + 11) == []


def test_what_a_crowd_pushed_out_is_told() -> None:
    side, sight = _Side(), CudaSight()
    side.book.crowded_out, side.untold_dropped = 2, 5
    side.state = TracerState(crowded_out=1)
    [finding] = sight.findings(cast(CudaSide, side), 0)
    assert [one.text for one in finding.evidence] == [
        "5 events that were not told, since too many waited",
        "3 times a process was forgotten, since too many others came",
    ]


def test_a_load_that_the_driver_refused_later_is_told_of_no_more_than_the_hour() -> None:
    side, sight = _Side(), CudaSight()
    side.book.take(_load(1, missed="nothing says how long it is"))
    side.book.take(LoadCame(pid=42, start_time_ns=START[1], number=1, handle=0, result=200))
    assert side.rules(sight, 10) == []


# ------------------------------------------------------------------ holders and verdicts


def test_a_holder_without_a_library_is_one_after_some_looks_in_a_row() -> None:
    less = LibraryLess()
    without = ((42, 500, ()),)
    for look in range(1, LOOKS + 2):
        changed = less.look(without, [START])
        assert changed == ([START] if look == LOOKS else [])
        assert less.has(START) == (look >= LOOKS)
    assert less.named() == [KEY]
    assert less.look((), [START]) == [START]
    assert not less.has(START)


def test_a_holder_whose_library_is_found_in_time_is_none() -> None:
    less = LibraryLess()
    without = ((42, 500, ()),)
    for _ in range(5):
        assert less.look(without, [START]) == []
        assert less.look((), [START]) == []


@pytest.mark.parametrize(
    ("verdict", "severity", "told"),
    [
        ("cryptominer", "critical", True),
        ("cryptominer", "error", True),
        ("suspicious", "error", True),
        ("suspicious", "critical", False),
        ("expected", "critical", False),
    ],
)
def test_a_verdict_tells_of_code_where_it_is_no_milder(
    verdict: str, severity: str, told: bool
) -> None:
    accused = Accused()
    accused.judged([Kin(pid=42, start_time_ticks=500, verdicts={"GPU-0": verdict})])
    assert accused.has_told(_finding("module_loaded_hash_like", severity)) is told
    assert not accused.has_told(_finding("module_loaded_unknown", severity))
    assert not accused.has_told(_finding("module_loaded_hash_like", severity, pid=43))


def test_who_is_accused_now_or_no_longer_is_judged_anew() -> None:
    accused = Accused()
    kin = Kin(pid=42, start_time_ticks=500, verdicts={"GPU-0": "cryptominer"})
    assert accused.judged([kin]) == {KEY}
    assert accused.judged([kin]) == set()
    assert accused.judged([]) == {KEY}
