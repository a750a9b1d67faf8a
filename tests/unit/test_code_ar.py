"""Archives of objects: names as GNU and BSD write them, and archives that are none."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.code import ar
from gpuwarden.code.bounds import Bounds
from gpuwarden.errors import Malformed
from tests.support import gpu_images as build
from tests.support.gpu_modules import CUBIN, FATBIN, modules, problems

FILES = {
    "short.o": b"odd",
    "a member with a name that is long.o": b"even",
    "another of the same length as that.o": b"",
}


@pytest.mark.parametrize("style", ["gnu", "bsd"])
def test_members_with_their_names(style: Literal["gnu", "bsd"]) -> None:
    data = build.archive(FILES, style=style)
    assert {
        member.name: data[member.start : member.end] for member in ar.members(memoryview(data))
    } == FILES


def test_members_are_those_that_ar_wrote(tmp_path: Path) -> None:
    for name, body in FILES.items():
        (tmp_path / name).write_bytes(body)
    subprocess.run(["ar", "rcs", "made.a", *FILES], cwd=tmp_path, check=True)
    data = (tmp_path / "made.a").read_bytes()
    assert {
        member.name: data[member.start : member.end] for member in ar.members(memoryview(data))
    } == FILES


def test_modules_of_members_say_which_member() -> None:
    data = build.archive({"host.o": build.program({".nv_fatbin": FATBIN}), "k.cubin": CUBIN})
    found = modules(data)
    assert {one.place.members for one in found} == {("host.o",), ("k.cubin",)}
    assert found[-1].place.found_by == "archive"
    assert found[-1].place.offset == 0
    assert found[0].place.section == ".nv_fatbin"


def test_an_archive_in_an_archive() -> None:
    inner = build.archive({"k.cubin": CUBIN})
    (one,) = modules(build.archive({"inner.a": inner}))
    assert one.place.members == ("inner.a", "k.cubin")


def test_archives_that_are_nested_too_deep_are_a_problem() -> None:
    data = CUBIN
    for _ in range(12):
        data = build.archive({"inner.a": data})
    assert [problem.reason for problem in problems(data)] == ["nested too deep"]


def test_a_thin_archive_is_a_problem() -> None:
    assert "thin" in problems(b"!<thin>\n" + bytes(60))[0].reason


@pytest.mark.parametrize("magic", [ar.MAGIC, ar.THIN_MAGIC])
def test_an_archive_that_is_none_hides_nothing(magic: bytes) -> None:
    data = magic + b"no header of a member" * 4 + CUBIN
    assert [problem.what for problem in problems(data)] == ["ar archive"]
    (one,) = modules(data)
    assert (one.kind, one.place.offset) == ("cubin", len(data) - len(CUBIN))


@pytest.mark.parametrize("size", [8 + 30, 8 + 60, 8 + 62])
def test_a_cut_archive_is_a_problem_after_what_is_there(size: int) -> None:
    data = build.archive({"k.cubin": CUBIN, "second.o": b"second"})
    first = 8 + 60 + len(CUBIN) + (len(CUBIN) & 1)
    cut = data[: first + size - 8]
    assert [one.place.members for one in modules(cut)] == [("k.cubin",)]
    assert problems(cut)


@pytest.mark.parametrize(
    "field",
    [b"-1        ", b"          ", b"0x10      ", b"9999999999", b"1_0       "],
)
def test_a_size_that_is_none_is_malformed(field: bytes) -> None:
    data = bytearray(build.archive(FILES))
    data[8 + 48 : 8 + 58] = field
    with pytest.raises(Malformed):
        list(ar.members(memoryview(bytes(data))))


def test_more_members_than_are_read_are_malformed() -> None:
    data = build.archive({f"{number}": b"" for number in range(11)})
    with pytest.raises(Malformed, match="more than 10"):
        list(ar.members(memoryview(data), Bounds(members=10)))


@given(st.binary(max_size=300))
def test_any_bytes_give_members_or_malformed(data: bytes) -> None:
    for whole in (data, ar.MAGIC + data):
        _members(whole)


@given(st.data())
def test_any_change_gives_members_or_malformed(data: st.DataObject) -> None:
    image = bytearray(build.archive(FILES))
    for _ in range(data.draw(st.integers(1, 5))):
        image[data.draw(st.integers(0, len(image) - 1))] = data.draw(st.integers(0, 255))
    _members(bytes(image))


def _members(data: bytes) -> None:
    last = 0
    try:
        for member in ar.members(memoryview(data)):
            assert last < member.start <= member.end <= len(data)
            last = member.end
    except Malformed:
        pass
