"""Loads put together from records: whole, broken, nested, forgotten; spool; images in memory."""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.code import elf, fatbin
from gpuwarden.errors import Malformed
from gpuwarden.probes.cuda import captures
from gpuwarden.probes.cuda.call_points import CALLS
from gpuwarden.probes.cuda.call_records import PIECE_BYTES, Call, Copied, LoadBegun, Piece, Returned
from gpuwarden.probes.cuda.captures import LOADS_LIMIT, LOST, REASONS, ROOM, Captures
from gpuwarden.probes.cuda.image_memory import Extent, Read, extents
from gpuwarden.probes.cuda.records import CapturedLoad
from gpuwarden.probes.cuda.spool import BLOCK_BYTES, STAGED_FROM_BYTES, Blocks, Image
from gpuwarden.probes.events import ProcessIdentity
from tests.support import gpu_images

FUNCTIONS = {each.function: number for number, each in enumerate(CALLS)}
SPOOL = 1 << 24
WRAPPER_MAGIC = gpu_images.wrapper()[:4]


class Loads:
    """Records of loads, as the ring would give them."""

    def __init__(self, spool_bytes: int = SPOOL) -> None:
        self.captures = Captures(spool_bytes)
        self.told: list[CapturedLoad] = []

    def call(self, begun_ns: int, function: str = "cuModuleLoadData", pid: int = 5) -> Call:
        return Call(begun_ns, begun_ns, 3, 5, pid, 0, FUNCTIONS[function])

    def begin(self, call: Call, size: int = 0, within_ns: int = 0) -> None:
        process = ProcessIdentity(pid=call.tgid, start_time_ns=call.start_ns)
        oldest = self.captures.begin(LoadBegun(call, 64, 64, size, within_ns, 1, 0, process))
        if oldest is not None:
            self.tell(oldest)

    def piece(self, call: Call, data: bytes, offset: int, of: int = 0) -> None:
        record = ctypes.create_string_buffer(bytes(PIECE_BYTES) + data)
        self.captures.piece(Piece(call, offset, len(data), of), ctypes.addressof(record))

    def copied(self, call: Call, size: int, sent: int | None = None, missing: int = 0) -> None:
        sent_bytes = size if sent is None else sent
        capture = self.captures.copied(Copied(call, 64, size, sent_bytes, 1, missing, 0, 0))
        if capture is not None:
            self.tell(capture)

    def tell(self, capture: captures.Capture) -> None:
        load = self.captures.load(capture)
        if load is not None:
            self.told.append(load)

    def whole(self, call: Call, data: bytes, within_ns: int = 0) -> None:
        self.begin(call, len(data), within_ns)
        half = len(data) // 2
        self.piece(call, data[:half], 0)
        self.piece(call, data[half:], half)
        self.copied(call, len(data))

    def close(self) -> None:
        self.captures.close()
        for load in self.told:
            if load.descriptor is not None:
                os.close(load.descriptor)


@pytest.fixture
def loads() -> Iterator[Loads]:
    before = set(os.listdir("/proc/self/fd"))
    made = Loads()
    yield made
    made.close()
    assert set(os.listdir("/proc/self/fd")) == before


def content(load: CapturedLoad) -> bytes | None:
    if load.descriptor is None:
        return None
    return os.pread(load.descriptor, load.captured_bytes + 1, 0)


# -------------------------------------------------------------------- one load


@pytest.mark.parametrize("size", [2, 5000, STAGED_FROM_BYTES - 1, BLOCK_BYTES * 2 + 17])
def test_a_whole_load(loads: Loads, size: int) -> None:
    data = os.urandom(size)
    loads.whole(loads.call(1), data)
    (load,) = loads.told
    assert (load.missed, load.image_bytes, load.captured_bytes) == ("", size, size)
    assert content(load) == data
    assert load.descriptor is not None
    with pytest.raises(OSError):
        os.pwrite(load.descriptor, b"x", 0)


