"""Slurm's spellings of "which GPUs": GRES strings, host lists and gres.conf.

Sources: gres.conf(5), slurm.conf(5), squeue(1) and the output of ``scontrol show job -d``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product

from msgspec import Struct

from gpuwarden.errors import Malformed
from gpuwarden.model import Gpu
from gpuwarden.pattern import pattern

HOSTLIST_LIMIT = 65_536
"""Names that one host list may stand for; Slurm's own bound is of that size."""
INDEX_LIMIT = 4_096
TEXT_LIMIT = 1 << 20
_DEPTH_LIMIT = 8
_NUMBER_DIGITS = 18

_ITEM = pattern(
    r"(?:gres[/:])?(?P<name>[A-Za-z_][\w.\-]*)"
    r"(?P<tokens>(?:[:=](?:\(null\)|[^:=(),\s]+))*)"
    r"(?P<groups>(?:\([^()]*\))*)\Z"
)
_TOKEN = pattern(r"[:=](\(null\)|[^:=(),\s]+)")
_GROUP = pattern(r"\(([^()]*)\)")
_COUNT = pattern(r"(\d{1,18})([KMGTP]?)\Z", re.ASCII)
_PART_OF = pattern(r"(\d{1,18})/(\d{1,18})\Z", re.ASCII)
_RANGE = pattern(r"(\d{1,18})(?:-(\d{1,18}))?\Z", re.ASCII)
_MIG_PROFILE = pattern(r"(?:\A|[_\-.])\d{1,2}g\.\d{1,4}gb", re.ASCII | re.IGNORECASE)
_PAIR = pattern(r"\b(\w{1,64})\s{0,8}=\s{0,8}(?:\"([^\"]*)\"|(\S+))")
_DEVICE_NUMBER = pattern(r"(\d{1,9})\Z", re.ASCII)
_SHARED = frozenset({"shard", "mps"})
_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}


class Gres(Struct, frozen=True):
    """One generic resource of a job or a node; ``indices`` is None when none were written."""

    name: str
    type: str | None = None
    count: int | None = None
    indices: tuple[int, ...] | None = None

    @property
    def is_gpu(self) -> bool:
        """Whether it stands for GPUs, whole or shared."""
        return self.name == "gpu" or self.is_shared

    @property
    def is_shared(self) -> bool:
        """Whether several jobs may hold the same GPU through it (gres.conf(5), shard and mps)."""
        return self.name in _SHARED

    @property
    def is_mig(self) -> bool:
        """Whether its type names a MIG profile, so that its index counts MIG devices."""
        return self.type is not None and _MIG_PROFILE.search(self.type) is not None


class GresDevice(Struct, frozen=True):
    """One GPU that gres.conf lists: its type and the number at the end of its device file."""

    type: str | None
    minor: int | None


class GresLayout(Struct, frozen=True):
    """What gres.conf says about this node's GPUs: how they are found, or which files they are."""

    autodetect: str | None = None
    devices: tuple[GresDevice, ...] = ()
    includes: tuple[str, ...] = ()


def split_outside(text: str, openers: str = "([", closers: str = ")]") -> list[str]:
    """``text`` cut at the commas that stand outside brackets. Errors: Malformed if unbalanced."""
    if len(text) > TEXT_LIMIT:
        raise Malformed("a Slurm list is longer than 1 MiB")
    parts: list[str] = []
    depth = start = 0
    for at, character in enumerate(text):
        if character in openers:
            depth += 1
        elif character in closers:
            depth -= 1
            if depth < 0:
                raise Malformed("a Slurm list closes a bracket that it did not open")
        elif character == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    if depth:
        raise Malformed("a Slurm list leaves a bracket open")
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def parse_indices(text: str) -> tuple[int, ...]:
    """``0,2-3`` as (0, 2, 3). Errors: Malformed; at most INDEX_LIMIT numbers."""
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.match(part.strip())
        if match is None:
            raise Malformed("a Slurm index list holds something that is not a number")
        first = int(match[1])
        last = int(match[2]) if match[2] else first
        if last < first or last - first >= INDEX_LIMIT or len(found) + last - first >= INDEX_LIMIT:
            raise Malformed("a Slurm index list is out of bounds")
        found.extend(range(first, last + 1))
    return tuple(found)


