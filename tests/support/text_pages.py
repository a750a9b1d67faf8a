"""Breakpoints of uprobes in a running process, and what of eBPF is in the kernel."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

_BREAKPOINT = {"x86_64": b"\xcc", "aarch64": b"\xa0\x00\x20\xd4"}
_KINDS = ("prog", "map", "link")


def changed(pid: int, file: Path, offsets: Iterable[int]) -> list[int]:
    """Those offsets of a file at which the process that maps it has other code than the file."""
    length = len(_BREAKPOINT[os.uname().machine])
    content = file.read_bytes()
    found = []
    status = file.stat()
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            fields = line.split(None, 5)
            if "x" not in fields[1] or int(fields[4]) != status.st_ino:
                continue
            start, end = (int(each, 16) for each in fields[0].split("-"))
            first = int(fields[2], 16)
            for offset in offsets:
                if first <= offset < first + end - start:
                    code = os.pread(memory.fileno(), length, start + offset - first)
                    if code != content[offset : offset + length]:
                        found.append(offset)
    return found


def bpf_ids() -> dict[str, set[int]]:
    """The ids of all programs, maps and links in the kernel."""
    library = ctypes.CDLL("libbpf.so.1")
    found: dict[str, set[int]] = {}
    for kind in _KINDS:
        ids: set[int] = set()
        number = ctypes.c_uint32(0)
        while getattr(library, f"bpf_{kind}_get_next_id")(number, ctypes.byref(number)) == 0:
            ids.add(number.value)
        found[kind] = ids
    return found


def bpf_of(pid: int) -> dict[str, set[int]]:
    """The ids of the programs, maps and links that a process has descriptors of."""
    found: dict[str, set[int]] = {kind: set() for kind in _KINDS}
    try:
        names = os.listdir(f"/proc/{pid}/fdinfo")
    except OSError:
        return found
    for name in names:
        try:
            lines = Path(f"/proc/{pid}/fdinfo/{name}").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            kind, _, number = line.partition("_id:")
            if kind in found:
                found[kind].add(int(number))
    return found


def link_holders() -> list[int]:
    """Processes that have descriptors of links: some of these may be uprobes."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [pid for pid in pids if bpf_of(pid)["link"]]
