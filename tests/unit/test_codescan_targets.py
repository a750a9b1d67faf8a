"""From a target to a report: files, folders, archives; every module once, nothing unseen silent."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import lz4.frame  # type: ignore[import-untyped]
import pytest
import zstandard

from gpuwarden.code.bounds import Bounds
from gpuwarden.codescan.scan import Options
from gpuwarden.errors import UsageError
from tests.support.code_scans import Entry, code, module_of, names, scanned, tar_of, write_tree
from tests.support.gpu_images import EntryImage, archive, fatbin, program, ptx


def zip_of(files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as made:
        for name, data in files.items():
            made.writestr(name, data)
    return out.getvalue()


def test_a_file_tells_its_modules_with_where_they_are(tmp_path: Path) -> None:
    library = tmp_path / "libmodel.so"
    images = [EntryImage("cubin", code("one"), codec="zstd"), EntryImage("ptx", ptx(["two"]))]
    library.write_bytes(program({".nv_fatbin": fatbin(images), ".text": bytes(4096)}))
    report = scanned(library)
    assert names(report) == ["one", "two"]
    [target] = report.targets
    assert (target.what, target.modules, target.files) == ("file", 2, 1)
    assert target.read_bytes == library.stat().st_size
    place = module_of(report, "one").sightings[0].place
    assert (place.target, place.members, place.section) == (str(library), (), ".nv_fatbin")
    assert not report.problems
    assert not report.unconfined


def test_a_module_that_is_there_often_is_told_once_with_its_places(tmp_path: Path) -> None:
    write_tree(tmp_path, {"a/x.cubin": code("same"), "b.cubin": code("same"), "c": code("other")})
    report = scanned(tmp_path)
    assert names(report) == ["other", "same"]
    assert [one.place.members for one in module_of(report, "same").sightings] == [
        ("a/x.cubin",),
        ("b.cubin",),
    ]
    assert report.targets[0].modules == 3


def test_links_and_names_of_one_file_are_looked_at_once(tmp_path: Path) -> None:
    write_tree(tmp_path / "in", {"a.cubin": code("inside")})
    outside = write_tree(tmp_path / "out", {"b.cubin": code("outside")})
    os.link(tmp_path / "in/a.cubin", tmp_path / "in/hard.cubin")
    (tmp_path / "in/soft.cubin").symlink_to(outside / "b.cubin")
    (tmp_path / "in/folder").symlink_to(outside)
    (tmp_path / "in/loop").symlink_to(tmp_path / "in")
    report = scanned(tmp_path / "in")
    assert names(report) == ["inside"]
    assert report.targets[0].skipped == ("1 files met before", "3 symbolic links")


def test_a_link_that_was_named_is_followed(tmp_path: Path) -> None:
    write_tree(tmp_path, {"lib.so.1.2": code("named")})
    (tmp_path / "lib.so").symlink_to("lib.so.1.2")
    assert names(scanned(tmp_path / "lib.so")) == ["named"]


def test_no_fifo_device_or_socket_is_opened(tmp_path: Path) -> None:
    write_tree(tmp_path, {"a.cubin": code("file")})
    # Opening it for reading would wait for a writer that never comes.
    os.mkfifo(tmp_path / "pipe")
    report = scanned(tmp_path)
    assert names(report) == ["file"]
    assert report.targets[0].skipped == ("1 FIFOs",)
    with pytest.raises(UsageError, match="FIFOs are not opened"):
        scanned(tmp_path / "pipe")


def test_what_is_neither_a_file_nor_an_image_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        scanned(tmp_path / "absent.so")


def test_a_file_that_cannot_be_opened_is_a_problem_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tree(tmp_path, {"a.cubin": code("a"), "b.cubin": code("b"), "c.cubin": code("c")})
    opened = os.open

    def vanishing(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == "b.cubin":
            (tmp_path / "b.cubin").unlink()
        return opened(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", vanishing)
    report = scanned(tmp_path)
    assert names(report) == ["a", "c"]
    [problem] = report.problems
    assert (problem.place.members, problem.reason) == (("b.cubin",), "No such file or directory")
    assert report.targets[0].problems == 1


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zstd": zstandard.compress,
    "xz": lzma.compress,
    "bzip2": bz2.compress,
    "lz4": lz4.frame.compress,
}


@pytest.mark.parametrize("method", PACKED)
def test_compressed_archives_and_files_are_unpacked(tmp_path: Path, method: str) -> None:
    pack = PACKED[method]
    write_tree(
        tmp_path,
        {
            "tar": pack(tar_of({"usr/lib/x.so": code("in tar")})),
            "file": pack(code("alone")),
            # gzip(1), xz(1), zstd(1): files put one after the other unpack to one.
            "two": pack(code("joined")[:100]) + pack(code("joined")[100:]),
        },
    )
    report = scanned(tmp_path)
    assert names(report) == ["alone", "in tar", "joined"]
    assert module_of(report, "in tar").sightings[0].place.members == ("tar", "usr/lib/x.so")


@pytest.mark.parametrize("method", PACKED)
def test_an_archive_that_is_cut_short_is_a_problem_after_what_was_whole(
    tmp_path: Path, method: str
) -> None:
    whole = tar_of({"first": code("first"), "second": os.urandom(3 << 20)})
    packed = PACKED[method](whole)
    (tmp_path / "cut").write_bytes(packed[: len(packed) * 9 // 10])
    report = scanned(tmp_path / "cut")
    # bzip2 gives nothing of a block that is not all there.
    assert names(report) == ["first"]
    assert report.problems


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_wheels_are_looked_into(tmp_path: Path, method: int) -> None:
    wheel = tmp_path / "pkg-1.0-py3-none-any.whl"
    library = program({".nv_fatbin": fatbin([EntryImage("cubin", code("wheel"))])})
    wheel.write_bytes(
        zip_of({"pkg/lib.so": library, "pkg-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0"}, method)
    )
    report = scanned(wheel)
    assert names(report) == ["wheel"]
    assert report.targets[0].what == "wheel"
    assert module_of(report, "wheel").sightings[0].place.members == ("pkg/lib.so",)


def test_archives_in_archives_and_debian_packages(tmp_path: Path) -> None:
    inner = zip_of({"deep.cubin": code("deep")})
    package = archive(
        {
            "debian-binary": b"2.0\n",
            "control.tar.gz": gzip.compress(tar_of({"control": b"Package: x"})),
            "data.tar.xz": lzma.compress(tar_of({"./usr/lib/libx.so": code("packaged")})),
        }
    )
    outer = tar_of({"a/b.whl": inner, "x.deb": package, "lib.a": archive({"o": code("static")})})
    (tmp_path / "bundle.tar.gz").write_bytes(gzip.compress(outer))
    report = scanned(tmp_path / "bundle.tar.gz")
    assert names(report) == ["deep", "packaged", "static"]
    assert module_of(report, "deep").sightings[0].place.members == ("a/b.whl", "deep.cubin")
    assert module_of(report, "packaged").sightings[0].place.members[-1] == "./usr/lib/libx.so"
    assert report.targets[0].what == "archive"


def test_nesting_has_an_end(tmp_path: Path) -> None:
    data = code("bottom")
    for _ in range(12):
        data = tar_of({"next.tar": data})
    (tmp_path / "deep.tar").write_bytes(data)
    report = scanned(tmp_path / "deep.tar")
    assert names(report) == []
    assert [p.reason for p in report.problems] == ["nested deeper than 8"]


def test_an_encrypted_member_is_a_problem(tmp_path: Path) -> None:
    data = bytearray(zip_of({"secret.cubin": code("secret"), "plain.cubin": code("plain")}))
    # General purpose bit 0 in the local and the central header of the first member (APPNOTE 4.4.4).
    data[6] |= 1
    data[data.index(b"PK\1\2") + 8] |= 1
    (tmp_path / "x.zip").write_bytes(data)
    report = scanned(tmp_path / "x.zip")
    assert names(report) == ["plain"]
    [problem] = report.problems
    assert (problem.place.members, problem.reason) == (("secret.cubin",), "encrypted")


def test_bytes_of_a_zip_that_belong_to_no_member_are_looked_at(tmp_path: Path) -> None:
    hidden = code("between") + bytes(70_000)
    (tmp_path / "x.zip").write_bytes(hidden + zip_of({"a": b"text"}))
    assert names(scanned(tmp_path / "x.zip")) == ["between"]


@pytest.mark.parametrize(
    "name",
    ["../../escape.cubin", "/etc/escape.cubin", "a/../../escape.cubin", "\x1b[2J", "x" * 90],
)
def test_names_in_archives_lead_nowhere(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "a/b"
    write_tree(
        folder,
        {"t.tar": tar_of({name: code("in tar")}), "z.zip": zip_of({name: code("in zip")})},
    )
    before = sorted(tmp_path.rglob("*"))
    assert names(scanned(folder)) == ["in tar", "in zip"]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_member_without_a_name_is_read_like_the_others(tmp_path: Path) -> None:
    # zipfile ends a name at its first NUL, and has no use for an empty one.
    data = zip_of({"QQ": code("nameless"), "z": code("last")}).replace(b"QQ", b"\0Q")
    (tmp_path / "x.zip").write_bytes(data)
    assert names(scanned(tmp_path / "x.zip")) == ["last", "nameless"]


def test_an_archive_that_cannot_be_read_is_looked_at_as_bytes(tmp_path: Path) -> None:
    data = zip_of({"a.cubin": code("stored")}, zipfile.ZIP_STORED)
    (tmp_path / "x.zip").write_bytes(data.replace(b"PK\1\2", b"PK\1\0"))
    report = scanned(tmp_path / "x.zip")
    assert names(report) == ["stored"]
    assert len(report.problems) == 1


def test_names_that_are_no_text_are_told_escaped(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/\xff\xfe"
    os.mkdir(folder)
    write_tree(tmp_path, {"a": code("a")})
    os.rename(tmp_path / "a", folder + b"/\x80.cubin")
    report = scanned(os.fsdecode(folder))
    place = module_of(report, "a").sightings[0].place
    assert place.target == f"{tmp_path}/\\xff\\xfe"
    assert place.members == ("\\x80.cubin",)
    assert names(scanned(tmp_path)) == ["a"]


def test_links_devices_and_pipes_in_archives_are_harmless(tmp_path: Path) -> None:
    entries = {
        "link": Entry(kind=b"2", link="/etc/passwd"),
        "hard": Entry(kind=b"1", link="../../etc/passwd"),
        "device": Entry(kind=b"3"),
        "pipe": Entry(kind=b"6"),
        "link/through.cubin": Entry(code("through")),
    }
    (tmp_path / "x.tar").write_bytes(tar_of(entries))
    report = scanned(tmp_path / "x.tar")
    assert names(report) == ["through"]
    assert report.targets[0].skipped == ("1 FIFOs in archives", "1 devices in archives")


def bomb_zip(size: int) -> bytes:
    return zip_of({"bomb": bytes(size), "after.cubin": code("after")})


BOMBS: dict[str, Callable[[int], bytes]] = {
    "gzip": lambda size: gzip.compress(bytes(size)),
    "zstd": lambda size: zstandard.compress(bytes(size)),
    "xz": lambda size: lzma.compress(bytes(size), preset=1),
    "bzip2": lambda size: bz2.compress(bytes(size)),
    "zip": bomb_zip,
}


@pytest.mark.parametrize("method", BOMBS)
def test_bombs_are_refused(tmp_path: Path, method: str) -> None:
    (tmp_path / "bomb").write_bytes(BOMBS[method](80 << 20))
    report = scanned(tmp_path / "bomb")
    [problem] = report.problems
    assert "unpacks to more than 250 times its size" in problem.reason


def test_what_one_target_may_unpack_to_has_an_end(tmp_path: Path) -> None:
    members = {f"{number}": os.urandom(1 << 20) for number in range(8)}
    write_tree(tmp_path, {"big.tar.gz": gzip.compress(tar_of(members)), "z.cubin": code("later")})
    report = scanned(tmp_path, options=Options(bounds=Bounds(total_bytes=4 << 20)))
    [problem] = report.problems
    assert problem.place.members[0] == "big.tar.gz"
    assert problem.reason == f"unpacks to more than {4 << 20} bytes"
    assert names(report) == ["later"]


def test_a_large_file_is_shared_out_and_told_once(tmp_path: Path) -> None:
    images = [EntryImage("cubin", code(f"k{n:03}"), codec="lz4") for n in range(101)]
    library = tmp_path / "large.so"
    library.write_bytes(program({".nv_fatbin": fatbin(images), ".data": bytes(70 << 20)}))
    report = scanned(library)
    assert names(report) == [f"k{n:03}" for n in range(101)]
    assert all(len(one.sightings) == 1 for one in report.modules)
    [target] = report.targets
    assert (target.modules, target.files) == (101, 1)
    assert target.read_bytes == library.stat().st_size


def test_a_large_archive_is_shared_out_and_told_once(tmp_path: Path) -> None:
    members = {f"{n}.so": code(f"k{n}") + bytes(9 << 20) for n in range(8)}
    (tmp_path / "large.tar").write_bytes(tar_of(members))
    report = scanned(tmp_path / "large.tar")
    assert names(report) == [f"k{n}" for n in range(8)]
    assert all(len(one.sightings) == 1 for one in report.modules)
    assert report.targets[0].files == 8


def test_a_jit_cache_is_named_by_its_path_or_what_is_beside(tmp_path: Path) -> None:
    beside = {"k/x.ttir": b"module {}", "k/x.json": b"{}", "k/y.json": b"{}"}
    caches = {
        "k/x.cubin": "Triton",
        "k/y.cubin": "",
        ".nv/ComputeCache/a/b/0123": "CUDA driver",
        ".triton/cache/ABCDEF/kernel.cubin": "Triton",
        "torchinductor_root/triton/0/ABC/k.cubin": "torch.compile",
        "models/kernel.cubin": "",
    }
    write_tree(tmp_path, {path: code(path) for path in caches} | beside)
    report = scanned(tmp_path)
    assert {
        one.place.members[0]: one.cache for m in report.modules for one in m.sightings
    } == caches


def test_two_targets_that_overlap_are_read_once(tmp_path: Path) -> None:
    write_tree(tmp_path, {"a.cubin": code("a"), "b.cubin": code("b")})
    report = scanned(tmp_path / "a.cubin", tmp_path)
    assert [target.modules for target in report.targets] == [1, 1]
    assert names(report) == ["a", "b"]
