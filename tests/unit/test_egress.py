"""Peers: a bridge that hides a pool is a sign, the tunnels of honest jobs are not."""

from __future__ import annotations

import pytest

from gpuwarden.finding import Row
from tests.support.nodes import NodeBuilder

OUTSIDE = "203.0.113.82"


def through(node: NodeBuilder, bridge: str, port: int, policy: str = "") -> Row:
    """A busy process of a person, connected to a local program that talks to the outside."""
    node.process(10, exe="/usr/bin/python3.11")
    node.process(11, exe=bridge)
    node.client(10, sm_percent=99)
    node.connection(10, "127.0.0.1", 7273, peer_pid=11)
    node.connection(11, OUTSIDE, port)
    return node.row(10, policy=policy)


@pytest.mark.parametrize("bridge", ["/usr/bin/ssh", "/usr/bin/v2ray", "/usr/bin/stunnel4"])
def test_an_ordinary_tunnel_is_told_and_accuses_nobody(node: NodeBuilder, bridge: str) -> None:
    row = through(node, bridge, 443)
    assert row.verdict == "other-team", row.path
    told = [e for e in row.evidence if OUTSIDE in e.text]
    assert [e.kind for e in told] == [None]


@pytest.mark.parametrize(("bridge", "port"), [("/opt/graftcp-local", 443), ("/usr/bin/ssh", 3333)])
def test_a_bridge_to_a_pool_is_a_sign(node: NodeBuilder, bridge: str, port: int) -> None:
    row = through(node, bridge, port)
    assert row.verdict == "suspicious", row.path
    assert any(e.kind == "egress" and e.strength == "strong" for e in row.evidence)


def test_a_declared_workload_may_not_go_round_by_a_tunnel(node: NodeBuilder) -> None:
    entry = "workloads: [{name: ours, match: {user: alice}, egress: [%s]}]"
    row = through(node, "/usr/bin/ssh", 443, entry % "192.0.2.0/24")
    assert any("the policy does not list that peer" in e.text for e in row.evidence)
    other = NodeBuilder()
    other.gpu()
    row = through(other, "/usr/bin/ssh", 443, entry % OUTSIDE)
    assert not any(e.kind == "egress" for e in row.evidence)
    assert row.verdict == "expected"
