"""GPU clients of any vendor from DRM fdinfo, and the GPUs that no other sensor knows.

Source: Documentation/gpu/drm-usage-stats.rst; older amdgpu keys from before that document.
NVIDIA's driver does not fill fdinfo.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import Struct, field

from gpuwarden.errors import Denied, GpuwardenError, Unavailable
from gpuwarden.host import Host
from gpuwarden.model import ClientKind, Gap, Gpu, GpuClient, Holder, Vendor
from gpuwarden.pattern import pattern
from gpuwarden.sensors.pci import normalise_pci
from gpuwarden.sensors.seen import Seen

NAME = "drm"
CLASS_DIRECTORY = "/sys/class/drm"

# "key:<whitespace>value" lines; amounts are "<digits>[ <unit>]".
LINE = pattern(r"^(drm-[a-z0-9_+-]{1,64}):[ \t]*([^\n]{1,128})$", re.MULTILINE)
AMOUNT = pattern(r"(\d{1,20})(?: (ns|KiB|MiB|Hz|MHz))?")
UNITS = {None: 1, "ns": 1, "KiB": 1 << 10, "MiB": 1 << 20}
ENGINE, CAPACITY, CYCLES = "drm-engine-", "drm-engine-capacity-", "drm-cycles-"
RESIDENT, TOTAL, OLD_MEMORY = "drm-resident-", "drm-total-", "drm-memory-"
TOTAL_CYCLES = "drm-total-cycles-"

LOCAL_REGIONS = ("vram", "local", "stolen-local")
COMPUTE_ENGINES = frozenset({"compute", "ccs"})
TRANSFER_ENGINES = frozenset({"dma", "copy", "bcs"})
HOLDER_KINDS = ("drm-render", "drm-card", "accel")

VENDORS: dict[str, Vendor] = {"10de": "nvidia", "1002": "amd", "8086": "intel", "1da3": "habana"}
VIRTUAL_VENDORS = frozenset({"1af4", "15ad", "1b36", "1234", "1414", "80ee"})
"""virtio, VMware, QEMU, Bochs, Hyper-V, VirtualBox: displays of a virtual machine."""
VIRTUAL_DRIVERS = frozenset(
    {"vgem", "vkms", "simple-framebuffer", "efi-framebuffer", "evdi", "udl"}
)

UEVENT_LINE = pattern(r"^([A-Z0-9_]{1,32})=([^\n]{0,128})$", re.MULTILINE)
NODE_NAME = pattern(r"(?P<kind>renderD|card)(?P<minor>\d{1,6})")

UNTOLD = ("memory_total_bytes", "memory_used_bytes", "sm_percent", "uuid")
FDINFO_LIMIT_BYTES = 16 << 10
UEVENT_LIMIT_BYTES = 4 << 10
VALUE_LIMIT = 1 << 52
"""Larger figures are left out, so that sums of them fit into a report."""
DEVICE_LIMIT = 256
DESCRIPTOR_LIMIT = 1024
"""Descriptors looked at for one holder."""


class DrmClient(Struct, frozen=True):
    """One DRM client as its driver describes it in fdinfo."""

    driver: str
    client_id: int
    pci_address: str | None = None
    engine_ns: dict[str, int] = field(default_factory=dict)
    cycles: dict[str, int] = field(default_factory=dict)
    regions: dict[str, int] = field(default_factory=dict)
    """Resident bytes of each memory region."""

    @property
    def memory_bytes(self) -> int | None:
        """Bytes in the GPU's own memory; on a GPU without any, bytes of host memory it uses."""
        local = [size for name, size in self.regions.items() if name.startswith(LOCAL_REGIONS)]
        amounts = local or list(self.regions.values())
        return sum(amounts) if amounts else None

    @property
    def busy_engines(self) -> frozenset[str]:
        counted = (*self.engine_ns.items(), *self.cycles.items())
        return frozenset(name for name, amount in counted if amount)

    @property
    def is_use(self) -> bool:
        """Whether it ever ran or holds something: a session manager that only opens does not."""
        return bool(self.busy_engines or any(self.regions.values()))

    @property
    def kinds(self) -> tuple[ClientKind, ...]:
        busy = self.busy_engines
        kinds: list[ClientKind] = ["C"] if busy & COMPUTE_ENGINES else []
        if busy - COMPUTE_ENGINES - TRANSFER_ENGINES:
            kinds.append("G")
        return tuple(kinds)


