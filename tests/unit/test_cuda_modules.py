"""Captured bytes of modules: what confined children say of them, whatever they are."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.code.baseline.entries import Entry
from gpuwarden.code.baseline.provenance import Provenance
from gpuwarden.code.module import Module
from gpuwarden.cuda import modules, open_profiles
from gpuwarden.cuda.loaded_modules import CUT
from gpuwarden.cuda.modules import ModuleExaminer
from gpuwarden.model import LoadedModule, ProfileStanding
from gpuwarden.policy import JitRules, Policy, PolicyProfile
from tests.support import nvcc
from tests.support.baselines import collected, opened, packed
from tests.support.captured_loads import (
    UNSIGNED,
    answers,
    assessing,
    captured,
    examined,
    large,
    replace_file,
)
from tests.support.code_scans import code, scanned
from tests.support.gpu_modules import SAMPLES, mutants
from tests.support.gpu_samples import SAMPLES as BUILT
from tests.support.jit_compilers import nvrtc

OWN = Provenance(package="training", version="2", file="kernels.so")


@pytest.fixture(scope="module")
def examiner() -> Iterator[ModuleExaminer]:
    with ModuleExaminer(Policy()) as made:
        yield made


def entry_of(data: bytes, folder: Path) -> Entry:
    """A baseline's entry for the one module in these bytes."""
    path = folder / "entry"
    path.write_bytes(data)
    [found] = scanned(path).modules
    module = found.module
    return Entry(bytes.fromhex(module.digest), bytes.fromhex(module.code_digest), OWN)


def standing(module: LoadedModule, profile: str) -> ProfileStanding:
    [found] = [one for one in module.standings if one.profile == profile]
    return found


# ------------------------------------------------------------------------------ what is said


@pytest.mark.parametrize(
    "name", ["fatbin", "fatbin, concatenated", "fatbin, small", "fatbin with Tile IR", "program"]
)
def test_digests_are_those_that_a_scan_of_the_file_gives(
    name: str, examiner: ModuleExaminer
) -> None:
    path = BUILT[name]()
    answer = examined(examiner, path.read_bytes())
    assert answer.problems == ()
    assert {(one.kind, one.arch, one.digest, one.code_digest) for one in answer.modules} == {
        (one.module.kind, one.module.arch, one.module.digest, one.module.code_digest)
        for one in scanned(path).modules
    }


def test_a_hash_in_an_unknown_module_is_told_with_its_kernel(examiner: ModuleExaminer) -> None:
    [module] = examined(examiner, nvcc.cubin("sha256").read_bytes()).modules
    assert (module.answer, module.kernels[0]) == ("hash-like", "sha256_blocks")
    assert module.score is not None
    assert module.score == pytest.approx(max(module.kernel_scores), abs=1)
    assert module.consistent_with == ("SHA-256",)
    assert module.standings == (ProfileStanding(profile="", standing="unknown"),)
    [gemm] = examined(examiner, nvcc.cubin("gemm").read_bytes()).modules
    assert (gemm.answer, gemm.offset) == ("not hash-like", 0)


def test_a_load_without_bytes_is_answered(examiner: ModuleExaminer) -> None:
    examiner.submit(captured(b"")._replace(number=5))
    examiner.submit(captured(b"x", 6)._replace(descriptor=None))
    assert {(one.number, one.modules, one.problems) for one in answers(examiner, 2)} == {
        (5, (), ("no bytes",)),
        (6, (), ()),
    }


@given(data=st.binary(max_size=300) | st.sampled_from(sorted(SAMPLES.values())))
def test_any_bytes_are_answered(data: bytes, examiner: ModuleExaminer) -> None:
    examined(examiner, data)
    assert examiner.replaced == 0


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_damaged_modules_are_answered(name: str, examiner: ModuleExaminer) -> None:
    found = list(mutants(SAMPLES[name], 20, seed=5))
    for number, data in enumerate(found):
        examiner.submit(captured(data, number))
    assert {one.number for one in answers(examiner, len(found))} == set(range(len(found)))
    assert examiner.replaced == 0


