"""Events of the probe for tests, without a kernel."""

from __future__ import annotations

import itertools
from typing import Any

from gpuwarden.probes.events import (
    ExecEvent,
    ExitEvent,
    HeldDescriptor,
    OpenEvent,
    OpenReturn,
    ProcessIdentity,
)
from tests.support.nodes import container_id

START_NS = 7_000_000_000
_clock = itertools.count(1_000_000_000_000, 2_000_000)


def identity(pid: int = 100, **fields: Any) -> ProcessIdentity:
    """A process in no container."""
    values: dict[str, Any] = {
        "pid": pid,
        "start_time_ns": START_NS + pid * 10_000_000,
        "ppid": 1,
        "uid": 1000,
        "loginuid": -1,
        "comm": "python3",
        "argv": ("python3", "train.py"),
        "exe_path": "/usr/bin/python3.11",
        "exe_device": "8:1",
        "exe_inode": 77,
        "cgroup_path": "/system.slice/train.service",
        "cgroup_path_hierarchy": 0,
        "mount_namespace": 4026531832,
        "pid_namespace": 4026531836,
        "pid_in_namespace": pid,
    }
    return ProcessIdentity(**{**values, **fields})


def contained(pid: int = 200, name: str = "c1", **fields: Any) -> ProcessIdentity:
    """A process in a container that Docker calls ``name``."""
    number = sum(name.encode())
    values: dict[str, Any] = {
        "cgroup_path": f"/system.slice/docker-{container_id(name)}.scope",
        "mount_namespace": 4026540000 + number,
        "pid_namespace": 4026550000 + number,
        "pid_in_namespace": 1,
        "argv": ("python3", "serve.py"),
    }
    return identity(pid, **{**values, **fields})


def opened(process: ProcessIdentity | None = None, **fields: Any) -> OpenEvent:
    """One open of /dev/nvidia0; each is two milliseconds after the one before."""
    since_boot_ns = fields.pop("since_boot_ns", next(_clock))
    process = process or identity()
    values: dict[str, Any] = {
        "at_ns": 1_700_000_000_000_000_000 + since_boot_ns,
        "since_boot_ns": since_boot_ns,
        "source": "cgroup/dev",
        "major": 195,
        "minor": 0,
        "how": "open",
        "state": "attempted",
        "process": process,
        "thread_id": process.pid,
        "path": "/dev/nvidia0",
    }
    return OpenEvent(**{**values, **fields})


def held(process: ProcessIdentity | None = None, **fields: Any) -> HeldDescriptor:
    """A descriptor on /dev/nvidia0."""
    process = process or identity()
    values: dict[str, Any] = {
        "pid": process.pid,
        "start_time_ns": process.start_time_ns,
        "thread_id": process.pid,
        "descriptor": 3,
        "major": 195,
        "minor": 0,
        "inode": 5,
        "open_flags": 0,
        "uid": 1000,
        "comm": process.comm,
    }
    return HeldDescriptor(**{**values, **fields})


def exited(process: ProcessIdentity, at_ns: int) -> ExitEvent:
    return ExitEvent(at_ns=at_ns, pid=process.pid, start_time_ns=process.start_time_ns, exit_code=0)


def executed(process: ProcessIdentity, tool: str | None = None, **fields: Any) -> ExecEvent:
    """A process became the program that its identity names."""
    values: dict[str, Any] = {"at_ns": 1_700_000_000_000_000_000 + next(_clock), "touched": True}
    return ExecEvent(process=process, tool=tool, **{**values, **fields})


def returned(event: OpenEvent, result: int) -> OpenReturn:
    """How an open ended: a descriptor, or a negative errno."""
    process = event.process
    return OpenReturn(
        at_ns=event.at_ns + 1000,
        attempt_since_boot_ns=event.since_boot_ns,
        pid=process.pid,
        thread_id=event.thread_id or process.pid,
        start_time_ns=process.start_time_ns,
        major=event.major,
        minor=event.minor,
        result=result,
        path=event.path,
    )
