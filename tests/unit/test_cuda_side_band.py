"""What the kernel tells of mappings, and what maps and mounts say, in any bytes."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.cuda.mapped_files import (
    LOCAL,
    Executable,
    parse_executables,
    parse_mounts,
    read_executables,
)
from gpuwarden.cuda.side_band import Forked, Heard, Mapped, parse_cpus, parse_records
from gpuwarden.host import Host

MMAP2, LOST, EXIT, FORK = 10, 2, 4, 7


def record(kind: int, body: bytes, misc: int = 0) -> bytes:
    return struct.pack("=IHH", kind, misc, 8 + len(body)) + body


def mapping(pid: int, start: int, size: int, device: tuple[int, int], inode: int) -> bytes:
    body = struct.pack("=IIQQQIIQQII", pid, pid + 1, start, size, 0, *device, inode, 77, 5, 2)
    return record(MMAP2, body + b"/opt/libaccelerate.so\0\0\0")


def heard(data: bytes) -> Heard:
    found = Heard([], [], [], False)
    return found._replace(lost=parse_records(data, found))


def test_records_are_told_in_their_order() -> None:
    data = (
        mapping(40, 0x7F0000001000, 0x2000, (0, 41), 12)
        + record(FORK, struct.pack("=IIIIQ", 41, 40, 41, 40, 5))
        + record(FORK, struct.pack("=IIIIQ", 40, 40, 43, 40, 5))
        + record(99, b"of a kernel to come")
        + record(EXIT, struct.pack("=IIIIQ", 41, 40, 41, 40, 6))
    )
    # A record's size is a multiple of eight there, but nothing depends on it.
    assert heard(data) == Heard(
        [Mapped(40, (0, 41, 12), 77, 0x7F0000001000, 0x7F0000003000)],
        [Forked(41, 40)],
        [41],
        False,
    )


def test_what_is_lost_is_told() -> None:
    assert heard(record(LOST, struct.pack("=QQ", 1, 5))).lost
    assert heard(mapping(1, 2, 3, (4, 5), 6)[:-1]).lost
    assert heard(struct.pack("=IHH", MMAP2, 0, 0)).lost
    assert not heard(b"").lost


@given(st.binary(max_size=400))
def test_any_records(data: bytes) -> None:
    found = heard(mapping(1, 2, 3, (4, 5), 6) + data)
    assert found.mapped[0].pid == 1
    assert len(found.mapped) <= 1 + len(data) // 8


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0-3,5\n", [0, 1, 2, 3, 5]), ("0\n", [0]), ("", [0]), ("x-3,1", [1]), ("0-", [0])],
)
def test_lists_of_processors(text: str, numbers: list[int]) -> None:
    assert parse_cpus(text) == numbers


@given(st.text(max_size=40))
def test_any_list_of_processors(text: str) -> None:
    assert 1 <= len(parse_cpus(text)) <= 4096


MAPS = b"""\
55d0c0000000-55d0c0001000 r--p 00000000 fe:00 260958                     /usr/bin/true
55d0c0001000-55d0c0004000 r-xp 00001000 fe:00 260958                     /usr/bin/true
7f0000000000-7f0000001000 rwxp 00000000 00:00 0
7f0000002000-7f0000003000 r-xp 00000000 00:01 4192                       /memfd:weights (deleted)
7f0000004000-7f0000005000 r-xs 00000000 00:29 7                          /a file\\012x r-xp
7f0000006000-7f0000007000 r-xp 00001000 fe:00 260958                     /usr/bin/true
7ffd00000000-7ffd00002000 r-xp 00000000 00:00 0                          [vdso]
"""


def test_executable_mappings_by_file() -> None:
    assert parse_executables(MAPS, 9) == {
        (0xFE, 0, 260958): Executable(9, 0x55D0C0001000, 0x55D0C0004000),
        (0, 1, 4192): Executable(9, 0x7F0000002000, 0x7F0000003000),
        (0, 0x29, 7): Executable(9, 0x7F0000004000, 0x7F0000005000),
    }


@given(st.binary(max_size=300))
def test_any_maps(data: bytes) -> None:
    found = parse_executables(MAPS + data, 9)
    assert (0, 0x29, 7) in found
    assert len(found) <= 4 + data.count(b"\n")


def test_the_kernels_own_list_says_the_same_as_its_text() -> None:
    pid = os.getpid()
    text = Path("/proc/self/maps").read_bytes()
    assert parse_executables(text, pid) == read_executables(Host(), pid)
    assert len(parse_executables(text, pid)) > 3


MOUNTS = b"""\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw
23 22 0:21 / /proc rw - proc proc rw
24 22 0:40 / /srv rw - nfs4 server:/srv rw
25 22 0:41 / /m rw master:3 propagate_from:2 - overlay overlay rw
26 22 8:1 / /data rw - fuseblk /dev/sda1 rw
27 22 0:42 / /dev/shm rw - tmpfs shm rw
28 22 0:42 / /odd rw - fuse x rw
"""


def test_only_file_systems_of_this_machine_are_read_here() -> None:
    mounts = parse_mounts(MOUNTS)
    assert mounts.local == {(254, 0)}
    assert mounts.layered == {(0, 41)}
    assert not LOCAL & {b"nfs4", b"fuse", b"fuseblk", b"overlay", b"9p", b"cifs", b"ceph"}


@given(st.binary(max_size=300))
def test_any_mounts(data: bytes) -> None:
    mounts = parse_mounts(data)
    assert not mounts.local & mounts.layered