def parse_fdinfo(data: bytes) -> DrmClient | None:
    """The DRM client in /proc/<pid>/fdinfo/<fd>, or None when its driver tells of none."""
    text = data[:FDINFO_LIMIT_BYTES].decode("utf-8", "backslashreplace")
    pairs = dict(LINE.findall(text))
    driver = pairs.get("drm-driver", "").strip()
    client_id = pairs.get("drm-client-id", "").strip()
    if not driver or not (client_id.isascii() and client_id.isdigit()):
        return None
    engines: dict[str, int] = {}
    cycles: dict[str, int] = {}
    regions: dict[str, dict[str, int]] = {RESIDENT: {}, OLD_MEMORY: {}, TOTAL: {}}
    for key, value in pairs.items():
        amount = AMOUNT.fullmatch(value.strip())
        if key.startswith((CAPACITY, TOTAL_CYCLES)) or amount is None or amount[2] not in UNITS:
            continue
        number = int(amount[1]) * UNITS[amount[2]]
        if number >= VALUE_LIMIT:
            continue
        if key.startswith(ENGINE):
            engines[key.removeprefix(ENGINE)] = number
        elif key.startswith(CYCLES):
            cycles[key.removeprefix(CYCLES)] = number
        else:
            for prefix, found in regions.items():
                if key.startswith(prefix):
                    found[key.removeprefix(prefix)] = number
    return DrmClient(
        driver=driver,
        client_id=int(client_id),
        pci_address=normalise_pci(pairs.get("drm-pdev", "")),
        engine_ns=engines,
        cycles=cycles,
        regions={**regions[TOTAL], **regions[OLD_MEMORY], **regions[RESIDENT]},
    )


def read(host: Host, seen: Seen) -> Iterator[Gpu | GpuClient | Gap]:
    """GPUs under /sys/class/drm that are not yet known, and the clients of every DRM driver.

    Errors: Unavailable when there is no DRM device and nobody holds one.
    """
    holders = [holder for holder in seen.holders if holder.kind in HOLDER_KINDS]
    devices = _devices(host)
    if not devices and not holders:
        raise Unavailable("no DRM device here")
    whole = [gpu for gpu in seen.gpus if gpu.parent_id is None]
    by_address = {gpu.pci_address: gpu.id for gpu in whole if gpu.pci_address is not None}
    by_minor = {gpu.render_minor: gpu.id for gpu in seen.gpus if gpu.render_minor is not None}
    for gpu in devices:
        known_as = by_minor.get(gpu.render_minor) if gpu.render_minor is not None else None
        if gpu.pci_address is not None:
            known_as = by_address.get(gpu.pci_address, known_as)
            by_address.setdefault(gpu.pci_address, known_as or gpu.id)
        if known_as is None:
            yield gpu
        for minor in (gpu.render_minor, gpu.card_minor):
            if minor is not None:
                by_minor.setdefault(minor, known_as or gpu.id)
    known = {(client.gpu_id, client.pid) for client in seen.clients}
    denied = 0
    merged: dict[tuple[str, int], list[DrmClient]] = {}
    taken: set[tuple[str, int]] = set()
    for holder in sorted(holders, key=lambda h: _age(seen, h)):
        try:
            clients = _clients(host, holder)
        except Denied:
            denied += 1
            continue
        for client in clients:
            gpu_id = by_address.get(client.pci_address) if client.pci_address else None
            gpu_id = gpu_id or by_minor.get(holder.minor) or client.pci_address
            # An inherited or passed descriptor is the same client: its oldest process has it.
            if gpu_id is None or (gpu_id, client.client_id) in taken:
                continue
            taken.add((gpu_id, client.client_id))
            if client.is_use and (gpu_id, holder.pid) not in known:
                merged.setdefault((gpu_id, holder.pid), []).append(client)
    for (gpu_id, pid), found in merged.items():
        yield _fact(gpu_id, pid, found)
    if denied:
        yield Gap(
            sensor=NAME,
            what="DRM clients of other users' processes",
            reason="their fdinfo may not be read by this user",
            remedy="run as root (with CAP_SYS_PTRACE in a container)",
            count=denied,
        )


