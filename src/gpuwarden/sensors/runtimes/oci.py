"""What an OCI runtime specification (config.json of a bundle) says of its container.

Used for bundles on disk and for the ``runtimeSpec`` in a CRI runtime's verbose answer (OCI
runtime-spec, config.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from gpuwarden.sensors.runtimes import fields

_PLAIN_DEVICES: Final = frozenset(
    f"/dev/{name}"
    for name in ("null", "zero", "full", "random", "urandom", "tty", "console", "ptmx", "fuse")
)
_CDI_ANNOTATION: Final = "cdi.k8s.io/"
_PODMAN_PRIVILEGED: Final = "io.podman.annotations.privileged"


class OciSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a specification that a container fact is made of."""

    entrypoint: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    visible_devices: str | None = None
    devices: tuple[str, ...] = ()
    """Device paths as named inside the container; the specification has no host path."""
    device_requests: tuple[str, ...] = ()
    host_mounts: tuple[str, ...] = ()
    privileged: bool | None = None
    host_pid: bool | None = None
    host_network: bool | None = None
    annotations: dict[str, str] = {}
    cgroup_path: str | None = None


def spec_of(document: object) -> OciSpec | None:
    """The fields of a decoded specification; None if it is not one."""
    spec = fields.mapping(document)
    process = fields.mapping(spec.get("process"))
    linux = fields.mapping(spec.get("linux"))
    if not process and not linux:
        return None
    annotations = fields.labels(spec.get("annotations"))
    hints, visible = fields.environment(fields.texts(process.get("env"), 4096))
    kinds = {
        fields.text(fields.mapping(item).get("type"))
        for item in fields.items(linux.get("namespaces"))
    }
    return OciSpec(
        entrypoint=fields.texts(process.get("args"), 4096),
        environment=hints,
        visible_devices=visible,
        devices=_devices(linux),
        device_requests=tuple(
            name
            for key, value in annotations.items()
            if key.startswith(_CDI_ANNOTATION)
            for name in value.split(",")
            if name
        ),
        host_mounts=_host_mounts(spec),
        privileged=_privileged(annotations, linux),
        host_pid="pid" not in kinds,
        host_network="network" not in kinds,
        annotations=annotations,
        cgroup_path=fields.text(linux.get("cgroupsPath"), 4096),
    )


def _devices(linux: Mapping[str, object]) -> tuple[str, ...]:
    paths = (
        fields.text(fields.mapping(item).get("path")) for item in fields.items(linux.get("devices"))
    )
    return tuple(path for path in paths if path and path not in _PLAIN_DEVICES)


def _host_mounts(spec: Mapping[str, object]) -> tuple[str, ...]:
    found: list[str] = []
    for item in fields.items(spec.get("mounts")):
        mount = fields.mapping(item)
        options = fields.texts(mount.get("options"))
        source = fields.text(mount.get("source"))
        destination = fields.text(mount.get("destination"))
        is_bind = mount.get("type") == "bind" or "bind" in options or "rbind" in options
        if is_bind and source and source.startswith("/") and destination:
            found.append(f"{source}:{destination}")
    return tuple(found)


def _privileged(annotations: Mapping[str, str], linux: Mapping[str, object]) -> bool | None:
    """Whether every device is allowed, which is what a runtime's --privileged comes to."""
    told = annotations.get(_PODMAN_PRIVILEGED)
    if told is not None:
        return told.upper() == "TRUE"
    rules = fields.items(fields.mapping(linux.get("resources")).get("devices"))
    if not rules:
        return None
    for item in rules:
        rule = fields.mapping(item)
        if (
            rule.get("allow") is True
            and rule.get("type") in (None, "", "a")
            and rule.get("major") in (None, -1)
            and rule.get("minor") in (None, -1)
        ):
            return True
    return False
