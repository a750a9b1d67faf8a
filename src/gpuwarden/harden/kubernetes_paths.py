"""Host paths that lead to accelerators, in whatever way they are spelled, as RE2 expressions.

``/dev//nvidia0``, ``/dev/./nvidia0/`` and ``dev/nvidia0`` are one path for a container runtime.
``..`` is refused as such. Links are not followed: a path that is a link on the node is its own name
here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

_LEAD: Final = r"^(\.?/)*"
_JOIN: Final = r"/(\.?/)*"
_END: Final = r"(/\.?)*$"
_BELOW: Final = r"(/|$)"

_RUN: Final = ("run", "var/run")
"""``/var/run`` is a link to ``/run``."""

DEVICES: Final = (
    "dev/nvidia[^/]*",
    "dev/nvhost[^/]*",
    "dev/nvmap",
    "dev/nvgpu[^/]*",
    "dev/dri",
    "dev/kfd",
    "dev/accel[^/]*",
    "dev/dxg",
    "dev/hl[0-9_][^/]*",
    "dev/habana[^/]*",
    "dev/vfio",
    "dev/char",
    *(f"{run}/nvidia/driver" for run in _RUN),
)
"""Accelerators' nodes: NVIDIA (also Tegra), DRM, AMD, Gaudi, WSL, devices handed to guests, links
to nodes by number, and the root of NVIDIA's driver container, which has nodes of its own."""

SOCKETS: Final = (
    "var/lib/kubelet/device-plugins",
    "var/lib/kubelet/pod-resources",
    "var/lib/kubelet/plugins_registry",
    "etc/cdi",
    *(f"{run}/cdi" for run in _RUN),
    *(f"{run}/nri" for run in _RUN),
    *(
        f"{run}/{name}"
        for run in _RUN
        for name in (
            "containerd",
            "crio",
            "docker[.]sock",
            "docker",
            "dockershim[.]sock",
            "cri-dockerd[.]sock",
            "k3s/containerd",
            "podman",
        )
    ),
)
"""Where GPUs are handed out: the kubelet's plugin sockets, CDI's specifications, and the runtimes'
sockets, behind which any container can be started."""

PROCESS_ROOTS: Final = tuple(
    f"proc/[0-9a-z-]+/{task}{link}"
    for task in ("", "task/[0-9]+/")
    for link in ("root", "cwd", "fd", "map_files")
)
"""Links of processes that lead out of /proc to the host's files. No part of them can be a dot: what
may stand between two parts would fit it too, in more ways than can be tried."""

GIVEN_BY_MOUNT: Final = tuple(f"{run}/nvidia-container-devices" for run in _RUN)
"""Where a mount names a GPU to NVIDIA's runtime, in a container."""


def _spelled(paths: Iterable[str]) -> str:
    """Paths without their first slash, with whatever may stand between their parts.

    Those of one directory share its text: what an expression costs goes by its length.
    """
    names: dict[tuple[str, ...], list[str]] = {}
    for path in paths:
        *above, name = _parts(path)
        names.setdefault(tuple(above), []).append(name)
    return "|".join(
        "".join(part + _JOIN for part in above) + (f"({'|'.join(own)})" if own[1:] else own[0])
        for above, own in names.items()
    )


def _parts(path: str) -> Iterator[str]:
    """The parts of a path in which ``[^/]`` may stand."""
    yield from path.replace("[^/]", "\0").replace("/", "\n").replace("\0", "[^/]").split("\n")


def at_or_below(paths: Iterable[str]) -> str:
    """Finds these paths and all below them."""
    return f"{_LEAD}({_spelled(paths)}){_BELOW}"


def exactly(paths: Iterable[str]) -> str:
    """Finds these paths alone; the empty one is the root."""
    named = _spelled(path for path in paths if path)
    return rf"{_LEAD}(\.|({named}){_END})?$"


def parents(paths: Iterable[str]) -> tuple[str, ...]:
    """All directories above some paths, the root (an empty text) first."""
    above = {""}
    for path in paths:
        parts = list(_parts(path))
        above.update("/".join(parts[:end]) for end in range(1, len(parts)))
    return tuple(sorted(above))


BACKSTEP: Final = r"(^|/)\.\.(/|$)"
