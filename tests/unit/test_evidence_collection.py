"""Parts of collecting evidence that need no real subject: whom it is about, notes, bounds."""

from __future__ import annotations

import hashlib
import os
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.code.module import Module, Place
from gpuwarden.codescan.tasks import Keep
from gpuwarden.errors import Malformed, TimedOut, Unavailable, UsageError
from gpuwarden.evidence import nameless_files, served_files
from gpuwarden.evidence.archive import ArchiveWriter
from gpuwarden.evidence.descriptors import parse_notes
from gpuwarden.evidence.kernel_lines import select
from gpuwarden.evidence.node_files import mask_snapshot
from gpuwarden.evidence.opened_process import OpenedProcess
from gpuwarden.evidence.shelf import Shelf
from gpuwarden.evidence.subjects import SUBJECTS_LIMIT, subjects
from gpuwarden.evidence.surroundings import CGROUPS, _group
from gpuwarden.evidence.wanted import Wanted
from gpuwarden.host import Host
from gpuwarden.judge import judge
from gpuwarden.node import Node
from gpuwarden.outputs.words import UNSEEN
from gpuwarden.policy import Policy
from gpuwarden.sensors.process.mounts import MountTable
from tests.support.nodes import NodeBuilder

LIMIT_BYTES = 8 << 20


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[ArchiveWriter]:
    with ArchiveWriter(str(tmp_path / "one.tar"), limit_bytes=LIMIT_BYTES) as one:
        yield one


def test_a_gpu_stands_for_all_of_its_processes_the_clients_first() -> None:
    builder = NodeBuilder()
    builder.gpu(0)
    builder.gpu(1)
    for pid in (30, 10, 20):
        builder.process(pid)
    builder.client(30)
    builder.holder(10, 0)
    builder.client(20, 1)
    found = subjects(Wanted(gpu="0"), Host("/nonexistent"), Node(builder.snapshot()))
    assert [one.pid for one in found.processes] == [30, 10]
    assert found.subject.kind == "gpu" and found.subject.pids == (30, 10)


def test_a_gpu_with_more_processes_than_an_archive_is_about() -> None:
    builder = NodeBuilder()
    builder.gpu(0)
    for pid in range(100, 100 + SUBJECTS_LIMIT + 5):
        builder.process(pid)
        builder.client(pid)
    found = subjects(Wanted(gpu="0"), Host("/nonexistent"), Node(builder.snapshot()))
    assert len(found.processes) == SUBJECTS_LIMIT and found.more == 5


@pytest.mark.parametrize("name", ["7", "GPU-none"])
def test_a_gpu_that_is_not_there(name: str) -> None:
    builder = NodeBuilder()
    builder.gpu(0)
    with pytest.raises(Unavailable, match="not on this node, which has 0"):
        subjects(Wanted(gpu=name), Host("/nonexistent"), Node(builder.snapshot()))


def _container_tree(root: Path, groups: dict[int, str]) -> Host:
    for pid, group in groups.items():
        folder = root / "proc" / str(pid)
        folder.mkdir(parents=True)
        tail = " ".join(["0"] * 6 + [str(pid * 10)] + ["0"] * 30)
        zeros = " ".join(["0"] * 12)
        (folder / "stat").write_text(
            f"{pid} (a) S 1 {zeros[:0]}" + " ".join(["0"] * 11) + f" {tail}"
        )
        (folder / "cgroup").write_text(f"0::{group}\n")
    return Host(str(root))


def test_a_container_is_named_by_the_beginning_of_its_id(tmp_path: Path) -> None:
    first, second = "ab12cd34ef" * 6 + "0000", "ab12cd9999" * 6 + "0000"
    groups = {11: f"/docker/{first}", 12: f"/docker/{first}", 13: f"/docker/{second}", 14: "/x"}
    host = _container_tree(tmp_path, groups)
    node = Node(NodeBuilder().snapshot())
    found = subjects(Wanted(container=first[:8]), host, node)
    assert {one.pid for one in found.processes} == {11, 12}
    assert found.subject.container_id == first
    with pytest.raises(UsageError, match="can be"):
        subjects(Wanted(container="ab12cd"), host, node)
    for name in ("ffffff", "ab"):
        with pytest.raises(Unavailable, match="no process of it"):
            subjects(Wanted(container=name), host, node)


@given(st.binary(max_size=300))
def test_any_notes_of_a_descriptor_give_a_result(data: bytes) -> None:
    for text in (word for pair in parse_notes(data).items() for word in pair):
        assert UNSEEN.isdisjoint(map(unicodedata.category, text))


def test_lines_of_the_kernel_log_about_gpus_and_the_processes() -> None:
    lines = [
        b"6,1,1,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=99",
        b"6,2,2,-;Out of memory: Killed process 4711 (python3)",
        b"6,3,3,-;miner[4711]: segfault at 0",
        b"6,4,4,-;Killed process 47110 (other)",
        b"6,5,5,-;usb 1-1: new device",
        b"6,6,6,-;xmrigger: trap",
    ]
    kept = list(select(lines, {4711: "xmrigger"}))
    assert kept == [lines[i] + b"\n" for i in (0, 1, 2, 5)]


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_any_lines_give_a_result(lines: list[bytes]) -> None:
    assert all(line.endswith(b"\n") for line in select(lines, {1: "a(+)b", 2: ""}))


