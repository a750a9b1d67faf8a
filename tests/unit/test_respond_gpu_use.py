"""What a process gave back of the GPUs, from two looks at the driver; who is in a freezer group."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuwarden.errors import Unavailable
from gpuwarden.model import Gpu, GpuClient
from gpuwarden.respond import freezer_group
from gpuwarden.respond.freezer_group import FreezerGroup
from gpuwarden.respond.gpu_use import GpuUse, compare

GIB = 1 << 30
BUSY = Gpu(id="g", index=0, memory_used_bytes=10 * GIB, sm_percent=99)
IDLE = replace(BUSY, memory_used_bytes=1 * GIB, sm_percent=0)
CLIENT = GpuClient(gpu_id="g", pid=7, memory_bytes=9 * GIB)
BEFORE = GpuUse((BUSY,), (CLIENT,))


def test_memory_and_work_that_fell() -> None:
    fall = compare(7, [], BEFORE, GpuUse((IDLE,)))
    assert fall.seen and fall.given_back
    assert fall.lines == ("GPU 0: memory 10.0 GiB to 1.0 GiB, utilisation 99 % to 0 %",)


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (GpuUse((IDLE,), (CLIENT,)), "lists it still"),
        (GpuUse((replace(IDLE, memory_used_bytes=9 * GIB),)), "memory did not come back"),
        (GpuUse((replace(IDLE, sm_percent=95),)), "as busy as before"),
    ],
)
def test_what_was_not_given_back_is_said(after: GpuUse, said: str) -> None:
    fall = compare(7, ["g"], BEFORE, after)
    assert fall.seen and not fall.given_back and said in fall.lines[0]


@pytest.mark.parametrize(
    "after",
    [
        GpuUse(unseen="it hung"),
        GpuUse((replace(IDLE, error="GPU is lost"),)),
        GpuUse((replace(IDLE, unread={"processes": "no permission"}),)),
        GpuUse((replace(IDLE, sm_percent=None),)),
    ],
)
def test_what_was_not_seen_is_not_given_back(after: GpuUse) -> None:
    fall = compare(7, ["g"], BEFORE, after)
    assert not fall.seen and not fall.given_back and "not seen" in fall.lines[0]


def test_one_that_was_on_no_gpu() -> None:
    assert compare(8, [], BEFORE, GpuUse((IDLE,))).given_back
    assert not compare(8, [], GpuUse(unseen="no driver"), GpuUse(unseen="no driver")).seen


# ---------------------------------------------------------------- groups


def group(directory: Path) -> FreezerGroup:
    return FreezerGroup(str(directory), 2, "leaf", "g")


def test_members_of_a_group_and_of_those_below_it(tmp_path: Path) -> None:
    (tmp_path / "cgroup.procs").write_text("5\n6\n")
    (tmp_path / "below").mkdir()
    (tmp_path / "below/cgroup.procs").write_text("7\n")
    assert sorted(freezer_group.members(group(tmp_path))) == [5, 6, 7]


@pytest.mark.parametrize("text", ["0\n", "5\n0\n", "x\n", "-1\n"])
def test_members_that_cannot_be_told_are_no_members(tmp_path: Path, text: str) -> None:
    (tmp_path / "cgroup.procs").write_text(text)
    with pytest.raises(Unavailable, match="another pid namespace"):
        freezer_group.members(group(tmp_path))


def test_too_many_members_and_a_group_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Unavailable):
        freezer_group.members(group(tmp_path / "gone"))
    monkeypatch.setattr(freezer_group, "MEMBERS_LIMIT", 2)
    (tmp_path / "cgroup.procs").write_text("5\n6\n7\n")
    with pytest.raises(Unavailable, match="too many"):
        freezer_group.members(group(tmp_path))


def test_the_states_of_both_versions(tmp_path: Path) -> None:
    old = FreezerGroup(str(tmp_path), 1, "leaf", "g")
    (tmp_path / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    (tmp_path / "cgroup.freeze").write_text("1\n")
    (tmp_path / "freezer.state").write_text("FREEZING\n")
    (tmp_path / "freezer.self_freezing").write_text("1\n")
    assert freezer_group.is_frozen(group(tmp_path)) and freezer_group.is_switched(group(tmp_path))
    assert not freezer_group.is_frozen(old) and freezer_group.is_switched(old)
    freezer_group.switch(old, frozen=False)
    assert (tmp_path / "freezer.state").read_text().startswith("THAWED")
