"""Where a module stands: what is known is not judged, what looks like JIT code is judged anyway."""

from __future__ import annotations

import pytest

from gpuwarden.code.baseline.difference import difference
from gpuwarden.code.baseline.entries import Entry
from gpuwarden.code.baseline.known import Baselines, KnownSet
from gpuwarden.code.baseline.provenance import Provenance
from gpuwarden.code.judgement import Answer, ModuleJudgement
from gpuwarden.code.module import Kind, Module
from gpuwarden.code.standing import (
    ALLOWANCE_HOLDS,
    Assessor,
    Buffer,
    JitRule,
    Standing,
    standing_of,
)
from gpuwarden.policy import JIT_CLASSES
from tests.support.baselines import collected, module, numbered, opened

KNOWN = numbered(5)
DRIVER = Provenance(package="GPU driver", version="580.1", file="libcuda.so.1", source="driver")
ANSWERS: tuple[Answer, ...] = (
    "hash-like",
    "not hash-like",
    "not enough code",
    "architecture too old",
    "architecture unknown",
    "form not judged",
    "unknown opcodes",
    "unreadable",
)


def unasked(kind: Kind, image: Buffer) -> ModuleJudgement:
    raise AssertionError("a known module is not judged")


def stands(
    found: Module,
    baselines: Baselines,
    *,
    answer: Answer | None = None,
    jit: dict[str, JitRule] | None = None,
    looks_like: str = "",
) -> Standing:
    def judge(kind: Kind, image: Buffer) -> ModuleJudgement:
        return ModuleJudgement(answer=answer) if answer else unasked(kind, image)

    return standing_of(
        found, b"image", baselines, jit, judge=judge, jit_class=lambda module, image: looks_like
    )


def test_an_exact_digest_is_known_by_the_first_baseline_that_knows_it() -> None:
    first, second = opened(collected(KNOWN[:1])), opened(collected(numbered(5, "other")))
    baselines = Baselines([first, second])
    found = stands(module(KNOWN[0].digest.hex()), baselines)
    assert (found.standing, found.known_as) == ("known", "torch 1.0 lib/0.so")
    assert found.is_known
    assert stands(module(KNOWN[3].digest.hex()), baselines).known_as == "other 1.0 lib/3.so"


def test_the_same_code_under_another_digest_is_rebuilt() -> None:
    baselines = Baselines([opened(collected(KNOWN))])
    found = stands(module("cd" * 32, KNOWN[2].code.hex()), baselines)
    assert (found.standing, found.known_as) == ("rebuilt", "code of torch 1.0 lib/2.so")


def test_no_code_is_nobodys_code() -> None:
    # A baseline whose module has no code digest must not know every module without one.
    baselines = Baselines([opened(collected([Entry(b"a" * 32, b"", KNOWN[0].provenance)]))])
    assert stands(module("cd" * 32, ""), baselines, answer="not hash-like").standing == "unknown"


def test_the_drivers_own_are_told_apart() -> None:
    own = module(KNOWN[0].digest.hex())
    in_baseline = opened(collected([Entry(KNOWN[0].digest, b"", DRIVER)]))
    assert stands(own, Baselines([in_baseline])).standing == "driver"
    here = KnownSet("here", [(own, DRIVER)])
    assert len(here) == 1
    found = stands(own, Baselines([opened(collected([])), here]))
    assert (found.standing, found.known and found.known.baseline) == ("driver", "here")
    rebuilt = module("cd" * 32, "ef" * 32)
    here = KnownSet("here", [(module("ab" * 32, "ef" * 32), DRIVER)])
    assert stands(rebuilt, Baselines([here])).standing == "rebuilt"
    assert here.lookup_code("") is None


@pytest.mark.parametrize("answer", ANSWERS)
def test_unknown_code_is_judged(answer: Answer) -> None:
    found = stands(module(), Baselines(), answer=answer)
    assert (found.standing, found.known_as) == ("unknown", "")
    assert found.judgement == ModuleJudgement(answer=answer)


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_allowed_class_is_judged_and_holds_only_for_what_is_seen_to_be_harmless(
    answer: Answer,
) -> None:
    found = stands(module(), Baselines(), answer=answer, jit={"nvrtc": "allow"}, looks_like="nvrtc")
    assert found.judgement == ModuleJudgement(answer=answer)
    assert found.jit == "nvrtc"
    if answer in ALLOWANCE_HOLDS:
        assert (found.standing, found.known_as) == ("jit", "looks like nvrtc, allowed")
    else:
        assert found.standing == "unknown"
        assert found.known_as == f"looks like nvrtc, allowed, but: {answer}"
    assert not found.is_known


@pytest.mark.parametrize(
    ("jit", "known_as"),
    [
        ({"nvrtc": "review"}, "looks like nvrtc, to be reviewed"),
        ({"triton": "allow"}, ""),
        ({}, ""),
        (None, ""),
    ],
)
def test_a_class_that_is_not_allowed_is_unknown(
    jit: dict[str, JitRule] | None, known_as: str
) -> None:
    found = stands(module(), Baselines(), answer="not hash-like", jit=jit, looks_like="nvrtc")
    assert (found.standing, found.known_as) == ("unknown", known_as)


def test_a_broken_module_is_never_known() -> None:
    entry = KNOWN[0]
    baselines = Baselines([opened(collected(KNOWN))])
    found = stands(module(entry.digest.hex(), entry.code.hex(), "cut short"), baselines)
    assert found.standing == "unknown"
    assert found.judgement == ModuleJudgement(answer="unreadable", reasons=("cut short",))


def test_an_assessor_says_the_same_as_the_decision() -> None:
    baselines = Baselines([opened(collected(KNOWN))])
    judgement = ModuleJudgement(answer="not hash-like")
    assess = Assessor(
        baselines,
        {"triton": "allow"},
        judge=lambda kind, image: judgement,
        jit_class=lambda module, image: "triton",
    )
    assert assess(module(KNOWN[1].digest.hex()), b"") == ("known", "torch 1.0 lib/1.so", None)
    assert assess(module(), b"") == ("jit", "looks like triton, allowed", judgement)
    assert [assess.knows(KNOWN[1].digest.hex()), assess.knows("ab" * 32)] == [True, False]


def test_jit_classes_are_those_that_a_policy_names() -> None:
    from typing import get_args

    from gpuwarden.code.jit import JitClass

    assert set(get_args(JitClass)) - {""} == set(JIT_CLASSES)


def test_a_difference_counts_by_package() -> None:
    before = [*numbered(4, "torch"), *numbered(3, "gone", 10), *numbered(2, "same", 20)]
    torch = [
        # One module is rebuilt, one is gone, one is new, two are the same.
        Entry(b"r" * 32, before[0].code, Provenance(package="torch", version="2.0")),
        *before[2:4],
        *numbered(1, "torch", 30),
    ]
    found = difference(
        opened(collected(before)), opened(collected([*torch, *numbered(2, "same", 20)], 16))
    )
    rows = {p.package: (p.added, p.removed, p.rebuilt, p.same) for p in found.packages}
    assert rows == {"torch": (1, 1, 1, 2), "gone": (0, 3, 0, 0), "same": (0, 0, 0, 2)}
    versions = {p.package: (p.versions_before, p.versions_after) for p in found.packages}
    assert versions["torch"] == (("1.0",), ("1.0", "2.0"))
    assert not found.is_empty
    one = opened(collected(before))
    assert difference(one, one).is_empty
