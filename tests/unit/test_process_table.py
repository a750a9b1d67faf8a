from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.errors import Malformed
from gpuwarden.host import Host
from gpuwarden.sensors.process import stat_lines
from tests.support.recorded_host import RecordedHost

NODE = Path(__file__).parent.parent / "hosts" / "nvidia-node"


def stat_line(comm: bytes) -> bytes:
    return b"77 (" + comm + b") S 5 6 7 34816 -1 64 0 0 0 0 30 12 0 0 20 0 3 0 999 1 2\n"


@given(st.binary(max_size=15).filter(lambda comm: b") " not in comm[-2:] and b"\0" not in comm))
def test_comm_may_hold_anything(comm: bytes) -> None:
    line = stat_lines.parse_stat(stat_line(comm))
    assert line.comm == comm.decode("utf-8", "backslashreplace")
    assert (line.pid, line.state, line.ppid, line.process_group, line.session_id) == (
        77,
        "S",
        5,
        6,
        7,
    )
    assert (line.tty_number, line.flags, line.cpu_ticks) == (34816, 64, 42)
    assert (line.thread_count, line.start_time_ticks) == (3, 999)


@given(st.binary(max_size=300))
def test_any_bytes_give_a_line_or_malformed(data: bytes) -> None:
    try:
        line = stat_lines.parse_stat(data)
    except Malformed:
        return
    line.comm.encode("utf-8")


@given(st.integers(0, 52))
def test_a_cut_line_is_malformed(size: int) -> None:
    with pytest.raises(Malformed):
        stat_lines.parse_stat(stat_line(b"x")[:size])


def test_a_recorded_table() -> None:
    table = stat_lines.read(RecordedHost(NODE))
    assert set(table) == {1, 2, 90, 100, 200, 300, 400, 500, 600}
    assert table[600].comm == "a) (b\n c) R 1"
    assert [pid for pid, line in table.items() if stat_lines.is_kernel_thread(line)] == [2]


def test_the_live_table_has_us_as_the_kernel_knows_us() -> None:
    table = stat_lines.read(Host())
    own = table[os.getpid()]
    assert own.ppid == os.getppid()
    assert own.session_id == os.getsid(0)


def test_both_listings_of_proc_agree() -> None:
    host = Host()
    before = set(host.pids())
    listed = set(host.kernel_pids())
    after = set(host.pids())
    assert before & after <= listed
    assert os.getpid() in listed


def test_own_pids_are_ours_and_our_descendants() -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    try:
        host = Host()
        own = stat_lines.own_pids(host, stat_lines.read(host))
        assert {os.getpid(), child} <= own
        assert os.getppid() not in own
    finally:
        os.close(writer)
        os.close(reader)
        os.waitpid(child, 0)


def test_a_recorded_tree_has_none_of_our_pids() -> None:
    host = RecordedHost(NODE)
    assert stat_lines.own_pids(host, stat_lines.read(host)) == set()
