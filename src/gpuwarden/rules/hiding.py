"""Hiding: not in /proc, behind a preloaded library, or on a driver library in an odd place."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.finding import Evidence
from gpuwarden.model import DriverLibrary, Process
from gpuwarden.node import Node
from gpuwarden.rules.masquerade import HOME_DOT_DIRECTORIES, TEMP_DIRECTORIES
from gpuwarden.rules.respawn import preload_is_known

SYSTEM_LIBRARY_PREFIXES = (
    "/usr/", "/lib/", "/lib64/", "/opt/", "/run/nvidia/", "/run/opengl-driver/", "/nix/", "/snap/",
    "/home/", "/root/", "/cvmfs/", "/apps/", "/sw/", "/software/", "/shared/", "/gpfs/", "/lustre/",
)  # fmt: skip


def odd_library(library: DriverLibrary) -> str | None:
    """Why a mapped driver library is not where drivers put theirs; None for a usual place."""
    folders = library.path.split("/")[1:-1]
    hidden = [f for f in folders if f.startswith(".") and f not in HOME_DOT_DIRECTORIES]
    if library.path.startswith(TEMP_DIRECTORIES):
        return "in a temporary directory"
    if hidden:
        return f"in a hidden directory ({hidden[0]})"
    if library.deleted and not library.path.startswith(SYSTEM_LIBRARY_PREFIXES):
        return "deleted since"
    return None


def _is_odd_preload(path: str) -> bool:
    """Whether a preloaded library lies where allocators and audit tools of honest users do not."""
    hidden = [f for f in path.split("/") if f.startswith(".") and f not in ("", ".", "..")]
    return path.startswith(TEMP_DIRECTORIES) or any(f not in HOME_DOT_DIRECTORIES for f in hidden)


def observe(node: Node, process: Process) -> Iterator[Evidence]:
    """Evidence that a process, or someone for it, hides it."""
    hidden = node.hidden_pids.get(process.pid)
    if hidden is not None:
        yield Evidence(
            kind="hiding",
            strength="strong",
            source=" and ".join(hidden.seen_by),
            text="it lives, but listing /proc does not show it",
        )
    preload = process.environment.get("LD_PRELOAD", "")
    odd = [p for p in preload.replace(":", " ").split() if _is_odd_preload(p)]
    if odd:
        yield Evidence(
            kind="hiding",
            strength="strong",
            source="environment",
            text=f"started with LD_PRELOAD={odd[0]}",
        )
    for entry in node.persistence:
        if entry.kind == "preload" and not preload_is_known(entry):
            yield Evidence(
                kind="hiding",
                strength="weak",
                source=entry.path,
                text=f"every program here loads {', '.join(entry.commands) or entry.text.strip()}",
            )
            break
    for library in process.driver_libraries:
        reason = odd_library(library)
        if reason is not None:
            yield Evidence(
                kind="hiding",
                strength="weak",
                source="/proc/<pid>/maps",
                text=f"its GPU driver library {library.path} lies {reason}",
            )
            break
