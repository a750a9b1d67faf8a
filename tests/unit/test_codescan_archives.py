"""Readers of archives and streams: any bytes give members or Malformed, real ones all of them."""

from __future__ import annotations

import gzip
import io
import os
import random
import tarfile
import zipfile
from collections.abc import Callable

import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from gpuwarden.code import fatbin
from gpuwarden.code.module import Place
from gpuwarden.codescan import tar, zips
from gpuwarden.codescan.board import Board
from gpuwarden.codescan.contents import Examiner
from gpuwarden.codescan.share import Share
from gpuwarden.codescan.streams import (
    FRAMES,
    Budget,
    Buffered,
    Chained,
    DescriptorStream,
    MemoryStream,
    Part,
    Stream,
    Unpacked,
    compression,
    read_up_to,
)
from gpuwarden.codescan.tasks import Answer, Done, FileTask, Settings
from gpuwarden.codescan.windows import windows
from gpuwarden.errors import Malformed
from tests.support.code_scans import Entry, code, docker_archive, oci_blobs, tar_of
from tests.support.gpu_images import EntryImage, archive
from tests.support.gpu_images import fatbin as fatbin_of


class Drips:
    """A stream that gives a few bytes at a time, as a pipe may."""

    def __init__(self, data: bytes, most: int) -> None:
        self._file = io.BytesIO(data)
        self._most = most

    def read(self, size: int, /) -> bytes:
        return self._file.read(min(size, self._most))


def all_of(stream: Stream) -> bytes:
    return bytes(read_up_to(stream, 1 << 40))


# ------------------------------------------------------------------------------ tar

names = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=300),
    st.lists(st.sampled_from(["usr", "lib", "é", "x" * 60]), min_size=1, max_size=6).map("/".join),
).filter(lambda name: name.strip("/") != "")


@example([("é\n", b"ends like the record that it is in")], tarfile.PAX_FORMAT, 100)
@given(
    st.lists(st.tuples(names, st.binary(max_size=2000)), max_size=6),
    st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
    st.integers(1, 5000),
)
def test_tar_members_are_those_of_python_s_reader(
    entries: list[tuple[str, bytes]], style: int, most: int
) -> None:
    data = tar_of(entries, style=style)
    with tarfile.open(fileobj=io.BytesIO(data)) as reader:
        wanted = [
            (m.name, reader.extractfile(m).read() if m.isfile() else b"")  # type: ignore[union-attr]
            for m in reader
        ]
    found = [
        (m.name.rstrip("/"), all_of(m.data)) for m in tar.members(Buffered(Drips(data, most)), 100)
    ]
    assert [(name.rstrip("/"), data) for name, data in wanted] == found


def test_tar_kinds_sizes_and_links() -> None:
    entries: dict[str, bytes | Entry] = {
        "f": b"1234",
        "d": Entry(kind=b"5"),
        "s": Entry(kind=b"2", link="f"),
        "h": Entry(kind=b"1", link="f" * 200),
        "c": Entry(kind=b"3"),
        "p": Entry(kind=b"6"),
    }
    found = [
        (m.name.rstrip("/"), m.kind, m.size, m.link)
        for m in tar.members(Buffered(MemoryStream(tar_of(entries))), 100)
    ]
    assert found == [
        ("f", "file", 4, ""),
        ("d", "directory", 0, ""),
        ("s", "symbolic link", 0, "f"),
        ("h", "hard link", 0, "f" * 200),
        ("c", "device", 0, ""),
        ("p", "FIFO", 0, ""),
    ]


def header(**fields: bytes) -> bytes:
    """A ustar header with these fields as they are, and the right checksum."""
    block = bytearray(tar_of({"name": b""})[:512])
    places = {"size": 124, "kind": 156, "name": 0, "magic": 257}
    for name, value in fields.items():
        block[places[name] : places[name] + len(value)] = value
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (header(size=b"\xff" * 12), "a size that cannot be"),
        (header(size=b"\x80" + b"\xff" * 11), "a size that cannot be"),
        (header(size=b"99999999999\0"), "a size that cannot be"),
        (header(size=b"00000002000\0") + bytes(100), "too early"),
        (header(kind=b"x", size=b"00004000001\0"), "an extended header of"),
        (header(kind=b"L", size=b"77777777777\0"), "an extended header of"),
        (header(kind=b"x", size=b"00000000010\0") + b"99 path=x\n", "cannot be read"),
        (header(kind=b"x", size=b"00000000010\0") + b"8 size=-1\n", "a size that cannot be"),
        (header() + b"x" * 512, "no header where one should be"),
        (header() + bytes(1024) + b"behind", "6 bytes behind the end"),
    ],
)
def test_tar_headers_that_cannot_be_are_malformed(data: bytes, reason: str) -> None:
    padded = data if reason.startswith("6") else data + bytes(-len(data) % 512)
    with pytest.raises(Malformed, match=reason):
        for member in tar.members(Buffered(MemoryStream(padded)), 100):
            all_of(member.data)


