"""What `code scan` shows: a line a target, what is not known and why, what was not read."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from gpuwarden.cli import main
from gpuwarden.code.judgement import ModuleJudgement
from gpuwarden.code.module import Kernel, Module, Place, Problem
from gpuwarden.code.report import CodeReport, FoundModule, ScannedTarget, Sighting
from gpuwarden.codescan.command import exit_code
from gpuwarden.codescan.progress import progress_on
from gpuwarden.codescan.scan import Progress
from gpuwarden.outputs.code_table import Wanted, architectures, render
from tests.conftest import Golden
from tests.support.code_scans import code, docker_archive, tar_of, write_tree

LIBRARY, IMAGE = "/opt/torch/lib/libtorch_cuda.so", "docker:registry.example/team/train:7"
HOSTILE = "\x1b]0;title\x07\x9b31m\nFORGED \u202e"


def found(
    name: str, kind: str, arch: str, *places: Place, standing: str = "unknown", **rest: object
) -> FoundModule:
    digest = (name.encode().hex() * 64)[:64]
    module = Module(
        kind=kind,  # type: ignore[arg-type]
        arch=arch,
        digest=digest,
        code_digest=digest[::-1],
        stored_bytes=4_000,
        image_bytes=123_456,
        codec="zstd",
        toolkit="ptxas 13.0.88",
        kernel_count=70,
        kernels=(
            Kernel(name=f"{name}_kernel", registers=64, shared_bytes=49_152, instructions=1_900),
            Kernel(name=f"{name}_told_less"),
        ),
        place=places[0],
    )
    hidden = "deleted in layer 3 of 4" if name == "hidden" else ""
    return FoundModule(
        module=module,
        standing=standing,  # type: ignore[arg-type]
        sightings=tuple(Sighting(place=place, hidden=hidden) for place in places),
        **rest,  # type: ignore[arg-type]
    )


def judged(answer: str, score: float | None = None, *reasons: str) -> ModuleJudgement:
    algorithms = ("SHA-256",) if answer == "hash-like" else ()
    return ModuleJudgement(
        answer=answer,  # type: ignore[arg-type]
        score=score,
        reasons=reasons,
        consistent_with=algorithms,
    )


def report() -> CodeReport:
    layer = "blobs/sha256/" + "ab" * 32
    in_image = Place(target=IMAGE, members=(layer, "opt/x/libx.so"), offset=0x1C40, section="s")
    return CodeReport(
        gpuwarden_version="0",
        targets=(
            ScannedTarget(
                name=LIBRARY, what="file", read_bytes=900 << 20, files=1, modules=3, seconds=4.25
            ),
            ScannedTarget(
                name=IMAGE,
                what="image",
                digest="sha256:" + "cd" * 32,
                read_bytes=5 << 30,
                files=31_207,
                modules=3,
                hidden=1,
                problems=1,
                skipped=("12 FIFOs in archives",),
                seconds=31.0,
            ),
            ScannedTarget(name="/srv/empty", what="folder", read_bytes=1 << 20, files=3),
        ),
        modules=(
            found("gemm", "cubin", "sm_90a", Place(target=LIBRARY, offset=64), standing="known",
                  known_as="torch 2.9.1 libtorch_cuda.so"),
            found("more", "ptx", "compute_120", Place(target=LIBRARY, offset=128),
                  standing="rebuilt", known_as="code of torch 2.9.1 libtorch_cuda.so"),
            found("odd", "cubin", "sm_100", Place(target=LIBRARY, offset=256),
                  judgement=judged("unknown opcodes", None, "14% of its opcodes are not known")),
            found("search", "cubin", "sm_86", in_image, Place(target=IMAGE, members=(layer, "y")),
                  judgement=judged("hash-like", 4.2,
                                   "hash-like integer compute: 31% xor, 12% rotates")),
            found("plain", "cubin", "sm_75", in_image, judgement=judged("not hash-like", 0.3)),
            found("hidden", "lto-ir", "lto_80", in_image, judgement=judged("hash-like", 5.0)),
        ),
        problems=(
            Problem(
                place=Place(target=IMAGE, members=(layer, "opt/secret.zip", "a.so")),
                what="member",
                reason="encrypted",
            ),
        ),
        unconfined=("system calls: all are allowed (seccomp: Invalid argument)",),
        judged=True,
        seconds=35.5,
    )  # fmt: skip


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("plain", Wanted()),
        ("list", Wanted(every_module=True, kernels=True, all_layers=True)),
    ],
)
def test_the_table(golden: Golden, width: int, name: str, wanted: Wanted) -> None:
    text = render(report(), width=width, colour=False, exit_code=1, wanted=wanted)
    assert max(map(len, text.splitlines())) <= width
    golden.check(f"code/{name}-{width}.txt", text)


def test_colour_changes_nothing_but_colour() -> None:
    plain = render(report(), width=100, colour=False, exit_code=1)
    coloured = render(report(), width=100, colour=True, exit_code=1)
    assert coloured != plain
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def test_nothing_in_a_name_acts_on_the_terminal() -> None:
    place = Place(target=f"/x{HOSTILE}", members=(HOSTILE,), section=HOSTILE, mapping=HOSTILE)
    hostile = found(HOSTILE, "cubin", f"sm_{HOSTILE}", place, known_as=HOSTILE,
                    judgement=judged("hash-like", 3.0, HOSTILE))  # fmt: skip
    document = CodeReport(
        gpuwarden_version="0",
        targets=(ScannedTarget(name=HOSTILE, what="file", digest=HOSTILE, skipped=(HOSTILE,)),),
        modules=(hostile,),
        problems=(Problem(place=place, what=HOSTILE, reason=HOSTILE),),
        unconfined=(HOSTILE,),
    )
    wanted = Wanted(every_module=True, kernels=True)
    text = render(document, width=80, colour=False, exit_code=1, wanted=wanted)
    assert not set("\x1b\x07\x9b\u202e") & set(text)


def test_hash_like_modules_that_are_alike_are_told_once_a_file() -> None:
    hashing = judged("hash-like", 4.0, "31% xor")
    modules = tuple(
        found(f"search{number}", "cubin", "sm_90", Place(target=target), judgement=hashing)
        for target in ("/a.so", "/b.so")
        for number in range(3)
    )
    document = CodeReport(gpuwarden_version="0", targets=(), modules=modules, problems=())
    text = render(document, width=80, colour=False, exit_code=1)
    assert text.count("31% xor") == 2
    assert text.count("and 2 more there of which the same is told") == 2
    every = Wanted(every_module=True)
    text = render(document, width=80, colour=False, exit_code=1, wanted=every)
    assert "the same is told" not in text


def test_architectures_are_told_by_their_ends() -> None:
    assert architectures(["sm_80", "sm_80", "sm_75"]) == "sm_75, sm_80"
    assert architectures(["sm_120", "sm_80", "sm_90a", "gfx90a"]) == "sm_80…sm_120 (3), gfx90a"
    assert architectures([""]) == ""


def test_exit_codes_follow_what_is_there() -> None:
    whole = report()
    assert exit_code(whole) == 1
    rest = [one for one in whole.modules if not one.is_alarming or one.is_hidden]

    def document(modules: list[FoundModule], problems: tuple[Problem, ...]) -> CodeReport:
        return CodeReport(
            gpuwarden_version="0", targets=(), modules=tuple(modules), problems=problems
        )

    assert exit_code(document(rest, whole.problems)) == 2
    assert exit_code(document(rest, ())) == 0
    assert exit_code(document(rest, ()), all_layers=True) == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_on_a_terminal_and_gone_afterwards() -> None:
    stream = Terminal()
    with progress_on(stream, width=40, quiet=False) as tell:
        tell(Progress(f"/x/{HOSTILE}{'y' * 100}", 5 << 30, 1200))
    first, cleared = stream.getvalue().split("\x1b[K")[:2]
    assert first.startswith("\r5,120 MiB, 1,200 modules: /x/\\e]0;")
    assert len(first) == 40
    assert cleared == "\r"
    for other, quiet in ((Terminal(), True), (io.StringIO(), False)):
        with progress_on(other, width=40, quiet=quiet) as tell:
            tell(Progress("x", 1, 1))
        assert other.getvalue() == ""


# ------------------------------------------------------------------------------ the command

QUIET = ("--no-starter", "--no-judge")


def test_a_look_at_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tree(tmp_path, {"a.cubin": code("a"), "b.cubin": code("b", sm=90)})
    assert main(["code", "scan", *QUIET, str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    # Where lines end depends on how long the path is.
    first = "".join(f"{tmp_path}: 2 modules (2 cubin), sm_80, sm_90; folder of 2 files".split())
    assert "".join(out.split()).startswith(first)
    # Nothing of progress where nobody is at a terminal.
    assert err == ""


def test_everything_is_in_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = tmp_path / "image.tar"
    image.write_bytes(docker_archive([tar_of({"x": code("x")}), tar_of({".wh.x": b""})]))
    assert main(["code", "scan", *QUIET, "--format", "json", str(image)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["version"]) == ("gpuwarden.code", 1)
    [target] = document["targets"]
    assert (target["what"], target["hidden"]) == ("image", 1)
    [module] = document["modules"]
    assert module["module"]["kernels"][0]["name"] == "x"
    assert module["sightings"][0]["hidden"] == "deleted in layer 2 of 2"
    assert document["problems"] == []
    assert document["unconfined"] == []


def test_kernels_are_listed_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tree(tmp_path, {"a.cubin": code("a_kernel")})
    main(["code", "scan", *QUIET, "--list", str(tmp_path)])
    assert "a_kernel" not in capsys.readouterr().out
    main(["code", "scan", *QUIET, "--list", "--kernels", str(tmp_path)])
    assert "a_kernel: 8 registers, 0 bytes shared, 16 instructions" in capsys.readouterr().out


def test_what_could_not_be_read_is_told_and_is_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tree(tmp_path, {"a.tar": tar_of({"a": code("a")})[:1200]})
    assert main(["code", "scan", *QUIET, str(tmp_path)]) == 2
    assert "Not read: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["code"],
        ["code", "scan"],
        ["code", "scan", "--no-starter", "/no/such/file"],
        ["code", "scan", "--pid", "0"],
        ["code", "scan", "--pid", "x"],
        ["code", "scan", "--format", "xml", "/"],
    ],
)
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main(arguments) == 64
    except SystemExit as ended:
        assert ended.code == 64
    assert capsys.readouterr().err
