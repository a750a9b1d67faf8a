"""What a process has loaded is judged as a look at its memory judges it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.code.baseline.known import Baselines
from gpuwarden.code.classify import judge_together
from gpuwarden.code.classify.model import load_model
from gpuwarden.code.judgement import KernelJudgement, ModuleJudgement
from gpuwarden.code.module import Module, Place
from gpuwarden.code.report import FoundModule, Sighting
from gpuwarden.code.set_bar import load_set_bar
from gpuwarden.code.standing import Assessor
from gpuwarden.codescan.judged_sets import MODULES_LIMIT, answer_of, judged_together
from gpuwarden.codescan.scan import Options
from gpuwarden.codescan.tasks import Found
from gpuwarden.cuda.judged_loads import LoadedCounts, counted, gpu_modules, judged
from gpuwarden.cuda.loaded_modules import MODULES_LIMIT as MODULES_OF_LOAD
from gpuwarden.cuda.loaded_modules import LoadAnswers, loaded_module
from gpuwarden.cuda.modules import ModuleExaminer
from gpuwarden.model import LoadedModule, ModuleLoad, Process, ProfileStanding
from gpuwarden.policy import Policy
from gpuwarden.rules.gpu_code import BY_ITSELF, HASH_LIKE
from tests.support import nvcc
from tests.support.captured_loads import examined, loads_of
from tests.support.code_scans import scanned

PROCESS = Process(pid=7, start_time_ticks=1, comm="python3")
PLACE = Place(target="pid 7")


def found(number: int, **given: Any) -> Found:
    """A module as a child answers it, whose digest is that of its number."""
    score: float | None = given.get("score", 0.5)
    told = given.get("told", (score,) if score is not None else ())
    answer = "unreadable" if score is None else HASH_LIKE if score >= 3.6 else "not hash-like"
    standing = given.get("standing", "unknown")
    return Found(
        module=Module(
            kind=given.get("kind", "cubin"),
            arch=given.get("arch", "sm_90"),
            digest=f"{number:064x}",
            stored_bytes=10,
            image_bytes=10,
            place=PLACE,
        ),
        standing=standing,
        judgement=ModuleJudgement(
            answer=answer,  # type: ignore[arg-type]
            score=score,
            judged=given.get("judged", len(told)),
            kernels=tuple(
                KernelJudgement(name=f"k{at}", answer=answer, score=one)  # type: ignore[arg-type]
                for at, one in enumerate(told)
            ),
        ),
        standings=(ProfileStanding(profile="p", standing=standing),),
    )


def loaded(one: Found) -> LoadedModule:
    return loaded_module(one, ["p"])


def load(*modules: LoadedModule, number: int = 1, path: str | None = None) -> ModuleLoad:
    return ModuleLoad(
        pid=7,
        start_time_ticks=1,
        number=number,
        at_ns=100 + number,
        thread_id=7,
        function="cuLibraryLoadData",
        path=path,
        modules=modules,
    )


def as_a_scan_finds_them(all_found: Sequence[Found]) -> tuple[FoundModule, ...]:
    return tuple(
        FoundModule(
            module=one.module,
            standing=one.standing,
            judgement=one.judgement,
            sightings=(Sighting(place=PLACE),),
        )
        for one in all_found
    )


scores = st.floats(0, 9) | st.sampled_from([3.5, 3.6, 4.6, 2.9])
sets = st.lists(
    st.fixed_dictionaries(
        {
            "score": st.none() | scores,
            "told": st.lists(st.none() | scores, max_size=10).map(tuple),
            "judged": st.integers(0, 2000),
            "arch": st.sampled_from(["sm_80", "sm_90"]),
            "kind": st.sampled_from(["cubin", "cubin", "ptx"]),
            "standing": st.sampled_from(["unknown", "unknown", "jit", "known", "rebuilt"]),
        }
    ),
    max_size=30,
)


@given(given_modules=sets)
def test_loads_raise_the_alarms_that_a_look_at_memory_raises(
    given_modules: list[dict[str, Any]],
) -> None:
    all_found = [found(number, **one) for number, one in enumerate(given_modules)]
    scan = judged_together(as_a_scan_finds_them(all_found), judge_together)
    mine = judged([loaded(one) for one in all_found], "p")
    assert [answer == HASH_LIKE for _, answer in mine] == [one.is_alarming for one in scan]
    expected = [answer_of(one) if one.standing in ("unknown", "jit") else "" for one in scan]
    assert [answer for _, answer in mine] == expected


@given(given_modules=sets)
def test_the_bar_for_sets_is_that_of_the_model(given_modules: list[dict[str, Any]]) -> None:
    judgements = [found(0, **one).judgement for one in given_modules]
    known = [one for one in judgements if one is not None]
    score, is_hash_like = load_set_bar()(known)
    expected = judge_together(known)
    assert is_hash_like == expected[1]
    assert math.isclose(score, expected[0], abs_tol=1e-9)


def test_the_bars_numbers_are_the_models() -> None:
    bar, model = load_set_bar(), load_model()
    assert (bar.threshold, bar.counted_kernels) == (model.set_threshold, model.counted_kernels)


@pytest.mark.parametrize("names", [["sha256", "gemm"], ["gemm", "elementwise", "reduction"]])
def test_real_modules_raise_the_alarms_of_a_scan(names: list[str]) -> None:
    paths = [nvcc.cubin(name) for name in names]
    scan = scanned(*paths, assess=Assessor(Baselines()), options=Options(judged=True))
    with ModuleExaminer(Policy()) as examiner:
        answers = [examined(examiner, path.read_bytes(), at) for at, path in enumerate(paths)]
    told = gpu_modules(PROCESS, loads_of(answers), "")
    alarming = [one for one in scan.modules if one.is_alarming]
    assert [one.digest for one in told] == [one.module.digest for one in alarming]
    assert [one.kernels[0] for one in told] == ["sha256_blocks"] * ("sha256" in names)


def test_one_that_looks_like_a_hash_among_many_is_told_as_one_by_itself() -> None:
    alone = loaded(found(1, score=3.7))
    others = [loaded(found(number, score=0.1, judged=40)) for number in range(2, 40)]
    assert judged([alone], "p") == [(alone, HASH_LIKE)]
    assert judged([alone, *others], "p")[0] == (alone, BY_ITSELF)


def test_what_a_profile_knows_has_no_answer_and_is_not_told() -> None:
    known = loaded(found(1, score=9.0, standing="known"))
    assert judged([known], "p") == [(known, "")]
    assert gpu_modules(PROCESS, [load(known)], "p") == ()
    assert counted([load(known)], "p") == LoadedCounts(known=1)


def test_a_module_is_told_once_with_the_load_that_it_was_first_in() -> None:
    module, other = loaded(found(1, score=9.0)), loaded(found(2))
    loads = [load(module, number=1), load(other, module, number=2, path="/tmp/x.cubin")]
    told = gpu_modules(PROCESS, loads, "p")
    assert [(one.digest, one.answer) for one in told] == [
        (module.digest, HASH_LIKE),
        (other.digest, "not hash-like"),
    ]
    assert [(one.loaded_at_ns, one.loaded_by, one.mapping) for one in told] == [
        (101, "cuLibraryLoadData", ""),
        (102, "cuLibraryLoadData", "/tmp/x.cubin"),
    ]
    assert (told[0].pid, told[0].start_time_ticks, told[0].kernels) == (7, 1, ("k0",))


def test_the_last_word_on_a_module_counts() -> None:
    before, after = loaded(found(1)), loaded(found(1, standing="known"))
    assert gpu_modules(PROCESS, [load(before), load(after)], "p") == ()
    assert len(gpu_modules(PROCESS, [load(after), load(before)], "p")) == 1


def test_the_gravest_are_told_and_all_are_counted() -> None:
    many = [loaded(found(number, score=0.1, arch="sm_75")) for number in range(300)]
    jit = loaded(found(1000, standing="jit", score=2.0, arch="sm_86"))
    hashing = loaded(found(1001, score=9.0))
    rebuilt, driver = (
        loaded(found(1002, standing="rebuilt")),
        loaded(found(1003, standing="driver")),
    )
    loads = [load(*many, jit, rebuilt), load(hashing, driver)]
    told = gpu_modules(PROCESS, loads, "p")
    assert len(told) == MODULES_LIMIT
    assert told[0].digest == hashing.digest
    assert {one.standing for one in told} == {"unknown"}
    counts = counted(loads, "p")
    assert counts == LoadedCounts(unknown=301, jit=1, rebuilt=1, driver=1)
    assert counts.modules == 304


def test_without_a_profile_that_can_be_asked_only_hashes_are_told() -> None:
    plain, hashing = found(1), found(2, score=9.0)
    undeclared = [loaded_module(one, [""]) for one in (plain, hashing)]
    assert [one.digest for one in gpu_modules(PROCESS, [load(*undeclared)], "")] == [
        hashing.module.digest
    ]
    # A profile that was not there when they were loaded, or whose baselines could not be read.
    loads = [load(*undeclared)]
    assert [one.digest for one in gpu_modules(PROCESS, loads, "new")] == [hashing.module.digest]
    assert counted(loads, "new") == LoadedCounts(not_compared=2)
    failed = ProfileStanding(profile="p", standing="unknown", not_compared="damaged")
    told = [loaded_module(_with(one, failed), ["p"]) for one in (plain, hashing)]
    assert [one.digest for one in gpu_modules(PROCESS, [load(*told)], "p")] == [
        hashing.module.digest
    ]


def _with(one: Found, standing: ProfileStanding) -> Found:
    return Found(module=one.module, judgement=one.judgement, standings=(standing,))


def test_a_load_tells_a_bounded_number_of_modules_the_unknown_first() -> None:
    answers = LoadAnswers(1 << 20, ["p"], is_cut=False)
    for number in range(MODULES_OF_LOAD):
        answers.take(found(number, standing="known"))
    answers.take(found(5000))
    answers.take(found(5000))
    told = answers.answer()
    assert len(told.modules) == MODULES_OF_LOAD
    assert told.modules[0].digest == f"{5000:064x}"
    assert told.problems == (f"1 more modules: {MODULES_OF_LOAD} of one load are told",)
