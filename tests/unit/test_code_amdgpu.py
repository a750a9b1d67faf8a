"""AMD's code objects, alone, in bundles and in compressed bundles."""

from __future__ import annotations

import hashlib
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.code import amdgpu
from gpuwarden.code.bounds import Bounds
from gpuwarden.code.elf import Elf, header_at
from gpuwarden.code.extract import modules_in
from gpuwarden.code.module import Problem
from gpuwarden.errors import Malformed
from tests.support import gpu_images as build
from tests.support.gpu_images import AmdKernel, Section
from tests.support.gpu_modules import BUNDLE, GFX, PLACE, found, module, modules, problems

OBJECT = build.amd_code_object([AmdKernel("one", 32, 2048, 512), AmdKernel("two", 8, 0, 64)])
HOST = "host-x86_64-unknown-linux-gnu-"


def test_a_code_object_with_its_kernels() -> None:
    one = module(OBJECT)
    assert (one.kind, one.arch, one.place.found_by) == ("amdgpu", "gfx90a", "whole")
    assert one.digest == hashlib.sha256(OBJECT).hexdigest()
    first, second = one.kernels
    assert (first.name, first.registers, first.shared_bytes) == ("one", 32, 2048)
    assert (first.code_bytes, first.instructions) == (512, None)
    assert (second.name, second.shared_bytes) == ("two", 0)


@pytest.mark.parametrize(
    ("mach", "flags", "arch"),
    [
        (0x3F, 0x500, "gfx90a"),
        (0x3F, 0xC00 | 0x200, "gfx90a:sramecc+:xnack-"),
        (0x4C, 0x300, "gfx942:xnack+"),
        (0x41, 0, "gfx1100"),
        (0x5F, 0, "gfx9-4-generic"),
        (0xFE, 0, ""),
    ],
)
def test_the_architecture_is_in_the_flags(mach: int, flags: int, arch: str) -> None:
    image = build.amd_code_object(mach=mach, flags=flags)
    assert module(image).arch == arch
    assert amdgpu.arch_of(header_at(image)) == arch


def test_a_bundle_gives_its_device_images_with_the_features_of_their_names() -> None:
    other = build.amd_code_object(mach=0x41)
    data = build.bundle({HOST: b"", GFX: OBJECT, "hip-amdgcn-amd-amdhsa--gfx1100": other})
    first, second = modules(data)
    assert (first.arch, first.digest) == ("gfx90a:xnack-", hashlib.sha256(OBJECT).hexdigest())
    assert (second.arch, second.digest) == ("gfx1100", hashlib.sha256(other).hexdigest())
    assert first.place.offset == data.index(OBJECT)


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("codec", ["zstd", "zlib"])
def test_a_compressed_bundle_gives_what_the_bundle_gives(version: int, codec: str) -> None:
    blob = build.compressed_bundle(BUNDLE, version=version, codec=codec)
    data = b"before" + blob + b"behind" + blob
    first, second = modules(data)
    expected = module(BUNDLE)
    assert first.digest == second.digest == expected.digest
    assert first.kernels == expected.kernels
    assert (first.codec, first.arch) == (codec, expected.arch)
    assert [one.place.offset for one in (first, second)] == [6, len(b"beforebehind") + len(blob)]
    assert problems(data) == []


def test_the_section_of_a_program_holds_bundles() -> None:
    data = build.program({".hip_fatbin": BUNDLE + build.compressed_bundle(BUNDLE)})
    assert [one.place.section for one in modules(data)] == [".hip_fatbin"] * 2


def test_what_is_no_amd_code_in_a_bundle_is_looked_into() -> None:
    cuda = build.fatbin([build.EntryImage("cubin", build.cubin())])
    host = build.program({".nv_fatbin": cuda})
    data = build.bundle({HOST: host, "cuda-nvptx64-nvidia-cuda--sm_90": cuda, GFX: OBJECT})
    assert [one.kind for one in modules(data)] == ["cubin", "cubin", "amdgpu"]
    compressed = build.compressed_bundle(data)
    assert [one.kind for one in modules(compressed)] == ["cubin", "cubin", "amdgpu"]


