"""What stands in the maps of a loaded object: its counters, the limiter's table, device numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

from gpuwarden.probes import layouts
from gpuwarden.probes.libbpf import Libbpf
from gpuwarden.probes.loading import LoadedObject
from gpuwarden.probes.settings import Number

ANY_MINOR = 0xFFFFF
COUNTS_LIMIT = 1 << 17
COUNT_KEY = layouts.packed("count_key")
COUNTERS = (
    "hits",
    "limited",
    "denied",
    "limiter_full",
    "dropped_opens",
    "dropped_returns",
    "dropped_execs",
    "dropped_exits",
    "dropped_groups",
)
"""By their numbers in the kernel."""
_DEVICE_KEY = layouts.packed("device_key")
_COUNTER_BYTES = 8


def device_key(number: Number) -> bytes:
    """The key of a watched device, or of every minor of its major."""
    return _DEVICE_KEY.pack(number[0], ANY_MINOR if number[1] is None else number[1])


def counters(bpf: Libbpf, loaded: LoadedObject) -> dict[str, int]:
    """Each counter, those of all CPUs together. Errors: OSError, Unavailable."""
    descriptor = loaded.map("counters")
    values = (ctypes.c_uint64 * bpf.checked("libbpf_num_possible_cpus"))()
    found = {}
    for index, name in enumerate(COUNTERS):
        key = ctypes.c_uint32(index)
        bpf.checked("bpf_map_lookup_elem", descriptor, ctypes.byref(key), ctypes.byref(values))
        found[name] = sum(values)
    return found


def clear_counters(bpf: Libbpf, loaded: LoadedObject) -> None:
    """Sets every counter to zero. Errors: OSError, Unavailable."""
    zeros = bytes(_COUNTER_BYTES * bpf.checked("libbpf_num_possible_cpus"))
    for index in range(len(COUNTERS)):
        loaded.put("counters", index.to_bytes(4, "little"), zeros)


def count_keys(bpf: Libbpf, loaded: LoadedObject) -> Iterator[bytes]:
    """The keys of the limiter's table, while it may change. Errors: Unavailable."""
    key: bytes | None = None
    following = ctypes.create_string_buffer(COUNT_KEY.size)
    for _ in range(COUNTS_LIMIT):
        counts = loaded.map("counts")
        if bpf.call("bpf_map_get_next_key", counts, key, following) != 0:
            return
        key = following.raw
        yield key
