"""Containers as the state directories of runc, crun, containerd, podman and Docker keep them.

Read when no runtime answers on a socket. ``state.json`` (runc) and ``status`` (crun) lead to the
bundle, whose ``config.json`` is the OCI specification; podman's and Docker's own records, which
lie beside, add the name and the image. Only files that root owns are believed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from gpuwarden.errors import GpuwardenError, Malformed
from gpuwarden.host import Host
from gpuwarden.model import Container
from gpuwarden.pattern import pattern
from gpuwarden.sensors.runtimes import fields
from gpuwarden.sensors.runtimes.docker_api import container_of
from gpuwarden.sensors.runtimes.oci import OciSpec, spec_of

ENTRY_LIMIT: Final = 4096
_FILE_LIMIT_BYTES: Final = 4 << 20
# A directory of containers, or of namespaces of containers; what its containers are run by; file.
_FLAT: Final = (
    ("/run/runc", "runc", "state.json"),
    ("/run/crun", "crun", "status"),
)
_NAMESPACED: Final = (
    ("/run/containerd/runc", "containerd", "state.json"),
    ("/run/docker/runtime-runc", "docker", "state.json"),
    ("/run/docker/runtime-nvidia", "docker", "state.json"),
)
_DOCKER_RECORDS: Final = "/var/lib/docker/containers"
_NAME = pattern(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,255}\Z")


class RuncState(msgspec.Struct, frozen=True, kw_only=True):
    """One runtime state file: who the container's first process is and where its bundle lies."""

    id: str
    pid: int | None = None
    bundle: str | None = None
    created_at_ns: int | None = None
    cgroup_paths: tuple[str, ...] = ()
    """Paths as /proc/<pid>/cgroup shows them, the mount point taken off where it is known."""


def parse_state(data: bytes) -> RuncState:
    """The state that runc (state.json) or crun (status) wrote. Errors: Malformed."""
    document = fields.decode(data, "runtime state")
    if not isinstance(document, dict):
        raise Malformed("runtime state: not a JSON object")
    config = fields.mapping(document.get("config"))
    bundle = fields.text(document.get("bundle"), 4096)
    for label in fields.texts(config.get("labels"), 4096):
        key, _, value = label.partition("=")
        if key == "bundle":
            bundle = value
    identity = fields.text(document.get("id")) or ""
    paths = [
        path for path in fields.mapping(document.get("cgroup_paths")).values() if _is_path(path)
    ]
    crun_path = fields.text(document.get("cgroup-path"), 4096)
    if crun_path:
        paths.append(crun_path)
    return RuncState(
        id=identity,
        pid=fields.number(document.get("init_process_pid")) or fields.number(document.get("pid")),
        bundle=bundle if bundle and bundle.startswith("/") else None,
        created_at_ns=fields.instant_ns(document.get("created")),
        cgroup_paths=tuple(str(path)[:4096] for path in paths[: fields.LIST_LIMIT]),
    )


def _is_path(value: object) -> bool:
    return isinstance(value, str) and value.startswith("/")


def look_up(host: Host, identity: str) -> Container | None:
    """The container with that id, from whichever state directory has it; None if none has.

    ``confirmed`` is false when a file that told of it is not root's.
    """
    if not _NAME.match(identity):
        return None
    docker = _docker_record(host, identity)
    if docker is not None:
        return docker
    for root, runtime, file in _FLAT:
        found = _read(host, f"{root}/{identity}", file, identity, runtime)
        if found is not None:
            return found
    for root, runtime, file in _NAMESPACED:
        for namespace in _entries(host, root):
            found = _read(host, f"{root}/{namespace}/{identity}", file, identity, runtime)
            if found is not None:
                return found
    return None


def files(host: Host, identity: str) -> Iterator[str]:
    """Paths of what runtimes and engines keep of a container: its state, bundle and records."""
    if not _NAME.match(identity):
        return
    places = [(f"{root}/{identity}", file) for root, _, file in _FLAT]
    places += [
        (f"{root}/{namespace}/{identity}", file)
        for root, _, file in _NAMESPACED
        for namespace in _entries(host, root)
    ]
    for directory, file in places:
        path = f"{directory}/{file}"
        try:
            state = parse_state(_owned(host, path)[0])
        except GpuwardenError:
            continue
        yield path
        if state.bundle is not None:
            yield f"{state.bundle}/config.json"
    for name in ("config.v2.json", "hostconfig.json"):
        path = f"{_DOCKER_RECORDS}/{identity}/{name}"
        if _is_file(host, path):
            yield path


def _is_file(host: Host, path: str) -> bool:
    try:
        return host.status(path).is_regular
    except GpuwardenError:
        return False


