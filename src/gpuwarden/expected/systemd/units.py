"""systemd's own formats: ``systemctl show``, unit files, DeviceAllow= and unit cgroup paths.

Sources: systemctl(1), systemd.syntax(7), systemd.resource-control(5), systemd.unit(5), and the
rule of sd_pid_get_unit(3): slices aside, the outermost component of a cgroup path is the unit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from msgspec import Struct, field

from gpuwarden.errors import Malformed
from gpuwarden.model import Gpu
from gpuwarden.pattern import pattern

SHOWN = (
    "Id",
    "LoadState",
    "ActiveState",
    "ControlGroup",
    "Transient",
    "DeviceAllow",
    "FragmentPath",
    "DropInPaths",
    "User",
    "UID",
)
ALIVE_STATES = frozenset({"active", "reloading", "activating", "deactivating", "refreshing"})
TEXT_LIMIT = 1 << 20
_BLOCK_LIMIT = 1_024
_DIRECTIVE_LIMIT = 4_096
_UNIT_NAME = pattern(r"[A-Za-z0-9:_.\\@\-]{1,255}\Z")
_SECTION = pattern(r"\[([^\[\]]+)\]\Z")
_NVIDIA = pattern(r"/dev/nvidia(\d{1,6})\Z", re.ASCII)
_NVIDIA_NUMBER = pattern(r"/dev/char/195:(\d{1,3})\Z", re.ASCII)
_RENDER = pattern(r"/dev/dri/renderD(\d{1,6})\Z", re.ASCII)
_CARD = pattern(r"/dev/dri/card(\d{1,6})\Z", re.ASCII)
_ACCEL = pattern(r"/dev/accel/accel(\d{1,6})\Z", re.ASCII)
_NVIDIA_CONTROL_MINOR = 254
"""195:254 is modeset and 195:255 nvidiactl; neither is a GPU."""
_CHARACTER_GROUPS = ("nvidia", "nvidia-frontend", "drm", "accel", "kfd")
"""Names in /proc/devices that stand for every GPU of their driver."""


class Unit(Struct, frozen=True):
    """A unit as systemd describes it, or as its files do."""

    name: str
    active_state: str = ""
    control_group: str = ""
    transient: bool = False
    device_allow: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    """Its unit file and drop-ins."""
    user: str | None = None
    uid: int | None = None

    def holds(self, path: str) -> bool:
        """Whether a cgroup path is this unit's own cgroup or one below it."""
        group = self.control_group
        return bool(group.strip("/")) and (path == group or path.startswith(group + "/"))


def is_unit_name(name: str) -> bool:
    """Whether ``name`` can be a service's name, and cannot be taken for an option or a pattern."""
    return (
        _UNIT_NAME.match(name) is not None
        and not name.startswith("-")
        and name.endswith(".service")
    )


def unit_of_path(path: str) -> tuple[str, str] | None:
    """(unit, its cgroup path) that a cgroup path lies in, by systemd's rule; None in no unit.

    Whatever a user's own manager or a container nests below is not the system's unit, so a nested
    directory with another unit's name proves nothing.
    """
    # "..": seen from within a cgroup namespace that the process is not in.
    parts = [part for part in path.split("/") if part not in ("", "..")]
    if "/.." in path and parts and not parts[0].endswith(".slice"):
        return None
    for place, part in enumerate(parts):
        if part.endswith(".slice"):
            continue
        # systemd puts "_" before a name that could be mistaken for a controller's file.
        name = part.removeprefix("_")
        if not name or "." not in name:
            return None
        return name, "/" + "/".join(parts[: place + 1])
    return None


def system_paths(cgroup_lines: Sequence[str]) -> list[str]:
    """The paths in systemd's own hierarchy: ``name=systemd`` of v1, ``0::`` of v2 and hybrid."""
    paths: list[str] = []
    for line in cgroup_lines:
        fields = line.split(":", 2)
        if len(fields) == 3 and fields[1] in ("", "name=systemd") and fields[2].strip("/"):
            paths.append(fields[2])
    return paths


def parse_show(data: bytes) -> dict[str, Unit]:
    """``systemctl show --property=… UNIT…`` by unit id. Errors: Malformed if it is not that."""
    if len(data) > TEXT_LIMIT:
        raise Malformed("systemctl's answer is too long")
    units: dict[str, Unit] = {}
    for block in data.decode("utf-8", "backslashreplace").split("\n\n")[:_BLOCK_LIMIT]:
        values: dict[str, list[str]] = {}
        for line in block.split("\n"):
            key, equals, value = line.partition("=")
            if equals:
                values.setdefault(key, []).append(value)
        first = {key: value[0] for key, value in values.items()}
        if "Id" not in first:
            if block.strip():
                raise Malformed("systemctl describes a unit without its name")
            continue
        if first.get("LoadState") in ("not-found", "bad-setting", "error"):
            continue
        uid = first.get("UID", "")
        units[first["Id"]] = Unit(
            name=first["Id"],
            active_state=first.get("ActiveState", ""),
            control_group=first.get("ControlGroup", ""),
            transient=first.get("Transient") == "yes",
            device_allow=tuple(values.get("DeviceAllow", ())),
            files=tuple(
                path
                for path in [first.get("FragmentPath", ""), *first.get("DropInPaths", "").split()]
                if path
            ),
            user=first.get("User") or "root",
            uid=int(uid) if uid.isascii() and uid.isdigit() and len(uid) < 11 else None,
        )
    return units


