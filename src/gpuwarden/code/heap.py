"""What reading GPU code asks of the C library's heap.

Images are of a megabyte or so and live for a millisecond. By default each is mapped anew and given
back at once, so that the kernel clears a gigabyte of pages for every gigabyte that is decompressed,
one thread at a time.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""From the C library's malloc.h."""
LARGEST_KEPT_BYTES = 32 << 20
"""Of one allocation; the C library takes no more than this."""


def keep_freed(size: int = 64 << 20) -> None:
    """Lets this process use freed memory again: one heap for all threads, ``size`` kept free.

    For a process that reads GPU code and does little else; it holds that much more at its peak.
    """
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_ARENA_MAX, 1)
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, size)
