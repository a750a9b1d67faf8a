"""Egress policies: who teaches, what becomes of a peer, and what is never allowed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.harden import kubernetes_egress as egress
from gpuwarden.harden.kubernetes_peers import Peers
from gpuwarden.rules.egress import POOL_PORTS
from tests.support.kubernetes_api import kubernetes_validate
from tests.support.nodes import NodeBuilder, gpu_id, policy_of

STORE = "198.51.100.7"
POLICY = policy_of("namespaces: {gpu: [training]}")
SERVICES = [
    {
        "metadata": {"name": "store", "namespace": "data"},
        "spec": {
            "clusterIP": "10.96.0.20",
            "clusterIPs": ["10.96.0.20", "fd00::20"],
            "selector": {"app": "store"},
            "ports": [
                {"port": 80, "targetPort": 9000},
                {"port": 443, "targetPort": "https"},
                {"port": 53, "protocol": "UDP", "targetPort": 5353},
                {"port": 8080},
            ],
        },
    },
    {
        "metadata": {"name": "kubernetes", "namespace": "default"},
        "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 443, "targetPort": 6443}]},
    },
    {"metadata": {"name": "headless", "namespace": "data"}, "spec": {"clusterIP": "None"}},
]
PODS = [
    {
        "metadata": {
            "name": "db-0",
            "namespace": "data",
            "labels": {"app": "db", "statefulset.kubernetes.io/pod-name": "db-0"},
        },
        "spec": {},
        "status": {"podIP": "10.1.2.3", "podIPs": [{"ip": "10.1.2.3"}, {"ip": "fd00::3"}]},
    },
    {
        "metadata": {"name": "x", "namespace": "bare", "labels": {"pod-template-hash": "h"}},
        "spec": {},
        "status": {"podIP": "10.1.2.4"},
    },
    {
        "metadata": {"name": "h", "namespace": "data", "labels": {"app": "host"}},
        "spec": {"hostNetwork": True},
        "status": {"podIP": "10.0.0.9"},
    },
]


def trainer(node: NodeBuilder, pid: int = 10, *, given: bool = True, **container: Any) -> None:
    """A process of a pod of the namespace training, which the kubelet gave GPU 0."""
    name = f"job-{pid}"
    uid = node.pod(name, namespace="training", **container)
    if given:
        gpu = (f"uuid:{gpu_id(0)}",)
        node.workload(
            "kubernetes",
            f"training/{name}",
            gpu,
            pod_uid=uid,
            pod_name=name,
            pod_namespace="training",
            containers=("main",),
        )
    else:
        node.source("kubernetes", scheduled=True)
    node.process(pid, exe="/usr/bin/python3.11", container=name)
    node.client(pid, sm_percent=50)


def learn(
    *nodes: NodeBuilder, pods: list[Any] | None = None, services: list[Any] | None = None
) -> egress.Learned:
    found = egress.learn(
        [node.snapshot() for node in nodes], POLICY, None, Peers(pods or (), services or ())
    )
    assert list(found) == ["training"]
    return found["training"]


def allowed(learned: egress.Learned) -> list[tuple[Any, list[Any]]]:
    """(selector, ports) of each rule but that for DNS."""
    made = egress.network_policy(learned)
    assert made is not None
    for version in ("1.30", "1.34", "1.37"):
        kubernetes_validate.validate(made, version, strict=True)
    assert made["spec"]["egress"][0] == egress.DNS
    return [(rule["to"][0], rule["ports"]) for rule in made["spec"]["egress"][1:]]


def block(address: str) -> dict[str, Any]:
    return {"ipBlock": {"cidr": address}}


def test_what_an_expected_process_talks_to_is_allowed(node: NodeBuilder) -> None:
    trainer(node)
    assert node.row(10).verdict == "expected"
    node.connection(10, STORE, 443)
    node.connection(10, STORE, 8443, protocol="tcp6", state="SYN_SENT")
    node.connection(10, "2001:db8::9", 443, protocol="tcp6")
    node.connection(10, "::ffff:198.51.100.8", 443, protocol="tcp6")
    node.connection(10, "198.51.100.9", 4739, protocol="udp")
    learned = learn(node)
    assert learned.processes == 1
    assert allowed(learned) == [
        (
            block("198.51.100.7/32"),
            [{"protocol": "TCP", "port": 443}, {"protocol": "TCP", "port": 8443}],
        ),
        (block("198.51.100.8/32"), [{"protocol": "TCP", "port": 443}]),
        (block("198.51.100.9/32"), [{"protocol": "UDP", "port": 4739}]),
        (block("2001:db8::9/128"), [{"protocol": "TCP", "port": 443}]),
    ]


@pytest.mark.parametrize("port", sorted(POOL_PORTS))
def test_a_pool_like_peer_is_never_allowed(port: int) -> None:
    node = NodeBuilder()
    node.gpu(0)
    trainer(node)
    node.connection(10, "10.7.7.7", port)
    learned = learn(node)
    assert not learned.seen
    assert egress.network_policy(learned) is None
    assert list(learned.refused.values()) == ["a port that pools use"]


def test_a_service_in_front_of_a_pool_like_port_is_not_allowed(node: NodeBuilder) -> None:
    trainer(node)
    node.connection(10, "10.96.0.30", 80)
    bridge = {
        "metadata": {"name": "b", "namespace": "n"},
        "spec": {
            "clusterIP": "10.96.0.30",
            "selector": {"a": "b"},
            "ports": [{"port": 80, "targetPort": 3333}],
        },
    }
    learned = learn(node, services=[bridge])
    assert not learned.seen
    assert "a port that pools use" in learned.refused.values()


def test_who_is_not_expected_teaches_nothing(node: NodeBuilder) -> None:
    trainer(node, 10, given=False)
    assert node.row(10).verdict == "rogue-container"
    node.connection(10, STORE, 443)
    learned = learn(node)
    assert not learned.seen
    assert learned.refused == {
        f"{STORE} TCP 443 (pid 10)": "seen of a process that is rogue-container"
    }
    lines = list(egress.words(learned))
    assert any("an empty one would cut all traffic" in line for line in lines)
    assert any(STORE in line for line in lines)


def test_a_peer_of_an_accused_process_is_not_allowed_to_others(node: NodeBuilder) -> None:
    trainer(node, 10)
    node.process(11, exe="/dev/shm/.x/xmrig", argv=("xmrig",))
    node.client(11, sm_percent=99)
    assert node.row(11).verdict in ("suspicious", "cryptominer")
    node.connection(10, STORE, 443)
    node.connection(11, STORE, 443)
    learned = learn(node)
    assert not learned.seen
    assert list(learned.refused.values()) == ["a peer of a process that is accused"]


def test_signs_against_an_expected_process_keep_it_from_teaching(node: NodeBuilder) -> None:
    trainer(node)
    node.connection(10, STORE, 443)
    node.connection(10, "203.0.113.5", 3333)
    row = node.row(10)
    assert any(evidence.kind for evidence in row.evidence), row
    assert not learn(node).seen


def test_another_namespace_and_the_host_network_are_left_out(node: NodeBuilder) -> None:
    trainer(node, host_network=True)
    node.connection(10, STORE, 443)
    learned = learn(node)
    assert not learned.seen
    assert any("host's network" in why for why in learned.refused.values())
    other = egress.learn([node.snapshot()], policy_of("namespaces: {gpu: [x]}"), None, Peers())
    assert not other["x"].seen
    assert not other["x"].refused


def test_who_calls_is_not_called_back(node: NodeBuilder) -> None:
    trainer(node)
    node.connection(10, "0.0.0.0", 0, state="LISTEN", local_port=50051)
    node.connection(10, "10.1.1.1", 80, local_port=50051)
    node.connection(10, "10.1.1.2", 45000, local_port=8000)
    node.connection(10, "10.1.1.3", 45000, local_port=8001, state="SYN_SENT")
    assert [peer.where for peer in learn(node).allowed] == ["10.1.1.3/32"]


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "::1", "127.9.9.9", "0.0.0.0", "224.0.0.1", "::", "nonsense", ""]
)
def test_loopback_and_nonsense_are_left_out(node: NodeBuilder, address: str) -> None:
    trainer(node)
    node.connection(10, address, 443)
    learned = learn(node)
    assert not learned.seen
    assert not learned.refused


def test_a_service_becomes_its_selector_and_its_target_port(node: NodeBuilder) -> None:
    trainer(node)
    for port in (80, 443, 8080):
        node.connection(10, "10.96.0.20", port)
    node.connection(10, "fd00::20", 53, protocol="udp6")
    selector = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "data"}},
        "podSelector": {"matchLabels": {"app": "store"}},
    }
    learned = learn(node, services=SERVICES)
    ((found, ports),) = allowed(learned)
    assert found == selector
    assert {(one["protocol"], one["port"]) for one in ports} == {
        ("TCP", 9000),
        ("TCP", "https"),
        ("TCP", 8080),
        ("UDP", 5353),
    }


def test_a_service_without_selector_is_said_to_need_a_person(node: NodeBuilder) -> None:
    trainer(node)
    node.connection(10, "10.96.0.1", 443)
    learned = learn(node, services=SERVICES)
    assert allowed(learned) == [(block("10.96.0.1/32"), [{"protocol": "TCP", "port": 443}])]
    assert any("default/kubernetes has no selector" in line for line in egress.words(learned))


def test_a_pod_becomes_its_lasting_labels(node: NodeBuilder) -> None:
    trainer(node)
    for address in ("10.1.2.3", "10.1.2.4", "10.0.0.9"):
        node.connection(10, address, 5432)
    learned = learn(node, pods=PODS)
    found = [selector for selector, _ in allowed(learned)]
    assert block("10.0.0.9/32") in found
    assert {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "data"}},
        "podSelector": {"matchLabels": {"app": "db"}},
    } in found
    assert {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "bare"}},
        "podSelector": {},
    } in found
    assert any("the whole namespace is allowed" in line for line in egress.words(learned))


def test_what_an_address_may_be_is_said(node: NodeBuilder) -> None:
    trainer(node)
    node.connection(10, "169.254.169.254", 80)
    node.connection(10, "10.5.5.5", 80)
    lines = list(egress.words(learn(node)))
    assert any("hands out credentials" in line for line in lines)
    assert any("--cluster or --pods tells" in line for line in lines)
    known = list(egress.words(learn(node, services=SERVICES)))
    assert not any("--cluster or --pods tells" in line for line in known)


def test_more_peers_than_fit_are_said() -> None:
    nodes = []
    for recording in range(2):
        node = NodeBuilder()
        node.gpu(0)
        trainer(node)
        for number in range(200):
            node.connection(10, f"198.51.{100 + recording}.{number + 1}", 443)
        nodes.append(node)
    learned = learn(*nodes)
    assert len(allowed(learned)) == egress.PEERS_LIMIT
    assert any(f"{400 - egress.PEERS_LIMIT} more peers" in line for line in egress.words(learned))


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.just("10.1.2.3"),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                ["metadata", "spec", "status", "podIP", "podIPs", "clusterIP", "ports", "selector"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
OBJECTS = st.lists(
    st.dictionaries(st.sampled_from(["metadata", "spec", "status"]), ANY), max_size=2
)


@settings(max_examples=100, deadline=None)
@given(OBJECTS, OBJECTS)
def test_any_objects_give_a_peer(pods: list[Any], services: list[Any]) -> None:
    peer, _ = Peers(pods, services).find("10.1.2.3", 80, "TCP")
    assert peer.port is not None
    assert peer.selector
