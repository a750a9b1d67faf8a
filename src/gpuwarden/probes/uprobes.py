"""uprobes at offsets of a file that is open: attached by inode, so a path cannot be exchanged.

From Linux 6.6 on one link has all points of a program, and they are taken away together; before, or
where that kind of link is not to be had, each point is a performance event of its own, and taking
one away waits for the whole machine. Which it is, is decided before programs are loaded.

Source: perf_event_open(2), bpf(2), include/uapi/linux/bpf.h, uprobes in Documentation/trace.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from gpuwarden.probes.libbpf import Libbpf

ANY_PROCESS = -1
KERNEL_TYPES = "/sys/kernel/btf/vmlinux"
_MULTI = b"BPF_TRACE_UPROBE_MULTI\0"
# enum bpf_attach_type and bpf_cmd; BPF_F_UPROBE_MULTI_RETURN; __NR_bpf.
_ATTACH_MULTI, _LINK_CREATE, _AT_RETURN = 48, 28, 1
_NR_BPF = {"x86_64": 321, "aarch64": 280}
# link_create of union bpf_attr: program, 0, attach type, flags; path, offsets, reference counters,
# cookies, how many points, flags, process.
_LINK = struct.Struct("=IIIIQQQQIIII")


class Point(NamedTuple):
    """Where in a file, as an offset in bytes, and what the program finds as its cookie."""

    file_offset: int
    cookie: int


class Link(NamedTuple):
    """What attaches a program: a descriptor of its own, or libbpf's pointer; the other is None."""

    descriptor: int | None
    pointer: int | None


class _Options(ctypes.Structure):
    """struct bpf_uprobe_opts as libbpf 1.0 has it; later ones take a shorter one too."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("reference_counter_offset", ctypes.c_size_t),
        ("cookie", ctypes.c_uint64),
        ("returns", ctypes.c_bool),
        ("function", ctypes.c_char_p),
    )


@cache
def together() -> bool:
    """Whether this kernel has links of many points."""
    try:
        with open(KERNEL_TYPES, "rb") as file:
            return os.uname().machine in _NR_BPF and _MULTI in file.read()
    except OSError:
        return False


def prepare(bpf: Libbpf, program: int) -> None:
    """Before a program is loaded that ``attach`` will be called for. Errors: OSError."""
    if together():
        bpf.checked("bpf_program__set_expected_attach_type", program, _ATTACH_MULTI)


def attach(
    bpf: Libbpf, program: int, descriptor: int, points: Sequence[Point], *, returns: bool = False
) -> list[Link]:
    """The links of ``program`` at every point of the file ``descriptor``.

    ``returns``: at the end of the function instead. All points or none. Errors: OSError.
    """
    path = f"/proc/{os.getpid()}/fd/{descriptor}".encode()
    if not points:
        return []
    if together():
        return [_attached_together(bpf, program, path, points, returns)]
    links: list[Link] = []
    try:
        links.extend(_attached_alone(bpf, program, path, point, returns) for point in points)
    except OSError:
        detach(bpf, links)
        raise
    return links


def detach(bpf: Libbpf, links: Sequence[Link]) -> None:
    """Takes links away, the last first."""
    for link in reversed(links):
        if link.descriptor is not None:
            os.close(link.descriptor)
        else:
            bpf.call("bpf_link__destroy", link.pointer)


def _attached_alone(bpf: Libbpf, program: int, path: bytes, point: Point, returns: bool) -> Link:
    options = _Options(ctypes.sizeof(_Options), 0, point.cookie, returns, None)
    pointer = bpf.pointer(
        "bpf_program__attach_uprobe_opts",
        program,
        ANY_PROCESS,
        path,
        point.file_offset,
        ctypes.addressof(options),
    )
    return Link(None, pointer)


def _attached_together(
    bpf: Libbpf, program: int, path: bytes, points: Sequence[Point], returns: bool
) -> Link:
    numbers = ctypes.c_uint64 * len(points)
    offsets = numbers(*(point.file_offset for point in points))
    cookies = numbers(*(point.cookie for point in points))
    name = ctypes.create_string_buffer(path)
    request = ctypes.create_string_buffer(
        _LINK.pack(
            bpf.checked("bpf_program__fd", program),
            0,
            _ATTACH_MULTI,
            0,
            ctypes.addressof(name),
            ctypes.addressof(offsets),
            0,
            ctypes.addressof(cookies),
            len(points),
            _AT_RETURN if returns else 0,
            0,
            0,
        )
    )
    ctypes.set_errno(0)
    done = ctypes.CDLL(None, use_errno=True).syscall(
        ctypes.c_long(_NR_BPF[os.uname().machine]),
        ctypes.c_long(_LINK_CREATE),
        request,
        ctypes.c_long(_LINK.size),
    )
    if done < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"uprobes at {len(points)} points: {os.strerror(code)}")
    return Link(done, None)
