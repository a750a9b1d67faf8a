"""Kubernetes' API as far as gpuwarden asks it: the official client, bounded in time.

A person's kubeconfig where ``KUBECONFIG`` names one, else the pod's own service account, else
``~/.kube/config``. Nothing is tried twice and no redirect is followed. Objects are JSON as the API
has it, without nulls. Source: core/v1.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, Final, Literal

from gpuwarden.errors import Denied, GpuwardenError, Malformed, TimedOut, Unavailable

CONNECT_SECONDS: Final = 3.0
ANSWER_SECONDS: Final = 10.0
PAGE_ITEMS: Final = 250
ITEMS_LIMIT: Final = 100_000
MESSAGE_LIMIT: Final = 300
_OWN_FILE: Final = "~/.kube/config"
_MISSING_CLIENT: Final = "pip install 'gpuwarden[kubernetes]'"

Deleted = Literal["deleting", "gone", "another"]


def is_configured() -> bool:
    """Whether there is a cluster to ask at all; costs nothing, asks nobody."""
    return bool(
        os.environ.get("KUBECONFIG")
        or os.environ.get("KUBERNETES_SERVICE_HOST")
        or os.path.exists(os.path.expanduser(_OWN_FILE))
    )


class NotFound(Unavailable):
    """The API server answered that there is no such object."""


class Changed(Unavailable):
    """The API server answered that the object is another one than the request was about."""


class Cluster:
    """The API server that this machine or this person is configured for.

    Errors of all methods: Denied (no right, or unknown to it), TimedOut, Unavailable, Malformed.
    """

    def __init__(self, *, answer_seconds: float = ANSWER_SECONDS) -> None:
        try:
            self._client = import_module("kubernetes.client")
            config = import_module("kubernetes.config")
            self._http_error = import_module("urllib3.exceptions").HTTPError
        except ImportError as error:
            raise Unavailable(
                "the Kubernetes client is not installed", remedy=_MISSING_CLIENT
            ) from error
        import yaml

        unusable = (
            config.ConfigException,
            yaml.YAMLError,
            OSError,
            ValueError,
            TypeError,
            AttributeError,
        )
        self._timeout = (min(CONNECT_SECONDS, answer_seconds), answer_seconds)
        configuration = self._client.Configuration()
        try:
            self.source = _configure(config, configuration)
        except unusable as error:
            raise Unavailable(
                f"no cluster is configured here: {_short(error)}",
                remedy="set KUBECONFIG, or run it in a pod with a service account",
            ) from error
        configuration.retries = False
        self._api = self._client.ApiClient(configuration)
        self._core = self._client.CoreV1Api(self._api)
        # The client does not say what the body of a deletion is: a server that took it for
        # something else would not see whose deletion it is.
        deleting = self._client.ApiClient(configuration)
        deleting.set_default_header("Content-Type", "application/json")
        self._deleting = self._client.CoreV1Api(deleting)

    def pod(self, namespace: str, name: str) -> dict[str, Any] | None:
        """A pod; None when there is none of that name."""
        return self._read(
            f"pod {namespace}/{name}", self._core.read_namespaced_pod, name, namespace
        )

    def node(self, name: str) -> dict[str, Any] | None:
        """A node; None when there is none of that name."""
        return self._read(f"node {name}", self._core.read_node, name)

    def set_schedulable(self, node: Mapping[str, Any], *, schedulable: bool) -> dict[str, Any]:
        """Cordons or uncordons a node as it was read; its state afterwards.

        Errors also: Changed when it was changed since it was read.
        """
        metadata = node["metadata"]
        body = {
            # null takes the field away, as kubectl uncordon does.
            "spec": {"unschedulable": None if schedulable else True},
            "metadata": {"resourceVersion": metadata["resourceVersion"]},
        }
        answer = self._call(
            f"node {metadata['name']}", self._core.patch_node, metadata["name"], body
        )
        return self._plain(answer)

    def delete_pod(self, namespace: str, name: str, uid: str, *, grace_seconds: int) -> Deleted:
        """Deletes that pod and no other one of its name."""
        options = self._client.V1DeleteOptions(
            api_version="v1",
            kind="DeleteOptions",
            grace_period_seconds=grace_seconds,
            preconditions=self._client.V1Preconditions(uid=uid),
        )
        try:
            self._call(
                f"pod {namespace}/{name}",
                self._deleting.delete_namespaced_pod,
                name,
                namespace,
                body=options,
            )
        except NotFound:
            return "gone"
        except Changed:
            return "another"
        return "deleting"

    def pods(self) -> Iterator[dict[str, Any]]:
        """All pods of all namespaces."""
        yield from self._all("pods", self._core.list_pod_for_all_namespaces)

    def services(self) -> Iterator[dict[str, Any]]:
        """All services of all namespaces."""
        yield from self._all("services", self._core.list_service_for_all_namespaces)

    # ---------------------------------------------------------------- one call

    def _read(self, what: str, call: Callable[..., Any], *arguments: str) -> dict[str, Any] | None:
        try:
            return self._plain(self._call(what, call, *arguments))
        except NotFound:
            return None

    def _all(self, what: str, call: Callable[..., Any]) -> Iterator[dict[str, Any]]:
        further, count = "", 0
        while True:
            paging = {"limit": PAGE_ITEMS} | ({"_continue": further} if further else {})
            answer = self._plain(self._call(what, call, **paging))
            found = answer.get("items", [])
            count += len(found)
            yield from found
            last, further = further, str((answer.get("metadata") or {}).get("continue") or "")
            if not further or further == last:
                return
            if count >= ITEMS_LIMIT:
                raise Unavailable(f"more than {ITEMS_LIMIT} {what}: not all were read")

    def _call(self, what: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        try:
            return call(*arguments, **named, _request_timeout=self._timeout)
        except self._client.ApiException as error:
            raise _of_status(what, error) from error
        except self._http_error as error:
            late = "Timeout" in type(error).__name__
            kind: type[GpuwardenError] = TimedOut if late else Unavailable
            raise kind(f"{what}: the API server: {_short(error)}") from error
        except OSError as error:
            raise Unavailable(f"{what}: the API server: {_short(error)}") from error
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise Malformed(f"{what}: no answer of an API server: {_short(error)}") from error

    def _plain(self, answer: Any) -> dict[str, Any]:
        plain = self._api.sanitize_for_serialization(answer)
        if not isinstance(plain, dict):
            raise Malformed("the API server answered with something that is no object")
        return plain


def _configure(config: Any, configuration: Any) -> str:
    """Fills the configuration; where it came from."""
    named = os.environ.get("KUBECONFIG", "")
    if not named and os.environ.get("KUBERNETES_SERVICE_HOST"):
        config.load_incluster_config(client_configuration=configuration)
        return "the pod's service account"
    # Named, since the client looks at the environment once only, when it is imported.
    file = named or os.path.expanduser(_OWN_FILE)
    config.load_kube_config(
        config_file=file, client_configuration=configuration, persist_config=False
    )
    return file


def _of_status(what: str, error: Any) -> GpuwardenError:
    status = error.status or 0
    text = f"{what}: the API server: {status} {_short(error.reason or '')}".rstrip()
    if status in (401, 403):
        return Denied(text, remedy="give the account the rights in docs/harden-kubernetes.md")
    if status == 404:
        return NotFound(text)
    if status == 409:
        return Changed(text)
    if status in (408, 504):
        return TimedOut(text)
    return Unavailable(text)


def _short(error: object) -> str:
    return str(error).strip().split("\n", 1)[0][:MESSAGE_LIMIT]
