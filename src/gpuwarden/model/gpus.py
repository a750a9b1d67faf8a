"""Accelerators, who the driver says is on them, its library, its fault lines."""

from __future__ import annotations

from typing import Literal

from gpuwarden.model.facts import Fact

Vendor = Literal["nvidia", "amd", "intel", "habana", "other"]
ClientKind = Literal["C", "G", "M"]
"""Compute, graphics, MPS compute: the driver's own letters."""
NodeKind = Literal[
    "nvidia-gpu",
    "nvidia-ctl",
    "nvidia-modeset",
    "nvidia-uvm",
    "nvidia-uvm-tools",
    "nvidia-caps",
    "nvidia-other",
    "kfd",
    "drm-render",
    "drm-card",
    "accel",
    "habana",
    "other",
]


class Gpu(Fact, frozen=True, kw_only=True):
    """One accelerator, or one MIG device of it (then ``parent_id`` names the whole GPU).

    ``id`` joins every other fact to it: the UUID if there is one, else the PCI address.
    ``pci_address`` is normalised to ``dddddddd:bb:dd.f`` in lower case.
    """

    id: str
    vendor: Vendor = "nvidia"
    index: int | None = None
    minor: int | None = None
    """N of /dev/nvidiaN; for other vendors the minor of its DRM render node."""
    uuid: str | None = None
    name: str | None = None
    pci_address: str | None = None
    parent_id: str | None = None
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    mig_enabled: bool | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    """In use by clients; the driver's own reserve is not counted in."""
    memory_reserved_bytes: int | None = None
    memory_is_numa: bool | None = None
    sm_percent: int | None = None
    memory_busy_percent: int | None = None
    temperature_celsius: int | None = None
    power_watts: float | None = None
    accounting_enabled: bool | None = None
    error: str | None = None
    """A per-device error such as "GPU is lost"; the other GPUs are still reported."""
    kfd_gpu_id: int | None = None
    render_minor: int | None = None
    card_minor: int | None = None
    unread: dict[str, str] = {}


class UtilisationSample(Fact, frozen=True, kw_only=True):
    """One utilisation sample of one process as the driver kept it."""

    at_ns: int
    sm_percent: int
    memory_percent: int = 0


class GpuClient(Fact, frozen=True, kw_only=True):
    """A process that the driver lists as having a context on a GPU, once per (gpu, pid)."""

    gpu_id: str
    pid: int
    kinds: tuple[ClientKind, ...] = ()
    memory_bytes: int | None = None
    sm_percent: int | None = None
    """Newest plausible sample; None when the driver had no sample or cannot measure."""
    samples: tuple[UtilisationSample, ...] = ()
    source: str = "nvml"
    """``nvml``, ``kfd``, ``drm`` or the kind of dump."""
    reported_name: str | None = None
    """The name in a dump, as printed there: a claim."""
    engine_ns: dict[str, int] = {}
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    unread: dict[str, str] = {}


class AccountedProcess(Fact, frozen=True, kw_only=True):
    """What the driver's accounting kept of a running or ended process."""

    gpu_id: str
    pid: int
    started_at_ns: int | None = None
    busy_ms: int | None = None
    sm_percent: int | None = None
    memory_max_bytes: int | None = None
    running: bool | None = None


class LibraryCheck(Fact, frozen=True, kw_only=True):
    """Whether the NVML library was safe to open: absolute, root-owned, not writable by others."""

    path: str
    accepted: bool
    reason: str = ""
    resolved: str | None = None
    device: str | None = None
    inode: int | None = None
    build_id: str | None = None


DRIVER_LIBRARIES = (
    "libcuda",
    "libnvidia-ml",
    "libnvidia-ptxjitcompiler",
    "libhsa-runtime64",
)
"""Libraries that come with a driver and that every program must load as the driver ships them."""


class DriverFile(Fact, frozen=True, kw_only=True):
    """A file of the installed driver, in a directory where the host's loader looks for libraries.

    One a file: links to it are followed.
    """

    library: str
    """One of DRIVER_LIBRARIES."""
    path: str
    """With all links followed."""
    device: str
    """``major:minor`` of the file system it is on, as stat(2) has it."""
    inode: int
    writable_by: tuple[int, ...] = ()
    """uids other than root that own the file or can write it; -1 stands for everybody."""


class DeviceNode(Fact, frozen=True, kw_only=True):
    """An accelerator's device node as found under /dev."""

    path: str
    major: int
    minor: int
    kind: NodeKind
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    inode: int | None = None
    device: str | None = None
    pci_address: str | None = None


class Holder(Fact, frozen=True, kw_only=True):
    """A process with an open descriptor on, or a mapping of, an accelerator's device node.

    One per (pid, major, minor). ``path`` is what the descriptor's link says and can be any name:
    the device is known by its number alone.
    """

    pid: int
    major: int
    minor: int
    kind: NodeKind
    path: str
    descriptors: tuple[int, ...] = ()
    mapped: bool = False
    renamed: bool = False
    """The path is not one that this device number has under /dev."""


class XidEvent(Fact, frozen=True, kw_only=True):
    """A GPU error line of the kernel log. A named pid is who was there, not who is to blame."""

    code: int
    pci_address: str | None = None
    pid: int | None = None
    process_name: str | None = None
    message: str = ""
    at_ns: int | None = None
    seconds_since_boot: float | None = None
    truncated: bool = False
    trusted: bool = True
    """False for a line that did not come from the NVIDIA driver (no NVRM, or facility user)."""
    gpu_instance: str | None = None
    compute_instance: str | None = None
