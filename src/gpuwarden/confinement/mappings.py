"""Memory that a child shares with the kernel because its parent did: ring buffers, BPF maps.

Their descriptors are closed, and the mappings of them go through a fork all the same: a child that
parses hostile bytes could tell the kernel how far its parent had read.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator

_LINE = re.compile(rb"([0-9a-f]{1,16})-([0-9a-f]{1,16}) \S{4} \S+ \S+ \S+ +anon_inode:")
_MAPS_LIMIT_BYTES = 16 << 20


def leave_kernel_mappings() -> str:
    """Unmaps what belongs to no file and no memory of ours; why not, empty when it is done."""
    try:
        descriptor = os.open("/proc/self/maps", os.O_RDONLY | os.O_CLOEXEC)
        try:
            maps = bytearray()
            while (part := os.read(descriptor, 1 << 16)) and len(maps) < _MAPS_LIMIT_BYTES:
                maps += part
        finally:
            os.close(descriptor)
    except OSError as error:
        return f"/proc/self/maps: {error.strerror}"
    libc = ctypes.CDLL(None, use_errno=True)
    for start, end in kernel_mappings(bytes(maps)):
        if libc.munmap(ctypes.c_void_p(start), ctypes.c_size_t(end - start)) != 0:
            return f"munmap: {os.strerror(ctypes.get_errno())}"
    return ""


def kernel_mappings(maps: bytes) -> Iterator[tuple[int, int]]:
    """(first address, address behind it) of mappings of the kernel's nameless files (proc(5))."""
    for line in maps.splitlines():
        found = _LINE.match(line)
        if found is not None:
            yield int(found[1], 16), int(found[2], 16)
