"""What may be learnt of a run: nothing of a process with hash-like code or with findings."""

from __future__ import annotations

from typing import Literal

import pytest

from gpuwarden import __version__
from gpuwarden.code.judgement import Answer, ModuleJudgement
from gpuwarden.code.module import Place
from gpuwarden.code.report import CodeReport, FoundModule, ScannedTarget, Sighting, Standing
from gpuwarden.codescan.learning import considered, objections
from tests.support.baselines import module
from tests.support.nodes import NodeBuilder

MINER = ("./rig", "-a", "kawpow", "-o", "stratum+tcp://pool.example:6060", "-u", "WALLET_X.rig")


def found(
    answer: Answer | None,
    *sightings: Sighting,
    standing: Standing = "unknown",
    digest: str = "ab" * 32,
    broken: str = "",
    together: Literal["hash-like", "not hash-like", ""] = "",
) -> FoundModule:
    return FoundModule(
        module=module(digest, broken=broken),
        standing=standing,
        judgement=ModuleJudgement(answer=answer) if answer else None,
        together=together,
        sightings=sightings,
    )


def in_memory(pid: int) -> Sighting:
    return Sighting(place=Place(target=f"pid {pid}"), in_no_mapped_file=True)


def in_file(pid: int) -> Sighting:
    return Sighting(place=Place(target=f"pid {pid}", members=("/opt/lib.so",)))


def in_cache() -> Sighting:
    return Sighting(place=Place(target="cache", members=("a.cubin",)))


def report(*modules: FoundModule) -> CodeReport:
    names = dict.fromkeys(s.place.target for one in modules for s in one.sightings)
    return CodeReport(
        gpuwarden_version=__version__,
        targets=tuple(
            ScannedTarget(name=name, what="process" if name.startswith("pid") else "folder")
            for name in names
        ),
        modules=modules,
        problems=(),
    )


def decisions(*modules: FoundModule, accept_flagged: bool = False) -> list[str]:
    candidates = considered(report(*modules), accept_flagged=accept_flagged)
    return [candidate.decision for candidate in candidates]


def test_harmless_code_in_memory_is_learnt() -> None:
    assert decisions(found("not hash-like", in_memory(7))) == ["take"]
    assert decisions(found("not enough code", in_cache())) == ["take"]


@pytest.mark.parametrize("accept", [False, True])
@pytest.mark.parametrize("answer", ["hash-like", "unknown opcodes", "unreadable", None])
def test_what_is_hash_like_or_unreadable_never_is(answer: Answer | None, accept: bool) -> None:
    assert decisions(found(answer, in_cache()), accept_flagged=accept) == ["refuse"]


@pytest.mark.parametrize(
    "answer", ["architecture too old", "architecture unknown", "form not judged"]
)
def test_what_cannot_be_judged_is_for_a_person_to_accept(answer: Answer) -> None:
    assert decisions(found(answer, in_cache())) == ["flag"]
    assert decisions(found(answer, in_cache()), accept_flagged=True) == ["take"]


def test_a_broken_module_is_refused_whatever_was_judged() -> None:
    assert decisions(found("not hash-like", in_cache(), broken="cut short")) == ["refuse"]


def test_one_hash_like_module_refuses_the_whole_process() -> None:
    harmless = found("not hash-like", in_memory(7))
    unjudged = found("architecture unknown", in_memory(7), digest="aa" * 32)
    other = found("not hash-like", in_memory(8), digest="cd" * 32)
    both = found("not hash-like", in_memory(8), in_memory(7), digest="bc" * 32)
    miner = found("hash-like", in_memory(7), digest="ef" * 32)
    every = (harmless, unjudged, other, both, miner)
    expected = ["refuse", "refuse", "take", "refuse", "refuse"]
    assert decisions(*every) == expected
    assert decisions(*every, accept_flagged=True) == expected
    # It may as well be in a file that the process has mapped.
    assert decisions(harmless, found("hash-like", in_file(7), digest="ef" * 32))[0] == "refuse"


def test_what_all_modules_come_to_together_counts() -> None:
    harmless = found("not hash-like", in_memory(7), together="not hash-like")
    alone = found("hash-like", in_memory(7), digest="ef" * 32, together="not hash-like")
    # One of thousands looks like a hash by chance: it is refused, its neighbours are not.
    assert decisions(harmless, alone) == ["take", "refuse"]
    share = found("not hash-like", in_memory(7), digest="ef" * 32, together="hash-like")
    assert decisions(harmless, share, accept_flagged=True) == ["refuse", "refuse"]


def test_known_hash_like_code_is_no_reason() -> None:
    library = found(None, in_memory(7), standing="known", digest="ef" * 32)
    assert decisions(found("not hash-like", in_memory(7)), library) == ["take", "known"]


def test_files_in_a_cache_do_not_taint_each_other() -> None:
    miner = found("hash-like", in_cache(), digest="ef" * 32)
    assert decisions(found("not hash-like", in_cache()), miner) == ["take", "refuse"]


def test_what_is_in_a_mapped_file_is_left_to_a_baseline_of_the_file() -> None:
    mapped = Sighting(place=Place(target="pid 7"), in_no_mapped_file=False)
    assert decisions(found("not hash-like", in_file(7))) == ["leave"]
    assert decisions(found("not hash-like", in_file(7), mapped)) == ["leave"]
    assert decisions(found("not hash-like", in_file(7), in_cache())) == ["take"]


def test_a_process_that_a_scan_accuses_is_refused_whole() -> None:
    node = NodeBuilder()
    node.gpu(0)
    for pid, argv in ((100, MINER), (200, ("python3", "train.py"))):
        node.process(pid, argv=argv, exe="/home/alice/rig" if pid == 100 else "/usr/bin/python3.11")
        node.client(pid)
    judged = node.judge()
    assert any(why.startswith("cryptominer on GPU") for why in objections(judged, 100))
    assert list(objections(judged, 200)) == []
    assert list(objections(judged, 300)) == []
