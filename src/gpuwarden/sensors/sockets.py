"""Sockets of the processes that matter, from their own network namespaces; nothing is resolved."""

from __future__ import annotations

import ipaddress
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Literal, get_args

from msgspec import Struct, field

from gpuwarden.errors import Denied, GpuwardenError, Malformed
from gpuwarden.host import Host
from gpuwarden.model import Connection, Gap
from gpuwarden.pattern import pattern
from gpuwarden.sensors.process import stat_lines
from gpuwarden.sensors.process.executables import read_namespace
from gpuwarden.sensors.seen import Seen

Protocol = Literal["tcp", "tcp6", "udp", "udp6"]

# /proc/net/tcp (Documentation/networking/proc_net_tcp.rst): "sl: local rem st tx:rx tr:tm retrnsmt
# uid timeout inode …"; an address is hexadecimal 32-bit words in the machine's byte order, ":",
# the port as a hexadecimal number.
_ROW = pattern(
    rb"^ *\d{1,9}: ([0-9A-F]{8}|[0-9A-F]{32}):([0-9A-F]{4})"
    rb" ([0-9A-F]{8}|[0-9A-F]{32}):([0-9A-F]{4})"
    rb" ([0-9A-F]{2}) [0-9A-F]{8}:[0-9A-F]{8} [0-9A-F]{2}:[0-9A-F]{8} [0-9A-F]{8} +\d{1,10}"
    rb" +\d{1,10} (\d{1,20})(?: [^\n]*)?$",
    re.M,
)
_TABLE_LIMIT_BYTES = 64 << 20
_CONNECTIONS_LIMIT = 4096
"""Connections told of one process; the rest is one Gap."""

# include/net/tcp_states.h
_STATES = {
    0x01: "ESTABLISHED",
    0x02: "SYN_SENT",
    0x03: "SYN_RECV",
    0x04: "FIN_WAIT1",
    0x05: "FIN_WAIT2",
    0x06: "TIME_WAIT",
    0x07: "CLOSE",
    0x08: "CLOSE_WAIT",
    0x09: "LAST_ACK",
    0x0A: "LISTEN",
    0x0B: "CLOSING",
    0x0C: "NEW_SYN_RECV",
    0x0D: "BOUND_INACTIVE",
}
_UNCONNECTED = "UNCONNECTED"
"""What the kernel's CLOSE means for a datagram socket."""

Endpoint = tuple[str, int]


class SocketRow(Struct, frozen=True):
    """One socket in a table of a network namespace; ``remote`` is None when it has no peer."""

    protocol: Protocol
    local: Endpoint
    remote: Endpoint | None
    state: str
    inode: int


class _Namespace(Struct):
    """The tables of one network namespace, joined by inode and by both ends."""

    by_inode: dict[int, SocketRow] = field(default_factory=dict)
    by_ends: dict[tuple[str, Endpoint, Endpoint], int] = field(default_factory=dict)


def _address(text: bytes, byte_order: Literal["little", "big"]) -> str:
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    raw = b"".join(word.to_bytes(4, byte_order) for word in words)
    if len(raw) == 4:
        return str(ipaddress.IPv4Address(raw))
    address = ipaddress.IPv6Address(raw)
    return str(address.ipv4_mapped or address)


def parse_net_table(
    data: bytes, protocol: Protocol, byte_order: Literal["little", "big"] = sys.byteorder
) -> list[SocketRow]:
    """The sockets in the text of /proc/net/{tcp,tcp6,udp,udp6}; other lines are skipped.

    An IPv4 address in IPv6 form is told as IPv4.
    """
    rows = []
    for local, local_port, remote, remote_port, code, inode in _ROW.findall(data):
        state = _STATES.get(int(code, 16), f"UNKNOWN_{code.decode()}")
        if protocol.startswith("udp") and state == "CLOSE":
            state = _UNCONNECTED
        port = int(remote_port, 16)
        has_peer = port != 0 or bool(remote.strip(b"0"))
        rows.append(
            SocketRow(
                protocol=protocol,
                local=(_address(local, byte_order), int(local_port, 16)),
                remote=(_address(remote, byte_order), port) if has_peer else None,
                state=state,
                inode=int(inode),
            )
        )
    return rows


