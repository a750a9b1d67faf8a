"""Egress: peers of a GPU process that look like a pool, a bridge to one, or were not declared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gpuwarden.finding import Evidence
from gpuwarden.model import Connection, Process
from gpuwarden.node import Node
from gpuwarden.policy import parse_peer

if TYPE_CHECKING:
    from ipaddress import IPv4Address, IPv6Address

# Ports of public pool rules that are not also everyday service ports (facts of public rule sets).
POOL_PORTS = frozenset(
    {3333, 3334, 3335, 3336, 3357, 5556, 5588, 5730, 6099, 7777, 7778, 14433, 14444, 45560, 45700}
)
# Proxies made to hide where a program connects, or to speak a pool's protocol (public incidents).
# Ordinary tunnels and proxies (ssh, stunnel, socat, v2ray, a sidecar) serve honest jobs every day.
POOL_BRIDGES = frozenset(
    {"graftcp", "graftcp-local", "mgraftcp", "stratum-proxy", "xmrig-proxy", "xmrig-proxy-ng"}
)
LIVE_STATES = frozenset({"ESTABLISHED", "SYN_SENT"})
PEERS_SHOWN = 8
SOURCE = "/proc/<pid>/net/tcp"
DOCUMENTATION = ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32")


def _address(text: str | None) -> IPv4Address | IPv6Address | None:
    # Imported here: a node without connections needs no addresses.
    import ipaddress

    try:
        address = ipaddress.ip_address(text or "")
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped if mapped is not None else address


def is_outside(text: str | None) -> bool:
    """Whether an address is beyond private, loopback, link-local and carrier-shared ranges."""
    address = _address(text)
    if address is None:
        return False
    # Documentation ranges count as outside: examples and tests stand for the internet with them.
    for network, _ in map(parse_peer, DOCUMENTATION):
        if address.version == network.version and address in network:
            return True
    return address.is_global and not address.is_multicast


def allows(declared: Sequence[str], connection: Connection) -> bool:
    """Whether a policy's egress list names this peer: address, address:port or network."""
    address = _address(connection.remote_address)
    for entry in declared:
        try:
            network, port = parse_peer(entry)
        except ValueError:
            continue
        if address is None or address.version != network.version or address not in network:
            continue
        if port is None or port == connection.remote_port:
            return True
    return False


def _peer(connection: Connection) -> str:
    return f"{connection.remote_address}:{connection.remote_port}"


def _bridge(
    node: Node, connection: Connection, declared: Sequence[str] | None
) -> Iterator[Evidence]:
    """A peer on this machine that carries the traffic on: told, and a sign where it is odd."""
    peer = node.processes.get(connection.peer_pid or -1)
    if peer is None or peer.pid == connection.pid:
        return
    name = (peer.exe.path.rsplit("/", 1)[-1] if peer.exe else peer.comm) or peer.comm
    outside = [
        c
        for c in node.connections_by_pid.get(peer.pid, ())
        if c.state in LIVE_STATES and is_outside(c.remote_address)
    ]
    if not outside and name not in POOL_BRIDGES:
        return
    target = f", which talks to {_peer(outside[0])}" if outside else ""
    text = f"connected on this machine to port {connection.remote_port} of pid {peer.pid} ({name})"
    if declared is not None and not all(allows(declared, c) for c in outside):
        why = "the policy does not list that peer for this workload"
    elif name in POOL_BRIDGES or any(c.remote_port in POOL_PORTS for c in outside):
        why = "a bridge can hide a pool"
    else:
        yield Evidence(source=SOURCE, text=text + target)
        return
    yield Evidence(kind="egress", strength="strong", source=SOURCE, text=f"{text}{target}: {why}")


def observe(
    node: Node,
    process: Process,
    *,
    declared: Sequence[str] | None,
    pools: Sequence[tuple[str, int | None]],
) -> Iterator[Evidence]:
    """Evidence about the peers of one process; ``declared`` is its policy's egress list."""
    outside: list[Connection] = []
    for connection in node.connections_by_pid.get(process.pid, ()):
        if connection.state not in LIVE_STATES or connection.remote_address is None:
            continue
        if connection.peer_pid is not None:
            yield from _bridge(node, connection, declared)
            continue
        named = next(
            (
                f"{host}:{port}"
                for host, port in pools
                if host == connection.remote_address and port in (None, connection.remote_port)
            ),
            None,
        )
        if named is not None:
            yield Evidence(
                kind="egress",
                strength="strong",
                source=SOURCE,
                text=f"connected to {_peer(connection)}, the pool on its command line",
            )
        elif declared is not None:
            if not allows(declared, connection):
                yield Evidence(
                    kind="egress",
                    strength="strong",
                    source=SOURCE,
                    text=f"connected to {_peer(connection)}, which the policy does not list "
                    "for this workload",
                )
        elif is_outside(connection.remote_address):
            if connection.remote_port in POOL_PORTS:
                yield Evidence(
                    kind="egress",
                    strength="weak",
                    source=SOURCE,
                    text=f"connected to {_peer(connection)}, a port that pools use",
                )
            else:
                outside.append(connection)
    if outside:
        shown = ", ".join(sorted({_peer(c) for c in outside})[:PEERS_SHOWN])
        yield Evidence(source=SOURCE, text=f"connected to outside addresses: {shown}")