def test_a_snapshot_with_masks_judges_as_before() -> None:
    builder = NodeBuilder()
    builder.gpu(0)
    url = "stratum+tcp://worker:hunter2@pool.example.net:3333"
    builder.process(4242, exe="/tmp/.x/m", argv=("m", "-o", url, "-a", "kawpow", "--api-key", "s3"))
    builder.client(4242, sm_percent=99)
    before = builder.snapshot()
    after = mask_snapshot(before)
    text = str(after.processes)
    assert "hunter2" not in text and "'s3'" not in text and "pool.example.net" in text
    verdicts = [
        [(row.pid, row.verdict) for row in judge(one, Policy(), None).rows]
        for one in (before, after)
    ]
    assert verdicts[0] == verdicts[1]


def test_a_control_group_outside_of_the_hierarchy_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "etc"
    secret.mkdir()
    (secret / "cgroup.procs").write_text("1\n")
    (tmp_path / CGROUPS[1:]).mkdir(parents=True)
    told = _group(Host(str(tmp_path)), "0::/../../../etc")
    assert not told["files"] and "outside" in told["unread"]


def test_a_handle_of_a_pipe_is_refused(writer: ArchiveWriter, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    handle = os.open(tmp_path / "pipe", os.O_PATH)
    try:
        with OpenedProcess(Host(), os.getpid()) as process:
            copying = nameless_files._Copying(process, Shelf(writer, "a", ""), MountTable())
            with pytest.raises(Malformed, match="no regular file"):
                nameless_files._copy(copying, handle, ("x", "x", "x"), 100)
    finally:
        os.close(handle)


def test_a_file_of_proc_is_not_read(writer: ArchiveWriter) -> None:
    with OpenedProcess(Host(), os.getpid()) as process:
        shelf = Shelf(writer, "a", "")
        copying = nameless_files._Copying(process, shelf, nameless_files._mounts(process))
        handle = os.open("/proc/version", os.O_PATH)
        try:
            assert not nameless_files._copy(copying, handle, ("x", "x", "/proc/version"), 100)
        finally:
            os.close(handle)
    assert not writer.members
    assert any("it is on proc" in one.why for one in writer._left)


def test_a_file_of_a_server_comes_whole_by_a_child(tmp_path: Path) -> None:
    path = tmp_path / "binary"
    path.write_bytes(os.urandom(3 << 20))
    assert b"".join(served_files.pieces(str(path))) == path.read_bytes()
    with pytest.raises(Unavailable, match="No such file"):
        list(served_files.pieces(str(tmp_path / "none")))
    first = served_files.pieces(str(path))
    assert next(first)
    first.close()
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_server_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hangs")
    with pytest.raises(TimedOut, match="did not answer"):
        list(served_files.pieces(str(tmp_path / "hangs"), 0.1))
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_binary_on_a_file_server_is_taken_as_the_server_gives_it(
    writer: ArchiveWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nameless_files, "_filesystem", lambda *_: "nfs4")
    with OpenedProcess(Host(), os.getpid()) as process:
        nameless_files.collect(process, Shelf(writer, "a", ""), [])
    (member,) = (one for one in writer.members if one.name == "a/exe")
    assert "as the server of nfs4 gave it" in member.what
    assert member.cut or member.size_bytes == os.stat("/proc/self/exe").st_size


def test_what_a_file_grows_by_while_it_is_read_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 100)
    handle = os.open(path, os.O_RDONLY)
    try:
        pieces = nameless_files._pieces(handle, 50)
        assert b"".join(pieces) == b"x" * 50
        with pytest.raises(Unavailable, match="cut to 100 bytes"):
            list(nameless_files._pieces(handle, 101))
    finally:
        os.close(handle)


def _module(data: bytes) -> Module:
    return Module(
        kind="cubin",
        arch="sm_90",
        digest=hashlib.sha256(data).hexdigest(),
        stored_bytes=len(data),
        image_bytes=len(data),
        place=Place(target="pid 1"),
    )


def test_an_image_is_handed_over_once_within_the_bounds_and_not_if_it_is_known() -> None:
    keep = Keep(image_bytes=10, total_bytes=15)
    assert keep.takes(_module(b"a"), "unknown", 10)
    assert not keep.takes(_module(b"a"), "unknown", 1)
    assert not keep.takes(_module(b"b"), "unknown", 11)
    assert not keep.takes(_module(b"c"), "unknown", 6)
    assert not keep.takes(_module(b"d"), "known", 1)
    assert not keep.takes(_module(b"e"), "driver", 1)
    assert keep.takes(_module(b"f"), "rebuilt", 5)
    assert not keep.takes(_module(b"g"), "unknown", 1)
    assert not keep.takes(_module(b"h"), "", 0)
