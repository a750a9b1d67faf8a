"""The sockets of a process's network namespace, as the kernel's tables hold them; never resolved.

Which of them are its own is told by the inodes in ``descriptors.json``.
"""

from __future__ import annotations

from gpuwarden.errors import GpuwardenError
from gpuwarden.evidence.opened_process import OpenedProcess
from gpuwarden.evidence.shelf import Shelf

TABLES = (
    ("net/tcp", 8 << 20),
    ("net/tcp6", 8 << 20),
    ("net/udp", 2 << 20),
    ("net/udp6", 2 << 20),
    ("net/unix", 4 << 20),
    ("net/raw", 1 << 20),
    ("net/packet", 1 << 20),
    ("net/netlink", 1 << 20),
    ("net/route", 1 << 20),
    ("net/arp", 1 << 20),
    ("net/dev", 1 << 20),
)
_ABSENT_ON_SOME = frozenset({"net/tcp6", "net/udp6", "net/packet"})
"""Without IPv6, or where that family was never used."""


def collect(process: OpenedProcess, shelf: Shelf) -> None:
    """The tables as they are, below ``net``."""
    below = shelf.below("net")
    for name, limit in TABLES:
        stored = name.partition("/")[2]
        if name in _ABSENT_ON_SOME:
            try:
                data = process.read(name, limit + 1)
            except GpuwardenError:
                continue
            below.put_text(stored, data, f"/proc/{process.pid}/{name}", limit)
        else:
            below.copy(process, name, limit, stored)
