"""The text of maps and smaps, and which of a process's pages are there to be read."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.codescan.memory_map import ADDRESS_LIMIT, Region, by_file, parse_maps
from gpuwarden.codescan.resident import PAGE_BYTES, Pages, Presence, parse_smaps

MAPS = b"""\
55d0c0000000-55d0c0021000 r--p 00000000 fe:00 1234                       /usr/bin/python3.11
55d0c0400000-55d0c0421000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000001000 rw-s 00001000 00:01 77                         /memfd:held (deleted)
7f0000001000-7f0000002000 rw-p 00000000 00:00 0\x20
7f0000002000-7f0000003000 rw-s 00000000 00:06 9                          /dev/nvidia0
7f0000003000-7f0000004000 r--p 00000000 fe:00 1235                       /tmp/a\\012b c
7f0000004000-7f0000005000 ---p 00000000 00:00 0                          [anon:mine]
7fff00000000-7fff00004000 r--p 00000000 00:00 0                          [vvar]
7fff00004000-7fff00006000 r-xp 00000000 00:00 0                          [vdso]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
"""


def test_the_kernels_own_text_is_read() -> None:
    regions = parse_maps(MAPS)
    assert [r.path for r in regions] == [
        "/usr/bin/python3.11",
        "[heap]",
        "/memfd:held (deleted)",
        "",
        "/dev/nvidia0",
        "/tmp/a\nb c",
        "[anon:mine]",
        "[vvar]",
        "[vdso]",
    ]
    assert [r.path for r in regions if r.is_kernels] == ["[vvar]", "[vdso]"]
    assert [r.inode for r in regions if r.is_shared] == [77, 9]
    assert regions[2].offset == 0x1000
    assert regions[0].device == (0xFE, 0)
    assert set(by_file(regions)) == {
        ((0xFE, 0), 1234),
        ((0, 1), 77),
        ((0, 6), 9),
        ((0xFE, 0), 1235),
    }


def test_a_file_cannot_name_itself_the_kernels() -> None:
    (region,) = parse_maps(b"1000-2000 r-xp 00000000 fe:00 5 [vdso]\n")
    assert not region.is_kernels


@given(st.binary(max_size=2000))
def test_any_bytes_give_regions_in_order(data: bytes) -> None:
    _check(parse_maps(data))


_hex = st.integers(0, 1 << 64).map(lambda n: f"{n:x}")
_line = st.builds(
    "{}-{} {} {} {}:{} {} {}".format,
    _hex,
    _hex,
    st.sampled_from(["rw-p", "r--s", "---p", "r-xp", "xxxx", ""]),
    _hex,
    st.sampled_from(["00", "fe", "103", "zz"]),
    st.sampled_from(["00", "01"]),
    st.integers(0, 1 << 70),
    st.text(max_size=30),
)


@given(st.lists(_line, max_size=12))
def test_lines_that_look_like_regions_do_too(lines: list[str]) -> None:
    _check(parse_maps("\n".join(lines).encode("utf-8", "surrogateescape")))


def _check(regions: list[Region]) -> None:
    assert regions == sorted(regions, key=lambda r: r.start)
    assert all(0 <= r.start < r.end <= ADDRESS_LIMIT for r in regions)
    assert sum(len(group) for group in by_file(regions).values()) <= len(regions)


def test_smaps_tells_which_regions_are_in_use() -> None:
    text = (
        b"1000-2000 rw-p 00000000 00:00 0 [heap]\nSize: 4 kB\nRss:                 4 kB\n"
        b"Swap:                0 kB\n"
        b"3000-9000 ---p 00000000 00:00 0 \nRss:                 0 kB\nSwap:   0 kB\n"
        b"9000-a000 rw-p 00000000 00:00 0 \nRss:                 0 kB\nSwap:   8 kB\n"
    )
    assert parse_smaps(text) == {0x1000: True, 0x3000: False, 0x9000: True}


@given(st.binary(max_size=2000))
def test_any_bytes_are_smaps(data: bytes) -> None:
    assert isinstance(parse_smaps(data), dict)


# ------------------------------------------------------------------------------- our own pages


@pytest.fixture(params=[True, False], ids=["PAGEMAP_SCAN", "pagemap"])
def pages(request: pytest.FixtureRequest) -> Iterator[Pages]:
    pagemap = os.open("/proc/self/pagemap", os.O_RDONLY)
    smaps = os.open("/proc/self/smaps", os.O_RDONLY)
    try:
        yield Pages(pagemap, smaps, by_scan=request.param)
    finally:
        os.close(pagemap)
        os.close(smaps)


def presence_of(pages: Pages, memory: mmap.mmap) -> tuple[Region, Presence]:
    """A mapping of ours as a region, and what of it is there."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with open("/proc/self/maps", "rb") as maps:
        (around,) = (r for r in parse_maps(maps.read()) if r.start <= address < r.end)
    # The kernel joins anonymous regions that are alike.
    region = msgspec.structs.replace(around, start=address, end=address + len(memory))
    return region, pages.presence([region])


def test_only_touched_pages_of_a_reservation_are_there(pages: Pages) -> None:
    reserved = 1 << 32
    with mmap.mmap(-1, reserved, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for page in (0, 7, 8, 9, 500_000):
            memory[page * PAGE_BYTES] = 1
        region, found = presence_of(pages, memory)
        spans = [
            ((s.start - region.start) // PAGE_BYTES, s.size // PAGE_BYTES) for s in found.spans
        ]
        assert spans == [(0, 1), (7, 3), (500_000, 1)]
        assert (found.swapped_bytes, found.unseen_bytes) == (0, 0)
        assert all(span.mapping == region.path for span in found.spans)


def test_a_private_file_is_memory_once_it_was_written_to(pages: Pages, tmp_path: Path) -> None:
    """Then all of it that is there: what was changed may be a part of something larger."""
    (tmp_path / "file").write_bytes(bytes(64 * PAGE_BYTES))
    with (
        (tmp_path / "file").open("r+b") as file,
        mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE) as memory,
    ):
        _ = memory[:]
        region, found = presence_of(pages, memory)
        assert found.bytes == 0
        memory[20 * PAGE_BYTES] = 1
        _, found = presence_of(pages, memory)
        assert [(s.start, s.size) for s in found.spans] == [(region.start, len(memory))]


def test_looking_makes_no_page(pages: Pages) -> None:
    with mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        memory[0] = 1
        _, first = presence_of(pages, memory)
        _, again = presence_of(pages, memory)
        assert first.bytes == again.bytes == PAGE_BYTES
