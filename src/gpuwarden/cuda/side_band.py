"""What is mapped executable on the whole machine, as it happens: perf's side band.

One counter per CPU that counts nothing and whose ring the kernel fills with a record for each
executable mapping, fork and exit. Source: perf_event_open(2), linux/perf_event.h.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import select
import struct
import threading
from contextlib import ExitStack
from typing import NamedTuple, Self

from gpuwarden.cuda.mapped_files import MapsKey
from gpuwarden.errors import Denied, GpuwardenError, Unavailable

# struct perf_event_attr: type u32, size u32, config u64, sample_period u64, sample_type u64,
# read_format u64, flags u64, wakeup_watermark u32, bp_type u32; zeros to its second size.
_ATTRIBUTES = struct.Struct("=IIQQQQQII")
_ATTRIBUTES_BYTES = 72
_SOFTWARE, _DUMMY = 1, 9
_MMAP, _TASK, _WATERMARK, _MMAP2 = 1 << 8, 1 << 13, 1 << 14, 1 << 23
_NUMBERS = {"x86_64": 298, "aarch64": 241}
_CLOEXEC = 8
# struct perf_event_mmap_page: data_head @1024, data_tail, data_offset, data_size (u64).
_HEAD = struct.Struct("=4Q")
_HEAD_AT, _TAIL_AT = 1024, 1032
_TAIL = struct.Struct("=Q")
# struct perf_event_header: type u32, misc u16, size u16.
_HEADER = struct.Struct("=IHH")
# PERF_RECORD_MMAP2: pid, tid, addr, len, pgoff, maj, min, ino, ino_generation, prot, flags; its
# name follows.
_MAPPED = struct.Struct("=I4xQQ8xIIQQ8x")
# PERF_RECORD_FORK, PERF_RECORD_EXIT: pid, ppid, tid, ptid.
_TASK_RECORD = struct.Struct("=IIII")
_RECORD_LOST, _RECORD_EXIT, _RECORD_FORK, _RECORD_MMAP2 = 2, 4, 7, 10
_MISC_BUILD_ID = 1 << 14

RING_BYTES = 64 << 10
"""Of each CPU: some five hundred mappings."""
RECORD_LIMIT_BYTES = 4096 + 256
CPU_LIST = "/sys/devices/system/cpu/online"
CPU_LIMIT = 4096

_libc = ctypes.CDLL(None, use_errno=True)
_barrier = threading.Lock()


class Mapped(NamedTuple):
    """A process mapped a part of a file executable."""

    pid: int
    key: MapsKey
    generation: int
    """Of the inode: another one when its number is given to another file."""
    start: int
    end: int


class Forked(NamedTuple):
    """A process was made, with its parent's mappings."""

    pid: int
    parent: int


class Heard(NamedTuple):
    """What was in the rings; ``lost``: some of it found no room, or made no sense."""

    mapped: list[Mapped]
    forked: list[Forked]
    ended: list[int]
    """Processes of which a thread ended."""
    lost: bool


class SideBand:
    """A context manager. Errors: Denied, Unavailable when this kernel lets us hear nothing."""

    def __init__(self, ring_bytes: int = RING_BYTES) -> None:
        self._opened = ExitStack()
        self._rings: list[_Ring] = []
        self._poll = select.epoll()
        self._opened.callback(self._poll.close)
        try:
            for cpu in online_cpus():
                descriptor = _counter(cpu)
                self._opened.callback(os.close, descriptor)
                ring = _Ring(descriptor, ring_bytes)
                self._opened.callback(ring.close)
                self._rings.append(ring)
                self._poll.register(descriptor, select.EPOLLIN)
        except BaseException:
            self._opened.close()
            raise
        if not self._rings:
            self._opened.close()
            raise Unavailable("no CPU of this machine could be listened to")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._opened.close()

    def fileno(self) -> int:
        """Readable when there is something in a ring, once for each time."""
        return self._poll.fileno()

    def hear(self) -> Heard:
        """All that is in the rings, those of one CPU in their order."""
        heard = Heard([], [], [], False)
        lost = False
        for ring in self._rings:
            data, was_full = ring.take()
            lost |= parse_records(data, heard) | was_full
        return heard._replace(lost=lost)


