"""Every module in any bytes: where it was found, and what hides nothing from the search."""

from __future__ import annotations

import hashlib
import mmap
import struct
from pathlib import Path

import pytest

from gpuwarden.code.bounds import Bounds
from gpuwarden.code.elf import header_at
from gpuwarden.code.extract import modules_in
from gpuwarden.code.fatbin import MARK
from gpuwarden.code.located import Located
from gpuwarden.code.module import Module, Place, Problem
from gpuwarden.code.sweep import PIECE_BYTES, sweep
from tests.support import gpu_images as build
from tests.support.gpu_images import EntryImage
from tests.support.gpu_modules import (
    BUNDLE,
    CUBIN,
    PLACE,
    SAMPLES,
    found,
    modules,
    problems,
)

DIGEST = hashlib.sha256(CUBIN).hexdigest()
SMALL = build.fatbin([EntryImage("cubin", CUBIN, 90, "zstd")])


def _where(one: Module) -> tuple[str, str, int | None]:
    return one.place.found_by, one.place.section, one.place.offset


@pytest.mark.parametrize("section", [".nv_fatbin", "__nv_relfatbin"])
def test_the_sections_of_programs(section: str) -> None:
    data = build.program({section: SMALL + bytes(8) + SMALL})
    first, second = modules(data)
    assert first.digest == second.digest == DIGEST
    start = data.index(SMALL)
    assert _where(first) == ("section", section, start + 16 + 64)
    assert _where(second) == ("section", section, start + len(SMALL) + 8 + 16 + 64)


def test_modules_outside_the_sections_are_found_by_a_sweep() -> None:
    data = build.program({".nv_fatbin": SMALL, ".rodata": b"odd" + SMALL + b"x" + CUBIN})
    inside, fatbin, bare = modules(data)
    assert [one.digest for one in (inside, fatbin, bare)] == [DIGEST] * 3
    assert [one.place.found_by for one in (inside, fatbin, bare)] == ["section", "sweep", "sweep"]


def test_what_a_section_holds_beside_fatbins_is_swept_too() -> None:
    data = build.program({".nv_fatbin": b"junk" + SMALL + b"junk" + CUBIN + build.ptx() + b"\0"})
    assert [one.kind for one in modules(data)] == ["cubin", "cubin", "ptx"]
    assert {one.place.section for one in modules(data)} == {".nv_fatbin"}


def test_a_program_whose_section_headers_lie_is_swept_as_any_bytes() -> None:
    data = bytearray(build.program({".nv_fatbin": SMALL, ".data": CUBIN}))
    for change in ((40, b"\xff" * 8), (60, b"\xff\xff"), (62, b"\xff\x00"), (58, b"\0\0")):
        broken = bytearray(data)
        broken[change[0] : change[0] + len(change[1])] = change[1]
        assert [one.digest for one in modules(bytes(broken))] == [DIGEST] * 2


def test_sections_that_overlap_tell_no_module_twice() -> None:
    data = bytearray(build.program({".nv_fatbin": SMALL, "__nv_relfatbin": b"x" * 8}))
    table = header_at(bytes(data)).sections_at
    data[table + 64 * 3 + 24 : table + 64 * 3 + 40] = data[
        table + 64 * 2 + 24 : table + 64 * 2 + 40
    ]
    assert len(modules(bytes(data))) == 1


@pytest.mark.parametrize(
    ("data", "kinds"),
    [
        (CUBIN + b"appended" + build.ptx(), ["whole", "sweep"]),
        (CUBIN + bytes(100) + CUBIN, ["whole", "sweep"]),
        (SMALL + CUBIN, ["whole", "sweep"]),
        (b"MZ" + CUBIN, ["sweep"]),
        (build.ptx() + b"\0" + SMALL, ["whole", "sweep"]),
        (BUNDLE, ["whole"]),
    ],
)
def test_an_image_that_begins_a_file_is_whole_and_what_is_behind_it_is_not(
    data: bytes, kinds: list[str]
) -> None:
    assert [one.place.found_by for one in modules(data)] == kinds


@pytest.mark.parametrize("shift", range(8))
def test_no_module_is_missed_where_pieces_of_the_search_meet(shift: int) -> None:
    for name, data in SAMPLES.items():
        if name in ("program", "archive"):
            continue
        held = bytes(PIECE_BYTES - shift) + data + bytes(PIECE_BYTES)
        expected = [one.digest for one in modules(b"\0" + data + b"\0")]
        assert [one.digest for one in modules(held)] == expected, name


