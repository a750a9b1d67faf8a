"""A process's memory in windows: everything is read once, and no module that fits is cut."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.code import fatbin
from gpuwarden.code.located import Located
from gpuwarden.code.module import Place
from gpuwarden.codescan import memory_windows
from gpuwarden.codescan.memory_parts import parts
from gpuwarden.codescan.memory_windows import Memory, memory_modules
from gpuwarden.codescan.tasks import MemoryTask, Span
from tests.support import gpu_images

PAGE = os.sysconf("SC_PAGE_SIZE")
WINDOW, LIMIT = 16 * PAGE, 64 * PAGE
Spans = list[tuple[int, int]]
"""(first page, pages) of memory that is there."""


def spans_of(pages: Spans) -> list[Span]:
    return [Span(start=first * PAGE, size=count * PAGE) for first, count in pages]


@pytest.fixture(scope="module", autouse=True)
def small_windows() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_windows, "WINDOW_BYTES", WINDOW)
        patch.setattr(memory_windows, "LIMIT_BYTES", LIMIT)
        patch.setattr(memory_windows, "TEXT_BEYOND_BYTES", PAGE)
        yield


Open = Callable[[bytes], int]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """Writes an address space to a file and opens it, as /proc/PID/mem would be."""
    path: Path = tmp_path_factory.mktemp("memory") / "mem"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def write(data: bytes) -> int:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, data, 0)
        return descriptor

    yield write
    os.close(descriptor)


def module(size: int, seed: int = 1) -> bytes:
    """Bytes that a fatbin's header says are one."""
    body = random.Random(seed).randbytes(size - fatbin.HEADER_BYTES)
    header = fatbin.HEADER.pack(0xBA55ED50, 1, 16, size - fatbin.HEADER_BYTES)
    return header + body.replace(b"\0", b"\1")


def read(descriptor: int, spans: list[Span]) -> list[tuple[int, bytes]]:
    return [(w.address, bytes(w.data)) for w in Memory(descriptor, spans).windows()]


_layouts = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=8)