def test_bitcode_is_a_module_without_kernels() -> None:
    one, *_ = modules(build.bundle({GFX: b"BC\xc0\xde" + bytes(60)}))
    assert (one.kind, one.arch, one.kernel_count) == ("amdgpu", "gfx90a:xnack-", 0)
    assert (one.broken, one.code_digest) == ("", "")


def test_a_bomb_is_a_problem_and_what_is_behind_it_is_found() -> None:
    blob = bytearray(build.compressed_bundle(BUNDLE + bytes(1 << 20), version=3))
    struct.pack_into("<Q", blob, 16, 1 << 40)
    data = bytes(blob) + OBJECT
    assert [problem.what for problem in problems(data)] == ["CCOB"]
    assert [one.digest for one in modules(data)] == [hashlib.sha256(OBJECT).hexdigest()]
    bomb = build.compressed_bundle(BUNDLE + bytes(1 << 20))
    bounded = modules_in(bomb, PLACE, Bounds(image_bytes=1 << 19))
    assert [one.what for one in bounded if isinstance(one, Problem)] == ["CCOB"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: data.index(b"hipv4") + 3],
        lambda data: data[:-100],
        lambda data: data.replace(struct.pack("<Q", 2), struct.pack("<Q", 4000), 1),
    ],
)
def test_a_broken_bundle_is_a_problem(damage: object) -> None:
    assert callable(damage)
    data = damage(build.bundle({HOST: b"", GFX: OBJECT}))
    assert problems(data)[0].what == "offload bundle"


def test_bundles_in_bundles_end() -> None:
    data = OBJECT
    for _ in range(20):
        data = build.bundle({HOST: data})
    assert "deep" in problems(data)[-1].reason


@pytest.mark.parametrize(
    "metadata",
    [
        b"\xc1",
        msgspec.msgpack.encode({"amdhsa.kernels": 5}),
        msgspec.msgpack.encode({"amdhsa.kernels": [{".name": "k", ".vgpr_count": "many"}]}),
        b"\x91" * 100_000,
        b"\xdf\xff\xff\xff\xff",
    ],
)
def test_metadata_that_is_none_breaks_the_module(metadata: bytes) -> None:
    note = Section(".note", build.note(b"AMDGPU", 32, metadata), build.SHT_NOTE)
    image = build.elf([note, Section(".text", b"code")], machine=224, flags=0x3F)
    one = module(image)
    assert one.broken
    assert one.digest == hashlib.sha256(image).hexdigest()


def test_the_code_digest_is_of_code_and_descriptors_only() -> None:
    def digest(**changed: bytes) -> str:
        return module(build.amd_code_object(**changed)).code_digest  # type: ignore[arg-type]

    assert module(build.amd_code_object([AmdKernel("renamed")])).code_digest == digest()
    assert len({digest(), digest(text=b"other"), digest(rodata=b"other")}) == 3


def test_sections_that_share_bytes_are_not_hashed_again_and_again() -> None:
    sections = [Section(f".text.{number}", bytes(64)) for number in range(300)]
    image = bytearray(build.elf(sections, machine=224, flags=0x3F))
    at = header_at(bytes(image)).sections_at
    for number in range(2, 302):
        struct.pack_into("<QQ", image, at + 64 * number + 24, 0, len(image))
    assert "same bytes" in module(bytes(image)).broken


@given(st.binary(max_size=300))
def test_any_bytes_behind_a_magic(data: bytes) -> None:
    for magic in (amdgpu.BUNDLE_MAGIC, b"CCOB\1\0\1\0", b"CCOB\2\0\0\0", b"CCOB\3\0\1\0"):
        found(magic + data)


@given(st.data())
def test_any_change_to_a_code_object(data: st.DataObject) -> None:
    image = bytearray(OBJECT)
    for _ in range(data.draw(st.integers(1, 6))):
        image[data.draw(st.integers(0, len(image) - 1))] = data.draw(st.integers(0, 255))
    try:
        amdgpu.kernels(Elf(bytes(image)))
    except Malformed:
        pass
