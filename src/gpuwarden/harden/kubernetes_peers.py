"""What an address is in the cluster: a service, a pod, or neither.

A process sees a service's own address; a network policy is held against the pod behind it. So a
service becomes its selector and its target port, and a pod its labels.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from gpuwarden.harden.kubernetes_admission import NAMESPACE_LABEL

LABELS_LIMIT: Final = 64
PASSING_LABELS: Final = frozenset(
    {
        "pod-template-hash",
        "pod-template-generation",
        "controller-revision-hash",
        "controller-uid",
        "job-name",
        "statefulset.kubernetes.io/pod-name",
        "apps.kubernetes.io/pod-index",
        "batch.kubernetes.io/controller-uid",
        "batch.kubernetes.io/job-name",
        "batch.kubernetes.io/job-completion-index",
    }
)
"""Labels of one pod or one rollout: the next one has others."""
METADATA_SERVICE: Final = "169.254.169.254"


class Peer(Struct, frozen=True):
    """Where egress goes: a selector as networking/v1 has it, and the port there."""

    where: str
    """Its name for a person, and what makes it the same as another."""
    namespace: str | None
    labels: tuple[tuple[str, str], ...]
    block: str | None
    protocol: str
    port: int | str

    @property
    def text(self) -> str:
        return f"{self.where} {self.protocol} {self.port}"

    @property
    def selector(self) -> dict[str, Any]:
        """A NetworkPolicyPeer."""
        if self.block is not None:
            return {"ipBlock": {"cidr": self.block}}
        return {
            "namespaceSelector": {"matchLabels": {NAMESPACE_LABEL: self.namespace}},
            "podSelector": {"matchLabels": dict(self.labels)} if self.labels else {},
        }


class Peers:
    """The cluster's pods and services by address; what is malformed among them is left out."""

    def __init__(
        self, pods: Sequence[Mapping[str, Any]] = (), services: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self.known = bool(pods or services)
        self._pods: dict[str, Mapping[str, Any]] = {}
        self._services: dict[str, Mapping[str, Any]] = {}
        for pod in pods:
            # In the host's network the address is the node's.
            if not _object(pod, "spec").get("hostNetwork"):
                for address in _addresses(_object(pod, "status"), "podIP", "podIPs"):
                    self._pods[address] = pod
        for service in services:
            for address in _addresses(_object(service, "spec"), "clusterIP", "clusterIPs"):
                self._services[address] = service

    def find(self, address: str, port: int, protocol: str) -> tuple[Peer, str]:
        """(the peer, what a person should know of it)."""
        service = self._services.get(address)
        if service is not None:
            return self._service(service, address, port, protocol)
        pod = self._pods.get(address)
        if pod is not None:
            metadata = _object(pod, "metadata")
            labels = _labels(
                {k: v for k, v in _object(metadata, "labels").items() if k not in PASSING_LABELS}
            )
            namespace = str(metadata.get("namespace", "default"))
            note = "" if labels else "its pod has no lasting label: the whole namespace is allowed"
            return _selected(namespace, labels, protocol, port), note
        return self._address(address, port, protocol)

    def _service(
        self, service: Mapping[str, Any], address: str, port: int, protocol: str
    ) -> tuple[Peer, str]:
        metadata, spec = _object(service, "metadata"), _object(service, "spec")
        namespace = str(metadata.get("namespace", "default"))
        name = f"service {namespace}/{metadata.get('name')}"
        labels = _labels(_object(spec, "selector"))
        if not labels:
            note = f"{name} has no selector: name the addresses behind it (its EndpointSlices)"
            return _block(address, port, protocol), note
        target: int | str = port
        ports = spec.get("ports")
        for one in ports if isinstance(ports, list) else ():
            if (
                isinstance(one, Mapping)
                and one.get("port") == port
                and one.get("protocol", "TCP") == protocol
                and isinstance(one.get("targetPort"), int | str)
            ):
                target = one["targetPort"]
        return _selected(namespace, labels, protocol, target), f"it was seen as {name}"

    def _address(self, address: str, port: int, protocol: str) -> tuple[Peer, str]:
        parsed = ipaddress.ip_address(address)
        note = ""
        if address == METADATA_SERVICE:
            note = "the cloud's metadata service, which hands out credentials: is it needed?"
        elif parsed.is_private and not self.known:
            note = (
                "a private address: where it is a service's, the policy does not match; "
                "--cluster or --pods tells"
            )
        return _block(address, port, protocol), note


def _selected(
    namespace: str, labels: tuple[tuple[str, str], ...], protocol: str, port: int | str
) -> Peer:
    named = ", ".join(f"{key}={value}" for key, value in labels) or "all"
    return Peer(f"pods {named} of {namespace}", namespace, labels, None, protocol, port)


def _block(address: str, port: int, protocol: str) -> Peer:
    block = str(ipaddress.ip_network(address))
    return Peer(block, None, (), block, protocol, port)


def _labels(labels: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    found = [(k, v) for k, v in labels.items() if isinstance(k, str) and isinstance(v, str)]
    return tuple(sorted(found)[:LABELS_LIMIT])


def _addresses(holder: Mapping[str, Any], one: str, all_of: str) -> Iterator[str]:
    several = holder.get(all_of)
    listed = [holder.get(one), *(several if isinstance(several, list) else ())]
    for entry in listed:
        text = entry.get("ip") if isinstance(entry, Mapping) else entry
        try:
            yield str(ipaddress.ip_address(str(text)))
        except ValueError:
            continue


def _object(holder: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    value = holder.get(field) if isinstance(holder, Mapping) else None
    return value if isinstance(value, Mapping) else {}