@settings(max_examples=60)
@given(layout=_layouts, marks=st.lists(st.tuples(st.integers(0, 400), st.integers(17, 80 * PAGE))))
def test_all_is_read_once_in_order_whatever_it_claims(
    opened: Open, layout: Spans, marks: Spans
) -> None:
    pages, at = [], 1
    for gap, count in layout:
        at += gap
        pages.append((at, count))
        at += count
    space = bytearray(random.Random(at).randbytes(at * PAGE))
    for where, claimed in marks:
        place = where * PAGE // 3
        head = module(17)[:8] + (claimed - 16).to_bytes(8, "little")
        space[place : place + len(head)] = head[: max(0, len(space) - place)]
    visible = bytearray(len(space))
    for first, count in pages:
        visible[first * PAGE : (first + count) * PAGE] = space[
            first * PAGE : (first + count) * PAGE
        ]
    windows = read(opened(bytes(space)), spans_of(pages))
    end = 0
    for address, data in windows:
        assert address >= end
        assert 0 < len(data) <= LIMIT
        assert data == bytes(visible[address : address + len(data)]).ljust(len(data), b"\0")
        end = address + len(data)
    covered = {a // PAGE + i for a, d in windows for i in range((len(d) + a % PAGE) // PAGE + 1)}
    assert {first + i for first, count in pages for i in range(count)} <= covered
    assert sum(len(d) for _, d in windows) >= sum(count for _, count in pages) * PAGE


@pytest.mark.parametrize("size", [100, WINDOW - 8, WINDOW, 3 * WINDOW, LIMIT - 100])
@pytest.mark.parametrize(
    "start", [3 * PAGE, 3 * PAGE + 4, WINDOW - 4, WINDOW + 1000, WINDOW * 2 - 9]
)
def test_a_module_that_fits_is_in_one_window(opened: Open, start: int, size: int) -> None:
    stored = module(size)
    space = bytearray((start + size) // PAGE * PAGE + 40 * PAGE)
    space[start : start + size] = stored
    windows = read(opened(bytes(space)), spans_of([(2, len(space) // PAGE - 2)]))
    assert sum(stored in data for _, data in windows) == 1


@given(layout=_layouts, size=st.integers(1, 80))
def test_parts_are_all_of_it_and_none_twice(layout: Spans, size: int) -> None:
    pages, at = [], 0
    for gap, count in layout:
        pages.append((at + gap * 16, count * 16))
        at += (gap + count) * 16
    spans = spans_of(pages)
    begin, own = 0, set[int]()
    found = list(parts(spans, size * 16 * PAGE, LIMIT))
    for part in found:
        assert part.stop > begin
        mine = {
            page
            for span in part.spans
            for page in range(span.start // PAGE, (span.start + span.size) // PAGE)
        }
        assert all(page * PAGE >= begin for page in mine)
        here = {page for page in mine if page * PAGE < part.stop}
        assert part.bytes == len(here) * PAGE
        # What a module that begins before the stop may reach is in sight.
        reach = range(part.stop // PAGE, (part.stop + LIMIT) // PAGE)
        assert {p for f, n in pages for p in range(f, f + n) if p in reach} <= mine
        own |= here
        begin = part.stop
    assert own == {page for first, count in pages for page in range(first, first + count)}
    assert sum(part.bytes for part in found) == len(own) * PAGE
    assert all(part.bytes < 3 * size * 16 * PAGE for part in found)


@pytest.mark.parametrize("start", [40 * PAGE, 63 * PAGE + 5, 64 * PAGE - 8, 64 * PAGE - 4])
@pytest.mark.parametrize("size", [PAGE, 3 * WINDOW])
def test_a_module_that_crosses_from_part_to_part_is_in_one_window(
    opened: Open, start: int, size: int
) -> None:
    stored = module(size)
    space = bytearray(256 * PAGE)
    space[start : start + size] = stored
    descriptor = opened(bytes(space))
    windows = [
        bytes(window.data)
        for part in parts([Span(start=0, size=len(space))], 64 * PAGE, LIMIT)
        for window in Memory(descriptor, part.spans, part.stop).windows()
    ]
    assert any(stored in data for data in windows)
    assert sum(map(len, windows)) < 2 * len(space), "little is read twice"


def test_untouched_pages_inside_a_module_are_its_zeros(opened: Open) -> None:
    stored = bytearray(module(40 * PAGE))
    stored[10 * PAGE : 35 * PAGE] = bytes(25 * PAGE)
    space = bytes(4 * PAGE) + bytes(stored) + bytes(4 * PAGE)
    windows = read(opened(space), spans_of([(4, 10), (39, 5)]))
    assert sum(bytes(stored) in data for _, data in windows) == 1


def test_far_spans_are_not_joined(opened: Open) -> None:
    space = bytes(2000 * PAGE)
    windows = read(opened(space), spans_of([(1, 1), (1500, 1)]))
    assert [(a // PAGE, len(d) // PAGE) for a, d in windows] == [(1, 1), (1500, 1)]


def test_memory_that_ends_is_said_to_have(opened: Open) -> None:
    memory = Memory(opened(bytes(4 * PAGE)), spans_of([(1, 10), (900, 1)]))
    assert sum(len(w.data) for w in memory.windows()) == 10 * PAGE
    assert memory.has_ended
    assert (memory.read_bytes, memory.lost_bytes) == (3 * PAGE, 7 * PAGE)


AMD = "hipv4-amdgcn-amd-amdhsa--gfx90a"
BUNDLE = gpu_images.bundle({AMD: gpu_images.amd_code_object()})
FORMATS: dict[str, bytes] = {
    "cubin": gpu_images.cubin(),
    "PTX": gpu_images.ptx(),
    "fatbin": gpu_images.fatbin([gpu_images.EntryImage("cubin", gpu_images.cubin())]),
    "Tile IR": gpu_images.tile_ir(),
    "bundle": BUNDLE,
    "compressed bundle": gpu_images.compressed_bundle(BUNDLE),
}


@pytest.mark.parametrize("form", FORMATS)
def test_a_window_with_any_form_of_gpu_code_is_looked_through(opened: Open, form: str) -> None:
    """What is passed over must be what nothing would have been found in."""
    space = bytes(PAGE + 24) + FORMATS[form]
    space += bytes(-len(space) % PAGE + PAGE)
    spans = (Span(start=PAGE, size=len(space) - PAGE, mapping="[heap]"),)
    task = MemoryTask(number=0, place=Place(target="pid 1"), spans=spans)
    memory = Memory(opened(space), spans)
    found = [one for one in memory_modules(memory, task) if isinstance(one, Located)]
    assert found
    assert {one.place.mapping for one in found} == {"[heap]"}
    assert all((one.place.offset or 0) >= PAGE + 24 for one in found)


def test_memory_without_any_beginning_of_gpu_code_is_passed_over(opened: Open) -> None:
    memory = Memory(opened(random.Random(5).randbytes(32 * PAGE)), spans_of([(0, 32)]))
    assert not any(window.is_marked for window in memory.windows())
