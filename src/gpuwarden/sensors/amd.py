"""AMD compute: the GPUs and processes of KFD, from sysfs alone.

Sources: drivers/gpu/drm/amd/amdkfd/kfd_topology.c and kfd_process.c; the amdgpu files beside the
PCI device (Documentation/gpu/amdgpu). No AMD library is needed or opened.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from msgspec import Struct, field

from gpuwarden.errors import Denied, GpuwardenError, Malformed, Unavailable
from gpuwarden.host import Host
from gpuwarden.model import Gap, Gpu, GpuClient
from gpuwarden.pattern import pattern
from gpuwarden.sensors.seen import Seen

NAME = "amd"
NODES = "/sys/class/kfd/kfd/topology/nodes"
PROCESSES = "/sys/class/kfd/kfd/proc"

# topology/nodes/<n>/properties and mem_banks/<n>/properties: "name decimal" lines.
PROPERTY = pattern(r"^([a-z0-9_]{1,48}) (\d{1,20})$", re.MULTILINE)
PID = pattern(r"[1-9][0-9]{0,9}")
NUMBER = pattern(r"\s*(\d{1,20})\s*")
PER_GPU_FILE = pattern(r"(?P<kind>vram|sdma|stats)_(?P<gpu>\d{1,10})")

VIDEO_HEAPS = (1, 2)
"""HSA_MEM_HEAP_TYPE_FB_PUBLIC and _FB_PRIVATE; 0 is the host's memory."""
NODE_LIMIT = 256
BANK_LIMIT = 16
PROCESS_LIMIT = 16384
QUEUE_LIMIT = 1024
FILE_LIMIT_BYTES = 16 << 10
NAME_LIMIT = 96
VALUE_LIMIT = 1 << 60
"""Larger figures would not fit into a report."""


def read(host: Host, seen: Seen) -> Iterator[Gpu | GpuClient | Gap]:
    """GPUs of the KFD topology and the processes that use them.

    Errors: Unavailable when there is no KFD or it has no GPU.
    """
    del seen
    try:
        names = host.names(NODES)
    except Unavailable as error:
        raise Unavailable("no AMD compute driver here (no KFD)") from error
    nodes: list[Node] = []
    for name in sorted((n for n in names if n.isascii() and n.isdigit()), key=int)[:NODE_LIMIT]:
        try:
            node = _read_node(host, name)
        except Denied:
            yield Gap(
                sensor=NAME,
                what=f"KFD node {name}",
                reason="the kernel keeps it from this container's device cgroup",
                remedy="run on the host, or allow the container this GPU's render node",
            )
            continue
        except GpuwardenError as error:
            yield Gap(sensor=NAME, what=f"KFD node {name}", reason=str(error))
            continue
        if node is not None:
            nodes.append(node)
    if not nodes:
        raise Unavailable("KFD is there and shows no GPU")
    by_id: dict[int, tuple[str, Node]] = {}
    partitions: dict[str, int] = {}
    for index, node in enumerate(nodes):
        place = node.pci_address or f"kfd-{node.gpu_id}"
        # A partitioned GPU shows each part as a node at the same address.
        part = partitions[place] = partitions.get(place, -1) + 1
        gpu = _gpu(host, node, f"{place}/{part}" if part else place, index)
        by_id[node.gpu_id] = (gpu.id, node)
        yield gpu
    yield from _clients(host, by_id)


# -------------------------------------------------------------------- the topology


class Node(Struct, frozen=True):
    """A GPU of the KFD topology."""

    gpu_id: int
    properties: dict[str, int]
    codename: str | None = None
    heaps: tuple[tuple[int, int], ...] = ()
    """(heap type, bytes) of each memory bank."""

    @property
    def pci_address(self) -> str | None:
        place = self.properties.get("location_id")
        domain = self.properties.get("domain", 0)
        if not place or place > 0xFFFF or domain > 0xFFFFFFFF:
            return None
        return f"{domain:08x}:{place >> 8:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"

    @property
    def compute_units(self) -> int | None:
        simds, per_unit = (self.properties.get(k) for k in ("simd_count", "simd_per_cu"))
        return simds // per_unit if simds and per_unit else None

    @property
    def render_minor(self) -> int | None:
        minor = self.properties.get("drm_render_minor", 0)
        return minor if 0 < minor < 1 << 20 else None


