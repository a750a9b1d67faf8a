"""The machine and the vantage point: host name, boot, kernel, and with what rights we look."""

from __future__ import annotations

import os
import re

from gpuwarden.errors import GpuwardenError
from gpuwarden.host import Host
from gpuwarden.model import NodeFacts
from gpuwarden.pattern import pattern

# The initial pid namespace's inode number (linux/proc_ns.h, PROC_PID_INIT_INO).
INITIAL_PID_NAMESPACE = 0xEFFFFFFC
NAME_LIMIT = 256
NODE_VARIABLE = "NODE_NAME"
"""Names the node in a pod, whose host name is the pod's."""

_BTIME = pattern(rb"^btime (\d{1,12})$", re.MULTILINE)
_CAPABILITIES = pattern(rb"^CapEff:\s*([0-9a-fA-F]{1,16})$", re.MULTILINE)
_NAMESPACE = pattern(r"pid:\[(\d{1,20})\]")


def parse_boot_time_ns(stat: bytes) -> int | None:
    """Unix time of boot from /proc/stat, or None when the line is missing."""
    found = _BTIME.search(stat)
    return int(found[1]) * 1_000_000_000 if found else None


def parse_capabilities(status: bytes) -> int | None:
    """The effective capability mask of /proc/<pid>/status, or None."""
    found = _CAPABILITIES.search(status)
    return int(found[1], 16) if found else None


def read_machine(host: Host, process_count: int | None = None) -> NodeFacts:
    """One NodeFacts; what could not be read is None with its reason in ``unread``.

    ``process_count`` is counted here unless the caller, who listed them anyway, has it.
    """
    unread: dict[str, str] = {}

    def line(path: str, field: str) -> str | None:
        try:
            return host.read_text(path, NAME_LIMIT).strip() or None
        except GpuwardenError as error:
            unread[field] = str(error)
            return None

    in_pod = host.is_live and not host.is_local
    given = os.environ.get(NODE_VARIABLE, "")[:NAME_LIMIT].strip() if in_pod else ""
    hostname = given or line("/proc/sys/kernel/hostname", "hostname")
    boot_time_ns: int | None = None
    try:
        boot_time_ns = parse_boot_time_ns(host.read_bytes("/proc/stat"))
    except GpuwardenError as error:
        unread["boot_time_ns"] = str(error)
    if process_count is None:
        try:
            process_count = len(host.kernel_pids())
        except GpuwardenError as error:
            unread["process_count"] = str(error)
    namespace: int | None = None
    capabilities: int | None = None
    if host.is_live:
        try:
            found = _NAMESPACE.fullmatch(host.read_link("/proc/self/ns/pid"))
            namespace = int(found[1]) if found else None
            capabilities = parse_capabilities(host.read_bytes("/proc/self/status"))
        except GpuwardenError as error:
            unread["observer_pid_namespace"] = str(error)
    return NodeFacts(
        hostname=hostname or "unknown",
        boot_id=line("/proc/sys/kernel/random/boot_id", "boot_id"),
        boot_time_ns=boot_time_ns,
        kernel=line("/proc/sys/kernel/osrelease", "kernel"),
        clock_ticks_per_second=os.sysconf("SC_CLK_TCK"),
        origin="live" if host.is_local else "root",
        observer_uid=os.geteuid(),
        observer_capabilities=capabilities,
        observer_pid_namespace=namespace,
        host_pid_namespace=None if namespace is None else namespace == INITIAL_PID_NAMESPACE,
        process_count=process_count,
        unread=unread,
    )