def parse_gres(text: str) -> tuple[Gres, ...]:
    """A GRES string such as ``gpu:a100:2(IDX:0-1),lscratch:0``, item by item. Errors: Malformed."""
    text = text.strip()
    if text in ("", "(null)", "N/A"):
        return ()
    return tuple(_parse_item(part) for part in split_outside(text))


def _parse_item(part: str) -> Gres:
    match = _ITEM.match(part)
    if match is None:
        raise Malformed("a GRES entry is not of the form name[:type][:count][(…)]")
    tokens = _TOKEN.findall(match["tokens"])
    count: int | None = None
    if tokens:
        counted = _COUNT.match(tokens[-1])
        if counted is not None:
            count = int(counted[1]) * _BINARY[counted[2]]
            tokens.pop()
    types = [token for token in tokens if token != "(null)"]  # noqa: S105 - not a secret
    indices: tuple[int, ...] | None = None
    for group in _GROUP.findall(match["groups"]):
        label, _, value = group.partition(":")
        if label == "IDX":
            indices = () if value.strip() in ("", "N/A") else parse_indices(value)
        elif label == "CNT":
            counted = _COUNT.match(value)
            count = int(counted[1]) if counted else count
        elif indices is None and "/" in group:
            indices = _used_parts(group)
    return Gres(name=match["name"], type=":".join(types) or None, count=count, indices=indices)


def _used_parts(group: str) -> tuple[int, ...] | None:
    """The positions with a share taken in ``2/4,0/4``: used of available, one entry a GPU."""
    parts = group.split(",")
    if len(parts) > INDEX_LIMIT:
        raise Malformed("a GRES entry lists too many shared GPUs")
    used: list[int] = []
    for index, part in enumerate(parts):
        match = _PART_OF.match(part.strip())
        if match is None:
            return None
        if int(match[1]):
            used.append(index)
    return tuple(used)


def expand_hostlist(text: str, limit: int = HOSTLIST_LIMIT) -> Iterator[str]:
    """The names in ``gpu-[001-003,7],x[1-2]-y[3-4]``, in order. Errors: Malformed beyond limit."""
    left = limit
    for part in split_outside(text, "[", "]"):
        pieces = [_piece(piece) for piece in _pieces(part)]
        size = 1
        for piece in pieces:
            size *= len(piece)
        if size > left:
            raise Malformed(f"a host list stands for more than {limit} names")
        left -= size
        for combination in product(*pieces):
            yield "".join(combination)


def _pieces(part: str) -> list[str]:
    pieces = [piece for piece in re.split(r"(\[[^\[\]]*\])", part) if piece]
    brackets = [piece for piece in pieces if "[" in piece or "]" in piece]
    if len(brackets) > _DEPTH_LIMIT or any(
        not (piece.startswith("[") and piece.endswith("]")) for piece in brackets
    ):
        raise Malformed("a host list has brackets that cannot be read")
    return pieces


def _piece(piece: str) -> Sequence[str]:
    if not piece.startswith("["):
        return (piece,)
    names: list[str] = []
    for part in piece[1:-1].split(","):
        match = _RANGE.match(part.strip())
        if match is None:
            raise Malformed("a host list holds a range that is not of numbers")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or len(names) + last - first >= HOSTLIST_LIMIT:
            raise Malformed("a host list holds a range that is out of bounds")
        names.extend(str(number).zfill(len(match[1])) for number in range(first, last + 1))
    return names


def host_position(text: str, node: str) -> int | None:
    """The place of ``node`` in a host list, from 0; None if it is not in it. Errors: Malformed."""
    for position, name in enumerate(expand_hostlist(text)):
        if name == node:
            return position
    return None


