"""How a tracer was asked to run."""

from __future__ import annotations

import msgspec


class TracerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is traced and how much of it."""

    root: str = "/"
    launches: bool = True
    sample_every: int = 5
    """Every so many windows one is sampled; 0: none."""
    sample_most: int = 4096
    """Launches of one process in a sampled window that are told in order."""
