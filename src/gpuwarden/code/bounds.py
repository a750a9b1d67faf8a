"""How much of what an attacker hands us is read: every limit in one place."""

from __future__ import annotations

from msgspec import Struct

KERNELS_TOLD = 64
"""Kernels of one module that a report lists."""

NAME_TOLD = 4096
"""Characters of a name, and of options, that are told: longer than any compiler's so far."""


class Bounds(Struct, frozen=True):
    """Limits of one buffer; what goes over one is a Problem, never a silence."""

    image_bytes: int = 1 << 30
    """Largest decompressed image."""
    total_bytes: int = 1 << 36
    """Largest sum of decompressed images of one file."""
    modules: int = 2_000_000
    kernels: int = 100_000
    """Kernels of one module that are counted."""
    sections: int = 400_000
    members: int = 2_000_000
    nesting: int = 8
    false_starts: int = 250_000
    """Places in one buffer that look like a module and are none."""


DEFAULT = Bounds()
