"""Today's pods, from a file or from the API server, and which of them the rules would refuse."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from gpuwarden.cluster import Cluster
from gpuwarden.errors import Malformed, UsageError
from gpuwarden.harden.kubernetes_rules import RuleSet

FILE_LIMIT_BYTES: Final = 512 << 20
ENDED: Final = ("Succeeded", "Failed")
NAMES_SHOWN: Final = 8


class Today(Struct, frozen=True):
    """What there is in the cluster, each object as JSON without nulls."""

    source: str
    pods: tuple[dict[str, Any], ...] = ()
    services: tuple[dict[str, Any], ...] = ()


class Refused(Struct, frozen=True):
    """A pod that would not be let in; ``unread`` says why it could not be judged instead."""

    namespace: str
    name: str
    maker: str | None
    node: str | None
    broken: dict[str, list[str]]
    unread: str = ""

    @property
    def text(self) -> str:
        """One line for a person; names in it are as the cluster gave them."""
        made = f" ({self.maker})" if self.maker else ""
        where = f" on {self.node}" if self.node else ""
        if self.unread:
            return f"{self.namespace}/{self.name}{made}{where}: cannot be judged: {self.unread}"
        why = "; ".join(
            f"{rule}: {', '.join(names[:NAMES_SHOWN])}"
            + (f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else "")
            for rule, names in self.broken.items()
        )
        return f"{self.namespace}/{self.name}{made}{where}: {why}"


class Judged(Struct, frozen=True):
    """All pods of a cluster against the rules."""

    refused: tuple[Refused, ...]
    judged: int
    exempt: int
    """In namespaces that are left out."""
    ended: int


def read_file(path: str) -> Today:
    """What ``kubectl get pods,services -A -o json`` printed. Errors: UsageError."""
    try:
        if path == "-":
            data = sys.stdin.buffer.read(FILE_LIMIT_BYTES + 1)
        else:
            with open(path, "rb") as file:
                data = file.read(FILE_LIMIT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"--pods {path}: {os.strerror(error.errno or 0)}") from error
    if len(data) > FILE_LIMIT_BYTES:
        raise UsageError(f"--pods {path}: more than {FILE_LIMIT_BYTES >> 20} MiB")
    try:
        return parse(data, path)
    except Malformed as error:
        raise UsageError(
            f"--pods {path}: {error}", remedy="kubectl get pods,services -A -o json"
        ) from error


def parse(data: bytes, source: str) -> Today:
    """Pods and services of a list, or one pod. Errors: Malformed."""
    try:
        document = without_nulls(msgspec.json.decode(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"not JSON: {error}") from error
    if not isinstance(document, dict):
        raise Malformed("not an object of Kubernetes")
    kind = str(document.get("kind", ""))
    items = document.get("items") if kind.endswith("List") else [document]
    if not isinstance(items, list):
        raise Malformed("a list without items")
    # Items of a typed list have no kind of their own.
    own = kind.removesuffix("List") if kind.endswith("List") else kind
    pods, services, other = [], [], 0
    for item in items:
        named = item.get("kind", own) if isinstance(item, dict) else ""
        if named == "Pod":
            pods.append(item)
        elif named == "Service":
            services.append(item)
        else:
            other += 1
    if other and not pods:
        raise Malformed("no pods in it")
    return Today(source, tuple(pods), tuple(services))


def read_cluster(cluster: Cluster) -> Today:
    """The same from the API server. Errors: those of Cluster."""
    return Today(cluster.source, tuple(cluster.pods()), tuple(cluster.services()))


def without_nulls(value: Any) -> Any:
    """A JSON value as the API server would hand it to CEL: fields that are null are missing."""
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [without_nulls(one) for one in value]
    return value


def judge(pods: Iterable[Mapping[str, Any]], rules: RuleSet, exempt: Sequence[str]) -> Judged:
    """Every pod that has not ended and is in no exempt namespace, against the rules."""
    refused: list[Refused] = []
    judged, left_out, ended = 0, 0, 0
    for pod in pods:
        metadata = _object(pod, "metadata")
        namespace = str(metadata.get("namespace", "default"))
        if namespace in exempt:
            left_out += 1
        elif _object(pod, "status").get("phase") in ENDED:
            ended += 1
        else:
            judged += 1
            refused += _judged(pod, rules)
    refused.sort(key=lambda one: (one.namespace, one.name))
    return Judged(tuple(refused), judged, left_out, ended)


def _judged(pod: Mapping[str, Any], rules: RuleSet) -> Iterator[Refused]:
    broken: dict[str, list[str]] = {}
    unread = ""
    metadata, spec = _object(pod, "metadata"), pod.get("spec")
    try:
        if not isinstance(spec, dict):
            raise Malformed("it has no spec")
        annotations = metadata.get("annotations", {})
        if not isinstance(annotations, dict):
            raise Malformed("its annotations are no object")
        broken = rules.broken(spec, annotations)
    except Malformed as error:
        unread = str(error)
    if broken or unread:
        node = spec.get("nodeName") if isinstance(spec, dict) else None
        yield Refused(
            str(metadata.get("namespace", "default")),
            str(metadata.get("name", "?")),
            _maker(metadata),
            None if node is None else str(node),
            broken,
            unread,
        )


def _maker(metadata: Mapping[str, Any]) -> str | None:
    owners = metadata.get("ownerReferences")
    for owner in owners if isinstance(owners, list) else ():
        if isinstance(owner, dict) and owner.get("controller"):
            return f"{owner.get('kind')}/{owner.get('name')}"
    return None


def _object(holder: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    value = holder.get(field) if isinstance(holder, Mapping) else None
    return value if isinstance(value, Mapping) else {}
