"""Containers as a CRI runtime (containerd, CRI-O) describes them, over its unix socket.

One ListPodSandbox for the pods and their labels, and one ContainerStatus per id that was seen
(Kubernetes CRI v1, runtime.v1.RuntimeService). The verbose part of an answer is free-form JSON of
each runtime: ``info["info"]`` on both containerd and CRI-O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from gpuwarden.errors import GpuwardenError, Malformed
from gpuwarden.model import Container
from gpuwarden.sensors.runtimes import fields
from gpuwarden.sensors.runtimes.oci import OciSpec, spec_of
from gpuwarden.wire.unix_grpc import NotKnown, UnixChannel, load

SERVICE: Final = "/runtime.v1.RuntimeService/"
INFO_LIMIT_CHARACTERS: Final = 4 << 20
_STATES: Final = ("created", "running", "exited", "unknown")
_SANDBOX_STATES: Final = ("ready", "not ready")
_NODE: Final = 2
"""NamespaceMode NODE: the host's namespace."""


class Verbose(msgspec.Struct, frozen=True, kw_only=True):
    """The verbose part of a ContainerStatus answer."""

    main_pid: int | None = None
    sandbox_id: str | None = None
    spec: OciSpec | None = None
    privileged: bool | None = None
    host_pid: bool | None = None
    host_network: bool | None = None
    host_devices: tuple[str, ...] | None = None
    cdi_devices: tuple[str, ...] = ()


class Sandbox(msgspec.Struct, frozen=True, kw_only=True):
    """A pod sandbox: one attempt to run a pod."""

    id: str
    pod: fields.Pod
    ready: bool
    labels: dict[str, str] = {}
    owner: str | None = None
    created_at_ns: int | None = None


def ask(
    path: str, identities: Sequence[str], *, runtime: str, deadline_seconds: float
) -> tuple[int, dict[str, Container | GpuwardenError]]:
    """(uid that listens, id → container or the error) for the ids that the runtime knows.

    Errors: Unavailable, TimedOut, Denied for the socket; NotInstalled without grpcio.
    """
    answers: dict[str, Container | GpuwardenError] = {}
    with UnixChannel(path, deadline_seconds=deadline_seconds) as channel:
        messages = load("gpuwarden.wire.cri_pb2")
        sandboxes = list_sandboxes(channel, messages)
        statuses = channel.calls(
            SERVICE + "ContainerStatus",
            [
                messages.ContainerStatusRequest(container_id=identity, verbose=True)
                for identity in identities
            ],
            messages.ContainerStatusResponse,
        )
        for identity, status in zip(identities, statuses, strict=True):
            if isinstance(status, NotKnown):
                if identity in sandboxes:
                    answers[identity] = _sandbox_container(sandboxes[identity], runtime)
                continue
            if isinstance(status, GpuwardenError):
                answers[identity] = status
                continue
            try:
                answers[identity] = _container(status, identity, sandboxes, runtime)
            except Malformed as error:
                answers[identity] = error
        return channel.uid, answers


def list_sandboxes(channel: UnixChannel, messages: Any) -> dict[str, Sandbox]:
    """Every pod sandbox of the node by its id. Errors: as UnixChannel.call."""
    answer = channel.call(
        SERVICE + "ListPodSandbox",
        messages.ListPodSandboxRequest(),
        messages.ListPodSandboxResponse,
    )
    found: dict[str, Sandbox] = {}
    for item in answer.items:
        tags = fields.labels(dict(item.labels))
        pod = fields.Pod(
            uid=fields.text(item.metadata.uid),
            name=fields.text(item.metadata.name),
            namespace=fields.text(item.metadata.namespace),
        )
        found[item.id[: fields.TEXT_LIMIT]] = Sandbox(
            id=item.id[: fields.TEXT_LIMIT],
            pod=pod,
            ready=item.state == 0,
            labels=tags,
            owner=fields.pod_owner(tags, pod.name, dict(item.annotations)),
            created_at_ns=fields.number(item.created_at),
        )
    return found