def read(host: Host, seen: Seen, pids: Iterable[int]) -> Iterator[Connection | Gap]:
    """The TCP and UDP sockets of ``pids``, each with the process at its other end if it is here.

    The other end is found in the same network namespace only, through ``seen.socket_owners``.
    A process that ends meanwhile is left out.
    """
    namespaces: dict[int, _Namespace | str] = {}
    denied = 0
    for pid in dict.fromkeys(pids):
        line = seen.table.get(pid)
        thread = stat_lines.living_thread(host, line) if line is not None else None
        number_in_proc = pid if thread is None else thread.pid
        try:
            files = host.open_files(f"/proc/{number_in_proc}/fd")
        except Denied:
            denied += 1
            continue
        except GpuwardenError:
            continue
        denied += files.unread > 0
        inodes = dict.fromkeys(files.sockets)
        if not inodes:
            continue
        number = _namespace_of(host, seen, pid)
        key = number if number is not None else -pid
        if key not in namespaces:
            namespaces[key] = _read_tables(host, number_in_proc)
        tables = namespaces[key]
        if isinstance(tables, str):
            # Read through another process next time: this one may just have ended.
            del namespaces[key]
            yield Gap(sensor="sockets", what=f"sockets of process {pid}", reason=tables)
            continue
        found = [tables.by_inode[inode] for inode in inodes if inode in tables.by_inode]
        for row in found[:_CONNECTIONS_LIMIT]:
            yield _connection(seen, pid, row, tables, number)
        if len(found) > _CONNECTIONS_LIMIT:
            yield Gap(
                sensor="sockets",
                what=f"sockets of process {pid} after the first {_CONNECTIONS_LIMIT}",
                reason="it has too many to list",
                count=len(found) - _CONNECTIONS_LIMIT,
            )
    if denied:
        yield Gap(
            sensor="sockets",
            what="sockets of other users' processes",
            reason="permission denied for /proc/<pid>/fd",
            remedy="run as root with CAP_SYS_PTRACE",
            count=denied,
        )


def _namespace_of(host: Host, seen: Seen, pid: int) -> int | None:
    process = seen.processes.get(pid)
    if process is not None and "net" in process.namespaces:
        return process.namespaces["net"]
    return read_namespace(host, pid, "net")


def _read_tables(host: Host, pid: int) -> _Namespace | str:
    """All four tables, or the reason why none could be read (IPv6 may be off)."""
    tables = _Namespace()
    reason = ""
    read_any = False
    for protocol in get_args(Protocol):
        try:
            data = host.read_bytes(f"/proc/{pid}/net/{protocol}", _TABLE_LIMIT_BYTES)
            rows = parse_net_table(data, protocol)
        except (GpuwardenError, Malformed) as error:
            reason = reason or str(error)
            continue
        read_any = True
        for row in rows:
            if row.inode:
                tables.by_inode.setdefault(row.inode, row)
                if row.remote is not None:
                    tables.by_ends[protocol[:3], row.local, row.remote] = row.inode
    return tables if read_any else reason


def _connection(
    seen: Seen, pid: int, row: SocketRow, tables: _Namespace, namespace: int | None
) -> Connection:
    peer: int | None = None
    if row.remote is not None:
        inode = tables.by_ends.get((row.protocol[:3], row.remote, row.local))
        peer = None if inode is None else seen.socket_owners.get(inode)
    return Connection(
        pid=pid,
        protocol=row.protocol,
        state=row.state,
        local_address=row.local[0],
        local_port=row.local[1],
        remote_address=None if row.remote is None else row.remote[0],
        remote_port=None if row.remote is None else row.remote[1],
        network_namespace=namespace,
        peer_pid=peer,
    )