def parse_properties(text: str) -> dict[str, int]:
    """The ``name number`` lines of a KFD properties file; others are passed over."""
    found = PROPERTY.findall(text[:FILE_LIMIT_BYTES])
    return {name: int(value) for name, value in found if int(value) < VALUE_LIMIT}


def parse_number(text: str) -> int:
    """The one decimal number of a sysfs file. Errors: Malformed."""
    found = NUMBER.fullmatch(text[:64])
    if found is None or int(found[1]) >= VALUE_LIMIT:
        raise Malformed(f"expected a number, got {text[:32]!r}")
    return int(found[1])


def _number(host: Host, path: str) -> int:
    return parse_number(host.read_text(path, FILE_LIMIT_BYTES))


def _read_node(host: Host, name: str) -> Node | None:
    base = f"{NODES}/{name}"
    gpu_id = _number(host, f"{base}/gpu_id")
    if gpu_id == 0:
        return None
    properties = parse_properties(host.read_text(f"{base}/properties", FILE_LIMIT_BYTES))
    codename = None
    with contextlib.suppress(GpuwardenError):
        codename = host.read_text(f"{base}/name", NAME_LIMIT).strip() or None
    heaps: list[tuple[int, int]] = []
    with contextlib.suppress(GpuwardenError):
        for bank in sorted(host.names(f"{base}/mem_banks"))[:BANK_LIMIT]:
            path = f"{base}/mem_banks/{bank}/properties"
            bank_properties = parse_properties(host.read_text(path, FILE_LIMIT_BYTES))
            if "heap_type" in bank_properties:
                heaps.append(
                    (bank_properties["heap_type"], bank_properties.get("size_in_bytes", 0))
                )
    return Node(gpu_id, properties, codename, tuple(heaps))


def _gpu(host: Host, node: Node, identity: str, index: int) -> Gpu:
    device = f"/sys/class/drm/renderD{node.render_minor}/device"
    unread: dict[str, str] = {}

    def figure(field_name: str, *paths: str) -> int | None:
        reason = "it has no DRM render node"
        for path in paths if node.render_minor is not None else ():
            try:
                return _number(host, path)
            except GpuwardenError as error:
                reason = str(error)
        unread[field_name] = reason
        return None

    total = figure("memory_total_bytes", f"{device}/mem_info_vram_total")
    video_bytes = sum(size for heap, size in node.heaps if heap in VIDEO_HEAPS)
    if total is None and video_bytes:
        total = video_bytes
        del unread["memory_total_bytes"]
    sensors = _sensor_directory(host, device)
    millidegrees = figure("temperature_celsius", f"{sensors}/temp1_input")
    microwatts = figure("power_watts", f"{sensors}/power1_average", f"{sensors}/power1_input")
    product = None
    with contextlib.suppress(GpuwardenError):
        product = host.read_text(f"{device}/product_name", NAME_LIMIT).strip() or None
    busy = figure("sm_percent", f"{device}/gpu_busy_percent")
    if busy is not None and busy > 100:
        unread["sm_percent"], busy = f"the driver said {busy} %", None
    return Gpu(
        id=identity,
        vendor="amd",
        index=index,
        minor=node.render_minor,
        name=product or node.codename,
        pci_address=node.pci_address,
        memory_total_bytes=total,
        memory_used_bytes=figure("memory_used_bytes", f"{device}/mem_info_vram_used"),
        memory_is_numa=not video_bytes if node.heaps else None,
        sm_percent=busy,
        memory_busy_percent=figure("memory_busy_percent", f"{device}/mem_busy_percent"),
        temperature_celsius=millidegrees // 1000 if millidegrees is not None else None,
        power_watts=microwatts / 1e6 if microwatts is not None else None,
        kfd_gpu_id=node.gpu_id,
        render_minor=node.render_minor,
        unread=unread,
    )