def test_loads_of_several_threads_mix(loads: Loads) -> None:
    calls = [loads.call(7, pid=pid) for pid in (5, 6, 7)]
    for call in calls:
        loads.begin(call, 4)
    for at in range(4):
        for call in calls:
            loads.piece(call, bytes((call.pid,)), at)
    for call in calls:
        loads.copied(call, 4)
    assert [content(load) for load in loads.told] == [bytes((pid,)) * 4 for pid in (5, 6, 7)]
    assert [load.number for load in loads.told] == [1, 2, 3]


def test_what_is_missing_is_said(loads: Loads) -> None:
    call = loads.call(1)
    loads.begin(call, 100)
    loads.piece(call, b"abc", 0)
    loads.copied(call, 100, sent=3, missing=ROOM)
    (load,) = loads.told
    assert (load.missed, load.image_bytes, content(load)) == (REASONS[ROOM], 100, b"abc")


@pytest.mark.parametrize(
    "pieces", [[], [(0, b"ab")], [(0, b"ab"), (90, b"cd")], [(4, b"cd"), (0, b"ab")]]
)
def test_a_piece_that_was_lost(loads: Loads, pieces: list[tuple[int, bytes]]) -> None:
    call = loads.call(1)
    loads.begin(call, 100)
    for offset, data in pieces:
        loads.piece(call, data, offset)
    loads.copied(call, 100)
    assert loads.told[0].missed == LOST


def test_pieces_and_ends_of_what_did_not_begin(loads: Loads) -> None:
    loads.piece(loads.call(1), b"ab", 0)
    loads.copied(loads.call(1), 2)
    assert loads.captures.returned(Returned(loads.call(1), 9, 0)) is None
    assert not loads.told


def test_a_load_by_name(loads: Loads) -> None:
    call = loads.call(1, "cuModuleLoad")
    loads.begin(call)
    loads.piece(call, b"/lib/\xff", 0, of=1)
    loads.piece(call, b"b" * 5000, 6, of=1)
    loads.copied(call, 0)
    (load,) = loads.told
    assert load.path is not None and os.fsencode(load.path) == b"/lib/\xff" + b"b" * 4090
    assert (load.missed, load.image_bytes, load.descriptor) == ("", None, None)


def test_no_more_is_held_than_may_be() -> None:
    loads = Loads(spool_bytes=100)
    for number in range(3):
        loads.begin(loads.call(number, pid=number), 60)
        loads.piece(loads.call(number, pid=number), b"x" * 60, 0)
        if number == 0:
            loads.copied(loads.call(0, pid=0), 60)
    for number in (1, 2):
        loads.copied(loads.call(number, pid=number), 60)
    assert [load.missed for load in loads.told] == ["", "", "too many bytes are held at once"]
    loads.close()


def test_no_more_loads_are_held_than_may_be(loads: Loads) -> None:
    for number in range(LOADS_LIMIT + 1):
        loads.begin(loads.call(number + 1, pid=number), 10)
    assert [load.missed for load in loads.told] == ["too many loads are copied at once"]
    assert loads.told[0].thread_id == 0


