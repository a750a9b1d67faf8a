"""Containers as Docker, or podman's Docker-compatible service, describes them.

``GET /containers/<id>/json`` (Docker Engine API, ContainerInspect), over the runtime's unix
socket.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpuwarden.errors import GpuwardenError, Malformed, TimedOut
from gpuwarden.model import Container
from gpuwarden.pattern import pattern
from gpuwarden.sensors.runtimes import fields

_ID = pattern(r"[0-9a-f]{64}\Z")


def ask(
    path: str, identities: Iterable[str], *, runtime: str, deadline_seconds: float
) -> tuple[int, dict[str, Container | GpuwardenError]]:
    """(uid that listens, id → container or the error) for the ids that the runtime knows.

    Ids that it does not know are left out. Errors: Unavailable, TimedOut, Denied for the socket.
    """
    # HTTP costs 40 ms to import, which a machine without Docker need not pay.
    from gpuwarden.sensors.runtimes.unix_http import UnixHttp

    answers: dict[str, Container | GpuwardenError] = {}
    with UnixHttp(path, deadline_seconds=deadline_seconds) as service:
        for identity in identities:
            if not _ID.match(identity):
                continue
            try:
                body = service.get(f"/containers/{identity}/json")
            except TimedOut as error:
                answers[identity] = error
                break
            except GpuwardenError as error:
                answers[identity] = error
                continue
            if body is None:
                continue
            try:
                container = parse_docker_inspect(body, runtime=runtime)
                if container.id != identity:
                    raise Malformed(f"{path}: answered for another container than asked")
                answers[identity] = container
            except Malformed as error:
                answers[identity] = error
        return service.uid, answers


def parse_docker_inspect(data: bytes, *, runtime: str = "docker") -> Container:
    """The container in what ``docker inspect`` prints or the API answers.

    Errors: Malformed if it is not JSON, not one container, or has no 64-digit id.
    """
    document = fields.decode(data, "docker inspect")
    if isinstance(document, list):
        if len(document) != 1:
            raise Malformed(f"docker inspect: {len(document)} containers where one was expected")
        document = document[0]
    if not isinstance(document, dict):
        raise Malformed("docker inspect: not a JSON object")
    return container_of(document, runtime=runtime)


def container_of(document: Mapping[str, object], *, runtime: str) -> Container:
    """The container in an inspect document that is already decoded. Errors: Malformed."""
    identity = fields.text(document.get("Id"))
    if identity is None or not _ID.match(identity):
        raise Malformed("docker inspect: no 64-digit Id")
    config = fields.mapping(document.get("Config"))
    host = fields.mapping(document.get("HostConfig"))
    state = fields.mapping(document.get("State"))
    tags = fields.labels(config.get("Labels"))
    name = fields.text(document.get("Name"))
    name = name.lstrip("/") or None if name else None
    hints, visible = fields.environment(fields.texts(config.get("Env"), 4096))
    reference = fields.text(config.get("Image"))
    image, digest = fields.image_and_digest(reference, fields.text(document.get("Image")))
    if image is None:
        # podman's answer has the name here.
        image = fields.text(document.get("ImageName"))
    unread = {} if image or not digest else {"image": "the runtime knows it by its digest only"}
    pod = fields.pod_of(tags, name=name, cgroup_parent=fields.text(host.get("CgroupParent")))
    policy = fields.mapping(host.get("RestartPolicy"))
    command = fields.text(document.get("Path"), 4096)
    return Container(
        id=identity,
        runtime=runtime,
        confirmed=True,
        name=name,
        image=image,
        image_digest=digest,
        labels=tags,
        privileged=fields.truth(host.get("Privileged")),
        host_pid=_is_host(host.get("PidMode")),
        host_network=_is_host(host.get("NetworkMode")),
        main_pid=fields.number(state.get("Pid")),
        devices=_devices(host.get("Devices")),
        visible_devices=visible,
        device_requests=_device_requests(host.get("DeviceRequests")),
        host_mounts=_host_mounts(document.get("Mounts"), host.get("Binds")),
        entrypoint=((command,) if command else ()) + fields.texts(document.get("Args"), 4096),
        restart_policy=fields.text(policy.get("Name")),
        started_at_ns=fields.instant_ns(state.get("StartedAt")),
        state=fields.text(state.get("Status")),
        pod_uid=pod.uid,
        pod_name=pod.name,
        pod_namespace=pod.namespace,
        pod_container=pod.container,
        pod_owner=fields.pod_owner(tags, pod.name),
        environment=hints,
        unread=unread,
    )


def _is_host(mode: object) -> bool | None:
    return mode == "host" if isinstance(mode, str) else None


def _devices(value: object) -> tuple[str, ...]:
    return tuple(
        path
        for item in fields.items(value)
        if (path := fields.text(fields.mapping(item).get("PathOnHost"))) is not None
    )


def _device_requests(value: object) -> tuple[str, ...]:
    """Ids and CDI names as asked for; ``all`` for a count of -1, ``count:N`` for another count."""
    asked: list[str] = []
    for item in fields.items(value):
        request = fields.mapping(item)
        identities = fields.texts(request.get("DeviceIDs"))
        count = request.get("Count")
        if identities:
            asked.extend(identities)
        elif count == -1:
            asked.append("all")
        elif (wanted := fields.number(count)) is not None:
            asked.append(f"count:{wanted}")
    return tuple(asked[: fields.LIST_LIMIT])


def _host_mounts(mounts: object, binds: object) -> tuple[str, ...]:
    found: list[str] = []
    for item in fields.items(mounts):
        mount = fields.mapping(item)
        source = fields.text(mount.get("Source"))
        destination = fields.text(mount.get("Destination"))
        if mount.get("Type", "bind") == "bind" and source and destination:
            found.append(f"{source}:{destination}")
    if found:
        return tuple(found)
    for bind in fields.texts(binds):
        parts = bind.split(":")
        if len(parts) >= 2 and parts[0].startswith("/"):
            found.append(f"{parts[0]}:{parts[1]}")
    return tuple(found)
