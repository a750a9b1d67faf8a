"""`gpuwarden baseline` and `gpuwarden code verify` as a person runs them, on wheels made here."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from gpuwarden.cli import main
from gpuwarden.code.baseline.reader import open_baseline
from gpuwarden.code.judgement import Answer, ModuleJudgement
from gpuwarden.codescan import known_code
from gpuwarden.codescan.baseline_commands import moment_of_building
from gpuwarden.codescan.known_code import trust
from gpuwarden.errors import Denied, UsageError
from tests.support.code_scans import docker_archive, tar_of
from tests.support.gpu_images import EntryImage, entry, fatbin, program
from tests.support.wheels import built, library, wheel

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def no_keys_of_this_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    keys = tmp_path / "trusted"
    monkeypatch.setattr(known_code, "KEY_DIRECTORY", str(keys))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    monkeypatch.chdir(tmp_path)
    return keys


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def run_it(*arguments: object) -> tuple[int, str, str]:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        output = capfd.readouterr()
        return code, output.out, output.err

    return run_it


@pytest.fixture(autouse=True)
def judged(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[bytes, Answer]], None]:
    """Answers of the judge by the image; the model is not what is under test here."""

    def judge_so(answers: Mapping[bytes, Answer]) -> None:
        def judge(kind: str, image: bytes | memoryview) -> ModuleJudgement:
            return ModuleJudgement(answer=answers[bytes(image)], reasons=("said the test",))

        monkeypatch.setattr("gpuwarden.code.classify.judge", judge)

    judge_so({})
    return judge_so


@pytest.fixture
def keys(run: Run, tmp_path: Path) -> tuple[Path, Path]:
    code, out, _ = run("baseline", "keygen", tmp_path / "release")
    assert code == 0
    assert "fingerprint" in out
    secret, public = tmp_path / "release.key", tmp_path / "release.pem"
    assert os.stat(secret).st_mode & 0o777 == 0o600
    return secret, public


FRAMEWORK = {"torch/lib/a.so": library(built(1), built(2)), "torch/b.so": library(built(3))}


def framework(folder: Path, version: str = "2.0", **more: bytes) -> Path:
    files = {**FRAMEWORK, **{f"torch/{name}.so": data for name, data in more.items()}}
    return wheel(folder, "torch", version, files)


def test_a_wheel_becomes_a_signed_baseline_that_says_what_it_knows(
    run: Run, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    secret, public = keys
    out = tmp_path / "torch.baseline"
    arguments = ("--sign", secret, "--name", "torch", "--version", "7")
    code, text, _ = run("baseline", "build", "-o", out, framework(tmp_path), *arguments)
    assert (code, "3 digests, 3 code digests" in text) == (0, True)
    digest = next(iter(open_baseline(str(out), allow_unsigned=True).entries())).digest.hex()
    code, text, _ = run("baseline", "show", out, "--key", public, "--digest", digest)
    assert code == 0
    assert "torch 7: 3 digests, signed by key " in text
    assert "made 2023-11-14 22:13:20Z by gpuwarden" in text
    assert [line.split() for line in text.splitlines() if line.startswith("torch    ")] == [
        ["torch", "2.0", "library", "2", "3"]
    ]
    assert f"{digest}: torch 2.0 torch/" in text
    code, text, _ = run("baseline", "show", out, "--key", public, "--format", "json")
    document = json.loads(text)
    assert (document["trust"], document["digests"], document["created"]) == (
        "trusted",
        3,
        1700000000,
    )
    assert document["packages"][0]["package"] == "torch"


def test_an_image_is_named_by_its_reference_and_digest(run: Run, tmp_path: Path) -> None:
    path, out = tmp_path / "saved.tar", tmp_path / "image.baseline"
    below = tar_of({"opt/a.so": library(built(1)), "opt/gone.so": library(built(2))})
    above = tar_of({"opt/.wh.gone.so": b""})
    path.write_bytes(docker_archive([below, above], tags=("example/app:1",)))
    code, text, _ = run("baseline", "build", "-o", out, path)
    assert (code, ": 1 digests, " in text) == (0, True)
    assert "1 left out, hidden by a later layer of its image" in text
    [origin] = open_baseline(str(out), allow_unsigned=True).origins()
    assert origin.title == "example/app:1 opt/a.so"
    assert origin.container_digest.startswith("sha256:")


def test_the_same_targets_give_the_same_file(run: Run, tmp_path: Path) -> None:
    path = framework(tmp_path)
    for name in ("a", "b"):
        assert run("baseline", "build", "-o", tmp_path / name, path)[0] == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_what_nobody_signed_is_refused_unless_told(
    run: Run, keys: tuple[Path, Path], tmp_path: Path, no_keys_of_this_host: Path
) -> None:
    secret, public = keys
    path = framework(tmp_path)
    signed, unsigned = tmp_path / "signed", tmp_path / "unsigned"
    assert run("baseline", "build", "-o", signed, path, "--sign", secret)[0] == 0
    assert "not signed" in run("baseline", "build", "-o", unsigned, path)[1]
    code, _, errors = run("code", "verify", path, "--baseline", unsigned, "--no-starter")
    assert (code, "nobody signed it" in errors, "--allow-unsigned" in errors) == (2, True, True)
    code, _, errors = run(
        "code", "verify", path, "--baseline", unsigned, "--no-starter", "--allow-unsigned"
    )
    assert (code, "NOT SIGNED" in errors) == (0, True)
    code, _, errors = run("code", "verify", path, "--baseline", signed, "--no-starter")
    assert (code, "which is not trusted here" in errors) == (2, True)
    no_keys_of_this_host.mkdir()
    (no_keys_of_this_host / "release.pem").write_bytes(public.read_bytes())
    assert run("code", "verify", path, "--baseline", signed, "--no-starter")[0] == 0
    code, text, _ = run("baseline", "verify", signed, unsigned)
    assert (code, text.splitlines()[0].startswith(f"{signed}: sound; ")) == (1, True)


def test_keys_that_others_can_change_are_no_keys(
    keys: tuple[Path, Path], no_keys_of_this_host: Path
) -> None:
    directory = no_keys_of_this_host
    directory.mkdir()
    (directory / "release.pem").write_bytes(keys[1].read_bytes())
    assert len(trust(directory=str(directory)).keys) == 1
    os.chmod(directory / "release.pem", 0o666)
    with pytest.raises(Denied, match="whose signatures hold"):
        trust(directory=str(directory))
    os.chmod(directory / "release.pem", 0o644)
    os.chmod(directory, 0o777)
    with pytest.raises(Denied, match="whose signatures hold"):
        trust(directory=str(directory))
    assert trust(directory=str(directory / "none")).keys == frozenset()


@pytest.mark.parametrize("content", [b"", b"text", b"-----BEGIN PRIVATE KEY-----\nAA==\n"])
def test_what_is_no_key_is_said(run: Run, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "bad"
    file.write_bytes(content)
    path = framework(tmp_path)
    code, _, errors = run("baseline", "build", "-o", tmp_path / "x", path, "--sign", file)
    assert (code, "no private key in PEM" in errors) == (64, True)
    code, _, errors = run("baseline", "show", tmp_path / "x", "--key", file)
    assert (code, "no public key in PEM" in errors) == (64, True)
    assert not (tmp_path / "x").exists()


def test_a_key_is_never_overwritten(run: Run, keys: tuple[Path, Path], tmp_path: Path) -> None:
    before = keys[0].read_bytes()
    code, _, errors = run("baseline", "keygen", tmp_path / "release")
    assert (code, "never overwritten" in errors) == (64, True)
    assert keys[0].read_bytes() == before


def test_a_damaged_baseline_could_not_be_read(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "x"
    path = framework(tmp_path)
    run("baseline", "build", "-o", out, path)
    data = bytearray(out.read_bytes())
    data[-9000] ^= 1
    out.write_bytes(data)
    code, text, _ = run("baseline", "verify", out, "--allow-unsigned")
    assert (code, "damaged" in text) == (2, True)
    out.write_bytes(data[:-1])
    code, _, errors = run("code", "verify", path, "--baseline", out, "--allow-unsigned")
    assert (code, "its head tells" in errors) == (2, True)


def test_merge_and_diff(run: Run, tmp_path: Path) -> None:
    old, new, both = (tmp_path / name for name in ("old", "new", "both"))
    run("baseline", "build", "-o", old, framework(tmp_path))
    more = {"c": library(built(4)), "d": library(built(1, "renamed"))}
    run("baseline", "build", "-o", new, framework(tmp_path, "2.1", **more))
    trusting = "--allow-unsigned"
    code, text, errors = run("baseline", "diff", old, new, trusting)
    assert code == 1
    row = text.splitlines()[1].split()
    assert row == ["torch", "2.0", "→", "2.1", "1", "0", "1", "3"]
    assert errors.count("NOT SIGNED") == 2
    assert run("baseline", "diff", old, old, trusting)[0] == 0
    code, text, _ = run("baseline", "merge", "-o", both, old, new, trusting)
    assert (code, "5 digests" in text) == (0, True)
    merged = open_baseline(str(both), allow_unsigned=True)
    assert {p.version for p in merged.origins()} == {"2.0", "2.1"}
    short = tmp_path / "short"
    assert run("baseline", "merge", "-o", short, both, trusting, "--digest-bytes", "16")[0] == 0
    code, _, errors = run("baseline", "merge", "-o", both, short, trusting)
    assert (code, "--digest-bytes 16" in errors) == (64, True)
    assert run("baseline", "diff", both, short, trusting)[0] == 0


def test_code_verify_tells_known_rebuilt_and_unknown(
    run: Run, judged: Callable[[Mapping[bytes, Answer]], None], tmp_path: Path
) -> None:
    out = tmp_path / "torch.baseline"
    run("baseline", "build", "-o", out, framework(tmp_path))
    stranger = built(9)
    judged({stranger: "not hash-like"})
    arguments = ("--baseline", out, "--allow-unsigned", "--no-starter")
    target = tmp_path / "a.so"
    target.write_bytes(library(built(1), built(2, "renamed")))
    code, text, _ = run("code", "verify", target, *arguments)
    assert (code, "1 known, 1 known code rebuilt" in text) == (0, True)
    target.write_bytes(library(built(1), stranger))
    code, text, _ = run("code", "verify", target, *arguments)
    assert (code, "1 known, 1 not known" in text) == (1, True)
    code, text, _ = run("code", "verify", target, *arguments, "--format", "json")
    standings = {one["standing"]: one.get("known_as") for one in json.loads(text)["modules"]}
    assert standings == {"known": "torch 2.0 torch/lib/a.so", "unknown": None}


def test_a_broken_module_is_not_built_in_and_could_not_be_read(run: Run, tmp_path: Path) -> None:
    broken = bytearray(entry(EntryImage("cubin", built(2), 90, codec="zlib")))
    broken[200:220] = bytes(20)
    target, out = tmp_path / "a.so", tmp_path / "b"
    whole = EntryImage("cubin", built(1), 90)
    target.write_bytes(program({".nv_fatbin": fatbin([whole, bytes(broken)])}))
    code, text, _ = run("baseline", "build", "-o", out, target)
    assert (code, ": 1 digests, " in text) == (2, True)
    assert "1 left out, cannot be read: " in text
    arguments = ("--baseline", out, "--allow-unsigned", "--no-starter")
    assert run("code", "verify", target, *arguments)[0] == 2


PROFILE = """\
profiles:
  - {name: serving, baselines: [%s], jit: {nvjitlink: allow}}
  - {name: gone, baselines: [/nonexistent/x.baseline]}
