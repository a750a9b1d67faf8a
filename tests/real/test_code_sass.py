"""SASS that NVIDIA's compiler made: the fast features against a plain decoder and nvdisasm."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from gpuwarden.code.classify import judge
from gpuwarden.code.sass import KernelTable, kernel_features
from gpuwarden.code.sass.groups import GROUP_OF, TRUTH_TABLES
from gpuwarden.code.sass.opcodes import mnemonic
from gpuwarden.code.sass.sections import read_sections
from tests.support import nvcc
from tests.support.listing import Listed, ListedKernel, listed
from tests.support.sass import differences

ARCHES = ("75", "80", "86", "90", "100", "120")
SOURCES = ("branches", "elementwise", "gemm", "keccak", "reduction", "sha256")


@pytest.fixture(params=[(source, arch) for arch in ARCHES for source in SOURCES], ids="-".join)
def sample(request: pytest.FixtureRequest) -> Path:
    source, arch = request.param
    return nvcc.cubin(source, arch)


def texts_of(image: bytes) -> tuple[dict[str, bytes], bytes]:
    sections = read_sections(image)
    texts = {one.name: image[one.offset : one.offset + one.size] for one in sections.code}
    return texts, b"".join(image[at : at + size] for at, size in sections.constants)


def test_features_equal_those_of_a_plain_decoder(sample: Path) -> None:
    image = sample.read_bytes()
    table = kernel_features(image)
    assert table.kernels
    assert differences(table, *texts_of(image)) == []


def test_instructions_are_those_that_nvdisasm_lists(sample: Path) -> None:
    table = kernel_features(sample.read_bytes())
    kernels = listed(sample)
    assert set(table.kernels) <= set(kernels)
    for place, name in enumerate(table.kernels):
        code = kernels[name].code
        strange = {
            (hex(one.opcode), one.mnemonic)
            for one in code
            if mnemonic(one.opcode, table.arch) != one.mnemonic
        }
        assert strange == set()
        assert table.unknown[place] == 0
        assert_same_histogram(table, place, kernels[name])


def group_of(one: Listed) -> str:
    """The group of an instruction: a multiplication by one adds, by a power of two shifts."""
    if one.moves:
        return "MOV"
    if one.factor == 1:
        return "IADD"
    if one.factor and one.factor.bit_count() == 1 and one.operands[3] == "RZ":
        return "SHIFT"
    return GROUP_OF.get(one.mnemonic, "OTHER")


def assert_same_histogram(table: KernelTable, place: int, kernel: ListedKernel) -> None:
    """The kernel's groups, truth tables, rotations and loops are those in the listing's text."""
    code = [one for one in kernel.code if one.mnemonic != "NOP"]
    assert table.instructions[place] == len(code)

    def share(name: str) -> float:
        return float(table.column(name)[place])

    counts = Counter(map(group_of, code))
    for group, count in counts.items():
        assert share(f"g_{group}") == np.float32(count / len(code)), group
    tables = Counter(one.table for one in code if one.table is not None)
    for name, number in TRUTH_TABLES.items():
        assert share(f"lut_{name}") == np.float32(tables[number] / max(sum(tables.values()), 1))
    rotations = sum(one.rotates for one in code)
    assert share("rot_s") >= np.float32(rotations / len(code))
    loops = list(kernel.loops())
    assert share("n_loops") == len(loops)
    assert share("maxloop") == max((last - first for first, last in loops), default=0)


def test_the_samples_have_what_is_compared() -> None:
    """Loops, rotations and truth tables are in the listings, or nothing was compared."""
    hashes = listed(nvcc.cubin("sha256", "90"))["sha256_blocks"]
    assert sum(one.rotates for one in hashes.code) > 100
    assert Counter(one.table for one in hashes.code)[0x96] > 100
    assert any(list(kernel.loops()) for kernel in listed(nvcc.cubin("branches", "90")).values())


def test_a_hash_stands_out_from_a_matrix_product() -> None:
    for arch in ARCHES:
        sha = kernel_features(nvcc.cubin("sha256", arch).read_bytes())
        gemm = kernel_features(nvcc.cubin("gemm", arch).read_bytes())
        assert sha.column("bitwin_max").max() > 0.5
        assert gemm.column("bitwin_max").max() < 0.2


@pytest.mark.parametrize("arch", ARCHES)
def test_compiled_hashes_are_judged_hash_like_and_others_are_not(arch: str) -> None:
    named = {"sha256": ("SHA-256",), "keccak": ("Keccak",)}
    for source in SOURCES:
        found = judge("cubin", nvcc.cubin(source, arch).read_bytes())
        assert found.consistent_with == named.get(source, ())
        assert (found.answer == "hash-like") == (source in named), source


@pytest.mark.parametrize("arch", ["75", "90", "120"])
def test_the_same_is_said_of_their_ptx(arch: str) -> None:
    named = {"sha256": ("SHA-256",), "keccak": ("Keccak",)}
    for source in SOURCES:
        found = judge("ptx", nvcc.ptx(source, arch).read_bytes())
        assert found.consistent_with == named.get(source, ())
        assert (found.answer == "hash-like") == (source in named), source
