from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.errors import Denied, Unavailable
from gpuwarden.host import FILE_LIMIT_BYTES, FileStatus, OpenFiles
from gpuwarden.model import Gap, GpuClient, Holder
from gpuwarden.sensors import device_nodes, holders
from gpuwarden.sensors.process import stat_lines
from gpuwarden.sensors.seen import Seen
from tests.support.recorded_host import RecordedHost

NODE = Path(__file__).parent.parent / "hosts" / "nvidia-node"


def look(host: RecordedHost) -> tuple[Seen, dict[tuple[int, int, int], Holder], list[Gap]]:
    seen = Seen(table=stat_lines.read(host))
    for node in device_nodes.read(host, seen):
        seen.add(node)
    facts = list(holders.read(host, seen))
    found = {(h.pid, h.major, h.minor): h for h in facts if isinstance(h, Holder)}
    assert len(found) == len([h for h in facts if isinstance(h, Holder)])
    return seen, found, [g for g in facts if isinstance(g, Gap)]


def test_one_holder_a_process_and_device_with_all_descriptors() -> None:
    _, found, gaps = look(RecordedHost(NODE))
    assert set(found) == {
        (100, 195, 255),
        (100, 195, 0),
        (100, 511, 0),
        (200, 195, 1),
        (400, 195, 1),
        (500, 195, 0),
    }
    assert gaps == []
    trainer = found[100, 195, 0]
    assert (trainer.descriptors, trainer.mapped, trainer.renamed) == ((4, 5), True, False)
    assert found[100, 511, 0].kind == "nvidia-uvm"


def test_a_node_under_another_name_is_known_by_its_number() -> None:
    _, found, _ = look(RecordedHost(NODE))
    miner = found[200, 195, 1]
    assert (miner.kind, miner.path, miner.renamed) == (
        "nvidia-gpu",
        "/tmp/.cache/null (deleted)",
        True,
    )


def test_a_mapping_alone_is_a_holding() -> None:
    _, found, _ = look(RecordedHost(NODE))
    mapper = found[400, 195, 1]
    assert (mapper.descriptors, mapper.mapped, mapper.path) == ((), True, "/dev/nvidia1")


def test_threads_that_outlive_the_first_one_still_hold() -> None:
    _, found, _ = look(RecordedHost(NODE))
    assert found[500, 195, 0].descriptors == (3,)


def test_sockets_get_their_owners_on_the_way() -> None:
    seen, _, _ = look(RecordedHost(NODE))
    assert seen.socket_owners == {9001: 100, 9002: 200, 9003: 300, 9004: 300, 9005: 300}


class Unprivileged(RecordedHost):
    def open_files(self, directory: str) -> OpenFiles:
        if directory in ("/proc/100/fd", "/proc/300/fd"):
            raise Denied(f"{directory}: permission denied")
        return super().open_files(directory)

    def link_target_status(self, path: str) -> FileStatus:
        if "/map_files/" in path:
            raise Denied(f"{path}: permission denied")
        return super().link_target_status(path)


def test_what_may_not_be_read_is_one_gap_with_a_count() -> None:
    _, found, gaps = look(Unprivileged(NODE))
    assert (200, 195, 1) in found
    fds = [gap for gap in gaps if "descriptors" in gap.what]
    assert [(gap.count, bool(gap.remedy)) for gap in fds] == [(2, True)]
    assert found[100, 195, 0].descriptors == ()
    assert found[100, 195, 0].mapped


class AnotherFile(Unprivileged):
    """A container's own copy of the node: its maps show an inode that /dev does not have."""

    def read_bytes(self, path: str, limit: int = FILE_LIMIT_BYTES) -> bytes:
        data = super().read_bytes(path, limit)
        return data.replace(b" 502 ", b" 888 ") if path.endswith("/maps") else data


def test_a_mapping_known_by_path_alone_says_so() -> None:
    _, found, gaps = look(AnotherFile(NODE))
    assert found[400, 195, 1].mapped
    assert [gap.count for gap in gaps if "path alone" in gap.what] == [1]


class NoDevices(RecordedHost):
    def read_bytes(self, path: str, limit: int = FILE_LIMIT_BYTES) -> bytes:
        if path == "/proc/devices":
            raise Denied("/proc/devices: permission denied")
        return super().read_bytes(path, limit)


def test_without_proc_devices_the_assigned_numbers_are_left_and_it_says_so() -> None:
    host = NoDevices(NODE)
    facts = list(holders.read(host, Seen(table=stat_lines.read(host))))
    assert any(isinstance(f, Gap) and "device numbers" in f.what for f in facts)
    assert {(f.major, f.minor) for f in facts if isinstance(f, Holder)} == {
        (195, 0),
        (195, 1),
        (195, 255),
    }


class NoDriver(RecordedHost):
    def read_bytes(self, path: str, limit: int = FILE_LIMIT_BYTES) -> bytes:
        return b"" if path == "/proc/devices" else super().read_bytes(path, limit)


def test_nothing_to_hold_is_absent_unless_a_driver_lists_somebody() -> None:
    host = NoDriver(NODE)
    with pytest.raises(Unavailable):
        list(holders.read(host, Seen(table=stat_lines.read(host))))
    seen = Seen(
        table=stat_lines.read(host), clients=[GpuClient(gpu_id="GPU-1", pid=100, kinds=("C",))]
    )
    assert list(holders.read(host, seen)) == []
    assert seen.socket_owners[9002] == 200


@given(st.binary(max_size=300))
def test_any_bytes_give_mappings(data: bytes) -> None:
    line = b"7f0000004000-7f0000005000 rw-s 00000000 00:06 502 /dev/x\xff y (deleted)\n"
    for mapped in holders.parse_shared_mappings(data):
        mapped.path.encode("utf-8")
    found = holders.parse_shared_mappings(data + b"\n" + line)
    assert found[-1] == holders.MappedFile(
        0x7F0000004000, 0x7F0000005000, (0, 6), 502, "/dev/x\\xff y (deleted)"
    )


@pytest.mark.parametrize(
    "line",
    [
        b"7f0000004000-7f0000005000 rw-p 00000000 00:06 502 /dev/nvidia0\n",
        b"7f0000004000-7f0000005000 rw-s 00000000 00:01 0 /x\n",
        b"7f0000004000-7f0000005000 rw-p 00000000 00:00 0 [heap] rw-s \n",
    ],
)
def test_private_and_anonymous_mappings_are_skipped(line: bytes) -> None:
    assert holders.parse_shared_mappings(line) == []
