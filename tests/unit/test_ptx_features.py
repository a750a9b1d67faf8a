"""Features of PTX text: what counts, what hides nothing, and any bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.code import ptx_features
from gpuwarden.code.constants import named_algorithms
from gpuwarden.code.ptx_features import Function, functions, number_words, table_words
from gpuwarden.errors import Malformed
from tests.support.gpu_images import ptx


def one(body: str) -> Function:
    (found,) = functions(ptx(body=body))
    return found


def test_kinds_of_statements_are_told_apart() -> None:
    found = one(
        "ld.param.u64 %rd1, [kernel_param_0]; mov.u32 %r1, %tid.x; cvta.to.global.u64 %rd2, %rd1;"
        "xor.b32 %r2, %r1, 5; lop3.b32 %r3, %r1, %r2, %r1, 0x96; and.b32 %r4, %r3, 7;"
        "lop3.b32 %r3, %r1, %r2, %r1, 0xC0; add.s32 %r5, %r4, 1; mad.lo.s32 %r6, %r5, 3, 1;"
        "fma.rn.f32 %f1, %f2, %f3, %f4; add.f64 %fd1, %fd2, %fd3; @%p1 bra L1; L1: ret;"
    )
    assert (found.statements, found.floating, found.worked) == (13, 2, 6)
    assert (found.xor, found.add, found.multiply) == (2 / 6, 1 / 6, 1 / 6)
    assert found.rotate == 0


@pytest.mark.parametrize(
    ("body", "rotations"),
    [
        ("shf.l.wrap.b32 %r2, %r1, %r1, 7;", 1),
        ("shf.l.wrap.b32 %r2, %r1, %r3, 7;", 0),
        ("shf.l.wrap.b32 %r2, %r1, %r3, 7; shf.l.wrap.b32 %r4, %r3, %r1, 7;", 1),
        ("shf.l.wrap.b32 %r2, %r1, %r3, 7; shf.l.wrap.b32 %r4, %r3, %r1, 8;", 0),
        ("shl.b32 %r2, %r1, 7; shr.u32 %r3, %r1, 25;", 1),
        ("shr.u64 %rd2, %rd1, 1; shl.b64 %rd3, %rd1, 63; or.b64 %rd4, %rd3, %rd2;", 1),
        ("shl.b32 %r2, %r1, 7; shr.u32 %r3, %r1, 24;", 0),
        ("shl.b32 %r2, %r1, 7; xor.b32 %r4, %r1, %r5; shr.u32 %r3, %r4, 25;", 1),
        ("shl.b32 %r2, %r1, 7;" + "add.s32 %r5, %r5, 1;" * 16 + "shr.u32 %r3, %r4, 25;", 0),
        ("shl.b64 %rd2, %rd1, 7; shr.u32 %r3, %r4, 25;", 0),
        ("prmt.b32 %r2, %r1, 0, 0x0123;", 1),
        ("prmt.b32 %r2, %r1, %r3, %r4;", 0),
        ("shl.b32 %r2, %r1, %r9;", 0),
    ],
)
def test_rotations_in_every_form(body: str, rotations: int) -> None:
    found = one(body)
    assert round(found.rotate * found.worked) == rotations


def test_windows_are_over_the_work_alone() -> None:
    padding = "fma.rn.f32 %f1, %f2, %f3, %f4; mov.u32 %r9, %r8;" * 3
    found = one(("xor.b32 %r1, %r2, %r3;" + padding) * 128 + "add.s32 %r1, %r2, 1;" * 1000)
    assert found.dense == 1
    assert found.dense_wide == 128 / 512
    assert one("xor.b32 %r1, %r2, %r3;" * 32).dense == 32 / 128


def test_comments_and_strings_are_not_code() -> None:
    found = one(
        "// xor.b32 %r1, %r2, %r3;\n/* } xor.b32 %r1, %r2, %r3; */ xor.b32 %r1, %r2, %r3;"
        '.pragma "}; xor.b32 %r1, %r2, %r3;"; /* never closed xor.b32 %r1, %r2, %r3; }'
    )
    assert found.worked == 1


def test_scopes_labels_predicates_and_other_functions() -> None:
    text = b"""
    .version 8.0 .target sm_80
    .global .align 4 .b8 table[4] = {1, 2, 3, 4};
    .func (.param .b32 out) helper(.param .b32 in) ;
    .visible .func (.param .b32 out) helper(.param .b32 in)
    { $L__BB0_1: @!%p1 xor.b32 %r1, %r2, %r3; { .reg .b32 t; L2: L3:xor.b32 %r1, %r2, t; } ret; }
    .section .debug_str { .b8 1, 2, 3 }
    .visible .entry kernel() .maxntid 256, 1, 1 { add.s32 %r1, %r2, %r3; }
    .entry cut_short() { xor.b32 %r1, %r2, %r3;
    """
    found = {one.name: one for one in functions(text)}
    assert list(found) == ["helper", "kernel", "cut_short"]
    assert [found["helper"].worked, found["helper"].xor] == [2, 1]
    assert found["helper"].statements == 3
    assert found["kernel"].add == 1
    assert found["cut_short"].xor == 1


def test_numbers_name_algorithms() -> None:
    constants = [0x428A2F98, 0x71374491, 0xB5C0FBCF, 0xE9B5DBA5, 0x3956C25B, 0x59F111F1]
    body = ";".join(f"add.s32 %r1, %r2, {word - (1 << 32) * (word >> 31)}" for word in constants)
    assert {*constants} <= set(number_words(one(body)).tolist())
    aes = ",".join(str(byte) for byte in bytes.fromhex("637c777bf26b6fc53001672bfed7ab76") * 2)
    words = table_words(b".const .align 4 .b8 box[32] = {" + aes.encode() + b"};")
    assert 0x7B777C63 in words.tolist()
    salsa = b".global .u32 x; .const .b32 s[4] = {1634760805, 0x3320646e, 2036477234, 1797285236};"
    assert named_algorithms(table_words(salsa)) == ("Salsa20 or ChaCha",)


def test_text_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptx_features, "MOST_BYTES", 100)
    with pytest.raises(Malformed, match="100 are read"):
        list(functions(b" " * 101))


PIECES = (
    b".entry f(", b".func g", b"(", b")", b"{", b"}", b";", b"/*", b"*/", b"//", b"\n", b'"',
    b"@%p1", b"shf.l.wrap.b32 %r1, %r1, %r1, ", b"xor.b32", b"0x", b"99999999999999999999", b"-1",
    b",", b" ",
    b"L1:", b"shl.b64 %r1, %r1, 4", b"lop3.b32 a,b,c,d,", b".b8 t[3] = {1,2,3", b".b64 t[] = {-5}",
    b"prmt.b32 a, b, c, -0x0123U", b"shr.b99999", b"mov", b"\x00\xff",
)  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=60).map(b"".join) | st.binary(max_size=300))
def test_any_bytes_have_features(text: bytes) -> None:
    for found in functions(text):
        assert 0 <= found.mixing <= 1
        number_words(found)
    table_words(text)


@pytest.mark.parametrize(
    "piece",
    [b"/*", b'"', b".entry x ", b"@a ", b"a: ", b"{", b"}", b"(", b".b8 x[1] = {", b"1,", b"0x"],
)
def test_repeated_pieces_take_linear_work(piece: bytes) -> None:
    """A megabyte of a piece that patterns could go back over; quadratic work would not end."""
    text = b".entry k() {" + piece * ((1 << 20) // len(piece))
    assert len(list(functions(text))) <= 1
    table_words(text)
