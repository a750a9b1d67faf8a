"""uprobes at offsets of a file that is open: attached by inode, so a path cannot be exchanged.

Source: perf_event_open(2), uprobes in Documentation/trace of the kernel.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import NamedTuple

from gpuwarden.probes.libbpf import Libbpf

ANY_PROCESS = -1


class Point(NamedTuple):
    """Where in a file, as an offset in bytes, and what the program finds as its cookie."""

    file_offset: int
    cookie: int


class _Options(ctypes.Structure):
    """struct bpf_uprobe_opts as libbpf 1.0 has it; later ones take a shorter one too."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("reference_counter_offset", ctypes.c_size_t),
        ("cookie", ctypes.c_uint64),
        ("returns", ctypes.c_bool),
        ("function", ctypes.c_char_p),
    )


def attach(
    bpf: Libbpf, program: int, descriptor: int, points: Sequence[Point], *, returns: bool = False
) -> list[int]:
    """libbpf's pointers to the links of ``program`` at every point of the file ``descriptor``.

    ``returns``: at the end of the function instead. All points or none. Errors: OSError.
    """
    path = f"/proc/{os.getpid()}/fd/{descriptor}".encode()
    links: list[int] = []
    try:
        for point in points:
            options = _Options(ctypes.sizeof(_Options), 0, point.cookie, returns, None)
            links.append(
                bpf.pointer(
                    "bpf_program__attach_uprobe_opts",
                    program,
                    ANY_PROCESS,
                    path,
                    point.file_offset,
                    ctypes.addressof(options),
                )
            )
    except OSError:
        detach(bpf, links)
        raise
    return links


def detach(bpf: Libbpf, links: Sequence[int]) -> None:
    """Takes links away, the last first."""
    for link in reversed(links):
        bpf.call("bpf_link__destroy", link)
