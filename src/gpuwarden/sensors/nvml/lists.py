"""The driver's process lists and utilisation samples: from its bytes to entries, or to nothing.

The bytes come from a library that may be old, wrong or lying. A buffer is filled with ``FILL``
before the driver writes to it: how far it wrote tells how long its entries really are, which the
first R535 drivers changed without saying so.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable

from msgspec import Struct

from gpuwarden.model import UtilisationSample

FILL = 0xA5
# nvmlProcessInfo_v1_t: pid, used memory.
PROCESS_V1 = struct.Struct("=I4xQ")
# nvmlProcessInfo_v2_t, also what _v3 functions write: pid, used memory, GPU and compute instance.
PROCESS_V2 = struct.Struct("=I4xQII")
# nvmlProcessUtilizationSample_t: pid, time in microseconds, SM, memory, encoder, decoder percent.
SAMPLE = struct.Struct("=I4xQIIII")

STRIDES = {PROCESS_V1.size: (16, 24), PROCESS_V2.size: (24, 32)}
"""The layout's own entry length, and the longer one that a driver may write instead."""
LONGEST_STRIDE_BYTES = 64

PID_LIMIT = 1 << 22
"""PID_MAX_LIMIT of the kernel on 64-bit machines."""
NO_INSTANCE = 0xFFFFFFFF
INSTANCE_LIMIT = 1024
MEMORY_NOT_AVAILABLE = (1 << 64) - 1
MEMORY_LIMIT_BYTES = 1 << 50

SAMPLE_AGE_LIMIT_NS = 120 * 10**9
SAMPLE_AHEAD_LIMIT_NS = 5 * 10**9


class Entry(Struct, frozen=True):
    """One line of a process list; ``memory_bytes`` None means the driver says N/A."""

    pid: int
    memory_bytes: int | None
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None


class ProcessList(Struct, frozen=True):
    """The believable entries of one list, and how many were not."""

    entries: tuple[Entry, ...]
    implausible: int = 0


def parse_processes(buffer: bytes, count: int, layout: struct.Struct) -> ProcessList:
    """The entries that the driver wrote into a buffer filled with ``FILL``.

    ``count`` is what the driver said it wrote; it is bounded by the buffer. Never raises.
    """
    narrow, wide = STRIDES[layout.size]
    count = max(0, min(count, len(buffer) // wide))
    written = len(buffer.rstrip(bytes((FILL,))))
    strides = (wide, narrow) if count * narrow < written <= count * wide else (narrow, wide)
    best: tuple[Entry, ...] = ()
    for stride in strides:
        entries = tuple(
            entry
            for fields in _each(buffer[: count * stride], layout, stride)
            if (entry := _entry(fields)) is not None
        )
        if len(entries) > len(best):
            best = entries
        if len(best) == count:
            break
    return ProcessList(best, implausible=count - len(best))


def _each(buffer: bytes, layout: struct.Struct, stride: int) -> Iterable[tuple[int, ...]]:
    if stride == layout.size:
        return layout.iter_unpack(buffer)
    return (layout.unpack_from(buffer, at) for at in range(0, len(buffer), stride))


def _entry(fields: tuple[int, ...]) -> Entry | None:
    pid, memory = fields[:2]
    if not 0 < pid <= PID_LIMIT or MEMORY_LIMIT_BYTES < memory != MEMORY_NOT_AVAILABLE:
        return None
    known = None if memory == MEMORY_NOT_AVAILABLE else memory
    if len(fields) == 2 or fields[2] == fields[3] == NO_INSTANCE:
        return Entry(pid, known)
    if any(INSTANCE_LIMIT <= instance != NO_INSTANCE for instance in fields[2:]):
        return None
    gpu_instance, compute_instance = (None if i == NO_INSTANCE else i for i in fields[2:])
    return Entry(pid, known, gpu_instance, compute_instance)


def parse_samples(
    buffer: bytes,
    count: int,
    pids: Collection[int],
    now_ns: int,
    *,
    since_us: int = -1,
    given_until_us: int = -1,
    was_given: Callable[[int, int], bool] | None = None,
    age_limit_ns: int = SAMPLE_AGE_LIMIT_NS,
    ahead_limit_ns: int = SAMPLE_AHEAD_LIMIT_NS,
) -> tuple[dict[int, tuple[UtilisationSample, ...]], set[int]]:
    """Each listed pid's believable samples, oldest first, and the pids that only had garbage.

    Kept are samples of a listed pid, at most 100 %, not older than two minutes and not from the
    future; drivers have been seen to hand out others. One up to ``since_us`` was kept before; for
    one up to ``given_until_us``, ``was_given`` tells, by pid and microseconds. Never raises.
    """
    kept: dict[int, dict[int, UtilisationSample]] = {}
    garbage: set[int] = set()
    count = max(0, min(count, len(buffer) // SAMPLE.size))
    oldest_us = -((age_limit_ns - now_ns) // 1000)
    latest_us = (now_ns + ahead_limit_ns) // 1000
    for pid, at_us, sm, memory, _, _ in SAMPLE.iter_unpack(buffer[: count * SAMPLE.size]):
        if pid not in pids or at_us <= since_us:
            continue
        if at_us <= given_until_us and was_given is not None and was_given(pid, at_us):
            continue
        if oldest_us <= at_us <= latest_us and sm <= 100 and memory <= 100:
            sample = UtilisationSample(at_ns=at_us * 1000, sm_percent=sm, memory_percent=memory)
            if pid in kept:
                kept[pid][at_us] = sample
            else:
                kept[pid] = {at_us: sample}
        else:
            garbage.add(pid)
    samples = {pid: tuple(found[at] for at in sorted(found)) for pid, found in kept.items()}
    return samples, garbage - samples.keys()
