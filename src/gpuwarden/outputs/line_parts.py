"""Parts that every event's line has: when it was, which process, in which container."""

from __future__ import annotations

import datetime

from gpuwarden.model import Container, Process


def time_text(at_ns: int) -> str:
    """``2026-01-01T00:00:00.000000007Z``: UTC, to the nanosecond."""
    seconds, rest = divmod(at_ns, 1_000_000_000)
    at = datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"


def process_part(process: Process) -> dict[str, object]:
    """A process; what is not known of it is null."""
    placement, exe = process.cgroup, process.exe
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


def parent_part(process: Process, parent: Process | None) -> dict[str, object]:
    """The parent of a process, as far as it was there to be read."""
    return {
        "pid": process.ppid,
        "comm": None if parent is None else parent.comm,
        "exe": None if parent is None or parent.exe is None else parent.exe.path,
    }


def container_part(state: str, process: Process, container: Container | None) -> dict[str, object]:
    """Its container as the runtime tells of it; ``state`` is none, known or unknown."""
    placement = process.cgroup
    identity = placement.container_id if placement is not None else None
    if container is None:
        return {"state": state, "id": identity}
    return {
        "state": state,
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
