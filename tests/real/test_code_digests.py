"""Which digest stays when the same source is built otherwise: each case built by nvcc."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuwarden.code.describe import describe
from gpuwarden.code.extract import modules_in
from gpuwarden.code.module import Module, Place, Problem
from tests.support import nvcc


def _modules(path: Path) -> list[Module]:
    found = []
    for each in modules_in(path.read_bytes(), Place(target="sample")):
        assert not isinstance(each, Problem), each
        found.append(describe(each, each.image()))
    return found


def _one(path: Path) -> Module:
    (module,) = _modules(path)
    return module


def _cubin_of(path: Path, arch: str = "sm_80") -> Module:
    (module,) = (each for each in _modules(path) if each.kind == "cubin" and each.arch == arch)
    return module


def _copied(name: str, folder: Path) -> Path:
    """A source in another place; the ``.cuh`` beside it too."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in nvcc.KERNELS.glob("*.cuh"):
        shutil.copy(path, folder)
    return Path(shutil.copy(nvcc.kernel(name), folder))


Builder = Callable[[Path], Module]


def _elsewhere(name: str, *options: str) -> Builder:
    def build(folder: Path) -> Module:
        return _one(nvcc.cubin(_copied(name, folder), "80", *options, at=folder))

    return build


def _here(name: str) -> Builder:
    def build(folder: Path) -> Module:
        return _one(nvcc.cubin(name))

    return build


def _renamed(folder: Path) -> Module:
    return _one(nvcc.cubin(_copied("sha256", folder).rename(folder / "other.cu"), "80", at=folder))


def _debugged(folder: Path) -> Module:
    same = folder.parent / "the same"
    return _one(nvcc.cubin(_copied("reduction", same), "80", "-G", at=same))


def _in_a_host_object(*options: str) -> Builder:
    def build(folder: Path) -> Module:
        return _cubin_of(
            nvcc.host_object(_copied("sha256", folder), *options, "-arch=sm_80", at=folder)
        )

    return build


def _among_others(folder: Path) -> Module:
    return _cubin_of(nvcc.fatbin("sha256", ["sm_75", "sm_80", "sm_90a", "compute_90"]))


# What changes, source, both builds, whether the image's digest and the code's stay.
CASES: dict[str, tuple[Builder, Builder, bool, bool]] = {
    "nothing, in another folder": (_here("sha256"), _elsewhere("sha256"), True, True),
    "the file's name": (_here("sha256"), _renamed, True, True),
    "host debugging": (_here("sha256"), _in_a_host_object("-g"), True, True),
    "the other targets": (_here("sha256"), _among_others, True, True),
    "the folder, with line numbers": (
        _elsewhere("sha256", "-lineinfo"),
        _elsewhere("sha256", "-lineinfo"),
        False,
        True,
    ),
    "line numbers or none": (_here("sha256"), _elsewhere("sha256", "-lineinfo"), False, True),
    "nothing, with device debugging": (_debugged, _debugged, False, True),
    "the folder, with symbols of one file": (
        _elsewhere("local_names"),
        _elsewhere("local_names"),
        False,
        True,
    ),
    "the folder, with the path in an assertion": (
        _elsewhere("messages"),
        _elsewhere("messages"),
        False,
        True,
    ),
    "a limit of registers that is not met": (
        _here("keccak"),
        _elsewhere("keccak", "-maxrregcount=128"),
        False,
        True,
    ),
    "the virtual architecture": (
        _here("sha256"),
        lambda folder: _one(
            nvcc.made(
                "other.cubin",
                "nvcc",
                *("-cubin", "-gencode", "arch=compute_75,code=sm_80"),
                nvcc.kernel("sha256"),
                at=folder,
            )
        ),
        False,
        True,
    ),
    "optimization": (_here("sha256"), _elsewhere("sha256", "-Xptxas=-O1"), False, False),
    "a table of constants": (_here("constants_a"), _here("constants_b"), False, False),
}


@pytest.mark.parametrize("change", CASES)
def test_what_stays_when_this_changes(change: str, tmp_path: Path) -> None:
    first, second, image_stays, code_stays = CASES[change]
    (tmp_path / "a").mkdir()
    (tmp_path / "quite another").mkdir()
    one, other = first(tmp_path / "a"), second(tmp_path / "quite another")
    assert one.code_digest
    assert other.code_digest
    assert (one.digest == other.digest) is image_stays
    assert (one.code_digest == other.code_digest) is code_stays


@pytest.mark.parametrize("codec", nvcc.CODECS)
def test_compression_changes_what_is_stored_and_no_digest(codec: str) -> None:
    images = nvcc.cubin("sha256"), nvcc.ptx("sha256")
    plain = _modules(nvcc.packed(*images, options=["-compress-mode=none"]))
    packed = _modules(nvcc.compressed(codec, *images))
    assert [each.digest for each in packed] == [each.digest for each in plain]
    assert [each.code_digest for each in packed] == [each.code_digest for each in plain]
    assert {each.codec for each in packed} == {"lz4" if codec == "lz4-high" else codec}
    assert all(each.stored_bytes < each.image_bytes for each in packed)


def test_fatbinary_takes_the_comments_out_of_ptx() -> None:
    (packed,) = _modules(nvcc.packed(nvcc.ptx("sha256")))
    alone = _one(nvcc.ptx("sha256"))
    assert packed.digest != alone.digest
    assert packed.code_digest == alone.code_digest


def test_a_concatenated_stream_changes_no_digest() -> None:
    codes = ["sm_80", "sm_90", "sm_120"]
    joined = _modules(nvcc.fatbin("branches", codes, "-concat"))
    apart = _modules(nvcc.fatbin("branches", codes))
    assert {each.digest for each in joined} == {each.digest for each in apart}
    assert {each.code_digest for each in joined} == {each.code_digest for each in apart}


def test_lto_ir_is_the_same_when_it_is_built_again_at_the_same_path(tmp_path: Path) -> None:
    """Its source's path is in it, under a key: nothing but its stored bytes can be compared."""
    folders = tmp_path / "a", tmp_path / "another"
    built = []
    for folder in (folders[0], folders[0], folders[1]):
        source = _copied("keccak", folder)
        built.append(_one(nvcc.fatbin(source, ["lto_80"], at=folder)))
    assert {each.kind for each in built} == {"lto-ir"}
    assert {each.code_digest for each in built} == {""}
    assert built[0].digest == built[1].digest
    assert built[0].digest != built[2].digest
