"""Where pods of GPU namespaces go, learned from processes that belong there, as NetworkPolicies.

Only a process whose every verdict is ``expected``, proven and without any sign against it teaches.
Its peers become pods and services of the cluster where those are known, else single addresses. A
port that pools use, or a peer of an accused process, is never allowed.
Source: networking.k8s.io/v1.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct, field

from gpuwarden.finding import Row
from gpuwarden.harden.kubernetes_peers import Peer, Peers
from gpuwarden.judge import judge
from gpuwarden.model import Connection, Container, Snapshot
from gpuwarden.node import Node
from gpuwarden.policy import Policy
from gpuwarden.rules.egress import LIVE_STATES, POOL_PORTS, is_outside

POLICY_NAME: Final = "gpuwarden-egress"
PEERS_LIMIT: Final = 256
"""Of one namespace: beyond that, addresses change too often to be listed."""
EPHEMERAL: Final = 32768
"""From here on the kernel takes ports for callers (net.ipv4.ip_local_port_range)."""
DNS: Final[dict[str, Any]] = {
    "to": [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
            "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
        }
    ],
    "ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}],
}
_ACCUSED: Final = ("cryptominer", "suspicious", "rogue-container")
_ACCUSED_PEER: Final = "a peer of a process that is accused"


class Learned(Struct):
    """What was seen of one namespace."""

    namespace: str
    seen: Counter[Peer] = field(default_factory=Counter)
    """Peer → in how many recordings of how many processes."""
    refused: dict[str, str] = {}
    """What is not allowed although it was seen → why."""
    processes: int = 0
    notes: dict[Peer, str] = {}

    @property
    def allowed(self) -> list[Peer]:
        """The peers that the policy lists, in a stable order."""
        most = [peer for peer, _ in self.seen.most_common(PEERS_LIMIT)]
        return sorted(most, key=lambda peer: peer.text)


def learn(
    snapshots: Iterable[Snapshot], policy: Policy, policy_path: str | None, peers: Peers
) -> dict[str, Learned]:
    """What expected processes of the policy's GPU namespaces talked to; others are listed."""
    learned = {name: Learned(name) for name in dict.fromkeys(policy.namespaces.gpu)}
    for snapshot in snapshots:
        report = judge(snapshot, policy, policy_path)
        node = Node(snapshot)
        rows: dict[int, list[Row]] = {}
        for row in report.rows:
            if row.pid is not None:
                rows.setdefault(row.pid, []).append(row)
        accused = {
            one.remote_address
            for pid, own in rows.items()
            if any(row.verdict in _ACCUSED for row in own)
            for one in node.connections_by_pid.get(pid, ())
            if is_outside(one.remote_address)
        }
        listening = {
            (one.network_namespace, one.local_port)
            for one in snapshot.connections
            if one.state == "LISTEN"
        }
        for pid, own in rows.items():
            process = node.processes.get(pid)
            container = node.container_of(process) if process is not None else None
            if process is None or container is None or container.pod_namespace not in learned:
                continue
            into = learned[container.pod_namespace]
            why = _not_learned(own, container)
            if not why:
                into.processes += 1
            for one in _outgoing(node.connections_by_pid.get(pid, ()), listening):
                reason = why or ("" if one.remote_address not in accused else _ACCUSED_PEER)
                _take(into, one, reason, peers)
    return learned


def _not_learned(rows: Sequence[Row], container: Container) -> str:
    """Why nothing is learned from a process; empty when something is."""
    for row in rows:
        if row.verdict != "expected":
            return f"seen of a process that is {row.verdict}"
        if row.proof != "proven":
            return "seen of a process whose workload is only claimed"
        if any(evidence.kind is not None for evidence in row.evidence):
            return "seen of a process with signs against it"
    if not container.confirmed:
        return "seen of a container that no runtime confirmed"
    if container.host_network:
        return "seen in the host's network, where network policies do not reach"
    return ""


def _outgoing(
    connections: Iterable[Connection], listening: Collection[tuple[int | None, int]]
) -> Iterator[Connection]:
    """Connections that a process made; those that others made to it need no egress."""
    for one in connections:
        if one.remote_address is None or one.remote_port is None:
            continue
        if one.protocol.startswith("tcp") and one.state not in LIVE_STATES:
            continue
        called = (one.network_namespace, one.local_port) in listening or (
            one.local_port < EPHEMERAL <= one.remote_port and one.state != "SYN_SENT"
        )
        if not called:
            yield one


def _take(into: Learned, one: Connection, why: str, peers: Peers) -> None:
    try:
        address = ipaddress.ip_address(one.remote_address or "")
    except ValueError:
        return
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback or address.is_unspecified or address.is_multicast:
        return
    port = one.remote_port or 0
    protocol = "TCP" if one.protocol.startswith("tcp") else "UDP"
    peer, note = peers.find(str(address), port, protocol)
    if not why and (port in POOL_PORTS or peer.port in POOL_PORTS):
        why = "a port that pools use"
    if why:
        into.refused[f"{address} {protocol} {port} (pid {one.pid})"] = why
        return
    into.seen[peer] += 1
    if note:
        into.notes[peer] = note


def network_policy(learned: Learned) -> dict[str, Any] | None:
    """The policy of a namespace; None where nothing was seen, since it would cut everything."""
    if not learned.seen:
        return None
    rules: dict[str, dict[str, Any]] = {}
    for peer in learned.allowed:
        rule = rules.setdefault(peer.where, {"to": [peer.selector], "ports": []})
        rule["ports"].append({"protocol": peer.protocol, "port": peer.port})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": POLICY_NAME, "namespace": learned.namespace},
        "spec": {
            "podSelector": {},
            "policyTypes": ["Egress"],
            "egress": [DNS, *rules.values()],
        },
    }


def words(learned: Learned) -> Iterator[str]:
    """What a person should know of one namespace's policy, a line each."""
    name = learned.namespace
    if not learned.seen:
        yield (
            f"{name}: no egress of an expected process was seen ({learned.processes} such "
            "processes): no policy, since an empty one would cut all traffic"
        )
    else:
        yield (
            f"{name}: {len(learned.allowed)} peers of {learned.processes} expected processes, "
            "and DNS"
        )
    if len(learned.seen) > PEERS_LIMIT:
        yield (
            f"{name}: {len(learned.seen) - PEERS_LIMIT} more peers were seen and are not allowed: "
            "addresses that change are better named as networks, by hand"
        )
    for peer in learned.allowed:
        if peer in learned.notes:
            yield f"{name}: {peer.text}: {learned.notes[peer]}"
    yield from _not_allowed(name, learned.refused)


def _not_allowed(name: str, refused: Mapping[str, str]) -> Iterator[str]:
    for what, why in sorted(refused.items())[:PEERS_LIMIT]:
        yield f"{name}: not allowed: {what}: {why}"
    if len(refused) > PEERS_LIMIT:
        yield f"{name}: not allowed: {len(refused) - PEERS_LIMIT} more"
