"""What the NVIDIA kernel module and our own rights say, without asking NVML."""

from __future__ import annotations

import contextlib

import msgspec
from msgspec import Struct

from gpuwarden.confinement.rights import CAP_SYS_ADMIN
from gpuwarden.errors import GpuwardenError
from gpuwarden.host import Host
from gpuwarden.model import Gpu
from gpuwarden.sensors.pci import normalise_pci

DRIVER_DIRECTORY = "/proc/driver/nvidia"
BOOT_ID = "/proc/sys/kernel/random/boot_id"
STATUS_LIMIT_BYTES = 8192


def is_this_machine(host: Host) -> bool:
    """Whether ``host`` is the running machine, also when it is mounted into our container."""
    if host.is_local:
        return True
    try:
        return host.read_bytes(BOOT_ID, 64) == Host().read_bytes(BOOT_ID, 64) != b""
    except GpuwardenError:
        return False


def driver_is_loaded(host: Host) -> bool:
    """Whether the NVIDIA kernel module is loaded."""
    for path in (f"{DRIVER_DIRECTORY}/version", "/sys/module/nvidia/initstate"):
        with contextlib.suppress(GpuwardenError):
            host.status(path)
            return True
    return False


def has_mig_instances(host: Host) -> bool:
    """Whether a GPU is cut into instances, whose processes only administrators are told."""
    base = f"{DRIVER_DIRECTORY}/capabilities"
    with contextlib.suppress(GpuwardenError):
        for gpu in host.names(base):
            if gpu.startswith("gpu"):
                with contextlib.suppress(GpuwardenError):
                    if any(name.startswith("gi") for name in host.names(f"{base}/{gpu}/mig")):
                        return True
    return False


def may_administrate() -> bool:
    """Whether this process has CAP_SYS_ADMIN."""
    with contextlib.suppress(GpuwardenError, ValueError, IndexError):
        status = Host().read_text("/proc/self/status", STATUS_LIMIT_BYTES)
        return bool(int(status.split("CapEff:")[1].split()[0], 16) >> CAP_SYS_ADMIN & 1)
    return False


class DriverGpu(Struct, frozen=True):
    """A GPU as the kernel module lists it, with or without NVML's help."""

    pci_address: str
    uuid: str | None = None
    name: str | None = None
    minor: int | None = None


def parse_information(pci_address: str, text: str) -> DriverGpu:
    """/proc/driver/nvidia/gpus/<address>/information; what it does not tell is None."""
    fields = {
        key.strip(): value.strip()
        for key, colon, value in (line.partition(":") for line in text.splitlines()[:64])
        if colon
    }
    uuid = fields.get("GPU UUID", "")
    minor = fields.get("Device Minor", "")
    return DriverGpu(
        pci_address=pci_address,
        uuid=uuid if uuid.startswith("GPU-") and "?" not in uuid and len(uuid) < 96 else None,
        name=fields.get("Model", "")[:96] or None,
        minor=int(minor) if minor.isascii() and minor.isdigit() and len(minor) < 8 else None,
    )


def driver_gpus(host: Host) -> list[DriverGpu]:
    """The GPUs that the kernel module lists in /proc, by PCI address."""
    found: list[DriverGpu] = []
    with contextlib.suppress(GpuwardenError):
        for name in sorted(host.names(f"{DRIVER_DIRECTORY}/gpus"))[:256]:
            address = normalise_pci(name)
            if address is not None:
                text = ""
                with contextlib.suppress(GpuwardenError):
                    path = f"{DRIVER_DIRECTORY}/gpus/{name}/information"
                    text = host.read_text(path, STATUS_LIMIT_BYTES)
                found.append(parse_information(address, text))
    return found


def identify(gpus: list[Gpu], known: list[DriverGpu]) -> tuple[list[Gpu], list[DriverGpu]]:
    """Gives a GPU that NVML could not name the identity that the kernel module has for it.

    Both count in PCI order, so it is done when as many are left on both sides. Returns the GPUs
    and those of the kernel module that NVML does not list at all.
    """
    named = {gpu.pci_address for gpu in gpus} - {None}
    free = sorted((k for k in known if k.pci_address not in named), key=lambda k: k.pci_address)
    nameless = [g for g in gpus if g.parent_id is None and g.uuid is None and not g.pci_address]
    if not nameless or len(nameless) != len(free):
        return gpus, [] if nameless else free
    match = dict(zip((gpu.id for gpu in nameless), free, strict=True))
    return [
        msgspec.structs.replace(
            gpu,
            id=match[gpu.id].uuid or match[gpu.id].pci_address,
            uuid=match[gpu.id].uuid,
            pci_address=match[gpu.id].pci_address,
            name=gpu.name or match[gpu.id].name,
            minor=match[gpu.id].minor,
        )
        if gpu.id in match
        else gpu
        for gpu in gpus
    ], []
