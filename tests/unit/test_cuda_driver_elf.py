"""Which ELF files are CUDA driver libraries, where to attach to them, and any bytes at all."""

from __future__ import annotations

import random
import struct
import subprocess
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.cuda.driver_elf import DriverElf, entry_point, examine
from gpuwarden.cuda.elf_symbols import EM_X86_64, DynamicSymbols
from gpuwarden.errors import Malformed
from gpuwarden.probes.cuda.functions import LAUNCHES, LOADS, WATCHED
from gpuwarden.sensors.elf import ReadAt
from tests.support.cuda_bed import BUILD_ID, bed
from tests.support.packages import require

READS_LIMIT = 20_000
MACHINE_AT = 18
AARCH64 = 183
EXPORTS = ("cuInit", "cuModuleLoadData", "cuLaunchKernel", "cuCtxCreate_v2")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., bytes]:
    """A shared object of a few functions, built as it is asked for."""
    require("gcc", "libc6-dev")
    folder = tmp_path_factory.mktemp("elf")

    @cache
    def build(source: str, *options: str) -> bytes:
        file = folder / "made.so"
        argv = ["gcc", "-shared", "-fPIC", "-nostdlib", "-xc", "-", "-o", str(file), *options]
        subprocess.run(argv, input=source.encode(), check=True)
        return file.read_bytes()

    return build


def functions(*names: str) -> str:
    return "".join(f"int {name}(int a) {{ return a + {n}; }}\n" for n, name in enumerate(names))


def reader(data: bytes, at: int = 0, new: bytes = b"") -> ReadAt:
    """Reads of ``data`` with ``new`` written into it; too many of them are an error."""
    left = READS_LIMIT

    def read_at(offset: int, size: int) -> bytes:
        nonlocal left
        left -= 1
        assert left > 0, "it reads without end"
        assert size <= 1 << 20
        if offset >= len(data):
            return b""
        found = data[offset : offset + size]
        if offset < at + len(new) and at < offset + len(found):
            changed = bytearray(found)
            for index, byte in enumerate(new, at - offset):
                if 0 <= index < len(changed):
                    changed[index] = byte
            return bytes(changed)
        return found

    return read_at


def examined(
    data: bytes, machine: str = "x86_64", known: dict[str, dict[str, int]] | None = None
) -> DriverElf:
    return examine(reader(data), len(data), machine, known or {})


@pytest.mark.parametrize("style", ["gnu", "sysv", "both"])
def test_either_hash_table_finds_what_is_exported(
    compiled: Callable[..., bytes], style: str
) -> None:
    names = [f"name_{number}" for number in range(200)]
    source = "int absent_one(int); int use(int a) { return absent_one(a); }" + functions(*names)
    data = compiled(source, f"-Wl,--hash-style={style}")
    symbols = DynamicSymbols(reader(data))
    for name in names:
        symbol = symbols.find(name)
        assert symbol is not None
        assert symbols.file_offset(symbol.address, executable=True) is not None
    assert symbols.find("absent_one") is None
    assert symbols.find("name_200") is None


def test_a_driver_library_by_its_exports_alone(compiled: Callable[..., bytes]) -> None:
    found = examined(compiled(functions(*EXPORTS)))
    assert found.kind == "wrapper"
    assert found.points.keys() == set(EXPORTS) & set(WATCHED)
    assert all(point.at_start for point in found.points.values())


def test_calling_the_driver_is_not_being_it(compiled: Callable[..., bytes]) -> None:
    calls = "".join(f"int {name}(int);" for name in EXPORTS)
    uses = " + ".join(f"{name}(a)" for name in EXPORTS)
    assert examined(compiled(f"{calls} int run(int a) {{ return {uses}; }}")).kind == "other"
    assert examined(compiled(functions("cuLaunchKernel"))).kind == "other"


def test_a_small_library_without_the_prologue_is_a_stub(compiled: Callable[..., bytes]) -> None:
    found = examined(compiled(functions(*EXPORTS), "-Wl,-soname,libcuda.so.1"))
    assert (found.kind, found.soname) == ("stub", "libcuda.so.1")
    assert "the toolkit's stub" in "; ".join(found.problems)


def test_one_function_under_two_names_is_one_place(compiled: Callable[..., bytes]) -> None:
    source = functions(*EXPORTS) + (
        "extern __typeof(cuLaunchKernel) cuLaunchKernel_ptsz"
        ' __attribute__((alias("cuLaunchKernel")));'
    )
    found = examined(compiled(source))
    assert "cuLaunchKernel" in found.points
    assert "cuLaunchKernel_ptsz" not in found.points


def test_what_is_no_code_is_told_and_not_attached_to(compiled: Callable[..., bytes]) -> None:
    source = functions("cuInit", "cuModuleLoadData", "cuCtxCreate_v2") + (
        "int cuLaunchKernel = 5;"
        "static int chosen(int a) { return a; } static void *choose(void) { return chosen; }"
        'int cuModuleLoad(int) __attribute__((ifunc("choose")));'
    )
    found = examined(compiled(source))
    assert found.points.keys() == {"cuModuleLoadData", "cuCtxCreate_v2"}
    said = "; ".join(found.problems)
    assert "cuLaunchKernel is not seen: it is no function" in said
    assert "cuModuleLoad is not seen: it is chosen at run time" in said
    assert "no launches are seen" in said


COMPARE = b"\x81\x3d\x4e\xea\x93\x01\x00\xba\x1c\x32"


