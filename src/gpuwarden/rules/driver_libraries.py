"""Driver libraries that processes on a GPU have mapped, against those that the host installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpuwarden.finding import Evidence, Row, Severity, severity_rank
from gpuwarden.model import DRIVER_LIBRARIES, DriverFile, DriverLibrary, Process
from gpuwarden.node import Node
from gpuwarden.policy import Policy
from gpuwarden.rules.hiding import odd_library
from gpuwarden.rules.hit import Hit, process_subject

SHOWN = 6
HOMES = ("/home/", "/root/", "/Users/", "/var/home/")
MEMORY = "/memfd:"
WSL_DRIVER = "/usr/lib/wsl/"
"""The host of the virtual machine shares its driver there; its inodes are a file server's."""
EVERYBODY = -1
# ROCm's runtime is a library that programs bring along (PyTorch's wheels do, so does conda).
BROUGHT_ALONG = frozenset({"libhsa-runtime64"})
# NVIDIA's forward-compatibility package holds these, and never the management library.
COMPATIBLE = frozenset({"libcuda", "libnvidia-ptxjitcompiler"})


class _Objection(NamedTuple):
    severity: Severity
    text: str


class _Installed(NamedTuple):
    """The host's driver files that root alone can change."""

    files: frozenset[tuple[str, int]]
    libraries: frozenset[str]
    directories: frozenset[str]


def library_of(path: str) -> str | None:
    """Which of DRIVER_LIBRARIES a file is by its name, ``libcuda`` for libcuda.so.550.54."""
    name, dot, version = path.removeprefix(MEMORY).rsplit("/", 1)[-1].partition(".so")
    is_whole = bool(dot) and (not version or version.startswith("."))
    return name if is_whole and name in DRIVER_LIBRARIES else None


def driver_library_unexpected(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[Hit]:
    """Processes on a GPU with a driver library that is not the one the host installed."""
    installed = _installed(node.snapshot.driver_files)
    mine: dict[int, list[Row]] = {}
    for row in rows:
        if row.pid is not None:
            mine.setdefault(row.pid, []).append(row)
    for pid, own in mine.items():
        process = node.processes.get(pid)
        if process is None:
            continue
        objections = [
            found
            for library in process.driver_libraries
            if (found := _objection(node, process, library, installed)) is not None
        ]
        if not objections:
            continue
        objections.sort(key=lambda found: -severity_rank(found.severity))
        yield Hit(
            process_subject(node, pid, process, [r.gpu_id for r in own if r.gpu_id is not None]),
            tuple(
                Evidence(
                    kind="hiding",
                    strength="strong" if found.severity == "error" else "weak",
                    source="/proc/<pid>/maps",
                    text=found.text,
                )
                for found in objections[:SHOWN]
            ),
            owner=own[0].owner,
            since_ns=process.started_at_ns,
            severity=objections[0].severity,
        )


def _installed(files: Sequence[DriverFile]) -> _Installed:
    sound = [file for file in files if not file.writable_by]
    return _Installed(
        frozenset((file.device, file.inode) for file in sound),
        frozenset(file.library for file in sound),
        frozenset(file.path.rpartition("/")[0] for file in sound),
    )


def _objection(
    node: Node, process: Process, library: DriverLibrary, installed: _Installed
) -> _Objection | None:
    """What speaks against one mapped library; None for the host's own and for honest others."""
    kind = library_of(library.path)
    if kind is None or library.inode is None:
        return None
    if any(
        device is not None and (device, library.inode) in installed.files
        for device in (library.file_device, library.device)
    ):
        return None
    shown = f"its {kind} is {library.path}"
    grave = _grave(node, process, library, kind)
    if grave:
        return _Objection("error", f"{shown}, {grave}")
    # Without the host's own there is nothing to compare with.
    if (
        kind in BROUGHT_ALONG
        or kind not in installed.libraries
        or _is_honest(node, process, library, kind, installed)
    ):
        return None
    number = f"inode {library.inode} on {library.file_device or library.device}"
    text = f"{shown} ({number}), which is none of the driver files installed on the host"
    if library.writable_by is None:
        text += "; who can write it could not be read"
    container = node.container_of(process)
    own_image = container is not None and container.confirmed and library.writable_by == ()
    return _Objection("info" if own_image else "warning", text)


def _grave(node: Node, process: Process, library: DriverLibrary, kind: str) -> str:
    """Why nobody's driver is like this; empty when it may be one."""
    path = library.path
    if path.startswith(MEMORY):
        return "which exists in memory only"
    preloaded = process.environment.get("LD_PRELOAD", "").replace(":", " ").split()
    if path in preloaded or path.rsplit("/", 1)[-1] in preloaded:
        return "loaded before all others by LD_PRELOAD, and none of the driver's own"
    place = odd_library(library)
    if place is not None and (not library.deleted or place != "deleted since"):
        return place
    if kind in BROUGHT_ALONG:
        return ""
    if path.startswith(HOMES):
        return "in a home directory"
    # Inside another user namespace the owner's number is whatever its root says.
    if library.writable_by and node.shares_host_namespace(process, "user") is not False:
        who = "everybody" if EVERYBODY in library.writable_by else f"uid {library.writable_by[0]}"
        return f"which {who} can write"
    return ""


def _is_honest(
    node: Node, process: Process, library: DriverLibrary, kind: str, installed: _Installed
) -> bool:
    """Whether root put it there in one of the ways in which honest nodes differ."""
    if library.writable_by:
        return False
    container = node.container_of(process)
    folder = library.path.rpartition("/")[0]
    if library.deleted and (container is not None or folder in installed.directories):
        # The driver was upgraded while the process runs.
        return True
    if library.path.startswith(WSL_DRIVER):
        return True
    return (
        container is not None
        and container.confirmed
        and kind in COMPATIBLE
        and "compat" in folder.split("/")
    )