def test_any_buffer_will_do(tmp_path: Path) -> None:
    path = tmp_path / "held"
    path.write_bytes(SAMPLES["program"])
    expected = [one.place.offset for one in modules(SAMPLES["program"])]
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for buffer in (mapped, bytearray(SAMPLES["program"]), memoryview(SAMPLES["program"])):
            places = [one.place.offset for one in modules_in(buffer, PLACE)]
            assert places == expected
    assert found(b"") == []


def test_an_address_is_added_to_every_offset() -> None:
    place = Place(target="pid 7", offset=0x7F00_0000_0000, mapping="[heap]")
    (one,) = sweep(memoryview(bytes(100) + CUBIN), place)
    assert one.place == Place(
        target="pid 7", offset=0x7F00_0000_0064, mapping="[heap]", found_by="sweep"
    )


def test_a_stale_header_does_not_hide_what_was_written_over_its_image() -> None:
    """The heap holds the header of a cubin that was freed, and newer ones in its place."""
    stale = bytearray(build.cubin([build.KernelImage("old", b"o" * 40_000)]))
    stale[8192 : 8192 + len(CUBIN)] = CUBIN
    stale[16384 : 16384 + len(SMALL)] = SMALL
    digests = [one.digest for one in modules(b"heap" + bytes(stale))]
    assert len(digests) == 3
    assert digests[1:] == [DIGEST, DIGEST]


def test_text_inside_a_cubin_is_no_module_of_its_own() -> None:
    """Device debugging puts the PTX into a section of the cubin."""
    held = build.cubin(more=[build.Section(".nv_debug_ptx_txt", build.ptx())])
    assert [one.kind for one in modules(held + b"\0" + build.ptx())] == ["cubin", "ptx"]


@pytest.mark.parametrize("magic", [b"\xed\x43\x4e\x7f", b"\x7fTileIR\0\x0d\1\0\0"])
def test_code_without_a_known_end_hides_nothing(magic: bytes) -> None:
    whole, inside = modules(magic + b"\1\2\3" * 9 + CUBIN)
    assert (whole.place.found_by, inside.digest) == ("whole", DIGEST)


def test_the_mark_of_a_fatbin_among_instructions_is_none() -> None:
    # mov [r12 + ...], and the mark as its number: as in libraries that write fatbins.
    code = bytes.fromhex("49c78424b0020000") * 20 + MARK + bytes.fromhex("49c78424b8020000") * 20
    assert found(code) == []
    (inside,) = found(code + SMALL)
    assert isinstance(inside, Located)
    assert hashlib.sha256(inside.image()).hexdigest() == DIGEST


def test_host_programs_in_other_bytes_are_none_of_ours() -> None:
    assert found(b"x" + build.program({".text": b"code"})) == []


def test_a_cubin_that_is_cut_short_is_a_problem() -> None:
    assert [one.what for one in problems(b"x" + CUBIN[:-1])] == ["cubin"]
    assert [one.what for one in problems(CUBIN[:-1])] == ["cubin"]


def _limited(bounds: Bounds, data: bytes) -> tuple[int, list[str]]:
    given = list(modules_in(data, PLACE, bounds))
    reasons = [one.reason for one in given if isinstance(one, Problem)]
    return sum(isinstance(one, Located) for one in given), reasons


def test_more_modules_or_bytes_than_are_read_are_a_problem() -> None:
    data = CUBIN * 10
    assert _limited(Bounds(modules=4), data) == (4, ["more than 4 modules"])
    count, (reason,) = _limited(Bounds(total_bytes=len(CUBIN) * 3 + 1), data)
    assert (count, "together" in reason) == (3, True)


@pytest.mark.parametrize(
    "unit",
    [b".version 8.0 ", b"\x7fELF\2\1\1", b"CCOB\2\0\1\0", b"CCOB\1\0\7\0", b"\x7fTileIR\0"],
)
def test_too_much_that_only_looks_like_code_is_a_problem(unit: bytes) -> None:
    count, reasons = _limited(Bounds(false_starts=100), b"x" + unit * 5000)
    assert count == 0
    assert "was not looked at" in reasons[-1]
    assert _limited(Bounds(false_starts=100), b"x" + unit * 90 + CUBIN)[0] == 1


def test_headers_that_share_one_long_section_table_are_not_all_read_to_its_end() -> None:
    rows = 60_000
    table = bytes(64 * rows)
    count = 500
    headers = bytearray(CUBIN[:64] * count)
    for number in range(count):
        at = 64 * number
        struct.pack_into("<Q", headers, at + 40, 64 * (count - number))
        struct.pack_into("<HHH", headers, at + 58, 64, rows, 0)
    given = found(b"x" + bytes(headers) + table)
    # Each claims all that is behind it: eight times over is enough.
    assert len(given) < 60
    assert isinstance(given[-1], Problem)
    assert "was not looked at" in given[-1].reason