@pytest.mark.parametrize(
    ("code", "after"),
    [
        (COMPARE + b"\x74\x0c", 10),
        (COMPARE + b"\x0f\x84\x00\x01\x00\x00", 10),
        (b"\xf3\x0f\x1e\xfa" + COMPARE + b"\x74\x0c", 14),
        (COMPARE + b"\x75\x0c", 0),
        (COMPARE, 0),
        (COMPARE[:6] + b"\x01\xba\x1c\x32\x74\x0c", 0),
        (b"\x81\x3e" + COMPARE[2:] + b"\x74\x0c", 0),
        (b"\x90" + COMPARE + b"\x74\x0c", 0),
        (b"", 0),
    ],
)
def test_only_the_known_compare_and_its_jump_are_passed_over(code: bytes, after: int) -> None:
    assert entry_point(reader(b"\0" * 64 + code), 64, EM_X86_64) == (64 + after, after == 0)
    assert entry_point(reader(b"\0" * 64 + code), 64, AARCH64) == (64, True)


def test_of_another_machine() -> None:
    data = bytearray(bed().library().read_bytes())
    assert examined(bytes(data), "aarch64").kind == "foreign"
    struct.pack_into("<H", data, MACHINE_AT, AARCH64)
    there = examined(bytes(data), "aarch64")
    assert there.kind == "driver"
    assert all(point.at_start for point in there.points.values())


def test_what_is_known_of_a_build_id_holds_without_names(compiled: Callable[..., bytes]) -> None:
    data = compiled(functions("first", "second"), f"-Wl,--build-id=0x{BUILD_ID}")
    symbols = DynamicSymbols(reader(data))
    first = symbols.find("first")
    assert first is not None
    offset = symbols.file_offset(first.address, executable=True)
    assert offset is not None
    known = {BUILD_ID: {"cuModuleLoadData": offset, "CUDART_INTERFACE[1]": 0}}
    assert examined(data).kind == "other"
    found = examined(data, known=known)
    assert found.kind == "copy"
    assert found.offsets == {"cuModuleLoadData": offset}
    assert (
        "CUDART_INTERFACE[1] is not seen: its address is not in the file's code" in found.problems
    )


def test_no_elf_file() -> None:
    assert examined(b"").kind == "none"
    assert examined(b"#!/bin/sh\n").kind == "none"
    assert examined(b"\x7fELF").kind in ("broken", "other")


def test_a_chain_without_an_end_is_told(compiled: Callable[..., bytes]) -> None:
    data = bytearray(compiled(functions(*EXPORTS), "-Wl,--hash-style=sysv"))
    symbols = DynamicSymbols(reader(bytes(data)))
    table = symbols.file_offset(symbols._hash or 0)
    assert table is not None
    buckets, chains = struct.unpack_from("<II", data, table)
    for index in range(chains):
        struct.pack_into("<I", data, table + 8 + 4 * (buckets + index), index)
    found = examined(bytes(data))
    assert found.kind == "broken"
    assert "a chain without an end" in "; ".join(found.problems)


# -------------------------------------------------------------------- hostile bytes


def check(data: bytes, at: int = 0, new: bytes = b"") -> None:
    """Whatever the bytes are: a result, with places in the file's code alone."""
    known = {BUILD_ID: {"CUDART_INTERFACE[1]": len(data) // 2}}
    found = examine(reader(data, at, new), len(data), "x86_64", known)
    symbols = None
    try:
        symbols = DynamicSymbols(reader(data, at, new))
    except Malformed:
        assert not found.points
    for name, point in found.points.items():
        assert name in (*WATCHED, "CUDART_INTERFACE[1]")
        assert symbols is not None
        assert symbols.in_code(found.offsets[name])
        assert point.file_offset - found.offsets[name] in (0, 10, 14)


@given(st.binary(max_size=600))
def test_any_bytes(data: bytes) -> None:
    check(data)
    check(b"\x7fELF\2\1\1" + data)


@given(st.data())
def test_any_change_to_a_library(data: st.DataObject) -> None:
    image = bed().library().read_bytes()
    at = data.draw(st.integers(0, 4096) | st.integers(0, len(image) - 1))
    check(image, at, data.draw(st.binary(min_size=1, max_size=64)))


def test_a_library_cut_anywhere() -> None:
    image = bed().library().read_bytes()
    for end in [*range(0, 8192, 61), *range(8192, len(image), 50_021)]:
        check(image[:end])


def test_tables_of_any_numbers() -> None:
    """Every word of the headers and of the dynamic section, one at a time."""
    image = bed().library().read_bytes()
    symbols = DynamicSymbols(reader(image))
    (dynamic,) = [segment for segment in symbols.segments if segment.kind == 2]
    random.seed(5)
    places = [*range(16, 64, 2), *range(64, 64 + 56 * len(symbols.segments), 4)]
    places += range(dynamic.offset, dynamic.offset + dynamic.size, 8)
    for place in places:
        for value in (0, 0xFFFFFFFF, random.getrandbits(64)):
            check(image, place, struct.pack("<Q", value))


def test_what_is_watched_is_there() -> None:
    """The stand-in is read as a driver library with everything that has to be seen."""
    found = examined(bed().library().read_bytes())
    assert found.kind == "driver"
    assert found.points.keys() >= {*LOADS, "cuLaunchKernel", "cuGraphLaunch"} & set(WATCHED)
    assert set(LAUNCHES) & found.points.keys()
    assert not any(point.at_start for point in found.points.values())
    assert found.problems == ()
