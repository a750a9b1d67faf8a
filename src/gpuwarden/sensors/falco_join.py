"""Falco's events joined with this machine: the device, the container and the process they name.

Falco knows a node by its path only. The device's number is told from this host's own nodes, or
from names whose number is fixed for good; where neither tells it, the event stays context.
"""

from __future__ import annotations

import errno
import posixpath
import re
from collections.abc import Callable, Iterable
from typing import Final

from gpuwarden.model import DeviceNode, Fact, NodeKind, OpenState, Process
from gpuwarden.pattern import pattern
from gpuwarden.sensors.falco import (
    GPU_RULE,
    ID_LENGTH,
    FalcoDrop,
    FalcoEvent,
    FalcoProcess,
)

_OPENS: Final = frozenset({"open", "openat", "openat2"})
_REFUSALS: Final = frozenset({"EPERM", "EACCES"})
_CLOCKS_APART_NS: Final = 3600 * 10**9
"""An event whose own time is further off than this is dated by when it came."""

# Names that the drivers and udev give; the NVIDIA ones are 195:N, 195:254 and 195:255, DRM's
# 226:N, accel's 261:N (Documentation/admin-guide/devices.txt), all others are given out.
_N: Final = r"(0|[1-9][0-9]{0,6})"
_NVIDIA_GPU = pattern(rf"/dev/nvidia{_N}")
_NVIDIA_CAPS = pattern(r"/dev/nvidia-caps(?:-imex-channels)?/[\w-]{1,64}", re.ASCII)
_NVIDIA_OTHER = pattern(r"/dev/nvidia[\w/-]{1,64}", re.ASCII)
_DRM = pattern(rf"/dev/dri/(renderD|card){_N}")
_ACCEL = pattern(rf"/dev/accel/accel{_N}")
_HABANA = pattern(rf"/dev/(?:hl(?:_controlD)?{_N}|accel/accel_controlD{_N})")
_OTHER = pattern(r"/dev/(?:dri|accel)/[\w/:.-]{1,128}", re.ASCII)
_MINORS: Final = 1 << 20
"""The kernel has 20 bits for a minor."""
_FIRST_RENDER_MINOR: Final = 128
_LAST_NVIDIA_GPU: Final = 253
_SECOND_NS: Final = 10**9

_Named = tuple[NodeKind, tuple[int, int] | None]


class FalcoDevice(Fact, frozen=True, kw_only=True):
    """The device that an event is about, and how the use of it ended."""

    path: str
    major: int
    minor: int
    kind: NodeKind
    state: OpenState
    error: int | None = None
    unread: dict[str, str] = {}


class FalcoContext(Fact, frozen=True, kw_only=True):
    """An event that is no use of a device that could be told, with the reason."""

    event: FalcoEvent
    reason: str


def named_device(path: str) -> _Named | None:
    """(kind, its fixed number or None) by a node's name; None for no accelerator's. vfio is none.

    Names in another place than /dev are not known, and a link's name tells no number.
    """
    if found := _NVIDIA_GPU.fullmatch(path):
        minor = int(found[1])
        return "nvidia-gpu", (195, minor) if minor <= _LAST_NVIDIA_GPU else None
    if path == "/dev/nvidiactl":
        return "nvidia-ctl", (195, 255)
    if path == "/dev/nvidia-modeset":
        return "nvidia-modeset", (195, 254)
    if path == "/dev/nvidia-uvm":
        return "nvidia-uvm", None
    if path == "/dev/nvidia-uvm-tools":
        return "nvidia-uvm-tools", None
    if _NVIDIA_CAPS.fullmatch(path):
        return "nvidia-caps", None
    if _NVIDIA_OTHER.fullmatch(path):
        return "nvidia-other", None
    if found := _DRM.fullmatch(path):
        renders, minor = found[1] == "renderD", int(found[2])
        least = _FIRST_RENDER_MINOR if renders else 0
        kind: NodeKind = "drm-render" if renders else "drm-card"
        return kind, (226, minor) if least <= minor < _MINORS else None
    if found := _ACCEL.fullmatch(path):
        minor = int(found[1])
        return "accel", (261, minor) if minor < _MINORS else None
    if path == "/dev/kfd":
        return "kfd", None
    if _HABANA.fullmatch(path):
        return "habana", None
    return ("other", None) if path == "/dev/dxg" or _OTHER.fullmatch(path) else None