def mutated(data: bytes) -> st.SearchStrategy[bytes]:
    """``data`` with a few bytes changed, removed or repeated."""

    def change(steps: list[tuple[int, int, int]]) -> bytes:
        out = bytearray(data)
        for at, value, what in steps:
            place = at % max(1, len(out))
            if what == 0:
                out[place : place + 1] = bytes([value])
            elif what == 1:
                del out[place : place + 1 + value]
            else:
                out[place:place] = out[place : place + value]
        return bytes(out)

    step = st.tuples(st.integers(0, 1 << 20), st.integers(0, 255), st.integers(0, 2))
    return st.lists(step, min_size=1, max_size=6).map(change)


TAR = tar_of({"a/b": b"1234", "x" * 150: b"5" * 700, "l": Entry(kind=b"2", link="y" * 150)})


@given(st.binary(max_size=3000) | mutated(TAR))
def test_any_bytes_are_a_tar_or_malformed(data: bytes) -> None:
    count = 0
    try:
        for member in tar.members(Buffered(MemoryStream(data)), 100):
            count += 1
            all_of(member.data)
    except Malformed:
        pass
    assert count <= 100


def test_paths_in_archives_stay_below_the_root() -> None:
    assert tar.entry_path("./usr//lib/../bin/x") == "usr/bin/x"
    assert tar.entry_path("/../../etc/passwd") == "etc/passwd"
    assert tar.entry_path("..") == ""


# ------------------------------------------------------------------------------ zip

ZIP = io.BytesIO()
with zipfile.ZipFile(ZIP, "w", zipfile.ZIP_DEFLATED) as made:
    made.writestr("a.txt", b"text " * 50)
    made.writestr("é.bin", bytes(range(256)))
    made.writestr("folder/", b"")


@given(st.binary(max_size=500) | mutated(ZIP.getvalue()))
def test_any_bytes_are_a_zip_or_malformed(data: bytes) -> None:
    view = memoryview(data)
    zips.is_zip(view)
    try:
        found = zips.ZipArchive(view, Budget(1 << 20), 100)
    except Malformed:
        return
    assert found.has_gaps in (True, False)
    for member in found.members():
        try:
            all_of(member.data)
        except Malformed:
            pass


# ------------------------------------------------------------------------------ streams

PACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zstd": zstandard.compress,
    "bzip2": __import__("bz2").compress,
    "xz": __import__("lzma").compress,
    "lz4": __import__("lz4.frame").frame.compress,
}


@pytest.mark.parametrize("method", PACK)
@given(
    parts=st.lists(st.binary(max_size=3000), min_size=1, max_size=3),
    most=st.integers(1, 4000),
    size=st.integers(1, 5000),
)
def test_frames_one_after_the_other_are_unpacked(
    method: str, parts: list[bytes], most: int, size: int
) -> None:
    packed = b"".join(map(PACK[method], parts))
    assert compression(packed) == method
    stream = Unpacked(Drips(packed, most), method, Budget(1 << 30))
    out = bytearray()
    while data := stream.read(size):
        assert len(data) <= size
        out += data
    assert out == b"".join(parts)


@pytest.mark.parametrize("method", PACK)
@given(cut=st.integers(1, 200), junk=st.binary(max_size=40))
def test_frames_that_are_damaged_are_malformed_or_end(method: str, cut: int, junk: bytes) -> None:
    packed = PACK[method](random.Random(1).randbytes(1000))
    with pytest.raises(Malformed):
        all_of(Unpacked(MemoryStream(packed[:-cut]), method, Budget(1 << 30)))
    try:
        all_of(Unpacked(MemoryStream(packed[:20] + junk + packed[40:]), method, Budget(1 << 30)))
    except Malformed:
        pass


@given(st.sampled_from(["zstd", *FRAMES]), st.binary(max_size=300))
def test_any_bytes_unpack_or_are_malformed(method: str, data: bytes) -> None:
    magic = b"\x28\xb5\x2f\xfd" if method == "zstd" else FRAMES[method][0]
    try:
        all_of(Unpacked(MemoryStream(magic + data), method, Budget(1 << 24)))
    except Malformed:
        pass


@given(st.binary(max_size=300), st.lists(st.integers(0, 60), max_size=20), st.integers(1, 50))
def test_buffered_reading_loses_nothing(data: bytes, steps: list[int], most: int) -> None:
    stream, done = Buffered(Drips(data, most)), 0
    for number, size in enumerate(steps):
        if number % 3 == 0:
            assert stream.peek(size) == data[done : done + size]
        elif number % 3 == 1:
            assert stream.take(size) == data[done : done + size]
            done = min(len(data), done + size)
        else:
            skipped = stream.skip(size)
            assert skipped <= size
            done += skipped
    assert all_of(stream) == data[done:]
    assert all_of(Chained(data[:7], MemoryStream(data[7:]))) == data


