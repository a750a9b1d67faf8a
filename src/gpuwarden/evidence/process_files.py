"""What the kernel and the process say of it, file by file of its directory in /proc."""

from __future__ import annotations

from typing import Any

from gpuwarden.errors import GpuwardenError
from gpuwarden.evidence.masks import is_secret_name, mask_arguments, mask_variable
from gpuwarden.evidence.opened_process import OpenedProcess
from gpuwarden.evidence.shelf import Shelf
from gpuwarden.outputs.words import escape
from gpuwarden.sensors.process import exec_mark
from gpuwarden.sensors.process.formats import ARGV_LIMIT_BYTES, parse_argv, parse_cgroup_lines

ENVIRONMENT_LIMIT_BYTES = 2 << 20
VARIABLES_LIMIT = 20_000
VALUE_LIMIT = 32 << 10
TEXT_LIMIT = 4096
CGROUP_LIMIT_BYTES = 64 << 10
NAMESPACES_LIMIT = 64
FILES = (
    # The most telling first: the process may end while they are read.
    ("status", 64 << 10),
    ("stat", 4096),
    ("maps", 32 << 20),
    ("cgroup", 64 << 10),
    ("mountinfo", 4 << 20),
    ("limits", 64 << 10),
    ("smaps_rollup", 64 << 10),
    ("auxv", 64 << 10),
    ("io", 4096),
    ("sched", 1 << 20),
    ("schedstat", 4096),
    ("statm", 4096),
    ("wchan", 4096),
    ("syscall", 4096),
    ("stack", 64 << 10),
    ("personality", 4096),
    ("loginuid", 4096),
    ("sessionid", 4096),
    ("uid_map", 64 << 10),
    ("gid_map", 64 << 10),
    ("oom_score_adj", 4096),
    ("coredump_filter", 4096),
    ("timens_offsets", 4096),
    ("attr/current", 4096),
)
_ABSENT_ON_SOME = frozenset({"sched", "schedstat", "wchan", "timens_offsets", "attr/current"})
"""Not built into every kernel, or not answered where no security module is: no gap."""


def collect(process: OpenedProcess, shelf: Shelf, boot_id: str | None) -> dict[str, Any]:
    """Everything of one process but what it has open; its identity as it is now."""
    identity = identify(process, boot_id)
    shelf.put_json("identity.json", identity, "who it is")
    _arguments(process, shelf)
    _environment(process, shelf)
    for name, limit in FILES:
        if name in _ABSENT_ON_SOME:
            try:
                data = process.read(name, limit + 1)
            except GpuwardenError:
                continue
            if data:
                shelf.put_text(name.replace("/", "-"), data, f"/proc/{process.pid}/{name}", limit)
        else:
            shelf.copy(process, name, limit)
    _namespaces(process, shelf)
    return identity


def identify(process: OpenedProcess, boot_id: str | None) -> dict[str, Any]:
    """Pid, start, boot, binary and mark of its latest exec; what cannot be told is None."""
    exe = process.binary()
    pid = int(process.folder.rpartition("/")[2])
    drawn = exec_mark.addresses_are_drawn(process.host)
    mark = exec_mark.read_mark(process.host, pid, exe, drawn=drawn)
    return {
        "pid": process.pid,
        "start_time_ticks": process.start_time_ticks,
        "boot_id": boot_id,
        "comm": escape(process.line.comm),
        "exe": _or_none(process, "exe"),
        "exe_device": exe[0] if exe else None,
        "exe_inode": exe[1] if exe else None,
        # Read by its number: of it only if that still is its own.
        "exec_mark": mark if not process.why_gone() else None,
        "cwd": _or_none(process, "cwd"),
        "root": _or_none(process, "root"),
        "threads": process.line.thread_count,
        "parent": process.line.ppid,
        "state": process.line.state,
        "cgroup": _cgroup(process),
    }


def _cgroup(process: OpenedProcess) -> list[str]:
    try:
        return list(parse_cgroup_lines(process.read("cgroup", CGROUP_LIMIT_BYTES)))
    except GpuwardenError:
        return []


def _or_none(process: OpenedProcess, name: str) -> str | None:
    try:
        return escape(process.link(name)[:TEXT_LIMIT])
    except GpuwardenError:
        return None


def _arguments(process: OpenedProcess, shelf: Shelf) -> None:
    with shelf.trying("arguments"):
        words, truncated = parse_argv(process.read("cmdline", ARGV_LIMIT_BYTES + 1))
        kept = mask_arguments(words)
        document = {
            "comm": escape(process.line.comm),
            "argv": kept,
            "masked": sum(before != after for before, after in zip(words, kept, strict=True)),
            "truncated": truncated,
        }
        shelf.put_json("arguments.json", document, "arguments, secrets masked")


def _environment(process: OpenedProcess, shelf: Shelf) -> None:
    with shelf.trying("environment"):
        data = process.read("environ", ENVIRONMENT_LIMIT_BYTES + 1)
        document = environment(data)
        shelf.put_json("environment.json", document, "environment, secrets masked")


def environment(data: bytes) -> dict[str, Any]:
    """/proc/PID/environ with secrets masked; ``duplicates`` are later values of one name.

    Any bytes give a result. Source: proc_pid_environ(5).
    """
    entries = data[:ENVIRONMENT_LIMIT_BYTES].split(b"\0")
    variables: dict[str, str] = {}
    duplicates: list[tuple[str, str]] = []
    odd: list[str] = []
    masked = 0
    for raw in entries[:VARIABLES_LIMIT]:
        if not raw:
            continue
        name, equals, value = raw.decode("utf-8", "backslashreplace").partition("=")
        if not equals or len(name) > TEXT_LIMIT:
            # No variable: a process can write anything there, a secret too.
            odd.append(f"{len(raw)} bytes without a name")
            continue
        kept = mask_variable(name, value[:VALUE_LIMIT])
        if kept != value[:VALUE_LIMIT]:
            masked += 1
        if len(value) > VALUE_LIMIT:
            # What was cut could have been the end of a secret's shape.
            kept = kept if is_secret_name(name) else f"{kept}… {len(value)} characters"
        if name in variables:
            duplicates.append((name, kept))
        else:
            variables[name] = kept
    return {
        "variables": variables,
        "duplicates": duplicates,
        "odd": odd[:100],
        "masked": masked,
        "truncated": len(data) > ENVIRONMENT_LIMIT_BYTES or len(entries) > VARIABLES_LIMIT + 1,
    }


def _namespaces(process: OpenedProcess, shelf: Shelf) -> None:
    with shelf.trying("namespaces"):
        names = sorted(process.names("ns"))[:NAMESPACES_LIMIT]
        links: dict[str, str | None] = {}
        for name in names:
            try:
                links[name] = process.link(f"ns/{name}")
            except GpuwardenError as error:
                links[name] = None
                shelf.unread(f"namespace {name}", str(error))
        shelf.put_json("namespaces.json", links, "namespaces")
