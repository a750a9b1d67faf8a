"""Unknown modules of one file are judged together, and one alarm is one for all of them."""

from __future__ import annotations

from collections.abc import Iterable

from gpuwarden.code.judgement import ModuleJudgement
from gpuwarden.code.module import Module, Place
from gpuwarden.code.report import FoundModule, Sighting
from gpuwarden.codescan.judged_sets import judged_together


def module(
    name: str,
    score: float | None,
    *,
    file: str = "lib.so",
    target: str = "/x",
    arch: str = "sm_80",
    kind: str = "cubin",
    standing: str = "unknown",
) -> FoundModule:
    answer = "unreadable" if score is None else "hash-like" if score >= 3 else "not hash-like"
    place = Place(target=target, members=(file,))
    return FoundModule(
        module=Module(
            kind=kind,  # type: ignore[arg-type]
            arch=arch,
            digest=name,
            stored_bytes=1,
            image_bytes=1,
            place=place,
        ),
        standing=standing,  # type: ignore[arg-type]
        judgement=ModuleJudgement(answer=answer, score=score),  # type: ignore[arg-type]
        sightings=(Sighting(place=place),),
    )


def together(judgements: Iterable[ModuleJudgement]) -> tuple[float, bool]:
    """The highest score less one for each module beside it; the bar is 2.5."""
    scores = [one.score or 0.0 for one in judgements]
    score = max(scores) - (len(scores) - 1)
    return score, score >= 2.5


def alarms(*modules: FoundModule) -> list[str]:
    return [one.module.digest for one in judged_together(modules, together) if one.is_alarming]


def test_one_that_looks_so_among_many_is_no_alarm() -> None:
    assert alarms(module("a", 3.0)) == ["a"]
    assert alarms(module("a", 3.0), module("b", 0.1), module("c", 0.2)) == []
    assert alarms(module("a", 9.0), module("b", 3.1), module("c", 0.2)) == ["a", "b"]


def test_files_targets_and_architectures_are_sets_of_their_own() -> None:
    assert alarms(module("a", 3.0), module("b", 0.1, file="other.so")) == ["a"]
    assert alarms(module("a", 3.0), module("b", 0.1, target="/y")) == ["a"]
    assert alarms(module("a", 3.0), module("b", 0.1, arch="sm_90")) == ["a"]
    assert alarms(module("a", 3.0), module("b", 0.1)) == []
    whole = [module("a", 3.0, target="pid 7"), module("b", 0.1, target="pid 7", file="other.so")]
    assert alarms(*whole) == []


def test_what_is_known_or_has_no_score_is_no_try() -> None:
    assert alarms(module("a", 3.0), module("b", 0.1, standing="known")) == ["a"]
    assert alarms(module("a", 3.0), module("b", None)) == ["a"]
    assert alarms(module("a", 3.0, standing="known")) == []


def test_a_set_whose_bar_is_lower_names_its_highest() -> None:
    assert alarms(module("a", 2.7)) == ["a"]
    assert alarms(module("a", 2.7), module("b", 3.6)) == ["b"]


def test_ptx_stands_for_itself() -> None:
    ptx = module("a", 3.0, kind="ptx")
    assert alarms(ptx, module("b", 0.1), module("c", 0.1)) == ["a"]