def test_a_part_is_skipped_in_a_file_without_reading_it() -> None:
    descriptor = os.memfd_create("x")
    os.pwrite(descriptor, bytes(5 << 20) + b"after", 0)
    told: list[int] = []
    stream = Buffered(DescriptorStream(descriptor, (5 << 20) + 5, told.append))
    Part(stream, 5 << 20).skip()
    assert all_of(stream) == b"after"
    assert sum(told) == 5
    with pytest.raises(Malformed, match="1 bytes too early"):
        Part(Buffered(DescriptorStream(descriptor, 99)), 100).skip()
    os.close(descriptor)


# ------------------------------------------------------------------------------ windows


@given(
    pieces=st.lists(
        st.tuples(st.sampled_from(["bytes", "text", "module"]), st.integers(24, 900)), max_size=12
    ),
    size=st.sampled_from([512, 1024]),
    most=st.integers(50, 3000),
)
def test_windows_hold_every_module_whole_and_every_byte_once(
    pieces: list[tuple[str, int]], size: int, most: int
) -> None:
    data, modules = bytearray(), []
    for number, (kind, length) in enumerate(pieces):
        data += bytes(-len(data) % 8)
        if kind == "module":
            modules.append((len(data), length))
            body = random.Random(number).randbytes(length - 16).replace(b"\0", b"\1")
            data += fatbin.HEADER.pack(0xBA55ED50, 1, 16, length - 16) + body
        else:
            data += bytes(length) if kind == "bytes" else b"x" * length
    found = [(w.offset, bytes(w.data)) for w in windows(Drips(bytes(data), most), size, 4 * size)]
    assert b"".join(part for _, part in found) == bytes(data)
    at = 0
    for offset, part in found:
        assert offset == at
        at += len(part)
    for start, length in modules:
        assert any(o <= start and start + length <= o + len(part) for o, part in found)


@given(st.binary(max_size=4000), st.lists(st.integers(0, 3900), max_size=8))
def test_windows_of_hostile_headers_hold_every_byte_once(data: bytes, marks: list[int]) -> None:
    hostile = bytearray(data.ljust(4096, b"\1"))
    for mark in marks:
        claimed = random.Random(mark).choice([8, 900, 5000, 1 << 40, 2**64 - 17])
        hostile[mark : mark + 16] = fatbin.HEADER.pack(0xBA55ED50, 1, 16, claimed)
    found = list(windows(MemoryStream(bytes(hostile)), 512, 2048))
    assert b"".join(bytes(w.data) for w in found) == bytes(hostile)
    assert len(found) <= 64


def test_what_was_read_before_a_stream_failed_is_given_first() -> None:
    packed = gzip.compress(os.urandom(4000))
    parts = windows(Unpacked(MemoryStream(packed[:3000]), "gzip", Budget(1 << 20)))
    assert len(next(parts).data) > 1000
    with pytest.raises(Malformed, match="cut short"):
        next(parts)


@given(st.lists(st.integers(0, 1000), max_size=50), st.integers(1, 4))
def test_shares_are_one_owner_each(sizes: list[int], shares: int) -> None:
    workers = [Share(number, shares) for number in range(shares)]
    for size in sizes:
        assert sum(one.is_mine(size) for one in workers) == 1


# ------------------------------------------------------------------------------ all together


def examined(data: bytes, *, is_stream: bool) -> list[Answer]:
    """What a child would say of these bytes, said here."""
    answers: list[Answer] = []
    descriptor = os.memfd_create("x")
    os.write(descriptor, data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    board = Board()
    examiner = Examiner(Settings(), None, answers.append, board)
    task = FileTask(number=1, place=Place(target="x"), size=None if is_stream else len(data))
    examiner.file(task, descriptor)
    os.close(descriptor)
    board.close()
    return answers


WHOLE = {
    "docker": docker_archive([tar_of({"a": code("a")}), tar_of({".wh.a": b""})]),
    "oci": gzip.compress(tar_of(oci_blobs([gzip.compress(tar_of({"b": code("b")}))]))),
    "zip": ZIP.getvalue(),
    "deb": archive({"debian-binary": b"2.0\n", "data.tar": tar_of({"c": code("c")})}),
    "fatbin": fatbin_of([EntryImage("cubin", code("d"), codec="lz4")]),
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stream_tells_what_a_file_tells(name: str, is_stream: bool) -> None:
    kinds = [type(one).__name__ for one in examined(WHOLE[name], is_stream=is_stream)]
    assert kinds == [type(one).__name__ for one in examined(WHOLE[name], is_stream=False)]
    assert "Trouble" not in kinds
    assert ("Found" in kinds) == (name != "zip")


@given(
    st.one_of(st.binary(max_size=2000), *(mutated(data) for data in WHOLE.values())),
    st.booleans(),
)
def test_any_bytes_come_to_one_end(data: bytes, is_stream: bool) -> None:
    answers = examined(data, is_stream=is_stream)
    assert [isinstance(one, Done) for one in answers] == [False] * (len(answers) - 1) + [True]