def _age(seen: Seen, holder: Holder) -> tuple[int, int]:
    line = seen.table.get(holder.pid)
    return (line.start_time_ticks if line else 1 << 62, holder.pid)


def _clients(host: Host, holder: Holder) -> list[DrmClient]:
    found: dict[tuple[str | None, int], DrmClient] = {}
    for descriptor in holder.descriptors[:DESCRIPTOR_LIMIT]:
        try:
            data = host.read_bytes(f"/proc/{holder.pid}/fdinfo/{descriptor}", FDINFO_LIMIT_BYTES)
        except Unavailable:
            continue
        client = parse_fdinfo(data)
        if client is not None and not client.driver.startswith("nvidia"):
            found.setdefault((client.pci_address, client.client_id), client)
    return list(found.values())


def _fact(gpu_id: str, pid: int, clients: list[DrmClient]) -> GpuClient:
    engines: dict[str, int] = {}
    kinds: list[ClientKind] = []
    amounts = [c.memory_bytes for c in clients if c.memory_bytes is not None]
    unread = {"sm_percent": "its driver counts time, and one look at a counter tells no rate"}
    for client in clients:
        kinds += [kind for kind in client.kinds if kind not in kinds]
        for name, amount in client.engine_ns.items():
            engines[name] = engines.get(name, 0) + amount
        if client.cycles and not client.engine_ns:
            unread["engine_ns"] = "its driver counts cycles, not time"
    if not amounts:
        unread["memory_bytes"] = "its driver does not tell"
    return GpuClient(
        gpu_id=gpu_id,
        pid=pid,
        kinds=tuple(sorted(kinds)),
        memory_bytes=sum(amounts) if amounts else None,
        source="drm",
        engine_ns={name: amount for name, amount in engines.items() if amount},
        unread=unread,
    )


# -------------------------------------------------------------------- devices


class _Device(Struct):
    uevent: dict[str, str]
    render_minor: int | None = None
    card_minor: int | None = None


def parse_uevent(text: str) -> dict[str, str]:
    """The ``KEY=value`` lines of a sysfs uevent file."""
    return dict(UEVENT_LINE.findall(text[:UEVENT_LIMIT_BYTES]))


def _devices(host: Host) -> list[Gpu]:
    try:
        names = sorted(host.names(CLASS_DIRECTORY))
    except GpuwardenError:
        return []
    found: dict[str, _Device] = {}
    for name in names:
        node = NODE_NAME.fullmatch(name)
        if node is None or len(found) >= DEVICE_LIMIT:
            continue
        try:
            text = host.read_text(f"{CLASS_DIRECTORY}/{name}/device/uevent", UEVENT_LIMIT_BYTES)
        except GpuwardenError:
            continue
        device = found.setdefault(text, _Device(parse_uevent(text)))
        if node["kind"] == "card":
            device.card_minor = int(node["minor"])
        else:
            device.render_minor = int(node["minor"])
    return [gpu for device in found.values() if (gpu := _gpu(device)) is not None]


def _gpu(device: _Device) -> Gpu | None:
    pci_address = normalise_pci(device.uevent.get("PCI_SLOT_NAME", ""))
    vendor_id = device.uevent.get("PCI_ID", "").partition(":")[0].lower().rjust(4, "0")
    driver = device.uevent.get("DRIVER", "")
    # A device without a render node, such as a server's management display, computes nothing.
    if device.render_minor is None or driver in VIRTUAL_DRIVERS or vendor_id in VIRTUAL_VENDORS:
        return None
    if pci_address is None and "OF_NAME" not in device.uevent:
        return None
    return Gpu(
        id=pci_address or f"renderD{device.render_minor}",
        vendor=VENDORS.get(vendor_id, "other"),
        minor=device.render_minor,
        name=f"{driver} {device.uevent.get('PCI_ID', '')}".strip() or None,
        pci_address=pci_address,
        render_minor=device.render_minor,
        card_minor=device.card_minor,
        unread=dict.fromkeys(UNTOLD, "its driver tells no more through DRM"),
    )
