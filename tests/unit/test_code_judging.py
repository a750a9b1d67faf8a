"""The answer for a module, whatever it is: a score only where there is something to score."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.code import reasons
from gpuwarden.code.classify import judge, judge_together
from gpuwarden.code.classify.cubin_judging import KERNELS_TOLD, MOST_UNKNOWN
from gpuwarden.code.constants import families
from gpuwarden.code.judgement import ModuleJudgement
from gpuwarden.code.module import Kind
from gpuwarden.code.sass import decode
from gpuwarden.code.sass.opcodes import mnemonic
from tests.support.gpu_images import KernelImage, cubin, ptx
from tests.support.sass import FFMA, IADD3, IMAD, LOP3, SHF, instruction

SHA_256 = next(one.words for one in families() if one.key == "sha256")
UNKNOWN = next(opcode for opcode in range(1 << 12) if not mnemonic(opcode, 90))


def rounds_of_a_hash(count: int, constants: tuple[int, ...] = SHA_256) -> bytes:
    """Rotations, three-input XORs and additions of constants, as SHA-256 has them."""
    code = []
    for place in range(count):
        code += [
            instruction(SHF, first=6, second=amount, third=6)
            for amount in (6 + place % 3, 11, 25, 2, 13, 22)
        ]
        code += [instruction(LOP3, table=0x96)] * 3
        code += [instruction(LOP3, table=0xCA), instruction(LOP3, table=0xE8)]
        code += [instruction(IADD3, second=constants[place % len(constants)])] * 2
        code += [instruction(0x210)] * 4
    return b"".join(code)


ROUNDS = [KernelImage("k", rounds_of_a_hash(64))]


def plain_code(count: int) -> bytes:
    return b"".join(
        instruction(FFMA) + instruction(0x381) + instruction(IMAD) for _ in range(count)
    )


def judged(*kernels: tuple[str, bytes], sm: int = 90) -> ModuleJudgement:
    return judge("cubin", cubin([KernelImage(name, code) for name, code in kernels], sm=sm))


@pytest.mark.parametrize("sm", [70, 86, 90, 100, 120])
def test_a_hash_is_hash_like_and_told_with_its_constants(sm: int) -> None:
    found = judged(("plain", plain_code(100)), ("rounds", rounds_of_a_hash(64)), sm=sm)
    assert found.answer == "hash-like"
    assert found.score is not None
    assert found.score > 3
    assert found.reasons[0].startswith("hash-like integer compute: 18% xor, 35% rotates, densest")
    assert found.reasons[1] == "constants consistent with SHA-256"
    assert found.consistent_with == ("SHA-256",)
    assert found.judged == 2
    assert [one.name for one in found.kernels] == ["rounds", "plain"]
    assert found.kernels[0].answer == "hash-like"
    assert found.kernels[1].answer == "not hash-like"
    assert found.kernels[1].consistent_with == ()


def test_plain_code_is_not_hash_like() -> None:
    found = judged(*((f"k{place}", plain_code(60 + place)) for place in range(14)))
    assert (found.answer, found.reasons, found.judged) == ("not hash-like", (), 14)
    assert found.score is not None
    assert len(found.kernels) == KERNELS_TOLD


def test_constants_alone_name_but_do_not_judge() -> None:
    table = b"".join(word.to_bytes(4, "little") for word in SHA_256)
    image = cubin([KernelImage("plain", plain_code(100))], constants={".nv.constant3": table})
    found = judge("cubin", image)
    assert found.answer == "not hash-like"
    assert found.reasons == ("constants consistent with SHA-256",)


@pytest.mark.parametrize(
    ("image", "answer", "reason"),
    [
        (cubin(ROUNDS, sm=61, abi=7), "architecture too old", "sm_61"),
        (cubin(ROUNDS, sm=130), "architecture unknown", "sm_130"),
        (cubin([KernelImage("k", rounds_of_a_hash(2))]), "not enough code", "long enough"),
        (cubin([]), "not enough code", "long enough"),
        (cubin()[:200], "unreadable", ""),
        (b"", "unreadable", ""),
    ],
)  # fmt: skip
def test_what_cannot_be_judged_is_said_so(image: bytes, answer: str, reason: str) -> None:
    found = judge("cubin", image)
    assert found.answer == answer
    assert found.score is None
    assert reason in found.reasons[0]


@pytest.mark.parametrize("kind", ["amdgpu", "lto-ir", "tile-ir", "unknown"])
def test_kinds_that_are_not_judged(kind: Kind) -> None:
    found = judge(kind, b"anything")
    assert (found.answer, found.score) == ("form not judged", None)
    assert found.reasons


def test_unknown_opcodes_are_no_acquittal() -> None:
    strange = instruction(UNKNOWN) * 12 + plain_code(60)
    assert MOST_UNKNOWN < 12 / (12 + 180)
    found = judged(("strange", strange), ("plain", plain_code(100)))
    assert (found.answer, found.score) == ("unknown opcodes", None)
    told = {one.name: one for one in found.kernels}
    assert told["strange"].answer == "unknown opcodes"
    assert told["strange"].reasons[0].startswith("6% of its opcodes")
    assert told["plain"].answer == "not hash-like"
    assert (
        judged(("rounds", instruction(UNKNOWN) * 80 + rounds_of_a_hash(64))).answer == "hash-like"
    )


def test_a_kernel_too_large_to_look_at_is_no_acquittal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MOST_INSTRUCTIONS", 500)
    found = judged(("huge", plain_code(200)), ("plain", plain_code(100)))
    assert (found.answer, found.judged) == ("unreadable", 1)
    beside = judged(("huge", plain_code(200)), ("rounds", rounds_of_a_hash(25)))
    assert beside.answer == "hash-like"


def ptx_rounds(count: int) -> str:
    shifts = "".join(f"shf.l.wrap.b32 %r2, %r1, %r1, {amount};" for amount in (7, 18, 25))
    return (shifts + "xor.b32 %r3, %r2, %r4; xor.b32 %r5, %r3, %r2; add.s32 %r1, %r5, %r3;") * count


def test_ptx_is_judged_by_its_text() -> None:
    found = judge("ptx", ptx(["rounds"], body=ptx_rounds(40)))
    assert found.answer == "hash-like"
    assert found.reasons == (
        "hash-like integer compute in PTX: 33% xor, 50% rotates, densest window 84%",
    )
    assert found.kernels[0].name == "rounds"
    plain = "ld.global.f32 %f1, [%rd1]; fma.rn.f32 %f2, %f1, %f1, %f3; add.s32 %r1, %r1, 1;" * 100
    assert judge("ptx", ptx(["a", "b"], body=plain)).answer == "not hash-like"
    assert judge("ptx", ptx(body="xor.b32 %r1, %r2, %r3;")).answer == "not enough code"
    assert judge("ptx", b"not PTX at all").answer == "unreadable"


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["cubin", "ptx", "lto-ir", "amdgpu"]),
    data=st.binary(max_size=200),
    cut=st.integers(0, 3000),
)
def test_any_bytes_have_an_answer(kind: Kind, data: bytes, cut: int) -> None:
    whole = {"ptx": ptx(body=ptx_rounds(20)), "cubin": cubin([KernelImage("k", plain_code(60))])}
    image = whole.get(kind, b"")
    for tried in (data, image[:cut] + data, image[:cut] + data + image[cut + len(data) :]):
        assert judge(kind, tried).answer


def test_reasons_tell_dilution_and_lowered_bit_work() -> None:
    features = dict.fromkeys(reasons.COLUMNS, 0.0)
    diluted = features | {
        "xor_s": 0.02,
        "rot_s": 0.01,
        "bitwin_max": 0.1,
        "h1_bit": 0.6,
        "fp_s": 0.7,
    }
    assert reasons.of_kernel(diluted) == (
        "hash-like integer compute: 2% xor, 1% rotates, densest window 60%",
        "thinned by 70% floating point",
    )
    lowered = features | {"int_s": 0.9, "h1_core": 0.45}
    assert reasons.of_kernel(lowered, ["MD5"]) == (
        "hash-like integer compute: 90% integer, densest window without floating point 45% "
        "additions and bit work",
        "constants consistent with MD5",
    )


def test_modules_are_judged_together_too() -> None:
    plain = [judged((f"k{place}", plain_code(60 + place))) for place in range(5)]
    rounds = judged(("rounds", rounds_of_a_hash(64)))
    assert judge_together([]) == (0.0, False)
    assert not judge_together(plain)[1]
    score, is_hash_like = judge_together([*plain, rounds, judge("cubin", b"")])
    assert is_hash_like
    assert rounds.score is not None
    assert score < rounds.score
