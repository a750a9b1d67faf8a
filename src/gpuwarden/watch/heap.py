"""What the agent asks of the C library's heap."""

from __future__ import annotations

import ctypes
from contextlib import suppress

M_ARENA_MAX = -8
"""From the C library's malloc.h."""


def one_for_all_threads() -> None:
    """With a heap each, what a thread frees is of no use to another."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def give_back() -> None:
    """Returns what is free to the kernel: the C library keeps the peak of each judgement."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
