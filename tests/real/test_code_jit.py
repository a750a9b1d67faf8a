"""Which just-in-time compiler a module says made it, on modules that those compilers did make."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.code.describe import describe
from gpuwarden.code.extract import modules_in
from gpuwarden.code.jit import JitClass, jit_class
from gpuwarden.code.module import Kernel, Kind, Module, Place, Problem
from gpuwarden.policy import JIT_CLASSES
from tests.support import nvcc
from tests.support.jit_compilers import nvjitlink, nvrtc

FIXTURES = Path(__file__).parents[1] / "fixtures/jit"
SOURCE = nvcc.kernel("reduction").read_bytes()


def _class(kind: Kind, image: bytes, *kernels: str) -> JitClass:
    module = Module(
        kind=kind,
        arch="sm_80",
        digest="0" * 64,
        stored_bytes=len(image),
        image_bytes=len(image),
        kernels=tuple(Kernel(name=name) for name in kernels),
        place=Place(target="sample"),
    )
    return jit_class(module, image)


@pytest.mark.parametrize("arch", ["75", "80", "90", "100", "120"])
def test_nvrtc_says_so_in_its_cubins(arch: str) -> None:
    assert _class("cubin", nvrtc(SOURCE, "CUBIN", f"-arch=sm_{arch}")) == "nvrtc"


def test_nvrtc_is_told_with_line_info_too() -> None:
    assert _class("cubin", nvrtc(SOURCE, "CUBIN", "-arch=sm_80", "-lineinfo")) == "nvrtc"


def test_nvjitlink_says_so_when_it_links_ptx() -> None:
    ptx = nvrtc(SOURCE, "PTX", "-arch=compute_80")
    assert _class("cubin", nvjitlink([("PTX", ptx)], "-arch=sm_80")) == "nvjitlink"


def test_nvjitlink_of_lto_ir_looks_like_nvrtc() -> None:
    lto_ir = nvrtc(SOURCE, "LTOIR", "-arch=compute_80", "-dlto")
    assert _class("cubin", nvjitlink([("LTOIR", lto_ir)], "-arch=sm_80", "-lto")) == "nvrtc"


@pytest.mark.parametrize("arch", ["75", "80", "90", "100", "120"])
def test_what_nvcc_built_claims_no_class(arch: str) -> None:
    assert _class("cubin", nvcc.cubin("reduction", arch, "-lineinfo").read_bytes()) == ""


def test_ptx_of_nvrtc_is_that_of_nvcc() -> None:
    ours = nvrtc(SOURCE, "PTX", "-arch=compute_80").rstrip(b"\0")
    assert ours == nvcc.ptx("reduction").read_bytes().rstrip(b"\0")
    assert _class("ptx", ours) == ""


@pytest.mark.parametrize("name", ["triton-sm_80.cubin", "triton-sm_90.cubin", "triton-sm_80.ptx"])
def test_triton_is_told_by_the_python_lines_it_keeps(name: str) -> None:
    kind: Kind = "ptx" if name.endswith("ptx") else "cubin"
    assert _class(kind, (FIXTURES / name).read_bytes()) == "triton"


def test_triton_without_lines_is_told_by_its_ptxas_only() -> None:
    image = (FIXTURES / "triton-sm_90.cubin").read_bytes().replace(b".py\0", b".cc\0")
    assert _class("cubin", image) == "triton"
    for kind, ending in (("cubin", "cubin"), ("ptx", "ptx")):
        bare = (FIXTURES / f"triton-sm_80-no-lines.{ending}").read_bytes()
        assert _class(kind, bare) == ""  # type: ignore[arg-type]


def test_cudnn_names_its_generated_kernels() -> None:
    image = nvrtc(SOURCE, "CUBIN", "-arch=sm_80")
    assert _class("cubin", image, "cudnn_generated_layer_norm_fwd_0") == "cudnn-jit"


def test_every_class_is_one_that_a_policy_can_name() -> None:
    assert set(JIT_CLASSES) | {""} == set(JitClass.__args__)  # type: ignore[attr-defined]


@given(st.binary(max_size=4096), st.sampled_from(["cubin", "ptx", "lto-ir", "unknown"]))
def test_any_bytes_have_an_answer(image: bytes, kind: Kind) -> None:
    assert _class(kind, image) in (*JIT_CLASSES, "")


@given(st.integers(0, 6743), st.binary(min_size=1, max_size=64))
def test_any_damage_has_an_answer(at: int, put: bytes) -> None:
    image = bytearray((FIXTURES / "triton-sm_90.cubin").read_bytes())
    image[at : at + len(put)] = put
    assert _class("cubin", bytes(image)) in (*JIT_CLASSES, "")


def test_nvrtc_of_a_source_has_the_code_digest_of_nvcc() -> None:
    ahead, running = (
        _described(image)
        for image in (
            nvcc.cubin("reduction").read_bytes(),
            nvrtc(SOURCE, "CUBIN", "-arch=sm_80", name="reduction.cu"),
        )
    )
    assert ahead.digest != running.digest
    assert ahead.code_digest == running.code_digest


def _described(image: bytes) -> Module:
    (located,) = modules_in(image, Place(target="sample"))
    assert not isinstance(located, Problem)
    return describe(located, located.image())
