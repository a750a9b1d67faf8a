from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.errors import Denied
from gpuwarden.host import OpenFiles
from gpuwarden.model import Connection, Gap
from gpuwarden.sensors import holders, sockets
from gpuwarden.sensors.process import stat_lines
from gpuwarden.sensors.seen import Seen
from gpuwarden.sensors.sockets import SocketRow, parse_net_table
from tests.support.recorded_host import RecordedHost

NODE = Path(__file__).parent.parent / "hosts" / "nvidia-node"
MAPPED = "0000000000000000FFFF0000"
"""::ffff:0:0/96 as the kernel prints it on a little-endian machine."""


def row(local: str, remote: str, state: str, inode: int = 7) -> bytes:
    return (
        f"   0: {local} {remote} {state} 00000000:00000000 00:00000000 00000000"
        f"  1000        0 {inode} 2 ffff888000000000 20 4 30 10 -1\n"
    ).encode()


def look(host: RecordedHost, pids: list[int]) -> list[Connection | Gap]:
    seen = Seen(table=stat_lines.read(host))
    list(holders.read(host, seen))
    return list(sockets.read(host, seen, pids))


@pytest.mark.parametrize(
    ("data", "protocol", "expected"),
    [
        (
            row("0100007F:0CEA", "00000000:0000", "0A"),
            "tcp",
            SocketRow("tcp", ("127.0.0.1", 3306), None, "LISTEN", 7),
        ),
        (
            row("0A02000A:9C40", "070200C0:01BB", "02"),
            "tcp",
            SocketRow("tcp", ("10.0.2.10", 40000), ("192.0.2.7", 443), "SYN_SENT", 7),
        ),
        (
            row("B80D0120000000000000000001000000:0050", "0" * 32 + ":0000", "0A"),
            "tcp6",
            SocketRow("tcp6", ("2001:db8::1", 80), None, "LISTEN", 7),
        ),
        (
            row(MAPPED + "070200C0:0050", MAPPED + "0A02000A:0051", "01"),
            "tcp6",
            SocketRow("tcp6", ("192.0.2.7", 80), ("10.0.2.10", 81), "ESTABLISHED", 7),
        ),
        (
            row("00000000:0035", "00000000:0000", "07"),
            "udp",
            SocketRow("udp", ("0.0.0.0", 53), None, "UNCONNECTED", 7),
        ),
        (
            row("0100007F:0035", "0100007F:1000", "01"),
            "udp",
            SocketRow("udp", ("127.0.0.1", 53), ("127.0.0.1", 4096), "ESTABLISHED", 7),
        ),
    ],
)
def test_rows_as_the_kernel_writes_them(
    data: bytes, protocol: sockets.Protocol, expected: SocketRow
) -> None:
    assert parse_net_table(b"  sl  local_address\n" + data, protocol, "little") == [expected]


def test_addresses_follow_the_machines_byte_order() -> None:
    big = parse_net_table(row("7F000001:0050", "00000000:0000", "0A"), "tcp", "big")
    assert big[0].local == ("127.0.0.1", 80)


def test_an_unknown_state_is_told_as_such() -> None:
    assert parse_net_table(row("0" * 8 + ":0001", "0" * 8 + ":0000", "FE"), "tcp")[0].state == (
        "UNKNOWN_FE"
    )


@given(st.binary(max_size=300))
def test_any_bytes_give_rows(data: bytes) -> None:
    known = row("0100007F:0035", "0100007F:1000", "01")
    assert parse_net_table(data + b"\n" + known + data, "tcp6")[-1].inode >= 0


def test_each_process_has_its_own_sockets_and_the_peer_behind_them() -> None:
    found = [f for f in look(RecordedHost(NODE), [100, 200, 300]) if isinstance(f, Connection)]
    told = [
        (c.pid, c.state, c.local_port, c.remote_address, c.remote_port, c.peer_pid) for c in found
    ]
    assert told == [
        (100, "ESTABLISHED", 8080, "127.0.0.1", 8081, None),
        (200, "ESTABLISHED", 50000, "127.0.0.1", 3333, 300),
        (300, "LISTEN", 3333, None, None, None),
        (300, "ESTABLISHED", 40000, "192.0.2.7", 443, None),
        (300, "ESTABLISHED", 3333, "127.0.0.1", 50000, 200),
    ]
    assert {c.network_namespace for c in found} == {4026531840}


def test_tables_are_read_once_a_namespace() -> None:
    class Counting(RecordedHost):
        reads = 0

        def read_bytes(self, path: str, limit: int = 1 << 20) -> bytes:
            self.reads += path.endswith("/net/tcp")
            return super().read_bytes(path, limit)

    host = Counting(NODE)
    look(host, [100, 200, 300])
    assert host.reads == 1


def test_what_may_not_be_read_is_a_gap() -> None:
    class Unprivileged(RecordedHost):
        def open_files(self, directory: str) -> OpenFiles:
            raise Denied(f"{directory}: permission denied")

    facts = list(sockets.read(Unprivileged(NODE), Seen(), [100, 200]))
    assert [(f.count, bool(f.remedy)) for f in facts if isinstance(f, Gap)] == [(2, True)]


def test_a_process_without_tables_is_a_gap_and_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "proc/5/fd").mkdir(parents=True)
    (tmp_path / "proc/5/fd/3").symlink_to("socket:[44]")
    facts = list(sockets.read(RecordedHost(tmp_path), Seen(), [5, 6]))
    assert [f.what for f in facts if isinstance(f, Gap)] == ["sockets of process 5"]