def parse_verbose(text: str) -> Verbose:
    """The JSON of ``info["info"]``. Errors: Malformed if it is not a JSON object."""
    document = fields.decode(text[:INFO_LIMIT_CHARACTERS], "CRI verbose info")
    if not isinstance(document, dict):
        raise Malformed("CRI verbose info: not a JSON object")
    config = fields.mapping(document.get("config"))
    linux = fields.mapping(config.get("linux"))
    security = fields.mapping(linux.get("security_context"))
    privileged = fields.truth(document.get("privileged"))
    if privileged is None and config:
        # containerd leaves a false flag out of the configuration that it echoes.
        privileged = fields.truth(security.get("privileged")) or False
    spec = spec_of(document.get("runtimeSpec"))
    host_pid = spec.host_pid if spec else None
    host_network = spec.host_network if spec else None
    if security:
        # In the specification a pod on the host's network joins a namespace by path all the same.
        options = fields.mapping(security.get("namespace_options"))
        host_pid = options.get("pid") == _NODE
        host_network = options.get("network") == _NODE
    devices = (
        tuple(
            path
            for item in fields.items(config.get("devices"))
            if (path := fields.text(fields.mapping(item).get("host_path"))) is not None
        )
        if config
        else None
    )
    cdi = tuple(
        name
        for item in fields.items(config.get("CDI_devices") or config.get("cdi_devices"))
        if (name := fields.text(fields.mapping(item).get("name"))) is not None
    )
    return Verbose(
        main_pid=fields.number(document.get("pid")),
        sandbox_id=fields.text(document.get("sandboxID")),
        spec=spec,
        privileged=privileged,
        host_pid=host_pid,
        host_network=host_network,
        host_devices=devices,
        cdi_devices=cdi,
    )


def _container(
    response: Any, identity: str, sandboxes: Mapping[str, Sandbox], runtime: str
) -> Container:
    status = response.status
    if status.id != identity:
        raise Malformed("CRI: answered for another container than asked")
    info = response.info.get("info")
    unread: dict[str, str] = {}
    verbose = Verbose()
    if info:
        try:
            verbose = parse_verbose(info)
        except Malformed as error:
            unread["main_pid"] = unread["devices"] = str(error)
    else:
        unread["main_pid"] = unread["devices"] = "the runtime gave no verbose information"
    spec = verbose.spec or OciSpec()
    tags = fields.labels(dict(status.labels))
    sandbox = sandboxes.get(verbose.sandbox_id or "")
    pod = fields.pod_of(tags) if tags else fields.pod_of(spec.annotations)
    if sandbox is None:
        sandbox = next((s for s in sandboxes.values() if pod.uid and s.pod.uid == pod.uid), None)
    if sandbox is not None:
        pod = fields.Pod(
            uid=sandbox.pod.uid or pod.uid,
            name=sandbox.pod.name or pod.name,
            namespace=sandbox.pod.namespace or pod.namespace,
            container=pod.container,
        )
    image, digest = fields.image_and_digest(
        fields.text(status.image.user_specified_image) or fields.text(status.image.image),
        fields.text(status.image_ref) or fields.text(status.image_id),
    )
    if image is None:
        image = fields.text(spec.annotations.get("io.kubernetes.cri.image-name"))
    name = fields.text(status.metadata.name)
    mounts = tuple(
        f"{mount.host_path}:{mount.container_path}"[: 2 * fields.TEXT_LIMIT]
        for mount in status.mounts[: fields.LIST_LIMIT]
        if mount.host_path
    )
    pod_labels = sandbox.labels if sandbox is not None else {}
    state = int(status.state)
    return Container(
        id=identity,
        runtime=runtime,
        confirmed=True,
        name=name,
        image=image,
        image_digest=digest,
        labels=tags,
        privileged=verbose.privileged if verbose.privileged is not None else spec.privileged,
        host_pid=verbose.host_pid,
        host_network=verbose.host_network,
        main_pid=verbose.main_pid,
        devices=verbose.host_devices if verbose.host_devices is not None else spec.devices,
        visible_devices=spec.visible_devices,
        device_requests=verbose.cdi_devices or spec.device_requests,
        host_mounts=mounts or spec.host_mounts,
        entrypoint=spec.entrypoint,
        restart_policy="kubelet" if pod.uid else None,
        started_at_ns=fields.number(status.started_at),
        state=_STATES[state] if 0 <= state < len(_STATES) else "unknown",
        pod_uid=pod.uid,
        pod_name=pod.name,
        pod_namespace=pod.namespace,
        pod_container=pod.container or name,
        pod_labels=pod_labels,
        pod_owner=sandbox.owner if sandbox is not None else fields.pod_owner(tags, pod.name),
        environment=spec.environment,
        unread=unread,
    )


def _sandbox_container(sandbox: Sandbox, runtime: str) -> Container:
    return Container(
        id=sandbox.id,
        runtime=runtime,
        confirmed=True,
        name="POD",
        labels=sandbox.labels,
        started_at_ns=sandbox.created_at_ns,
        state=_SANDBOX_STATES[0 if sandbox.ready else 1],
        pod_uid=sandbox.pod.uid,
        pod_name=sandbox.pod.name,
        pod_namespace=sandbox.pod.namespace,
        pod_container="POD",
        pod_labels=sandbox.labels,
        pod_owner=sandbox.owner,
    )
