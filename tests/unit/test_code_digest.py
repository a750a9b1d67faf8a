"""What the code digest of a cubin sees, and what it does not."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuwarden.code.describe import describe
from gpuwarden.code.digest import _without_folders
from gpuwarden.code.elf import SHT_CUDA_SHARED, header_at
from gpuwarden.code.located import Located
from gpuwarden.code.module import Module
from tests.support import gpu_images as build
from tests.support.gpu_images import KernelImage, Section
from tests.support.gpu_modules import FATBIN, SAMPLES, found, module

CODE, OTHER_CODE = bytes(range(256)), bytes(range(255, -1, -1))
KERNELS = [KernelImage("one", CODE), KernelImage("two", OTHER_CODE)]
TABLE = {".nv.constant3": b"constants" * 8}
ALLOC, EXECUTE = 2, 4
MESSAGE = b"p[0] > 3\0/home/a/project/kernel.cu\0\0void k(int *)\0"


def digest(*sections: Section, **changed: object) -> str:
    arguments: dict[str, object] = {"kernels": KERNELS, "constants": TABLE, "more": sections}
    return module(build.cubin(**(arguments | changed))).code_digest  # type: ignore[arg-type]


SAME: dict[str, Callable[[], str]] = {
    "names of kernels": lambda: digest(
        kernels=[KernelImage("a", CODE), KernelImage("b", OTHER_CODE)]
    ),
    "their order": lambda: digest(kernels=KERNELS[::-1]),
    "registers and shared memory": lambda: digest(
        kernels=[KernelImage("one", CODE, 99, 4096), KernelImage("two", OTHER_CODE)]
    ),
    "a launch's parameters": lambda: digest(
        kernels=[KernelImage("one", CODE, parameters=b"p" * 64), KernelImage("two", OTHER_CODE)]
    ),
    "line numbers": lambda: digest(Section(".debug_line", b"/home/a/kernel.cu")),
    "the toolkit's note": lambda: digest(toolkit=False),
    "the suffix": lambda: digest(suffix="a"),
    # Of a type of its own, and longer than the file, as in relocatable code of nvshmem.
    "the debugger's shared memory": lambda: digest(
        Section(".nv_debug.shared", kind=SHT_CUDA_SHARED, flags=ALLOC, size=1 << 20)
    ),
}
OTHER: dict[str, Callable[[], str]] = {
    "an instruction": lambda: digest(
        kernels=[KernelImage("one", b"\1" + CODE[1:]), KernelImage("two", OTHER_CODE)]
    ),
    "a kernel more": lambda: digest(kernels=[*KERNELS, KernelImage("three", bytes(128))]),
    "a kernel twice": lambda: digest(kernels=[*KERNELS, KernelImage("three", CODE)]),
    "a constant": lambda: digest(constants={".nv.constant3": b"Constants" * 8}),
    "the bank of constants": lambda: digest(constants={".nv.constant4": b"constants" * 8}),
    "more constants": lambda: digest(Section(".nv.constant2.one", b"2")),
    "globals": lambda: digest(Section(".nv.global.init", b"2")),
    "read-only data": lambda: digest(Section(".rodata", b"2")),
    "code that the driver finishes": lambda: digest(Section(".nv.capmerc.text.one", b"2")),
    "code in a section of another type": lambda: digest(Section(".text.x", CODE, 0x7000_0000)),
    "code under a name of its own": lambda: digest(Section(".hidden", CODE, flags=ALLOC | EXECUTE)),
    "code of the debugger's type": lambda: digest(
        Section(".hidden", CODE, SHT_CUDA_SHARED, flags=ALLOC | EXECUTE)
    ),
    "data under a name of its own": lambda: digest(Section(".table", b"2", flags=ALLOC)),
    "the architecture": lambda: digest(sm=89),
}


@pytest.mark.parametrize("change", SAME)
def test_what_does_not_change_it(change: str) -> None:
    assert SAME[change]() == digest() != ""


@pytest.mark.parametrize("change", OTHER)
def test_what_changes_it(change: str) -> None:
    assert OTHER[change]() not in (digest(), "")


def _with_message(message: bytes) -> str:
    return digest(Section(".nv.global.init", message))


def test_of_a_source_s_path_only_the_last_name_counts() -> None:
    first = _with_message(MESSAGE)
    moved = MESSAGE.replace(b"/home/a/project/kernel.cu\0\0", b"/b/kernel.cu\0\0\0\0")
    assert _with_message(moved) == first
    assert _with_message(MESSAGE.replace(b"/home/a/project/", b"")) == first
    assert _with_message(MESSAGE.replace(b"kernel.cu", b"Kernel.cu")) != first
    assert _with_message(MESSAGE.replace(b"p[0]", b"q[0]")) != first


def test_other_text_with_a_slash_is_a_constant_like_any() -> None:
    first = _with_message(b"/etc/one/secret\0")
    assert _with_message(b"/etc/two/secret\0") != first
    assert _with_message(b"/a/table.bin\0") != _with_message(b"/b/table.bin\0")


def test_there_is_none_without_code() -> None:
    assert digest(kernels=[]) == ""
    assert digest(kernels=[KernelImage("empty", b"")]) == ""


def test_sections_that_share_bytes_are_not_hashed_again_and_again() -> None:
    image = bytearray(build.cubin([KernelImage(f"k{number}", CODE) for number in range(200)]))
    header = header_at(bytes(image))
    for number in range(header.sections):
        row = header.sections_at + 64 * number
        (size,) = struct.unpack_from("<Q", image, row + 32)
        if size == len(CODE):
            struct.pack_into("<QQ", image, row + 24, 0, len(image))
    one = module(bytes(image))
    assert "same bytes" in one.broken
    assert one.code_digest == ""


def test_a_known_digest_gets_no_code_digest() -> None:
    def told(answer: bool) -> list[Module]:
        located = [one for one in found(FATBIN) if isinstance(one, Located)]
        return [describe(one, one.image(), known=lambda _: answer) for one in located]

    assert not any(one.code_digest for one in told(True))
    assert [one.digest for one in told(True)] == [one.digest for one in told(False)]
    assert [one.kernels for one in told(True)] == [one.kernels for one in told(False)]
    assert sum(bool(one.code_digest) for one in told(False)) == 8


def test_of_a_known_image_nothing_is_told_but_its_digest_unless_kernels_are_asked_for() -> None:
    for one in found(FATBIN):
        assert isinstance(one, Located)
        image = one.image()
        brief = describe(one, image, known=lambda _: True, kernels=False)
        whole = describe(one, image)
        assert (brief.digest, brief.kind, brief.place) == (whole.digest, whole.kind, whole.place)
        assert (brief.code_digest, brief.toolkit, brief.kernel_count) == ("", "", 0)


def test_kernels_that_nobody_asks_for_are_counted() -> None:
    for data in SAMPLES.values():
        for one in found(data):
            assert isinstance(one, Located)
            told, counted = (describe(one, one.image(), kernels=asked) for asked in (True, False))
            assert counted.kernels == ()
            assert counted == msgspec.structs.replace(told, kernels=())


# ------------------------------------------------------------------------------ paths

TEXT = re.compile(rb"[\x20-\x7e]{4,4096}\x00+")
SOURCE = re.compile(
    rb"(?:.*[/\\])?([^/\\]+\.(?:cuh?|hpp|hxx|h|cc|cpp|cxx|c|inl|inc|py))\x00+", re.S
)


def plainly_without_folders(data: bytes) -> bytes:
    """Every text of any kind looked at: slow where a text is long."""

    def last_name(found: re.Match[bytes]) -> bytes:
        source = SOURCE.fullmatch(found[0])
        return source[1] + b"\0" if source else found[0]

    return TEXT.sub(last_name, data)


WORDS = rb"/ \ .c .cu .cuh .h .py . a src".split()
pieces = st.lists(
    st.sampled_from([*WORDS, b"\0", b"\0\0", b"\xff", b" ", b"k" * 40]) | st.binary(max_size=3),
    max_size=40,
).map(b"".join)


@given(data=pieces)
@example(data=b"k" * 5000 + b"/x.cu\0\0\0after")
@example(data=b"k" * 4090 + b"/xxxxx.cu\0")
@example(data=b"a.c\0\0b/.c\0/c/d.c\0\0")
def test_the_folders_of_sources_are_left_out_as_a_plain_reading_does_it(data: bytes) -> None:
    assert b"".join(_without_folders(data)) == plainly_without_folders(data)


def test_a_text_without_end_takes_no_time() -> None:
    # Read plainly, this would take some minutes.
    data = b"k" * (4 << 20) + b".c" + b"/x.c\0" * 100_000
    assert len(b"".join(_without_folders(data))) < len(data)
