"""Accelerators' device nodes: which device numbers are theirs, and the nodes under /dev."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from msgspec import Struct, field

from gpuwarden.errors import Denied, GpuwardenError, Malformed, Unavailable
from gpuwarden.host import Host
from gpuwarden.model import DeviceNode, NodeKind
from gpuwarden.pattern import pattern
from gpuwarden.sensors.seen import Seen

# /proc/devices: "Character devices:", one "%3d name" a line, an empty line, "Block devices:".
_LINE = pattern(rb"^ *(\d{1,7}) ([^\n]{1,64})$", re.M)
_BLOCK_DEVICES = b"Block devices:"
_DEVICES_LIMIT_BYTES = 1 << 16

# Names as the drivers register them. Only 195, 226 and 261 are assigned numbers
# (Documentation/admin-guide/devices.txt); all others are given out when the driver loads.
_ASSIGNED: Mapping[int, str] = {195: "nvidia", 226: "drm", 261: "accel"}
_NVIDIA_MAJOR = 195
_NVIDIA_CONTROL_MINOR = 255
_NVIDIA_MODESET_MINOR = 254
_DRM_FIRST_RENDER_MINOR = 128
_KINDS_BY_NAME: Mapping[str, NodeKind] = {
    "nvidia": "nvidia-gpu",
    "nvidia-frontend": "nvidia-gpu",
    "nvidiactl": "nvidia-ctl",
    "nvidia-modeset": "nvidia-modeset",
    "nvidia-uvm": "nvidia-uvm",
    "nvidia-caps": "nvidia-caps",
    "drm": "drm-card",
    "kfd": "kfd",
    "accel": "accel",
    "habanalabs": "habana",
    "hl": "habana",
}
_NVIDIA_PREFIX = "nvidia"
_OTHER_NAMES = ("mali", "neuron", "davinci_manager", "devdrv", "apex", "vastai", "cambricon", "dxg")
"""Other vendors' drivers, by how their names begin."""

# /dev and these below it; never the whole tree.
_FOLDERS = ("/dev", "/dev/dri", "/dev/accel", "/dev/nvidia-caps", "/dev/nvidia-caps-imex-channels")
_FOLDER_NAMES = pattern(r"hl\w{0,16}|nvidia[\w-]{0,32}")
_NAMES_LIMIT = 8192
_DEV_NAMES = pattern(
    r"nvidia.*|kfd|hl.*|accel.*|render.*|card.*|mali.*|neuron.*|davinci.*|devmm.*|hisi.*|apex.*"
    r"|cambricon.*|dxg"
)
"""Names whose number is worth looking up first if /dev should hold too many."""

