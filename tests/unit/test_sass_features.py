"""SASS features: the fast pass against a plain one, and any bytes."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.code import elf
from gpuwarden.code.bounds import Bounds
from gpuwarden.code.sass import COLUMNS, decode, kernel_features
from gpuwarden.code.sass.columns import PARTS
from gpuwarden.code.sass.opcodes import mnemonic
from gpuwarden.errors import Malformed
from tests.support.gpu_images import KernelImage, Section, cubin
from tests.support.sass import (
    BRA,
    FFMA,
    IADD3,
    LOP3,
    NOP,
    SHF,
    any_code,
    branch,
    differences,
    instruction,
)

ARCHES = (70, 75, 80, 86, 89, 90, 100, 103, 120, 121)
LENGTHS = (0, 1, 7, 8, 9, 31, 32, 33, 127, 128, 129, 160, 255, 256, 257, 300, 512, 513, 700, 1024,
           1025, 1300, 2100)  # fmt: skip


def image_of(texts: dict[str, bytes], arch: int, constants: bytes = b"") -> bytes:
    kernels = [KernelImage(name, code) for name, code in texts.items()]
    banks = {".nv.constant3": constants} if constants else None
    return cubin(kernels, sm=arch, constants=banks)


@pytest.mark.parametrize("arch", [70, 89, 90, 120])
def test_all_columns_equal_those_of_a_plain_decoder(arch: int) -> None:
    texts = {f"k{size}": any_code(1000 * arch + size, size, arch) for size in LENGTHS}
    constants = struct.pack("<40I", *range(0x61707850, 0x61707850 + 40)) * 2
    table = kernel_features(image_of(texts, arch, constants))
    assert table.columns == COLUMNS
    assert len(table.kernels) > len(LENGTHS) - 6
    assert differences(table, texts, constants) == []


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=5),
    arch=st.sampled_from(ARCHES),
)
def test_any_code_has_the_same_columns_in_both(seed: int, lengths: list[int], arch: int) -> None:
    texts = {f"k{place}": any_code(seed + place, size, arch) for place, size in enumerate(lengths)}
    assert differences(kernel_features(image_of(texts, arch)), texts) == []


def test_chunks_do_not_change_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {f"k{place}": any_code(place, 50 * place, 86) for place in range(1, 20)}
    whole = kernel_features(image_of(texts, 86))
    monkeypatch.setattr(decode, "CHUNK_INSTRUCTIONS", 700)
    monkeypatch.setattr(decode, "CHUNK_KERNELS", 3)
    pieces = kernel_features(image_of(texts, 86))
    assert pieces.kernels == whole.kernels
    assert np.array_equal(pieces.values, whole.values)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_alone_is_what_it_is_among_all(part: str) -> None:
    image = image_of({"k": any_code(5, 900, 90)}, 90, bytes(range(256)))
    whole, alone = kernel_features(image), kernel_features(image, PARTS[part])
    assert alone.columns == PARTS[part]
    for name in alone.columns:
        assert alone.column(name)[0] == whole.column(name)[0]


@pytest.mark.parametrize("arch", [75, 90, 120])
def test_nested_loops_are_counted_and_weigh(arch: int) -> None:
    inner = [instruction(IADD3)] * 10 + [branch(10, arch)]
    code = [*[instruction(FFMA)] * 4, *inner, branch(12, arch), instruction(LOP3)]
    table = kernel_features(image_of({"k": b"".join(code)}, arch))
    assert table.column("n_loops")[0] == 2
    assert table.column("maxdepth")[0] == 2
    assert table.column("maxloop")[0] == 12
    weights = 3 + 1 * 8 + 11 * 64 + 8 + 1
    assert table.column("w_IADD")[0] == np.float32(640 / weights)


def test_padding_and_tiny_kernels_do_not_count() -> None:
    texts = {
        "padding": instruction(NOP) * 40,
        "tiny": instruction(LOP3) * 7 + instruction(NOP) * 9,
        "real": instruction(SHF, first=6, third=6) * 10 + instruction(NOP) * 6,
    }
    table = kernel_features(image_of(texts, 80))
    assert table.kernels == ("real",)
    assert table.instructions.tolist() == [10]
    assert table.column("rot_s")[0] == 1


def test_unknown_opcodes_are_told_from_those_that_training_did_not_see() -> None:
    assert mnemonic(0x249, 100) == "FFMA2"
    unseen = instruction(0x249) * 4
    unknown = next(op for op in range(1 << 12) if not mnemonic(op, 100))
    table = kernel_features(
        image_of({"k": unseen + instruction(unknown) * 2 + instruction(IADD3) * 4}, 100)
    )
    assert table.column("g_UNK")[0] == np.float32(0.6)
    assert table.unknown[0] == 0.2


def test_a_kernel_too_large_to_look_at_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MOST_INSTRUCTIONS", 100)
    table = kernel_features(
        image_of({"huge": instruction(IADD3) * 101, "fine": instruction(IADD3) * 100}, 80)
    )
    assert (table.kernels, table.oversized) == (("fine",), ("huge",))


def test_sections_over_the_same_bytes_are_refused() -> None:
    image = bytearray(cubin([KernelImage(f"k{n}", instruction(IADD3) * 64) for n in range(4)]))
    file = elf.Elf(bytes(image))
    table_at = file.header.sections_at
    texts = [place for place, name in enumerate(file.names) if name.startswith(b".text")]
    for place in texts:
        row = table_at + place * elf.SECTION.size
        struct.pack_into("<QQ", image, row + 24, 0, len(image))
    with pytest.raises(Malformed, match="same bytes"):
        kernel_features(bytes(image))


def test_kernels_beyond_the_bound_are_refused() -> None:
    image = cubin([KernelImage(f"k{n}", instruction(IADD3) * 8) for n in range(5)])
    with pytest.raises(Malformed, match="more than 4 kernels"):
        kernel_features(image, bounds=Bounds(kernels=4))


def test_another_machines_image_is_refused() -> None:
    image = bytearray(cubin())
    image[18:20] = (62).to_bytes(2, "little")
    with pytest.raises(Malformed, match="machine 62"):
        kernel_features(bytes(image))


def test_a_module_without_code_has_no_rows() -> None:
    table = kernel_features(cubin([]))
    assert table.kernels == ()
    assert table.values.shape == (0, len(COLUMNS))


MODEL_IMAGE = cubin(
    [KernelImage(f"k{size}", any_code(size, size, 90)) for size in (9, 40, 300)],
    constants={".nv.constant3": bytes(range(200)), ".rodata": b"abcdefgh"},
    more=[Section(".nv.global.init", b"12345678")],
)


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    edits=st.lists(
        st.tuples(st.integers(0, len(MODEL_IMAGE) - 1), st.integers(0, 255)), max_size=8
    ),
)
def test_any_bytes_give_features_or_malformed(
    data: st.DataObject, edits: list[tuple[int, int]]
) -> None:
    image = bytearray(MODEL_IMAGE)
    headers = elf.header_at(MODEL_IMAGE).sections_at
    for place, value in edits:
        near_headers = data.draw(st.booleans())
        image[headers + place % (len(image) - headers) if near_headers else place] = value
    cut = data.draw(st.integers(0, len(image)))
    for tried in (bytes(image), bytes(image[:cut])):
        try:
            table = kernel_features(tried)
        except Malformed:
            continue
        assert np.isfinite(table.values).all()


@given(st.binary(max_size=400))
def test_bytes_that_are_no_cubin_are_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        kernel_features(data)


@pytest.mark.parametrize("length", [64, 640])
def test_random_words_as_code_have_the_same_columns(length: int) -> None:
    code = np.random.default_rng(length).integers(0, 256, 16 * length, np.uint8).tobytes()
    for arch in (80, 90):
        table = kernel_features(image_of({"k": code}, arch))
        assert differences(table, {"k": code}) == []


@pytest.mark.parametrize("arch", [52, 61, 130])
def test_architectures_of_another_encoding_are_refused(arch: int) -> None:
    with pytest.raises(Malformed, match=f"sm_{arch}"):
        kernel_features(cubin(sm=arch))


def test_a_branch_to_nowhere_is_no_loop() -> None:
    code = instruction(IADD3) * 10 + instruction(BRA, second=0x80000000) + instruction(IADD3) * 3
    assert kernel_features(image_of({"k": code}, 80)).column("n_loops")[0] == 0