def test_of_what_was_cut_only_whole_modules_are_told(examiner: ModuleExaminer) -> None:
    whole = SAMPLES["fatbin"]
    first = examined(examiner, whole).modules
    examiner.submit(captured(whole[: len(whole) // 2], missed="the ring was full"))
    [answer] = answers(examiner)
    assert 0 < len(answer.modules) < len(first)
    assert {one.digest for one in answer.modules} < {one.digest for one in first}
    text = nvcc.ptx("elementwise").read_bytes()
    examiner.submit(captured(text[:-200], missed="the ring was full"))
    [answer] = answers(examiner)
    assert answer.modules == ()
    assert answer.problems == ("1 modules of which not all bytes were copied are left out",)


def test_a_part_that_computes_a_hash_is_told_as_a_part(examiner: ModuleExaminer) -> None:
    text = nvcc.ptx("sha256").read_bytes()
    examiner.submit(captured(text[:-200], missed="the ring was full"))
    [answer] = answers(examiner)
    [module] = answer.modules
    assert (module.answer, module.broken) == ("hash-like", CUT)
    # The same bytes as a whole load are another thing.
    [module] = examined(examiner, text[:-200]).modules
    assert module.broken == ""


# ------------------------------------------------------------------------------ standings


def test_a_module_stands_in_each_profile_and_is_judged_when_one_does_not_know_it(
    tmp_path: Path,
) -> None:
    known, unknown = code("known"), nvcc.cubin("keccak").read_bytes()
    (tmp_path / "a").write_bytes(packed(collected([entry_of(known, tmp_path)])))
    (tmp_path / "b").write_bytes(
        packed(collected([entry_of(known, tmp_path), entry_of(unknown, tmp_path)]))
    )
    profiles = [
        PolicyProfile(name="a", baselines=["starter", str(tmp_path / "a")]),
        PolicyProfile(name="b", baselines=[str(tmp_path / "b")]),
    ]
    with ModuleExaminer(Policy(profiles=profiles[1:]), UNSIGNED) as examiner:
        examiner.use(Policy(profiles=profiles), UNSIGNED)
        [module] = examined(examiner, known).modules
        assert [(one.profile, one.standing) for one in module.standings] == [
            ("", "unknown"),
            ("a", "known"),
            ("b", "known"),
        ]
        assert standing(module, "b").known_as == "training 2 kernels.so"
        [module] = examined(examiner, unknown).modules
        assert standing(module, "a") == ProfileStanding(profile="a", standing="unknown")
        assert standing(module, "b").standing == "known"
        assert module.answer == "hash-like"


def test_a_module_that_every_profile_knows_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = nvcc.cubin("keccak").read_bytes()
    starter = tmp_path / "starter"
    starter.write_bytes(packed(collected([entry_of(image, tmp_path)])))
    monkeypatch.setattr(open_profiles, "STARTER", str(starter))
    with ModuleExaminer(Policy(), UNSIGNED) as examiner:
        [module] = examined(examiner, image).modules
        assert standing(module, "").standing == "known"
        assert (module.answer, module.score, module.kernel_scores) == ("", None, ())
        policy = Policy(profiles=[PolicyProfile(name="strict", baselines=["starter"])])
        examiner.use(policy, UNSIGNED)
        [module] = examined(examiner, image).modules
        assert [one.standing for one in module.standings] == ["known", "unknown"]
        assert module.answer == "hash-like"


def test_an_allowed_class_holds_for_what_is_no_hash_and_only_where_it_is_allowed() -> None:
    profiles = [
        PolicyProfile(name="allows", baselines=["starter"], jit=JitRules(nvrtc="allow")),
        PolicyProfile(name="reviews", baselines=["starter"], jit=JitRules(nvrtc="review")),
        PolicyProfile(name="says nothing", baselines=["starter"]),
    ]
    option = "--gpu-architecture=sm_90"
    harmless = nvrtc(nvcc.kernel("elementwise").read_bytes(), "CUBIN", option)
    include = f"--include-path={nvcc.KERNELS}"
    hashing = nvrtc(nvcc.kernel("sha256").read_bytes(), "CUBIN", option, include)
    with ModuleExaminer(Policy(profiles=profiles), UNSIGNED) as examiner:
        [module] = examined(examiner, harmless).modules
        words = {one.profile: (one.standing, one.known_as) for one in module.standings}
        assert words == {
            "": ("unknown", ""),
            "allows": ("jit", "looks like nvrtc, allowed"),
            "reviews": ("unknown", "looks like nvrtc, to be reviewed"),
            "says nothing": ("unknown", ""),
        }
        [module] = examined(examiner, hashing).modules
        told = standing(module, "allows")
        assert (told.standing, told.known_as) == (
            "unknown",
            "looks like nvrtc, allowed, but: hash-like",
        )


def test_a_profile_whose_baseline_cannot_be_opened_is_told_and_says_nothing(
    tmp_path: Path,
) -> None:
    profiles = [
        PolicyProfile(name="gone", baselines=["starter", str(tmp_path / "none")]),
        PolicyProfile(name="there", baselines=["starter"]),
    ]
    with ModuleExaminer(Policy(profiles=profiles), UNSIGNED) as examiner:
        assert examiner.problems == (f"{tmp_path}/none: No such file or directory",)
        [module] = examined(examiner, code("x")).modules
    told = standing(module, "gone")
    assert (told.standing, told.not_compared) == ("unknown", examiner.problems[0])
    assert standing(module, "there").not_compared == ""


def test_a_baseline_that_is_damaged_where_it_is_asked_is_told(tmp_path: Path) -> None:
    image = code("x")
    whole = packed(collected([entry_of(image, tmp_path)]))
    chunks_at = opened(collected([entry_of(image, tmp_path)])).head.chunks_at
    path = tmp_path / "damaged"
    path.write_bytes(whole[:chunks_at] + bytes(len(whole) - chunks_at))
    policy = Policy(profiles=[PolicyProfile(name="p", baselines=[str(path)])])
    with ModuleExaminer(policy, UNSIGNED) as examiner:
        [module] = examined(examiner, image).modules
    assert "damaged" in standing(module, "p").not_compared


def test_a_baseline_that_was_replaced_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "BASELINES_SECONDS", 0.0)
    path, image = tmp_path / "own", code("x")
    path.write_bytes(packed(collected([entry_of(code("other"), tmp_path)])))
    policy = Policy(profiles=[PolicyProfile(name="p", baselines=[str(path)])])
    with ModuleExaminer(policy, UNSIGNED) as examiner:
        [module] = examined(examiner, image).modules
        assert standing(module, "p").standing == "unknown"
        replace_file(path, packed(collected([entry_of(image, tmp_path)])))
        assert examiner.take() == []
        [module] = examined(examiner, image).modules
        assert standing(module, "p").standing == "known"
        path.unlink()
        assert examiner.take() == []
        [module] = examined(examiner, image).modules
        assert "No such file" in standing(module, "p").not_compared


# ------------------------------------------------------------------------------ the same bytes


def test_the_same_bytes_are_examined_once() -> None:
    # Memory that the children share: they have no descriptor to write to.
    asked = mmap.mmap(-1, mmap.PAGESIZE)

    def count(module: Module) -> None:
        asked[0] += 1

    with ModuleExaminer(Policy(), assess=assessing(count)) as examiner:
        for name, data in (("small", code("small")), ("large", large("large"))):
            asked[0] = 0
            for number in range(50):
                examiner.submit(captured(data, number))
            found = answers(examiner, 50)
            assert {one.number for one in found} == set(range(50))
            assert {one.modules for one in found} == {found[0].modules}
            assert found[0].modules[0].kernels == (name,)
            assert examined(examiner, data).modules == found[0].modules
            assert asked[0] == 1


def test_what_was_asked_for_longest_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuwarden.cuda.load_queue.KEPT_ANSWERS", 2)
    with ModuleExaminer(Policy(), assess=assessing(lambda module: None)) as examiner:
        for name in "abac":
            examined(examiner, code(name))
        assert (len(examiner.answers), examiner.answers.hits) == (2, 1)
        examined(examiner, code("a"))
        assert examiner.answers.hits == 2
        examined(examiner, code("b"))
        assert examiner.answers.hits == 2