_PCI_ADDRESS = pattern(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_DRM_UEVENT_PCI = pattern(r"^PCI_SLOT_NAME=(\S{1,32})$", re.M)


class Majors(Struct, frozen=True):
    """Which character-device majors are accelerators', by the driver's name."""

    names: dict[int, str] = field(default_factory=dict)
    misc: dict[int, str] = field(default_factory=dict)
    """Minors of the shared misc major (10) that are accelerators', from /proc/misc."""

    def __bool__(self) -> bool:
        return bool(self.names or self.misc)


_MISC_MAJOR = 10
_MISC_LIMIT_BYTES = 1 << 14
_MISC_LINE = pattern(rb"^ *(\d{1,7}) (\S{1,64})$", re.M)


def _is_accelerator(name: str) -> bool:
    return (
        name in _KINDS_BY_NAME or name.startswith(_NVIDIA_PREFIX) or name.startswith(_OTHER_NAMES)
    )


def parse_devices(data: bytes) -> dict[int, str]:
    """Accelerators' majors in the text of /proc/devices: major → the driver's name.

    195 is called nvidia-frontend by the drivers of the 400s and 500s. Text that is no such list
    gives an empty table.
    """
    characters = data.split(_BLOCK_DEVICES, 1)[0]
    found: dict[int, str] = {}
    for number, name in _LINE.findall(characters):
        text = name.decode("utf-8", "backslashreplace").strip()
        if _is_accelerator(text):
            found.setdefault(int(number), text)
    return found


def parse_misc(data: bytes) -> dict[int, str]:
    """Accelerators' minors in the text of /proc/misc: minor → name (WSL's dxg registers there)."""
    found: dict[int, str] = {}
    for number, name in _MISC_LINE.findall(data):
        text = name.decode("utf-8", "backslashreplace")
        if _is_accelerator(text):
            found.setdefault(int(number), text)
    return found


def read_majors(host: Host) -> Majors:
    """The accelerators' device numbers of a machine, as its kernel lists them.

    Errors: Unavailable or Denied if /proc/devices cannot be read.
    """
    names = parse_devices(host.read_bytes("/proc/devices", _DEVICES_LIMIT_BYTES))
    try:
        misc = parse_misc(host.read_bytes("/proc/misc", _MISC_LIMIT_BYTES))
    except GpuwardenError:
        misc = {}
    return Majors(names, misc)


def assigned_majors() -> Majors:
    """The majors that are assigned for good; what is left to go by when /proc/devices is not."""
    return Majors(dict(_ASSIGNED))


def kind_of(major: int, minor: int, majors: Majors) -> NodeKind | None:
    """What kind of accelerator node a device number is, None if it is none.

    /dev/nvidiactl is minor 255 of major 195 and /dev/nvidia-modeset 254; a DRM minor from 128 on
    is a render node (linux/drm_drv.c; from 192 on new kernels give minors to either type, and those
    count as render nodes, which compute).
    """
    name = majors.names.get(major)
    if name is None:
        return "other" if major == _MISC_MAJOR and minor in majors.misc else None
    if major == _NVIDIA_MAJOR or name in ("nvidia", "nvidia-frontend"):
        if minor == _NVIDIA_CONTROL_MINOR:
            return "nvidia-ctl"
        return "nvidia-modeset" if minor == _NVIDIA_MODESET_MINOR else "nvidia-gpu"
    if name == "nvidia-uvm":
        return "nvidia-uvm-tools" if minor == 1 else "nvidia-uvm"
    if name == "drm":
        return "drm-render" if minor >= _DRM_FIRST_RENDER_MINOR else "drm-card"
    known = _KINDS_BY_NAME.get(name)
    if known is not None:
        return known
    return "nvidia-other" if name.startswith(_NVIDIA_PREFIX) else "other"


def parse_uevent_pci(text: str) -> str | None:
    """The PCI address in a device's uevent file, as ``dddddddd:bb:dd.f`` in lower case."""
    match = _DRM_UEVENT_PCI.search(text)
    if match is None:
        return None
    address = match.group(1).lower()
    return address.rjust(16, "0") if _PCI_ADDRESS.fullmatch(address) else None


def _pci_address(host: Host, major: int, minor: int) -> str | None:
    try:
        uevent = host.read_bytes(f"/sys/dev/char/{major}:{minor}/device/uevent", 4096)
    except GpuwardenError:
        return None
    return parse_uevent_pci(uevent.decode("utf-8", "backslashreplace"))


def _folder_names(host: Host, folder: str) -> list[str]:
    try:
        names = host.names(folder)
    except GpuwardenError:
        return []
    if len(names) > _NAMES_LIMIT:
        names.sort(key=lambda name: _DEV_NAMES.fullmatch(name) is None)
    return names[:_NAMES_LIMIT]


def node_at(host: Host, path: str, majors: Majors) -> DeviceNode | None:
    """The accelerator's node of that path; None when it is none, or cannot be looked at."""
    try:
        status = host.status(path)
    except (Unavailable, Denied, Malformed):
        return None
    if not status.is_character_device:
        return None
    major, minor = status.special
    kind = kind_of(major, minor, majors)
    if kind is None:
        return None
    return DeviceNode(
        path=path,
        major=major,
        minor=minor,
        kind=kind,
        mode=status.mode & 0o7777,
        uid=status.uid,
        gid=status.gid,
        inode=status.inode,
        device=f"{status.device[0]}:{status.device[1]}",
        pci_address=_pci_address(host, major, minor) if kind.startswith("drm") else None,
    )


def read(host: Host, seen: Seen) -> Iterator[DeviceNode]:
    """The accelerators' nodes in /dev and its folders for them, whatever their names are.

    Errors: Unavailable if the machine has no accelerator's driver; Denied.
    """
    majors = read_majors(host)
    if not majors:
        raise Unavailable(
            "no accelerator's driver is loaded: /proc/devices names none",
            remedy="load the driver (nvidia, amdgpu, i915, xe, habanalabs) if this node has one",
        )
    names = _folder_names(host, "/dev")
    folders = [*_FOLDERS, *(f"/dev/{n}" for n in sorted(names) if _FOLDER_NAMES.fullmatch(n))]
    for folder in dict.fromkeys(folders):
        for name in sorted(_folder_names(host, folder) if folder != "/dev" else names):
            node = node_at(host, f"{folder}/{name}", majors)
            if node is not None:
                yield node
