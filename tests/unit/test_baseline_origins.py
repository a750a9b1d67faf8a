"""Which package a module is of: wheels, installed packages, images, plain files."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.code.module import Place
from gpuwarden.code.report import ScannedTarget, TargetKind
from gpuwarden.codescan.origins import NOT_AS_RECORDED, NOT_IN_RECORD, Label, Origins
from gpuwarden.codescan.packages import (
    InstalledPackages,
    is_as_recorded,
    parse_metadata,
    parse_record,
    read_wheel,
)
from gpuwarden.errors import Malformed, Unavailable
from tests.support.wheels import install, wheel

LABEL = Label(source="library", when=7, tool="tests")


def target(name: object, what: TargetKind, digest: str = "") -> ScannedTarget:
    return ScannedTarget(name=str(name), what=what, digest=digest)


def place(name: object, *members: str, mapping: str = "") -> Place:
    return Place(target=str(name), members=members, mapping=mapping)


def test_a_module_of_a_wheel_is_named_by_its_metadata(tmp_path: Path) -> None:
    path = wheel(tmp_path, "torch-cuda", "2.9.1", {"torch/lib/a.so": b"a"})
    origin = Origins(LABEL).of(target(path, "wheel"), place(path, "torch/lib/a.so"))
    assert origin.title == "torch-cuda 2.9.1 torch/lib/a.so"
    assert origin.container == path.name
    assert origin.container_digest == f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    assert (origin.source, origin.when, origin.tool, origin.note) == ("library", 7, "tests", "")
    member = Origins(LABEL).of(target(path, "wheel"), place(path, "torch/lib/a.so", "b.o"))
    assert member.file == "torch/lib/a.so!b.o"


def test_what_a_wheel_does_not_record_is_noted(tmp_path: Path) -> None:
    files = {"a/x.so": b"a", "a/y.so": b"b"}
    path = wheel(tmp_path, "a", "1", files, recorded={"a/x.so": b"a"})
    origins = Origins(LABEL)
    assert origins.of(target(path, "wheel"), place(path, "a/x.so")).note == ""
    assert origins.of(target(path, "wheel"), place(path, "a/y.so")).note == NOT_IN_RECORD
    assert origins.of(target(path, "wheel"), place(path)).note == NOT_IN_RECORD


@pytest.mark.parametrize(
    "file_name",
    [
        "other-1.0-py3-none-any.whl",
        "good-2.0-py3-none-any.whl",
        "good-1.0.whl",
        "good.whl",
        "x-good-1.0-py3-none-any-more-more.whl",
    ],
)
def test_a_wheel_whose_name_is_another_is_refused(tmp_path: Path, file_name: str) -> None:
    path = wheel(tmp_path, "good", "1.0", {"a": b"a"}, file_name=file_name)
    with pytest.raises(Malformed, match="its file name does not"):
        read_wheel(str(path))


def test_names_are_compared_as_installers_do(tmp_path: Path) -> None:
    name = "My_Good.Thing-1.0-3-py3-none-any.whl"
    path = wheel(tmp_path, "my-good-thing", "1.0", {"a": b"a"}, file_name=name)
    assert read_wheel(str(path)).name == "my-good-thing"


def test_what_is_no_wheel_is_malformed(tmp_path: Path) -> None:
    for name, members in {
        "none": {},
        "two": {"a.dist-info/METADATA": "", "b.dist-info/METADATA": ""},
        "no RECORD": {"a.dist-info/METADATA": "Name: a\nVersion: 1\n"},
        "no name": {"a.dist-info/METADATA": "", "a.dist-info/RECORD": ""},
        "odd RECORD": {
            "a.dist-info/METADATA": "Name: a\nVersion: 1\n",
            "a.dist-info/RECORD": 'a"b,"c\n"',
        },
    }.items():
        path = tmp_path / f"{name}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for member, text in members.items():
                archive.writestr(member, text)
        with pytest.raises(Malformed):
            read_wheel(str(path))
    (tmp_path / "text.whl").write_text("text")
    with pytest.raises(Malformed, match="not a wheel"):
        read_wheel(str(tmp_path / "text.whl"))
    with pytest.raises(Unavailable):
        read_wheel(str(tmp_path / "absent.whl"))


@given(st.binary(max_size=200))
def test_any_bytes_as_metadata_and_record(data: bytes) -> None:
    for parse in (parse_metadata, parse_record):
        try:
            parse(data)
        except Malformed:
            pass


def test_an_installed_file_is_its_packages(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    install(site, "nvidia-cublas", "13.1", {"nvidia/cu13/lib/b.so": b"b", "nvidia/x.so": b"x"})
    install(site, "other", "1", {"other/a.so": b"a"})
    (site / "nvidia" / "stray.so").write_bytes(b"s")
    packages = InstalledPackages()
    owner = packages.owner(str(site / "nvidia/cu13/lib/b.so"))
    assert owner is not None
    assert (owner[0].name, owner[0].version, owner[1]) == (
        "nvidia-cublas",
        "13.1",
        "nvidia/cu13/lib/b.so",
    )
    assert packages.owner(str(site / "nvidia/stray.so")) is None
    origins = Origins(LABEL)
    file = site / "nvidia/x.so"
    assert origins.of(target(file, "file"), place(file)).title == "nvidia-cublas 13.1 nvidia/x.so"
    folder = target(site, "folder")
    title = origins.of(folder, place(site, "nvidia/x.so", "member.o")).title
    assert title == "nvidia-cublas 13.1 nvidia/x.so!member.o"
    assert origins.of(folder, place(site, "nvidia/x.so")).note == ""
    (site / "other/a.so").write_bytes(b"changed")
    assert origins.of(folder, place(site, "other/a.so")).note == NOT_AS_RECORDED


def test_damaged_lists_own_nothing(tmp_path: Path) -> None:
    install(tmp_path, "a", "1", {"a.so": b"a"})
    (tmp_path / "a-1.dist-info" / "METADATA").unlink()
    assert InstalledPackages().owner(str(tmp_path / "a.so")) is None


def test_a_plain_file_is_named_by_path_and_hash(tmp_path: Path) -> None:
    file = tmp_path / "a.so"
    file.write_bytes(b"a")
    origin = Origins(LABEL).of(target(file, "file"), place(file))
    assert origin.title == f"{file} sha256:{hashlib.sha256(b'a').hexdigest()}"
    with pytest.raises(Unavailable):
        Origins(LABEL).of(target(tmp_path / "b", "file"), place(tmp_path / "b"))


def test_a_wheel_in_a_folder_is_a_wheel(tmp_path: Path) -> None:
    path = wheel(tmp_path, "a", "1", {"a/x.so": b"x"})
    origin = Origins(LABEL).of(target(tmp_path, "folder"), place(tmp_path, path.name, "a/x.so"))
    assert origin.title == "a 1 a/x.so"


def test_images_and_processes_are_named_by_themselves() -> None:
    image = target("registry.example/app:1", "image", "sha256:ab")
    layered = place(image.name, "blobs/sha256/cd", "usr/lib/a.so", "x.o")
    origin = Origins(LABEL).of(image, layered)
    assert (origin.package, origin.file) == ("registry.example/app:1", "usr/lib/a.so!x.o")
    assert (origin.container, origin.container_digest) == ("registry.example/app:1", "sha256:ab")
    saved = ScannedTarget(name="saved.tar", what="image", digest="sha256:ab", image="app:2")
    origin = Origins(LABEL).of(saved, place("saved.tar", "layer.tar", "opt/a.so"))
    assert (origin.title, origin.container) == ("app:2 opt/a.so", "app:2")
    process = Origins(LABEL).of(target("pid 7", "process"), place("pid 7", mapping="[heap]"))
    assert process.title == "pid 7 [heap]"


def test_hashes_of_a_record_that_are_none() -> None:
    digest = hashlib.sha256(b"").hexdigest()
    assert is_as_recorded("", digest)
    assert is_as_recorded("md5=x", digest)
    assert not is_as_recorded("sha256=x", digest)
