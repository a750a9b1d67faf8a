"""Our images against those of NVIDIA's extractor, byte for byte, on samples of every form."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest

from gpuwarden.code.extract import modules_in
from gpuwarden.code.module import Place, Problem
from tests.support import nvcc
from tests.support.cuobjdump import extracted, plain_count
from tests.support.gpu_samples import SAMPLES


def _ours(data: bytes) -> dict[str, Counter[str]]:
    """SHA-256 of each image by kind; a problem fails the test."""
    found: dict[str, Counter[str]] = {}
    for each in modules_in(data, Place(target="sample")):
        assert not isinstance(each, Problem), each
        digest = hashlib.sha256(each.image()).hexdigest()
        found.setdefault(each.kind, Counter())[digest] += 1
    return found


@pytest.mark.parametrize("name", SAMPLES)
def test_every_image_is_what_cuobjdump_extracts(name: str) -> None:
    sample = SAMPLES[name]()
    theirs, ours = extracted(sample), _ours(sample.read_bytes())
    assert theirs.failure == ""
    assert theirs.modules
    assert ours.get("cubin", Counter()) == theirs.cubins
    assert ours.get("ptx", Counter()) == theirs.ptx


@pytest.mark.parametrize("name", SAMPLES)
def test_what_cuobjdump_does_not_extract_is_there_by_a_plain_count(name: str) -> None:
    data = SAMPLES[name]().read_bytes()
    ours = {kind: digests.total() for kind, digests in _ours(data).items()}
    assert ours == dict(plain_count(data))


@pytest.mark.parametrize("arch", nvcc.ARCHES)
def test_a_bare_cubin_is_itself(arch: str) -> None:
    cubin = nvcc.cubin("gemm", arch)
    data = cubin.read_bytes()
    assert extracted(cubin).cubins == _ours(data)["cubin"]
    assert _ours(data) == {"cubin": Counter([hashlib.sha256(data).hexdigest()])}


def test_modules_outside_the_toolkit_s_sections_are_found_where_cuobjdump_finds_none() -> None:
    """A fatbin and a cubin amid other data, as cuFFT and cuSPARSE keep thousands."""
    fatbin, cubin = nvcc.fatbin("gemm"), nvcc.cubin("keccak")
    held = b"\x7fELF nothing" * 100 + bytes(8) + fatbin.read_bytes() + bytes(64)
    held += bytes(-len(held) % 8) + cubin.read_bytes() + b"and more"
    inside = extracted(fatbin)
    ours = _ours(held)
    assert ours["cubin"] == inside.cubins + extracted(cubin).cubins
    assert ours["ptx"] == inside.ptx