def test_loads_that_do_not_end(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    loads.begin(loads.call(1), 10)
    loads.piece(loads.call(1), b"abc", 0)
    assert not loads.captures.overdue(now + captures.PATIENCE_SECONDS)
    for capture in loads.captures.overdue(now + captures.PATIENCE_SECONDS + 1):
        loads.tell(capture)
    loads.copied(loads.call(1), 10)
    (load,) = loads.told
    assert "not at its end" in load.missed and content(load) == b"abc"


def test_processes_that_have_ended(loads: Loads) -> None:
    loads.begin(loads.call(1), 10)
    loads.whole(loads.call(1, pid=6), b"abcd")
    assert not loads.captures.forget(5, 4)
    for capture in loads.captures.forget(5, 3):
        loads.tell(capture)
    assert [load.missed for load in loads.told] == ["", "the process ended meanwhile"]
    assert loads.captures.returned(Returned(loads.call(1, pid=6), 9, 0)) is None


# -------------------------------------------------------------------- nested loads


def test_the_same_image_further_in_is_the_same_load(loads: Loads) -> None:
    loads.whole(loads.call(1, "cuLibraryLoadData"), b"image")
    loads.whole(loads.call(2, "cuModuleLoadDataEx"), b"image", within_ns=1)
    loads.whole(loads.call(3), b"image", within_ns=1)
    assert [(load.function, load.number) for load in loads.told] == [("cuLibraryLoadData", 1)]
    came = [loads.captures.returned(Returned(loads.call(at), 8, 0)) for at in (3, 2, 1)]
    assert [one.number for one in came if one is not None] == [1, 1, 1]


@pytest.mark.parametrize("other", [b"other", b"imag", b"images"])
def test_other_bytes_further_in_are_another_load(loads: Loads, other: bytes) -> None:
    loads.whole(loads.call(1), b"image")
    loads.whole(loads.call(2), other, within_ns=1)
    assert [content(load) for load in loads.told] == [b"image", other]
    assert [load.number for load in loads.told] == [1, 2]


def test_what_is_missing_is_never_the_same(loads: Loads) -> None:
    loads.whole(loads.call(1), b"image")
    loads.begin(loads.call(2), 5, within_ns=1)
    loads.piece(loads.call(2), b"ima", 0)
    loads.copied(loads.call(2), 5, sent=3, missing=ROOM)
    assert [load.missed for load in loads.told] == ["", REASONS[ROOM]]


def test_a_load_by_name_gets_the_bytes_of_what_is_further_in(loads: Loads) -> None:
    by_name = loads.call(1, "cuModuleLoad")
    loads.begin(by_name)
    loads.piece(by_name, b"/lib/a.cubin", 0, of=1)
    loads.copied(by_name, 0)
    loads.whole(loads.call(2, "cuModuleLoadDataEx"), b"image", within_ns=1)
    loads.whole(loads.call(3), b"image", within_ns=2)
    assert [(load.number, load.function, load.path) for load in loads.told] == [
        (1, "cuModuleLoad", "/lib/a.cubin")
    ] * 2
    assert [content(load) for load in loads.told] == [None, b"image"]


# -------------------------------------------------------------------- any records

_CALLS = st.builds(
    lambda begun, pid, function: Call(begun, begun, 3, 5, pid, 0, function),
    st.integers(0, 3),
    st.integers(0, 2),
    st.integers(0, len(CALLS) - 1),
)
_STEPS = st.one_of(
    st.tuples(st.just("begin"), _CALLS, st.integers(0, 1 << 22), st.integers(0, 3)),
    st.tuples(st.just("piece"), _CALLS, st.binary(max_size=40), st.integers(0, 60)),
    st.tuples(st.just("copied"), _CALLS, st.integers(0, 100), st.integers(0, 9)),
    st.tuples(st.just("returned"), _CALLS, st.just(0), st.just(0)),
    st.tuples(st.just("forget"), _CALLS, st.just(0), st.just(0)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(_STEPS, max_size=40))
def test_any_records_in_any_order(steps: list[tuple[str, Call, int | bytes, int]]) -> None:
    loads = Loads(spool_bytes=500)
    begun = set()
    for what, call, first, second in steps:
        if what == "begin" and isinstance(first, int):
            loads.begin(call, first, second)
            begun.add(call.load)
        elif what == "piece" and isinstance(first, bytes):
            loads.piece(call, first, second, of=second & 1)
        elif what == "copied" and isinstance(first, int):
            loads.copied(call, first, missing=second)
        elif what == "returned":
            loads.captures.returned(Returned(call, 1, 0))
        else:
            for capture in loads.captures.forget(call.tgid, call.start_ns):
                loads.tell(capture)
    for load in loads.told:
        data = content(load)
        assert (data is None) == (load.descriptor is None)
        assert data is None or len(data) == load.captured_bytes
    loads.close()


# -------------------------------------------------------------------- the spool


USED_BLOCKS = Blocks()


def test_what_one_image_leaves_is_not_in_the_next() -> None:
    memory = ctypes.create_string_buffer(b"x" * 64, 64)
    for gap in (0, 7):
        image = Image(USED_BLOCKS, STAGED_FROM_BYTES)
        image.append(ctypes.addressof(memory), 5, 0)
        image.append(ctypes.addressof(memory), 5, 5 + gap)
        descriptor = image.file()
        assert descriptor is not None
        assert os.pread(descriptor, 100, 0) == b"xxxxx" + bytes(gap) + b"xxxxx"
        os.close(descriptor)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([0, STAGED_FROM_BYTES - 1, STAGED_FROM_BYTES]),
    st.lists(st.tuples(st.binary(max_size=300), st.integers(0, 7)), max_size=12),
    st.integers(1, 700),
    st.binary(max_size=50),
    st.integers(0, 60),
)
def test_an_image_is_what_was_added(
    expected: int, parts: list[tuple[bytes, int]], slice_bytes: int, rest: bytes, skipped: int
) -> None:
    image, wanted = Image(USED_BLOCKS, expected), b""
    for data, gap in parts:
        wanted += bytes(gap if data else 0)
        memory = ctypes.create_string_buffer(data, max(len(data), 1))
        image.append(ctypes.addressof(memory), len(data), len(wanted))
        wanted += data
    last = image.last(100)
    assert last == (wanted[-100:] if wanted else b"")
    while image.move(slice_bytes):
        pass
    more = os.memfd_create("more")
    os.pwrite(more, rest, 0)
    image.append_file(more, skipped)
    os.close(more)
    wanted += rest[skipped:]
    descriptor = image.file()
    image.close()
    if descriptor is None:
        assert not wanted
        return
    assert os.pread(descriptor, len(wanted) + 1, 0) == wanted
    os.close(descriptor)


# -------------------------------------------------------------------- images in memory


def reader(parts: dict[int, bytes]) -> Read:
    def read(address: int, size: int) -> bytes:
        for start, data in parts.items():
            if start <= address < start + len(data):
                return data[address - start : address - start + size]
        return b""

    return read


def test_extents_of_every_form() -> None:
    packed = gpu_images.fatbin([gpu_images.EntryImage("ptx", gpu_images.ptx("a"))])
    module = gpu_images.cubin([])
    tile = gpu_images.tile_ir()
    parts = {
        0x1000: packed,
        0x100000: module + b"more",
        0x200000: tile + b"more",
        0x300000: b".version 8.0\0",
        0x400000: gpu_images.wrapper(1, 0x1000),
        0x500000: gpu_images.wrapper(2, 0x1000, 0x600000),
        0x600000: struct.pack("<QQ", 0x1000, 0),
        0x700000: gpu_images.wrapper(2, 0x1000, 0x800000),
        0x800000: struct.pack("<Q", 0x1000) * 100,
    }
    read = reader(parts)
    whole = Extent(0x1000, len(packed))
    assert list(extents(read, 0x1000)) == list(extents(read, 0x400000)) == [whole]
    assert list(extents(read, 0x500000)) == [whole, whole]
    assert list(extents(read, 0x100000)) == [Extent(0x100000, elf.end_of(module))]
    assert list(extents(read, 0x200000)) == [Extent(0x200000, len(tile))]
    assert list(extents(read, 0x300000)) == [Extent(0x300000, 0, until_nul=True)]
    for nowhere in (0, 0x700000):
        with pytest.raises(Malformed):
            list(extents(read, nowhere))


@settings(max_examples=300)
@given(
    st.sampled_from(
        [b"", fatbin.MAGIC, b"\x7fELF\x02\x01\x01", b"\xb1\x43\x62\x46", b"\x7fTileIR\0"]
    ),
    st.binary(max_size=300),
)
def test_any_memory(magic: bytes, data: bytes) -> None:
    try:
        for extent in extents(reader({0: magic + data}), 0):
            assert extent.size_bytes >= 0
    except Malformed:
        pass