"""


def test_a_profile_names_what_may_be_loaded(run: Run, tmp_path: Path) -> None:
    out, policy = tmp_path / "torch.baseline", tmp_path / "policy.yaml"
    path = framework(tmp_path)
    run("baseline", "build", "-o", out, path)
    policy.write_text(PROFILE % out)
    arguments = ("code", "verify", path, "--policy", policy, "--allow-unsigned", "--profile")
    assert run(*arguments, "serving")[0] == 0
    code, _, errors = run(*arguments, "gone")
    assert (code, "profile gone: /nonexistent/x.baseline" in errors) == (2, True)
    code, _, errors = run(*arguments, "other")
    assert (code, "no profile of that name" in errors) == (64, True)


def learnt(path: Path) -> set[str]:
    return {e.digest.hex() for e in open_baseline(str(path), allow_unsigned=True).entries()}


def test_learning_takes_what_is_harmless_and_refuses_the_rest(
    run: Run, judged: Callable[[Mapping[bytes, Answer]], None], tmp_path: Path
) -> None:
    known = tmp_path / "known"
    run("baseline", "build", "-o", known, framework(tmp_path))
    answers: dict[bytes, Answer] = {
        built(20): "not hash-like",
        built(21): "not enough code",
        built(22): "hash-like",
        built(23): "unknown opcodes",
        built(24): "architecture too old",
        built(25): "unreadable",
    }
    judged(answers)
    cache = tmp_path / "cache"
    cache.mkdir()
    for number, image in enumerate([built(1), *answers]):
        (cache / f"{number}.cubin").write_bytes(image)
    out = tmp_path / "learnt"
    arguments = ("--baseline", known, "--allow-unsigned", "--no-starter", "--digest-bytes", "20")
    code, text, errors = run("baseline", "learn", "-o", out, cache, *arguments)
    assert code == 1
    assert "2 learnt, 1 known already, 3 refused, 1 flagged" in text
    assert "refused: cubin sm_90" in text
    assert "hash-like: said the test" in text
    assert "NOT SIGNED" in errors
    assert len(learnt(out)) == 2
    baseline = open_baseline(str(out), allow_unsigned=True)
    assert {origin.source for origin in baseline.origins()} == {"learned"}
    # Whatever a person accepts, hash-like and unreadable code stay out.
    code, text, _ = run("baseline", "learn", "-o", out, cache, *arguments, "--accept-flagged")
    assert (code, "3 learnt, 1 known already, 3 refused, 0 flagged" in text) == (1, True)
    notes = {o.note for o in open_baseline(str(out), allow_unsigned=True).origins()}
    assert any("nobody can say" in note for note in notes)
    out.unlink()
    assert run("baseline", "learn", "-o", out, cache, *arguments, "--dry-run")[0] == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("learn", "-o", "x"), "name a process"),
        (("build", "-o", "x", "y", "--digest-bytes", "8"), "expected 16 to 32"),
        (("build", "-o", "x", "nowhere/at/all"), "nowhere/at/all"),
        (("build", "-o", "x", ".", "--name", "n" * 100), "the baseline's name"),
        (("build", "-o", "x"), "TARGET"),
        ((), "ACTION"),
    ],
)
def test_usage_errors(run: Run, arguments: tuple[str, ...], said: str) -> None:
    code, _, errors = run("baseline", *arguments)
    assert code == 64
    assert said in errors


def test_the_time_of_a_build_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "12")
    assert moment_of_building() == 12
    for wrong in ("-1", "soon", "1" * 13):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", wrong)
        with pytest.raises(UsageError):
            moment_of_building()
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    assert moment_of_building() > 1_700_000_000
