"""The preset of programs that belong on a GPU node by themselves: verdict ``system``.

Proven on a host by a root-owned file in a system directory that only root can write, seen from the
host's own mount namespace; in a container by image, digest and namespace as the runtime confirms
them. A name alone (a dump has nothing else) is a claim and is said to be one.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from gpuwarden.finding import Proof
from gpuwarden.model import Executable, Process
from gpuwarden.node import Node
from gpuwarden.pattern import pattern
from gpuwarden.rules.masquerade import SYSTEM_DIRECTORIES, basename


class SystemProgram(NamedTuple):
    """A kind of program with the names of its binaries."""

    kind: str
    names: re.Pattern[str]


SYSTEM_PROGRAMS = (
    SystemProgram(
        "display server",
        pattern(
            r"Xorg(?:\.bin)?|X|Xwayland|gnome-shell|kwin_(?:x11|wayland)|plasmashell|mutter"
            r"|cosmic-comp|sway|weston|Hyprland|labwc|river|wayfire|niri|xfwm4|cinnamon|compiz"
            r"|gnome-remote-desktop-daemon|gdm-x-session|sddm(?:-greeter)?|lightdm|xdg-desktop-portal.*"
        ),
    ),
    SystemProgram("MPS server", pattern(r"nvidia-cuda-mps-(?:server|control)")),
    SystemProgram("DCGM", pattern(r"nv-hostengine|dcgm-exporter|dcgmi")),
    SystemProgram(
        "driver service",
        pattern(
            r"nvidia-persistenced|nvidia-fabricmanager|nv-fabricmanager|nvidia-powerd|nvidia-smi"
            r"|nvidia-modprobe|nvidia-gridd|nvidia-topologyd|nvsm_core|rocm-smi|amd-smi|xpu-smi"
        ),
    ),
    SystemProgram(
        "device plugin",
        pattern(r"nvidia-device-plugin|k8s-device-plugin|gpu-feature-discovery|config-manager"),
    ),
    SystemProgram(
        "desktop program",
        pattern(
            r"firefox(?:-bin|-esr)?|chrome|chromium(?:-browser)?|msedge|brave|opera|vivaldi(?:-bin)?"
            r"|code|codium|electron\d*|slack|discord|Discord|spotify|thunderbird|nautilus|gnome-.+"
            r"|xfce4-.+|konsole|kitty|alacritty|wezterm-gui|ghostty|libreoffice|soffice\.bin|vlc|mpv"
            r"|explorer\.exe|dwm\.exe|NVIDIA Share\.exe|nvcontainer\.exe|SearchHost\.exe"
            r"|steamwebhelper|steam"
        ),
    ),
)
# Repository paths (without the registry) and namespaces in which cluster add-ons run.
ADDON_IMAGES = pattern(
    r"(?:.*/)?(?:k8s-device-plugin|gpu-feature-discovery|dcgm-exporter|dcgm|driver|container-toolkit"
    r"|gpu-operator(?:-validator)?|k8s-driver-manager|mig-parted|k8s-mig-manager|node-feature-discovery"
    r"|amdgpu-device-plugin|rocm/k8s-device-plugin|rocm-device-metrics-exporter|intel-gpu-plugin)"
    r"(?::[^@]*)?(?:@.*)?"
)
ADDON_NAMESPACES = frozenset(
    "kube-system gpu-operator nvidia-gpu-operator gpu-operator-resources nvidia-device-plugin "
    "nvidia-network-operator openshift-nvidia-gpu kube-amd-gpu node-feature-discovery monitoring "
    "gmp-system gke-managed-system".split()
)
CODE_VARIABLES = ("LD_PRELOAD", "LD_AUDIT", "LD_LIBRARY_PATH", "CUDA_INJECTION64_PATH")
"""Variables that make the loader or the driver put other code into a program (ld.so(8))."""
SNAP_LIBRARIES = "/var/lib/snapd/lib/"
"""Where snapd, as root, puts the driver's libraries for the programs that it starts."""


class SystemMatch(NamedTuple):
    """What kind of system program it is, how far that is proven, and why."""

    kind: str
    proof: Proof
    why: str


def kind_by_name(name: str) -> str | None:
    """The kind of system program with this binary name, or None."""
    wanted = name.replace("\\", "/").rsplit("/", 1)[-1]
    return next((p.kind for p in SYSTEM_PROGRAMS if p.names.fullmatch(wanted)), None)


def reported(name: str) -> SystemMatch | None:
    """A system program by the name that a dump prints: claimed at most."""
    kind = kind_by_name(name)
    if kind is None:
        return None
    return SystemMatch(
        kind, "claimed", f"{basename(name)} is the name of a {kind}; a dump cannot prove it"
    )


def matches(node: Node, process: Process) -> SystemMatch | None:
    """The preset entry that a process fits, with its proof; None when it fits none."""
    container = node.container_of(process)
    if container is not None:
        image = container.image or ""
        if not ADDON_IMAGES.fullmatch(image) or container.pod_namespace not in ADDON_NAMESPACES:
            return None
        # An image can bring any label, the pod's namespace too; a place among the pods it cannot.
        in_pod = process.cgroup is not None and process.cgroup.pod_uid is not None
        proven = container.confirmed and container.image_digest is not None and in_pod
        how = f", digest {container.image_digest}" if proven else "; no pod and digest confirm it"
        return SystemMatch(
            "cluster add-on",
            "proven" if proven else "claimed",
            f"image {image} in namespace {container.pod_namespace}{how}",
        )
    exe = process.exe
    name = basename(exe.path) if exe else (basename(process.argv[0]) if process.argv else "")
    kind = kind_by_name(name)
    if kind is None:
        return None
    if exe is None:
        return SystemMatch(kind, "claimed", f"it says it is {name}; its binary could not be read")
    doubt = next(doubts(node, process, exe), None)
    if doubt is None:
        return SystemMatch(kind, "proven", f"{exe.path} is root-owned and only root can write it")
    return SystemMatch(kind, "claimed", f"{exe.path} is named like a {kind}, but {doubt}")


def doubts(node: Node, process: Process, exe: Executable) -> Iterator[str]:
    """Why a binary's path and owner do not prove what runs in the process."""
    if (
        not exe.path.startswith(SYSTEM_DIRECTORIES)
        or exe.owner_uid != 0
        or exe.mode is None
        or exe.mode & 0o022
        or exe.directory_writable_by
        or exe.memfd
        or (exe.deleted and not exe.replaced)
    ):
        yield "others can write it"
    # An upgrade leaves another file at that path; only who has no mounts of its own shows where.
    upgraded = exe.deleted and exe.replaced and node.shares_host_namespace(process, "mnt") is True
    if exe.path_is_genuine is not True and not upgraded:
        yield "that path is not the host's own file"
    if node.shares_host_namespace(process, "user") is False:
        yield "it lives in a user namespace, where anybody can lay files over its libraries"
    loaded = foreign_code(process.environment)
    if loaded is not None:
        yield f"it was started with {loaded}"


def foreign_code(environment: Mapping[str, str]) -> str | None:
    """``NAME=entry`` by which a program loads code from where root alone does not write."""
    for name in CODE_VARIABLES:
        for entry in environment.get(name, "").replace(":", " ").split():
            path = os.path.normpath(entry) if entry.startswith("/") else entry
            bare = "/" not in entry and name != "LD_LIBRARY_PATH"
            if not bare and not f"{path}/".startswith((*SYSTEM_DIRECTORIES, SNAP_LIBRARIES)):
                return f"{name}={entry}"
    return None
