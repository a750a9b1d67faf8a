"""A small HTTP server that plays Kubernetes' API for nodes, pods and services: a mock.

There is no API server to be had here, so what a real one would say of a request is taken from its
schemas: bodies and objects are held against them. What it cannot show: RBAC, admission, the
scheduler, kubelets.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import jsonschema
import pytest
import yaml

# By name: the schemas' package has no types.
kubernetes_validate = import_module("kubernetes_validate")
VERSION = "1.34"


def check_delete_options(body: dict[str, Any]) -> None:
    """Against the schema of the API's DeleteOptions, which all groups share."""
    utils = import_module("kubernetes_validate.utils")
    resource = import_module("referencing").Resource
    directory = f"kubernetes-json-schema/v{VERSION}.0-local-strict"
    schema, definitions = (
        utils.schema_contents(f"{directory}/{name}.json", VERSION)
        for name in ("deleteoptions-meta-v1", "_definitions")
    )
    registry = resource.from_contents(schema) @ import_module("referencing").Registry()
    registry = resource.from_contents(definitions) @ registry
    jsonschema.Draft202012Validator(schema, registry=registry).validate(body)


class Asked(NamedTuple):
    """One request as it came."""

    method: str
    path: str
    body: Any
    content_type: str
    token: str


class Api:
    """The objects there are, and how requests are answered.

    ``answers`` maps ``METHOD path`` to a status that is sent instead; ``hang`` names requests that
    get none. ``stubborn`` pods stay although they are deleted; a pod in ``comes_back`` is made anew
    under its name.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, dict[str, Any]] = {}
        self.pods: dict[tuple[str, str], dict[str, Any]] = {}
        self.services: list[dict[str, Any]] = []
        self.asked: list[Asked] = []
        self.answers: dict[str, int] = {}
        self.hang: set[str] = set()
        self.stubborn: set[tuple[str, str]] = set()
        self.comes_back: set[tuple[str, str]] = set()
        self.released = threading.Event()
        self.page = 0
        self.raw: bytes | None = None
        """Sent as the body of every answer."""

    def add_node(self, name: str, *, boot_id: str, unschedulable: bool = False) -> None:
        info = dict.fromkeys(
            (
                "architecture",
                "containerRuntimeVersion",
                "kernelVersion",
                "kubeProxyVersion",
                "kubeletVersion",
                "machineID",
                "operatingSystem",
                "osImage",
                "systemUUID",
            ),
            "x",
        )
        self.nodes[name] = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "resourceVersion": "7", "uid": f"uid-of-{name}"},
            "spec": {"unschedulable": True} if unschedulable else {},
            "status": {"nodeInfo": {**info, "bootID": boot_id}},
        }
        kubernetes_validate.validate(self.nodes[name], VERSION, strict=True)

    def add_pod(self, namespace: str, name: str, **more: Any) -> dict[str, Any]:
        metadata = {"name": name, "namespace": namespace} | more.pop("metadata", {})
        spec = {"containers": [{"name": "c", "image": "i"}]} | more.pop("spec", {})
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, **more}
        kubernetes_validate.validate(pod, VERSION, strict=True)
        self.pods[namespace, name] = pod
        return pod

    def answer(self, asked: Asked, query: dict[str, list[str]]) -> tuple[int, Any]:
        """Status and body for a request; an AssertionError is a request no server would take."""
        parts = asked.path.strip("/").split("/")
        assert parts[:2] == ["api", "v1"], asked
        match asked.method, parts[2:]:
            case "GET", ["pods"]:
                return 200, self._page("PodList", list(self.pods.values()), query)
            case "GET", ["services"]:
                return 200, self._page("ServiceList", self.services, query)
            case "GET", ["nodes", name]:
                return (200, self.nodes[name]) if name in self.nodes else (404, None)
            case "PATCH", ["nodes", name]:
                return self._patched(name, asked)
            case "GET", ["namespaces", namespace, "pods", name]:
                found = self.pods.get((namespace, name))
                return (404, None) if found is None else (200, found)
            case "DELETE", ["namespaces", namespace, "pods", name]:
                return self._deleted((namespace, name), asked)
        raise AssertionError(f"no server would take {asked}")

    def _page(
        self, kind: str, items: list[dict[str, Any]], query: dict[str, list[str]]
    ) -> dict[str, Any]:
        limit = self.page or int(query["limit"][0])
        start = int(query.get("continue", ["0"])[0])
        further = str(start + limit) if start + limit < len(items) else ""
        page = items[start : start + limit]
        metadata = {"resourceVersion": "7", "continue": further}
        return {"apiVersion": "v1", "kind": kind, "metadata": metadata, "items": page}

    def _patched(self, name: str, asked: Asked) -> tuple[int, Any]:
        assert asked.content_type in (
            "application/merge-patch+json",
            "application/strategic-merge-patch+json",
        ), asked
        node = self.nodes[name]
        if asked.body["metadata"]["resourceVersion"] != node["metadata"]["resourceVersion"]:
            return 409, None
        assert set(asked.body) == {"metadata", "spec"}
        assert set(asked.body["spec"]) == {"unschedulable"}
        spec = node["spec"] | asked.body["spec"]
        patched = node | {"spec": {k: v for k, v in spec.items() if v is not None}}
        kubernetes_validate.validate(patched, VERSION, strict=True)
        patched["metadata"] = node["metadata"] | {"resourceVersion": "8"}
        self.nodes[name] = patched
        return 200, patched

    def _deleted(self, key: tuple[str, str], asked: Asked) -> tuple[int, Any]:
        assert asked.content_type == "application/json", asked
        assert asked.body["kind"] == "DeleteOptions"
        check_delete_options(asked.body)
        pod = self.pods.get(key)
        if pod is None:
            return 404, None
        if asked.body["preconditions"]["uid"] != pod["metadata"].get("uid"):
            return 409, None
        if key not in self.stubborn:
            del self.pods[key]
        if key in self.comes_back:
            metadata = pod["metadata"] | {"uid": "uid-of-the-next"}
            self.pods[key] = pod | {"metadata": metadata}
        return 200, pod


@contextmanager
def api_server(
    directory: Path, monkeypatch: pytest.MonkeyPatch, token: str = "a-token"
) -> Iterator[Api]:
    """An Api that listens, and a kubeconfig for it in ``KUBECONFIG``."""
    api = Api()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            address = urlsplit(self.path)
            length = int(self.headers.get("Content-Length", "0"))
            raw = self.rfile.read(length)
            asked = Asked(
                self.command,
                address.path,
                json.loads(raw) if raw else None,
                self.headers.get("Content-Type", ""),
                self.headers.get("Authorization", ""),
            )
            api.asked.append(asked)
            key = f"{asked.method} {asked.path}"
            if key in api.hang:
                api.released.wait(20)
                self.close_connection = True
                return
            status, body = api.answers.get(key, 0), None
            if not status:
                status, body = api.answer(asked, parse_qs(address.query))
            if body is None:
                body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status}
            data = json.dumps(body).encode() if api.raw is None else api.raw
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PATCH = do_DELETE = do_POST = do_PUT = handle_one

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    config = directory / "kubeconfig"
    config.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "clusters": [{"name": "c", "cluster": {"server": url}}],
                "users": [{"name": "u", "user": {"token": token}}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            }
        )
    )
    monkeypatch.setenv("KUBECONFIG", str(config))
    for proxy in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    try:
        yield api
    finally:
        api.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
