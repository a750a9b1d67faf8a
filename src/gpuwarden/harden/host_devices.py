"""Who can open this host's accelerators: nodes, groups, the driver's own settings, MPS.

Sources: the NVIDIA driver's README (NVreg_*, /proc/driver/nvidia/params), nvidia-persistenced(1),
the manual of CUDA's Multi-Process Service.
"""

from __future__ import annotations

import re
import shlex
import stat
from collections.abc import Iterator, Sequence

from gpuwarden.errors import Denied, GpuwardenError, Malformed, Unavailable
from gpuwarden.harden.access import changers
from gpuwarden.harden.setting import About, Setting, State
from gpuwarden.host import Host
from gpuwarden.model import DeviceNode
from gpuwarden.pattern import pattern
from gpuwarden.sensors import device_nodes
from gpuwarden.sensors.process import stat_lines
from gpuwarden.sensors.seen import Seen

PARAMS = "/proc/driver/nvidia/params"
GROUPS = "/etc/group"
MPS_DIRECTORY = "/tmp/nvidia-mps"
_MPS_CONTROL = "nvidia-cuda-mps"
_PERSISTENCED = "nvidia-persiste"
"""What the kernel keeps of the name: 15 characters."""
_PARAM = pattern(r"^(\w{1,64}): \"?([^\"\n]{0,256})\"?$", re.MULTILINE)
_MODPROBE = "/etc/modprobe.d/gpuwarden-nvidia.conf"
_GROUP_NAMES = ("render", "video")
_SHOWN = 8

NODES = About(
    "device-nodes",
    "who can open the GPUs' device nodes",
    "Every account of this host can compute on a GPU that was given to somebody else, from a login "
    "session as well as from a service that was broken into.",
    may_break="programs and containers of users who are not in that group; Slurm's and Kubernetes' "
    "own jobs when their users are not",
)
DRIVER_MODE = About(
    "driver-device-mode",
    "the mode that the NVIDIA driver gives to its nodes",
    "The driver makes its nodes anew when it loads: a chmod of today is gone after a restart.",
    commands=(
        "groupadd --force --system gpu",
        'echo "options nvidia NVreg_DeviceFileUID=0 NVreg_DeviceFileGID=$(getent group gpu '
        f'| cut -d: -f3) NVreg_DeviceFileMode=0660" > {_MODPROBE}',
        "update-initramfs -u",
    ),
    may_break="users and containers outside the group gpu; it counts when the driver is loaded "
    "anew",
)
PROFILING = About(
    "profiling-counters",
    "who may read the GPU's performance counters",
    "Counters of a GPU that is shared tell what others compute on it: they have been used to find "
    "out a neighbour's model.",
    commands=(
        f"echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=1' >> {_MODPROBE}",
        "update-initramfs -u",
    ),
    may_break="Nsight Compute and other profilers for users without CAP_SYS_ADMIN",
)
GROUP = About(
    "gpu-groups",
    "which accounts the groups of the device nodes hold",
    "Whoever is in such a group opens the GPUs without being given one.",
)
MPS = About(
    "mps-directory",
    "who can write the pipes of the Multi-Process Service",
    "Who owns that directory before the service starts stands between it and its clients; who can "
    "write it can stop them.",
    commands=(f"install -d -o root -g root -m 0755 {MPS_DIRECTORY}",),
    may_break="a service that a user starts as himself: give it CUDA_MPS_PIPE_DIRECTORY in a "
    "directory of its own",
)
PERSISTENCED = About(
    "persistence-daemon",
    "as whom nvidia-persistenced runs",
    "It needs root to start and no rights afterwards; as root, a defect of it is a way to root.",
    commands=(
        "useradd --system --no-create-home --shell /usr/sbin/nologin nvidia-persistenced",
        "systemctl edit nvidia-persistenced   # ExecStart= with --user nvidia-persistenced",
    ),
    may_break="nothing that is known",
)


def read(host: Host) -> Iterator[Setting]:
    """What stands between an account of this host and its GPUs."""
    try:
        nodes = list(device_nodes.read(host, Seen()))
    except Unavailable as error:
        yield NODES.said("absent", str(error), "/proc/devices")
        nodes = []
    except (Denied, Malformed) as error:
        yield NODES.said("unknown", str(error), "/proc/devices")
        nodes = []
    else:
        yield nodes_setting(nodes)
    yield from groups(host, nodes)
    yield from driver(host)
    yield from services(host)


# ------------------------------------------------------------------ nodes


def nodes_setting(nodes: Sequence[DeviceNode]) -> Setting:
    """The nodes' modes; open when everybody may open one that computes."""
    if not nodes:
        return NODES.said("absent", "no device node of an accelerator is under /dev", "/dev")
    computing = [node for node in nodes if node.kind not in ("drm-card", "nvidia-modeset")]
    unread = [node for node in computing if node.mode is None]
    open_ = [node for node in computing if (node.mode or 0) & 0o006]
    shown = open_ or computing
    state: State = "open" if open_ else "unknown" if unread else "sound"
    listed = ", ".join(
        f"{node.path} {(node.mode or 0) & 0o777:04o} {node.uid}:{node.gid}"
        for node in shown[:_SHOWN]
    )
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    commands = tuple(
        f"chgrp {_group_of(node)} {shlex.quote(node.path)} && chmod 0660 {shlex.quote(node.path)}"
        for node in open_[:_SHOWN]
    )
    return NODES.said(
        state, listed + more, "/dev", commands=("groupadd --force --system gpu", *commands)
    )


def _group_of(node: DeviceNode) -> str:
    return "render" if node.kind in ("drm-render", "kfd") else "gpu"