def _sensor_directory(host: Host, device: str) -> str:
    with contextlib.suppress(GpuwardenError):
        for name in sorted(host.names(f"{device}/hwmon"))[:4]:
            return f"{device}/hwmon/{name}"
    return f"{device}/hwmon/none"


# -------------------------------------------------------------------- its processes


class _Use(Struct):
    """What one process does on one GPU."""

    memory_bytes: int | None = None
    sdma_us: int = 0
    occupied_units: int | None = None
    queues: int = 0
    unread: dict[str, str] = field(default_factory=dict)

    @property
    def is_use(self) -> bool:
        # KFD keeps files for every GPU of the node; only a trace of use makes a client.
        traces = (self.memory_bytes, self.sdma_us, self.occupied_units, self.queues)
        return any(traces) or bool(self.unread)


def _clients(host: Host, gpus: dict[int, tuple[str, Node]]) -> Iterator[GpuClient | Gap]:
    try:
        names = host.names(PROCESSES)
        pids = sorted(int(name) for name in names if PID.fullmatch(name))
    except GpuwardenError as error:
        yield Gap(
            sensor=NAME,
            what="processes on AMD GPUs",
            reason=str(error),
            remedy="a kernel from 5.6 on lists them in /sys/class/kfd/kfd/proc",
        )
        return
    if len(pids) > PROCESS_LIMIT:
        yield Gap(
            sensor=NAME, what="more KFD processes", reason="too many to read", count=len(pids)
        )
    for pid in pids[:PROCESS_LIMIT]:
        try:
            uses = _uses(host, f"{PROCESSES}/{pid}")
        except Unavailable:
            continue
        except GpuwardenError as error:
            yield Gap(sensor=NAME, what=f"KFD process {pid}", reason=str(error))
            continue
        for gpu_id, use in sorted(uses.items()):
            if gpu_id in gpus and use.is_use:
                yield _client(pid, use, *gpus[gpu_id])


def _client(pid: int, use: _Use, gpu: str, node: Node) -> GpuClient:
    percent = None
    if use.occupied_units is not None and node.compute_units:
        percent = min(100, round(100 * use.occupied_units / node.compute_units))
    elif "sm_percent" not in use.unread:
        use.unread["sm_percent"] = (
            "this GPU does not tell the compute units that a process occupies"
        )
    return GpuClient(
        gpu_id=gpu,
        pid=pid,
        kinds=("C",),
        memory_bytes=use.memory_bytes,
        sm_percent=percent,
        source="kfd",
        engine_ns={"sdma": use.sdma_us * 1000} if use.sdma_us else {},
        unread=use.unread,
    )


def _uses(host: Host, base: str) -> dict[int, _Use]:
    uses: dict[int, _Use] = {}
    for name in host.names(base):
        found = PER_GPU_FILE.fullmatch(name)
        if found is None:
            continue
        use = uses.setdefault(int(found["gpu"]), _Use())
        path = f"{base}/{name}"
        if found["kind"] == "stats":
            with contextlib.suppress(Unavailable):
                use.occupied_units = _counted(host, f"{path}/cu_occupancy", "sm_percent", use)
        elif found["kind"] == "vram":
            use.memory_bytes = _counted(host, path, "memory_bytes", use)
        else:
            use.sdma_us = _counted(host, path, "engine_ns", use) or 0
    with contextlib.suppress(Unavailable, Denied):
        for queue in host.names(f"{base}/queues")[:QUEUE_LIMIT]:
            with contextlib.suppress(GpuwardenError):
                gpu_id = _number(host, f"{base}/queues/{queue}/gpuid")
                uses.setdefault(gpu_id, _Use()).queues += 1
    return uses


def _counted(host: Host, path: str, field_name: str, use: _Use) -> int | None:
    try:
        return _number(host, path)
    except (Denied, Malformed) as error:
        use.unread[field_name] = str(error)
        return None