def device_of(
    event: FalcoEvent,
    nodes: Iterable[DeviceNode],
    look: Callable[[str], DeviceNode | None] = lambda path: None,
) -> FalcoDevice | FalcoContext:
    """The accelerator that an event is about; ``nodes`` are this host's own.

    ``look`` gives the node at a path under /dev that is not among them: it was made since, as
    /dev/nvidia-uvm is when it is first used.
    """
    if event.from_text:
        reason = "a line of text can be forged by what it quotes; set json_output in falco.yaml"
        return FalcoContext(event=event, reason=reason)
    if event.process is None:
        return FalcoContext(event=event, reason="it is about no process")
    if event.rule != GPU_RULE and event.event_type not in _OPENS:
        return FalcoContext(event=event, reason="it is not about opening a file")
    if event.file is None:
        why = event.unread.get("file", "the rule's output does not tell fd.name")
        return FalcoContext(event=event, reason=f"the file is not known: {why}")
    # Twice: POSIX keeps two slashes at the start.
    path = posixpath.normpath(event.file).replace("//", "/")
    named = named_device(path)
    node = next((one for one in nodes if one.path == path), None)
    if node is None and named is None:
        return FalcoContext(event=event, reason="its file is not an accelerator's by its name")
    state, error, unread = _end(event)
    if node is None and named is not None and named[1] is None:
        node = look(path)
    if node is not None:
        kind, major, minor = node.kind, node.major, node.minor
    elif named is not None and named[1] is not None:
        kind, (major, minor) = named[0], named[1]
    else:
        reason = f"the number of {path} is not fixed, and this host has no such node"
        return FalcoContext(event=event, reason=reason)
    return FalcoDevice(
        path=path, major=major, minor=minor, kind=kind, state=state, error=error, unread=unread
    )


def _end(event: FalcoEvent) -> tuple[OpenState, int | None, dict[str, str]]:
    """How it ended: Falco's own rule matches what succeeded, other rules match anything."""
    failed = event.result not in (None, "SUCCESS")
    if not failed and event.descriptor is not None:
        failed = event.descriptor < 0
    if failed:
        number = getattr(errno, event.result or "", None)
        error = number if isinstance(number, int) else None
        return ("denied" if event.result in _REFUSALS else "attempted"), error, {}
    if event.rule == GPU_RULE or event.result == "SUCCESS" or event.descriptor is not None:
        return "opened", None, {}
    return "unknown", None, {"state": "the rule's output tells neither evt.res nor fd.num"}


def happened_at_ns(event: FalcoEvent, received_ns: int) -> int:
    """When it happened: as Falco says, unless that is over an hour away from when it came."""
    at_ns = event.at_ns
    if at_ns is None or abs(at_ns - received_ns) > _CLOCKS_APART_NS:
        return received_ns
    return at_ns


def match_container(claimed: str, container_ids: Iterable[str]) -> str | None:
    """The one full id that begins with what Falco says; None if none does, or several do."""
    if len(claimed) < ID_LENGTH:
        return None
    found = {one for one in container_ids if one.startswith(claimed)}
    return found.pop() if len(found) == 1 else None


def is_of_node(event: FalcoEvent | FalcoDrop, hostname: str) -> bool | None:
    """Whether an event is of this machine, by the first label of both names; None if it says none.

    In a container Falco calls itself by the container's name unless FALCO_HOSTNAME says better.
    """
    if event.hostname is None:
        return None
    return event.hostname.lower().partition(".")[0] == hostname.lower().partition(".")[0]


def contradiction(claimed: FalcoProcess, process: Process, at_ns: int | None) -> str | None:
    """Why a process that has the claimed pid now is not the one Falco saw; None if nothing says so.

    A pid is given out again, so the process must be older than the event; one second is allowed,
    since the machine's boot time is kept in whole ones.
    """
    if claimed.pid != process.pid:
        return f"Falco's process is pid {claimed.pid}"
    started = process.started_at_ns
    if at_ns is not None and started is not None and started > at_ns + _SECOND_NS:
        return f"pid {process.pid} began after the event: it was given out again"
    exe = process.exe
    if claimed.exe_path is not None and exe is not None and exe.path != claimed.exe_path:
        return f"pid {process.pid} runs {exe.path!r} and Falco saw {claimed.exe_path!r}"
    return None
