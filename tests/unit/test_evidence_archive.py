"""The writer of evidence archives: any tar opens them, and they keep within their bounds."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import zstandard
from msgspec.structs import replace

from gpuwarden import tar_format
from gpuwarden.errors import Malformed, Unavailable, UsageError
from gpuwarden.evidence import archive, directory
from gpuwarden.evidence import manifest as words
from gpuwarden.evidence.archive import ArchiveWriter
from gpuwarden.evidence.clock import read_clock
from gpuwarden.evidence.verify import verify
from tests.support.archives import ACCOUNT, LIMIT_BYTES, MEMBERS, sealed

WHAT = "something"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out" / "one.tar"


@pytest.fixture
def writer(path: Path) -> Iterator[ArchiveWriter]:
    with ArchiveWriter(str(path), limit_bytes=LIMIT_BYTES) as one:
        yield one


def test_any_tar_opens_it(path: Path, tmp_path: Path) -> None:
    sealed(path)
    subprocess.run(["tar", "xf", path, "-C", tmp_path], check=True, capture_output=True)
    for name, data in MEMBERS.items():
        assert (tmp_path / name).read_bytes() == data
    with tarfile.open(path) as opened:
        assert opened.getnames() == [*MEMBERS, words.MANIFEST, words.SEAL]
        assert {(one.uid, one.gid, one.mode, one.type) for one in opened} == {
            (0, 0, 0o600, tarfile.REGTYPE)
        }
        assert len({one.mtime for one in opened}) == 1


def test_the_manifest_names_every_member_with_its_digest(path: Path) -> None:
    told = sealed(path)
    by_name = {member.name: member for member in told.manifest.members}
    assert list(by_name) == list(MEMBERS)
    for name, data in MEMBERS.items():
        assert by_name[name].sha256 == hashlib.sha256(data).hexdigest()
        assert by_name[name].size_bytes == len(data)
    assert told.size_bytes == path.stat().st_size
    with tarfile.open(path) as one:
        manifest = one.extractfile(words.MANIFEST)
        assert manifest is not None
        assert hashlib.sha256(manifest.read()).hexdigest() == told.manifest_sha256


def test_others_can_neither_read_nor_list_it(path: Path) -> None:
    sealed(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_what_is_compressed_has_both_digests(writer: ArchiveWriter, path: Path) -> None:
    plain = b"sparse" * 50_000
    member = writer.add("memory/heap", iter([plain]), what=WHAT, compress=True)
    assert member is not None and member.name == "memory/heap.zst"
    assert (member.plain_size_bytes, member.plain_sha256) == (
        len(plain),
        hashlib.sha256(plain).hexdigest(),
    )
    writer.close(ACCOUNT, None)
    with tarfile.open(path) as one:
        stored = one.extractfile("memory/heap.zst")
        assert stored is not None
        data = stored.read()
    assert hashlib.sha256(data).hexdigest() == member.sha256
    assert zstandard.ZstdDecompressor().decompressobj().decompress(data) == plain


def test_a_descriptor_is_read_to_its_end(writer: ArchiveWriter) -> None:
    handle = os.open("/bin/sh", os.O_RDONLY)
    try:
        member = writer.add("exe", handle, what=WHAT)
    finally:
        os.close(handle)
    assert member is not None
    assert member.sha256 == hashlib.sha256(Path("/bin/sh").read_bytes()).hexdigest()


def test_a_source_that_fails_leaves_what_it_gave(writer: ArchiveWriter, path: Path) -> None:
    def dies() -> Iterator[bytes]:
        yield b"first half"
        raise ProcessLookupError(errno.ESRCH, "No such process")

    member = writer.add("memory/1", dies(), what=WHAT)
    assert member is not None and member.size_bytes == 10
    assert member.cut == "No such process"
    writer.close(ACCOUNT, None)
    assert verify(str(path)).state == "intact"


def test_a_source_that_gives_nothing_is_told_as_unread(writer: ArchiveWriter) -> None:
    def dies() -> Iterator[bytes]:
        raise Unavailable("gone")
        yield b""

    assert writer.add("memory/1", dies(), what="its memory") is None
    assert [(one.what, one.why) for one in writer.close(ACCOUNT, None).manifest.unread] == [
        ("its memory", "gone")
    ]


def test_what_is_too_large_is_named_and_leaves_no_trace(writer: ArchiveWriter, path: Path) -> None:
    pieces = (b"x" * 65536 for _ in range(1 << 20))
    assert writer.add("large", pieces, what="a large thing") is None
    assert writer.add("said", iter([b"x"]), what="said to be large", size_bytes=1 << 40) is None
    assert writer.add("small", b"kept", what=WHAT) is not None
    manifest = writer.close(ACCOUNT, None).manifest
    assert [one.what for one in manifest.left_out] == ["a large thing", "said to be large"]
    assert manifest.left_out[1].size_bytes == 1 << 40
    assert [one.name for one in manifest.members] == ["small"]
    assert verify(str(path)).state == "intact"
    assert path.stat().st_size < 1 << 20


def test_a_source_without_an_end_is_cut_where_asked(writer: ArchiveWriter) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b"0123456789"

    member = writer.add("a", endless(), what=WHAT, limit_bytes=25, cut=True)
    assert member is not None and member.size_bytes == 25
    assert "25" in member.cut
    squeezed = writer.add("b", endless(), what=WHAT, limit_bytes=25, cut=True, compress=True)
    assert squeezed is not None and squeezed.plain_size_bytes == 25


@pytest.mark.parametrize("compress", [False, True])
def test_the_whole_file_keeps_within_its_limit(path: Path, compress: bool) -> None:
    limit = archive.SMALLEST_BYTES
    with ArchiveWriter(str(path), limit_bytes=limit) as writer:
        for number in range(200):
            data = os.urandom(7000)
            writer.add(f"m{number}", iter([data]), what="w" * 500, compress=compress, cut=True)
        manifest = writer.close(ACCOUNT, None).manifest
    assert path.stat().st_size <= limit
    assert manifest.left_out or any(one.cut for one in manifest.members)
    assert verify(str(path)).state == "intact"


def test_notes_are_bounded_and_counted(writer: ArchiveWriter, path: Path) -> None:
    for number in range(words.OMISSIONS_LIMIT + 7):
        writer.left_out(f"{number}", "\x00" * 2000)
    manifest = writer.close(ACCOUNT, None).manifest
    assert len(manifest.left_out) + manifest.left_out_more == words.OMISSIONS_LIMIT + 7
    assert manifest.left_out_more >= 7
    assert path.stat().st_size <= LIMIT_BYTES


def test_a_full_disk_costs_the_member_and_not_the_archive(
    writer: ArchiveWriter, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.add("first", b"kept", what=WHAT)
    real = os.pwrite

    def full(handle: int, data: bytes, at: int) -> int:
        if at + len(data) > 64 << 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    assert writer.add("second", (b"x" * 1000 for _ in range(1000)), what="too much") is None
    manifest = writer.close(ACCOUNT, None).manifest
    assert [one.name for one in manifest.members] == ["first"]
    assert [(one.what, one.why) for one in manifest.left_out] == [
        ("too much", "the disk has no more room")
    ]
    assert verify(str(path)).state == "intact"


def test_room_is_left_on_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "free_bytes", lambda _: archive.DISK_RESERVE_BYTES + 1000)
    with pytest.raises(Unavailable, match="stay free"):
        ArchiveWriter(str(path), limit_bytes=LIMIT_BYTES)
    assert list(path.parent.iterdir()) == []


def test_after_its_deadline_nothing_more_is_taken(path: Path) -> None:
    with ArchiveWriter(str(path), limit_bytes=LIMIT_BYTES, deadline_seconds=0) as writer:
        assert writer.add("late", b"x", what="late") is None
        manifest = writer.close(ACCOUNT, None).manifest
    assert [(one.what, one.why) for one in manifest.left_out] == [("late", "no time left")]


@pytest.mark.parametrize(
    "name",
    [
        *("", "/etc/passwd", "../up", "a/../b", "a//b", ".hidden", "a/.b", "a b", "a\nb", "ä"),
        *("-rf", "a" * 97, words.MANIFEST, words.SEAL),
    ],
)
def test_a_name_that_cannot_be_is_refused(writer: ArchiveWriter, name: str) -> None:
    with pytest.raises(UsageError):
        writer.add(name, b"x", what=WHAT)


@pytest.mark.parametrize("second", ["a/b", "a", "a/b/c"])
def test_two_members_never_meet(writer: ArchiveWriter, second: str) -> None:
    writer.add("a/b", b"x", what=WHAT)
    with pytest.raises(UsageError):
        writer.add(second, b"y", what=WHAT)


def test_an_archive_is_never_written_over(path: Path) -> None:
    sealed(path)
    before = path.read_bytes()
    with pytest.raises(UsageError, match="is there already"):
        ArchiveWriter(str(path), limit_bytes=LIMIT_BYTES)
    assert path.read_bytes() == before


def test_a_link_in_its_place_is_not_followed(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    path.parent.mkdir(mode=0o700)
    path.with_name(path.name + ".partial").symlink_to(target)
    with pytest.raises(UsageError):
        ArchiveWriter(str(path), limit_bytes=LIMIT_BYTES)
    assert not target.exists()


def test_a_directory_that_others_write_is_refused(path: Path) -> None:
    path.parent.mkdir()
    path.parent.chmod(0o777)
    with pytest.raises(UsageError, match="others may write"):
        ArchiveWriter(str(path), limit_bytes=LIMIT_BYTES)
    path.parent.chmod(0o1777)
    sealed(path)


def test_what_is_not_sealed_stays_partial(path: Path) -> None:
    with ArchiveWriter(str(path), limit_bytes=LIMIT_BYTES) as writer:
        writer.add("a", b"x", what=WHAT)
    assert [one.name for one in path.parent.iterdir()] == [path.name + ".partial"]


def test_an_account_is_bounded(writer: ArchiveWriter) -> None:
    with pytest.raises(Malformed):
        writer.close(replace(ACCOUNT, findings=("f" * 1000,) * 400), None)


def test_a_directory_says_what_it_holds(path: Path) -> None:
    assert directory.held_bytes(str(path.parent)) == 0
    sealed(path, {"a": os.urandom(1 << 20)})
    assert (1 << 20) <= directory.held_bytes(str(path.parent)) < (2 << 20)


def test_the_clock_says_what_it_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = read_clock()
    assert sound.boot_id is not None and len(sound.boot_id) == 36
    assert sound.boottime_ns > 0
    monkeypatch.setattr("gpuwarden.evidence.clock.BOOT_ID", "/nonexistent")
    monkeypatch.setattr("gpuwarden.evidence.clock.ctypes.CDLL", lambda *_, **__: SimpleNamespace())
    blind = read_clock()
    assert (blind.boot_id, blind.synchronised) == (None, None)
    assert {"boot_id", "synchronised"} <= set(blind.unread)


def test_a_header_follows_from_four_values() -> None:
    header = tar_format.Header("a/b", 513, 1_700_000_000, b"\x07" * 32)
    assert tar_format.decode(tar_format.encode(header)) == header
    assert header.padding == 511
    with pytest.raises(ValueError, match="no such member"):
        tar_format.encode(tar_format.Header("a", tar_format.SIZE_LIMIT_BYTES + 1, 0, b"\x07" * 32))