class Directives(Struct):
    """What the [Service] sections of a unit's files set, later files over earlier ones."""

    device_allow: list[str] = field(default_factory=list)
    user: str = ""

    def apply(self, text: str, unit: str) -> None:
        """Adds one file; an empty DeviceAllow= clears the list. Any text gives a result."""
        section = ""
        for line in _logical_lines(text[:TEXT_LIMIT]):
            heading = _SECTION.match(line)
            if heading is not None:
                section = heading[1]
                continue
            key, equals, value = line.partition("=")
            if not equals or section != "Service":
                continue
            value = _with_specifiers(value.strip(), unit)
            if key.strip() == "User":
                self.user = value
            elif key.strip() == "DeviceAllow":
                if not value:
                    self.device_allow.clear()
                elif len(self.device_allow) < _DIRECTIVE_LIMIT:
                    self.device_allow.append(value)


def _logical_lines(text: str) -> Iterator[str]:
    pending = ""
    for line in text.split("\n"):
        stripped = line.strip()
        if stripped.startswith(("#", ";")):
            continue
        if stripped.endswith("\\"):
            pending += stripped[:-1] + " "
            continue
        if pending or stripped:
            yield (pending + stripped).strip()
        pending = ""
    if pending:
        yield pending.strip()


def _with_specifiers(value: str, unit: str) -> str:
    name = unit.removesuffix(".service")
    prefix, _, instance = name.partition("@")
    values = {"i": instance, "I": instance, "p": prefix, "n": unit, "N": name, "%": "%"}
    return re.sub(r"%([iIpnN%])", lambda match: values[match[1]], value)


def file_names(unit: str) -> tuple[list[str], list[str]]:
    """(file names, drop-in directory names) that define a service, the most specific first."""
    name = unit.removesuffix(".service")
    prefix, at, _ = name.partition("@")
    files = [unit]
    folders = [f"{unit}.d"]
    if at:
        files.append(f"{prefix}@.service")
        folders.append(f"{prefix}@.service.d")
    pieces = prefix.split("-")
    folders += [f"{'-'.join(pieces[:end])}-.service.d" for end in range(len(pieces) - 1, 0, -1)]
    return files, [*folders[:64], "service.d"]


def allotted_gpus(device_allow: Sequence[str], gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """The accelerators that DeviceAllow= entries open, as Workload references; () for none.

    Control and memory nodes (nvidiactl, nvidia-uvm) give no GPU by themselves. /dev/kfd alone
    counts as all: it is the gate to every AMD GPU.
    """
    found: list[str] = []
    gate = False
    for entry in device_allow[:_DIRECTIVE_LIMIT]:
        words = entry.split()
        if not words or (len(words) > 1 and not set("rw") & set(words[1])):
            continue
        gate = gate or words[0] == "/dev/kfd"
        found.extend(_references(words[0], gpus))
    if not found and gate:
        return ("all",)
    return tuple(dict.fromkeys(found))


def _references(node: str, gpus: Sequence[Gpu]) -> Iterator[str]:
    if node.startswith("char-"):
        if any(fnmatchcase(group, node[5:]) for group in _CHARACTER_GROUPS):
            yield "all"
        return
    nvidia = _NVIDIA.match(node) or _NVIDIA_NUMBER.match(node)
    if nvidia is not None:
        if int(nvidia[1]) < _NVIDIA_CONTROL_MINOR or node.startswith("/dev/nvidia"):
            yield f"minor:{int(nvidia[1])}"
        return
    render, card, accel = _RENDER.match(node), _CARD.match(node), _ACCEL.match(node)
    if accel is not None:
        yield f"minor:{int(accel[1])}"
    for gpu in gpus:
        number = gpu.render_minor if render else gpu.card_minor
        match = render or card
        if match is not None and number == int(match[1]):
            yield _name_of(gpu)
            return
    if render is not None:
        yield f"minor:{int(render[1])}"


def _name_of(gpu: Gpu) -> str:
    if gpu.uuid is not None:
        return f"uuid:{gpu.uuid}"
    return f"pci:{gpu.pci_address}" if gpu.pci_address is not None else f"minor:{gpu.minor}"