def parse_gres_conf(text: str, node: str) -> GresLayout:
    """The GPUs that a gres.conf gives to ``node``, in the file's order. Errors: Malformed.

    ``includes`` names further files as written; the caller reads them.
    """
    autodetect: str | None = None
    devices: list[GresDevice] = []
    includes: list[str] = []
    for line in configuration_lines(text):
        if line[:8].lower() == "include ":
            includes.append(line[8:].strip())
            continue
        pairs = {key.lower(): quoted or bare for key, quoted, bare in _PAIR.findall(line)}
        if "nodename" in pairs and host_position(pairs["nodename"], node) is None:
            continue
        if "autodetect" in pairs:
            autodetect = pairs["autodetect"].lower()
        if pairs.get("name", "").lower() != "gpu":
            continue
        files = list(expand_hostlist(pairs.get("file", ""), INDEX_LIMIT))
        if not files:
            # One device made of several nodes: the GPU's own, then its MIG capabilities.
            files = list(expand_hostlist(pairs.get("multiplefiles", ""), INDEX_LIMIT))[:1]
        for name in files:
            number = _DEVICE_NUMBER.search(name)
            devices.append(
                GresDevice(pairs.get("type"), int(number[1]) if number is not None else None)
            )
            if len(devices) > INDEX_LIMIT:
                raise Malformed("gres.conf lists too many devices")
    return GresLayout(autodetect, tuple(devices), tuple(includes))


def configuration_lines(text: str) -> Iterator[str]:
    """The lines of a Slurm configuration file: continued, without comments and blanks."""
    for line in text[:TEXT_LIMIT].replace("\\\n", " ").split("\n"):
        bare = re.sub(r"(?<!\\)#.*", "", line).strip()
        if bare:
            yield bare


def gpu_references(
    items: Sequence[Gres], layout: GresLayout, node_gres: Sequence[Gres], gpus: Sequence[Gpu]
) -> tuple[tuple[str, ...], bool, str]:
    """A job's GPUs on one node as Workload references, whether they are shared, and what is unsure.

    An IDX counts the files of gres.conf, type after type in the order of the node's own ``Gres=``
    (observed in 22.05; for ``File=/dev/nvidia[0-7]`` it is the minor number), and NVML's order
    with AutoDetect. With MIG it counts MIG devices. What cannot be mapped becomes ``all`` with a
    reason, because the job does hold GPUs here.
    """
    references: list[str] = []
    shared = False
    unsure = ""
    slots = _slots(gpus)
    for item in items:
        if not item.is_gpu:
            continue
        if item.indices is None:
            if item.count:
                references.append("all")
                unsure = "Slurm does not say which GPUs"
            continue
        shared = shared or (item.is_shared and bool(item.indices))
        for index in item.indices:
            reference = _reference(index, item, layout, node_gres, slots)
            if reference is None:
                reference, unsure = "all", "its MIG devices could not be told apart"
            references.append(reference)
    return tuple(dict.fromkeys(references)), shared, unsure


def _reference(
    index: int, item: Gres, layout: GresLayout, node_gres: Sequence[Gres], slots: Sequence[Gpu]
) -> str | None:
    detected = layout.autodetect not in (None, "off") and not layout.devices
    if item.is_mig or (detected and any(slot.parent_id for slot in slots)):
        return f"uuid:{slots[index].uuid}" if index < len(slots) and slots[index].uuid else None
    if detected:
        return f"index:{index}"
    files = _in_node_order(layout.devices, node_gres)
    if index < len(files) and files[index].minor is not None:
        return f"minor:{files[index].minor}"
    return f"minor:{index}"


def _in_node_order(
    devices: Sequence[GresDevice], node_gres: Sequence[Gres]
) -> Sequence[GresDevice]:
    order = {item.type: place for place, item in reversed(list(enumerate(node_gres)))}
    if len({device.type for device in devices}) < 2:
        return devices
    return sorted(devices, key=lambda device: order.get(device.type, len(order)))


def _slots(gpus: Sequence[Gpu]) -> list[Gpu]:
    """What Slurm counts with AutoDetect: each GPU, or its MIG devices in the place of it."""
    wholes = [gpu for gpu in gpus if gpu.parent_id is None and gpu.index is not None]
    slots: list[Gpu] = []
    for whole in sorted(wholes, key=lambda gpu: gpu.index or 0):
        parts = [gpu for gpu in gpus if gpu.parent_id == whole.id]
        slots.extend(parts or [whole])
    return slots
