"""Device events as JSON lines: who, with what, where, how it ended; for `watch --events`."""

from __future__ import annotations

import datetime

import msgspec

from gpuwarden.model import Container, DeviceOpen, Executable, Process

EVENT_SCHEMA = "gpuwarden.event"
EVENT_VERSION = 1

_encoder = msgspec.json.Encoder()


def event_line(
    event: DeviceOpen,
    process: Process,
    parent: Process | None,
    container: Container | None,
    *,
    node: str,
    at_ns: int,
) -> bytes:
    """One event as JSON, without a newline; what is not known is null, with its reason."""
    exe = process.exe
    document = {
        "schema": EVENT_SCHEMA,
        "version": EVENT_VERSION,
        "node": node,
        "time": _time(at_ns),
        "at_ns": at_ns,
        "device": {
            "major": event.major,
            "minor": event.minor,
            "kind": event.kind,
            "path": event.path,
            "path_is_claimed": event.path_is_claimed,
            "renamed": event.renamed,
        },
        "how": event.how,
        "state": event.state,
        "error": event.error,
        "denial": event.denial,
        "flags": event.open_flags,
        "reads": event.reads,
        "writes": event.writes,
        "io_uring": event.io_uring,
        "count": event.count,
        "source": event.source,
        "process": _process(process, exe),
        "parent": {
            "pid": process.ppid,
            "comm": None if parent is None else parent.comm,
            "exe": None if parent is None or parent.exe is None else parent.exe.path,
        },
        "container": _container(event, process, container),
        "unread": {**process.unread, **event.unread},
    }
    return _encoder.encode(document)


def _time(at_ns: int) -> str:
    seconds, rest = divmod(at_ns, 1_000_000_000)
    at = datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"


def _process(process: Process, exe: Executable | None) -> dict[str, object]:
    placement = process.cgroup
    return {
        "pid": process.pid,
        "start_time_ticks": process.start_time_ticks,
        "exe": None if exe is None else exe.path,
        "exe_device": None if exe is None else exe.device,
        "exe_inode": None if exe is None else exe.inode,
        "exe_deleted": None if exe is None else exe.deleted or exe.memfd,
        "argv": process.argv,
        "argv_truncated": process.argv_truncated,
        "comm": process.comm,
        "uid": process.uid,
        "user": process.user,
        "loginuid": process.loginuid,
        "login_user": process.login_user,
        "tty": process.tty,
        "namespaces": process.namespaces,
        "cgroup": None if placement is None else list(placement.paths),
    }


def _container(
    event: DeviceOpen, process: Process, container: Container | None
) -> dict[str, object]:
    placement = process.cgroup
    identity = placement.container_id if placement is not None else None
    if container is None:
        return {"state": event.container_state, "id": identity}
    return {
        "state": event.container_state,
        "id": container.id,
        "runtime": container.runtime,
        "confirmed": container.confirmed,
        "name": container.name,
        "image": container.image,
        "image_digest": container.image_digest,
        "labels": container.labels,
        "pod": container.pod_name,
        "namespace": container.pod_namespace,
        "pod_uid": container.pod_uid,
        "pod_labels": container.pod_labels,
    }