def groups(host: Host, nodes: Sequence[DeviceNode]) -> Iterator[Setting]:
    """The members of the nodes' groups, as far as /etc/group names them."""
    gids = {
        node.gid
        for node in nodes
        if node.gid not in (0, None) and node.mode is not None and node.mode & 0o060
    }
    try:
        known = parse_groups(host.read_text(GROUPS, 4 << 20))
    except GpuwardenError as error:
        yield GROUP.said("unknown", str(error), GROUPS)
        return
    for name, (gid, members) in sorted(known.items()):
        if gid in gids or (name in _GROUP_NAMES and nodes):
            listed = ", ".join(members[:_SHOWN]) or "nobody"
            more = f" and {len(members) - _SHOWN} more" if len(members) > _SHOWN else ""
            # Membership is somebody's decision: it is shown, not accused.
            now = f"{name} ({gid}): {listed}{more}; a directory service may name others"
            yield GROUP.said("sound", now, GROUPS)


def parse_groups(text: str) -> dict[str, tuple[int, list[str]]]:
    """The lines of group(5) by name: gid and members. Lines that are none are skipped."""
    found: dict[str, tuple[int, list[str]]] = {}
    for line in text.split("\n"):
        fields = line.split(":")
        if len(fields) != 4 or not (fields[2].isascii() and fields[2].isdigit()):
            continue
        if not fields[0] or len(fields[2]) > 10:
            continue
        members = [name for name in fields[3].strip().split(",") if name]
        found.setdefault(fields[0], (int(fields[2]), members))
    return found


# ------------------------------------------------------------------ the NVIDIA driver


def parse_params(text: str) -> dict[str, str]:
    """The lines ``Name: value`` of /proc/driver/nvidia/params."""
    return {name: value.strip() for name, value in _PARAM.findall(text)}


def driver(host: Host) -> Iterator[Setting]:
    """What the driver that is loaded does by itself."""
    try:
        params = parse_params(host.read_text(PARAMS, 1 << 16))
    except Unavailable:
        for about in (DRIVER_MODE, PROFILING):
            yield about.said("absent", "the NVIDIA driver is not loaded", PARAMS)
        return
    except GpuwardenError as error:
        for about in (DRIVER_MODE, PROFILING):
            yield about.said("unknown", str(error), PARAMS)
        return
    yield _mode(params)
    restricted = params.get("RmProfilingAdminOnly")
    if restricted not in ("0", "1"):
        yield PROFILING.said("unknown", "the driver does not say RmProfilingAdminOnly", PARAMS)
    else:
        state: State = "sound" if restricted == "1" else "open"
        yield PROFILING.said(state, f"RmProfilingAdminOnly={restricted}", PARAMS)


def _mode(params: dict[str, str]) -> Setting:
    names = ("ModifyDeviceFiles", "DeviceFileUID", "DeviceFileGID", "DeviceFileMode")
    values = {name: params.get(name, "") for name in names}
    if any(not (v.isascii() and v.isdigit() and len(v) < 11) for v in values.values()):
        return DRIVER_MODE.said("unknown", "the driver does not say DeviceFileMode", PARAMS)
    mode = int(values["DeviceFileMode"]) & 0o7777
    now = (
        f"DeviceFileMode={mode:04o}, owner {values['DeviceFileUID']}:{values['DeviceFileGID']}, "
        f"ModifyDeviceFiles={values['ModifyDeviceFiles']}"
    )
    if values["ModifyDeviceFiles"] == "0":
        return DRIVER_MODE.said("sound", f"{now}: somebody else sets them", PARAMS)
    return DRIVER_MODE.said("open" if mode & 0o006 else "sound", now, PARAMS)


# ------------------------------------------------------------------ services beside it


def services(host: Host) -> Iterator[Setting]:
    """MPS's pipes and the persistence daemon, by who runs now."""
    try:
        table = stat_lines.read(host)
    except GpuwardenError as error:
        yield PERSISTENCED.said("unknown", str(error), "/proc")
        yield MPS.said("unknown", str(error), "/proc")
        return
    names = {line.pid: line.comm for line in table.values()}
    persisting = [pid for pid, name in names.items() if name == _PERSISTENCED]
    if not persisting:
        yield PERSISTENCED.said("absent", "it does not run", "/proc")
    for pid in persisting:
        yield _persistence(host, pid)
    yield mps(host, runs=any(name.startswith(_MPS_CONTROL) for name in names.values()))


def _persistence(host: Host, pid: int) -> Setting:
    path = f"/proc/{pid}"
    try:
        uid = host.status(path).uid
    except GpuwardenError as error:
        return PERSISTENCED.said("unknown", str(error), path)
    return PERSISTENCED.said("open" if uid == 0 else "sound", f"pid {pid} runs as uid {uid}", path)


def mps(host: Host, *, runs: bool) -> Setting:
    """The directory that MPS uses when it is told no other."""
    state: State
    try:
        status = host.status(MPS_DIRECTORY)
    except Unavailable:
        if not runs:
            return MPS.said("absent", "no MPS runs here", MPS_DIRECTORY)
        return MPS.said("unknown", "MPS runs with its pipes in another place", MPS_DIRECTORY)
    except GpuwardenError as error:
        return MPS.said("unknown", str(error), MPS_DIRECTORY)
    try:
        others = changers(host, MPS_DIRECTORY)
    except GpuwardenError as error:
        return MPS.said("unknown", str(error), MPS_DIRECTORY)
    state = "open" if others or not stat.S_ISDIR(status.mode) else "sound"
    writers = ", ".join(others) or "root alone"
    return MPS.said(
        state, f"mode {status.mode & 0o7777:04o}, to be changed by {writers}", MPS_DIRECTORY
    )
