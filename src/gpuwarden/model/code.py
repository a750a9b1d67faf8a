"""GPU code in running processes: modules, and how much of each process was seen."""

from __future__ import annotations

from typing import Literal

from gpuwarden.model.facts import Fact, Gap

ModuleStanding = Literal["known", "rebuilt", "driver", "jit", "unknown"]
"""Against the baselines of a profile: exactly known, known code built elsewhere, the driver's own,
of a JIT class that the profile allows, none of these. A class is a claim that anyone can make:
hash-like code of an allowed class is unknown."""


class GpuModule(Fact, frozen=True, kw_only=True):
    """One GPU code image in a process that is not simply known: once per (process, digest).

    What it is called and what is noted in it is the module's own word; ``digest`` and what it
    computes are not.
    """

    pid: int
    start_time_ticks: int
    digest: str
    """SHA-256 of the decompressed image, in hexadecimal."""
    code_digest: str = ""
    kind: str
    """``cubin``, ``ptx``, ``lto-ir``…"""
    arch: str = ""
    image_bytes: int = 0
    mapping: str = ""
    """The mapped file, or what the kernel calls the region; empty for anonymous memory."""
    offset: int | None = None
    """In the file; for memory the address."""
    in_no_mapped_file: bool = False
    """It is in the process's memory and in none of the files that it has mapped."""
    standing: ModuleStanding = "unknown"
    known_as: str = ""
    """What a baseline says it is, or which JIT class it looks like, and what of that."""
    kernels: tuple[str, ...] = ()
    """The first ones' names."""
    kernel_count: int = 0
    answer: str = ""
    """What it computes: ``hash-like``, ``not hash-like``, or why that cannot be said. Where one has
    many unknown modules, not each that looks so by itself is hash-like."""
    score: float | None = None
    reasons: tuple[str, ...] = ()
    consistent_with: tuple[str, ...] = ()
    """Algorithms whose constants are in it."""
    broken: str = ""
    """Why it could not be read to its end."""
    loaded_at_ns: int | None = None
    """When it was seen being loaded; None: it was found by looking at the process."""
    not_compared: str = ""
    """Why its profile's baselines could not be asked."""
    loaded_by: str = ""
    """The driver's function that was called for it."""


class CodeScan(Fact, frozen=True, kw_only=True):
    """How much of one process's GPU code was seen, and compared with which profile."""

    pid: int
    start_time_ticks: int | None = None
    profile: str
    state: Literal["ok", "partial", "failed"] = "ok"
    reason: str = ""
    """Why not all was seen that can be seen."""
    remedy: str = ""
    modules: int = 0
    """Distinct ones; each is one of the next five."""
    known: int = 0
    rebuilt: int = 0
    driver: int = 0
    jit: int = 0
    unknown: int = 0
    file_count: int = 0
    """Mapped files that were read."""
    memory_bytes: int = 0
    swapped_bytes: int = 0
    """In swap or in a device's memory: not read, so as not to bring it back."""
    device_mappings: int = 0
    limits: tuple[str, ...] = ()
    """What no look at memory can see, in words."""


class SeenCode(Fact, frozen=True, kw_only=True):
    """What a look at one process found, kept so that it need not be looked at again at once."""

    seen_at_seconds: float
    """Since boot, by the monotonic clock."""
    compared_with: str
    """Which content of the profile."""
    scan: CodeScan
    modules: tuple[GpuModule, ...] = ()
    gaps: tuple[Gap, ...] = ()