class _Ring:
    def __init__(self, descriptor: int, size: int) -> None:
        try:
            self._memory = mmap.mmap(
                descriptor, mmap.PAGESIZE + size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE
            )
        except OSError as error:
            raise Unavailable(f"no memory for the side band: {error.strerror}") from error

    def close(self) -> None:
        self._memory.close()

    def take(self) -> tuple[bytes, bool]:
        """What is in it, and whether the largest record may have found no room."""
        head, tail, begin, size = _HEAD.unpack_from(self._memory, _HEAD_AT)
        if head == tail:
            return b"", False
        _order()
        length = min(head - tail, size)
        at = begin + tail % size
        found = self._memory[at : min(at + length, begin + size)]
        if len(found) < length:
            found += self._memory[begin : begin + length - len(found)]
        _order()
        _TAIL.pack_into(self._memory, _TAIL_AT, head)
        # The kernel tells of what it lost with the next record that finds room, if there is one.
        return found, length > size - RECORD_LIMIT_BYTES


def parse_records(data: bytes, heard: Heard) -> bool:
    """Adds the records in ``data`` to ``heard``; whether any was lost, or was none."""
    at = 0
    lost = False
    while at + _HEADER.size <= len(data):
        kind, misc, size = _HEADER.unpack_from(data, at)
        if size < _HEADER.size or at + size > len(data):
            return True
        body = at + _HEADER.size
        if kind == _RECORD_MMAP2 and not misc & _MISC_BUILD_ID:
            if size >= _HEADER.size + _MAPPED.size:
                heard.mapped.append(_mapped(data, body))
        elif kind in (_RECORD_FORK, _RECORD_EXIT):
            if size >= _HEADER.size + _TASK_RECORD.size:
                pid, parent, *_ = _TASK_RECORD.unpack_from(data, body)
                if kind == _RECORD_EXIT:
                    heard.ended.append(pid)
                elif pid != parent:
                    heard.forked.append(Forked(pid, parent))
        elif kind == _RECORD_LOST:
            lost = True
        at += size
    return lost or at != len(data)


def _mapped(data: bytes, body: int) -> Mapped:
    pid, start, length, major, minor, inode, generation = _MAPPED.unpack_from(data, body)
    return Mapped(pid, (major, minor, inode), generation, start, start + length)


def online_cpus() -> list[int]:
    """The numbers in the kernel's list, as ``0-3,5``; the first alone if it cannot be read."""
    try:
        with open(CPU_LIST) as file:
            return parse_cpus(file.read(1 << 16))
    except OSError:
        return [0]


def parse_cpus(text: str) -> list[int]:
    """The numbers of such a list; what is none is skipped."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            end = min(int(last or first), CPU_LIMIT)
            found.extend(range(int(first), end + 1))
    return found[:CPU_LIMIT] or [0]


def _counter(cpu: int) -> int:
    number = _NUMBERS.get(os.uname().machine)
    if number is None:
        raise Unavailable(f"no number of perf_event_open for {os.uname().machine}")
    flags = _MMAP | _MMAP2 | _TASK | _WATERMARK
    attributes = _ATTRIBUTES.pack(_SOFTWARE, _ATTRIBUTES_BYTES, _DUMMY, 0, 0, 0, flags, 1, 0)
    buffer = ctypes.create_string_buffer(attributes, _ATTRIBUTES_BYTES)
    every, none = ctypes.c_int(-1), ctypes.c_int(-1)
    descriptor = _libc.syscall(
        ctypes.c_long(number), buffer, every, ctypes.c_int(cpu), none, ctypes.c_ulong(_CLOEXEC)
    )
    if descriptor >= 0:
        return int(descriptor)
    code = ctypes.get_errno()
    reason = f"perf_event_open: {os.strerror(code)}"
    error: GpuwardenError = Unavailable(reason)
    if code in (errno.EACCES, errno.EPERM):
        error = Denied(reason, remedy="run as root with CAP_PERFMON")
    raise error


def _order() -> None:
    """Reads before it are done before reads and writes after it: a lock is let go and taken."""
    with _barrier:
        pass
    with _barrier:
        pass