def every_state(host: Host) -> Iterator[tuple[str, RuncState]]:
    """(runtime, state) of each container that a state directory holds, bounded."""
    places = [(root, runtime, file) for root, runtime, file in _FLAT]
    places += [
        (f"{root}/{namespace}", runtime, file)
        for root, runtime, file in _NAMESPACED
        for namespace in _entries(host, root)
    ]
    for place, runtime, file in places:
        for identity in _entries(host, place):
            try:
                state = parse_state(_owned(host, f"{place}/{identity}/{file}")[0])
            except GpuwardenError:
                continue
            yield runtime, msgspec.structs.replace(state, id=identity)


def _entries(host: Host, directory: str) -> list[str]:
    try:
        return [name for name in host.names(directory)[:ENTRY_LIMIT] if _NAME.match(name)]
    except GpuwardenError:
        return []


def _owned(host: Host, path: str) -> tuple[bytes, bool]:
    """(content, whether root owns it). Errors: as Host.read_bytes."""
    data = host.read_bytes(path, _FILE_LIMIT_BYTES)
    status = host.status(path)
    return data, status.uid == 0 and not status.mode & 0o022


def _read(host: Host, directory: str, file: str, identity: str, runtime: str) -> Container | None:
    try:
        data, trusted = _owned(host, f"{directory}/{file}")
        state = parse_state(data)
    except GpuwardenError:
        return None
    unread: dict[str, str] = {}
    spec = OciSpec()
    if state.bundle is None:
        unread["devices"] = f"{directory}/{file}: names no bundle"
    else:
        try:
            data, is_roots = _owned(host, f"{state.bundle}/config.json")
            trusted = trusted and is_roots
            spec = spec_of(fields.decode(data, f"{state.bundle}/config.json")) or OciSpec()
        except GpuwardenError as error:
            unread["devices"] = str(error)
    name, image, digest, is_podman = _podman_record(host, state.bundle, identity)
    if not is_podman and image is None:
        image = fields.text(spec.annotations.get("io.kubernetes.cri.image-name"))
        image = image or fields.text(spec.annotations.get("io.kubernetes.cri-o.ImageName"))
        name = spec.annotations.get("io.kubernetes.cri.container-name")
    if image is None:
        unread["image"] = f"{runtime} keeps no image name in its state directory"
    pod = fields.pod_of(spec.annotations, cgroup_parent=spec.cgroup_path)
    return Container(
        id=identity,
        runtime="podman" if is_podman else runtime,
        confirmed=trusted,
        name=name,
        image=image,
        image_digest=digest,
        labels=spec.annotations,
        privileged=spec.privileged,
        host_pid=spec.host_pid,
        host_network=spec.host_network,
        main_pid=state.pid,
        devices=spec.devices,
        visible_devices=spec.visible_devices,
        device_requests=spec.device_requests,
        host_mounts=spec.host_mounts,
        entrypoint=spec.entrypoint,
        started_at_ns=state.created_at_ns,
        pod_uid=pod.uid,
        pod_name=pod.name,
        pod_namespace=pod.namespace,
        pod_container=pod.container,
        pod_owner=fields.pod_owner(spec.annotations, pod.name),
        environment=spec.environment,
        unread=unread,
    )


def _podman_record(
    host: Host, bundle: str | None, identity: str
) -> tuple[str | None, str | None, str | None, bool]:
    """(name, image, image id, whether podman keeps it) from the storage's containers.json."""
    nobody = (None, None, None, False)
    if bundle is None or not bundle.endswith(f"-containers/{identity}/userdata"):
        return nobody
    records = bundle[: -len(f"/{identity}/userdata")] + "/containers.json"
    try:
        document = fields.decode(_owned(host, records)[0], records)
    except GpuwardenError:
        return (None, None, None, True)
    for item in document[:ENTRY_LIMIT] if isinstance(document, list) else []:
        record = fields.mapping(item)
        if record.get("id") != identity:
            continue
        names = fields.texts(record.get("names"))
        image: str | None = None
        try:
            metadata = fields.decode(fields.text(record.get("metadata"), 1 << 16) or "", records)
            image = fields.text(fields.mapping(metadata).get("image-name"))
        except Malformed:
            pass
        _, digest = fields.image_and_digest(None, fields.text(record.get("image")))
        return (names[0] if names else None, image, digest, True)
    return (None, None, None, True)


def _docker_record(host: Host, identity: str) -> Container | None:
    """Docker's own record of the container, which is laid out as inspect prints it."""
    directory = f"{_DOCKER_RECORDS}/{identity}"
    try:
        data, trusted = _owned(host, f"{directory}/config.v2.json")
        document = fields.decode(data, f"{directory}/config.v2.json")
        settings = fields.decode(
            _owned(host, f"{directory}/hostconfig.json")[0], f"{directory}/hostconfig.json"
        )
        whole = {**fields.mapping(document), "Id": identity, "HostConfig": settings}
        mounts = fields.mapping(whole.get("MountPoints")).values()
        whole["Mounts"] = list(mounts)
        container = container_of(whole, runtime="docker")
    except GpuwardenError:
        return None
    state = fields.mapping(fields.mapping(document).get("State"))
    return msgspec.structs.replace(
        container, confirmed=trusted, state="running" if state.get("Running") is True else None
    )
