"""The byte layouts of cuda_launches.bpf.c, and what stands in its maps and its ring, decoded."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from gpuwarden.errors import Malformed
from gpuwarden.probes import layouts
from gpuwarden.probes.cuda.records import OTHER_HANDLES, LaunchCount, SampledLaunch

LAYOUTS: layouts.Layouts = {
    "launch_process": (("start_ns", "Q"), ("tgid", "I"), ("stretch", "I")),
    "launch_key": (("process", "launch_process"), ("handle", "Q")),
    "launch_totals": (("graphs", "Q"), ("others", "Q"), ("handles", "Q")),
    "sample_share": (("taken", "Q"), ("dropped", "Q")),
    "launch_settings": (
        ("until_ns", "Q"),
        ("handles_limit", "Q"),
        ("handles_freed", "Q"),
        ("ring_half_bytes", "Q"),
        ("stretch", "I"),
        ("most_of_one_process", "I"),
    ),
    "launch_sample": (
        ("time_ns", "Q"),
        ("start_ns", "Q"),
        ("handle", "Q"),
        ("stream", "Q"),
        ("tgid", "I"),
        ("pid", "I"),
        ("grid", "3I"),
        ("block", "3I"),
    ),
}

PROCESS = layouts.packed("launch_process", among=LAYOUTS)
KEY = layouts.packed("launch_key", among=LAYOUTS)
TOTALS = layouts.packed("launch_totals", among=LAYOUTS)
SHARE = layouts.packed("sample_share", among=LAYOUTS)
SETTINGS = layouts.packed("launch_settings", among=LAYOUTS)
SAMPLE = layouts.packed("launch_sample", among=LAYOUTS)
_PID_AT = layouts.offset("launch_sample", "tgid", among=LAYOUTS)
COUNT = struct.Struct("<Q")
COUNTERS = ("handles", "uncounted", "unsampled")
"""By their numbers in the kernel."""


def counts(keys: bytes, values: bytes) -> Iterator[LaunchCount]:
    """The launches by handle, of keys and values as a map gives them. Errors: Malformed."""
    _check_pair(keys, KEY.size, values, COUNT.size)
    for (start_ns, tgid, _, handle), (launches,) in zip(
        KEY.iter_unpack(keys), COUNT.iter_unpack(values), strict=True
    ):
        yield LaunchCount(tgid, start_ns, handle, launches)


def totals(keys: bytes, values: bytes) -> Iterator[LaunchCount]:
    """The launches of each process that are no handle's: graphs, then others. Errors: Malformed."""
    _check_pair(keys, PROCESS.size, values, TOTALS.size)
    for (start_ns, tgid, _), (graphs, others, _) in zip(
        PROCESS.iter_unpack(keys), TOTALS.iter_unpack(values), strict=True
    ):
        if graphs:
            yield LaunchCount(tgid, start_ns, 0, graphs)
        if others:
            yield LaunchCount(tgid, start_ns, OTHER_HANDLES, others)


def shares(keys: bytes, values: bytes, stretch: int) -> tuple[int, dict[int, int]]:
    """Of a stretch: the launches that were told of, and by pid those that were not.

    Errors: Malformed.
    """
    _check_pair(keys, PROCESS.size, values, SHARE.size)
    told = 0
    dropped: dict[int, int] = {}
    for (_, tgid, number), (taken, more) in zip(
        PROCESS.iter_unpack(keys), SHARE.iter_unpack(values), strict=True
    ):
        if number == stretch:
            told += taken
            if more:
                dropped[tgid] = dropped.get(tgid, 0) + more
    return told, dropped


def samples(records: Iterable[bytes]) -> tuple[list[SampledLaunch], int]:
    """The launches in the records of the ring, in order of time; how many could not be read."""
    found: list[SampledLaunch] = []
    malformed = 0
    for record in records:
        if len(record) != SAMPLE.size:
            malformed += 1
            continue
        at_ns, start_ns, handle, stream, tgid, thread_id, *sizes = SAMPLE.unpack(record)
        found.append(
            SampledLaunch(
                at_ns, tgid, start_ns, thread_id, handle, stream, tuple(sizes[:3]), tuple(sizes[3:])
            )
        )
    # The ring has them as its room was given out, which is not quite when each began.
    found.sort(key=lambda one: one.at_ns)
    return found, malformed


def pid_of(record: bytes) -> int:
    """Whose sample a record of the ring is."""
    return int.from_bytes(record[_PID_AT : _PID_AT + 4], "little")


def _check_pair(keys: bytes, key_bytes: int, values: bytes, value_bytes: int) -> None:
    if len(keys) % key_bytes or len(values) != len(keys) // key_bytes * value_bytes:
        raise Malformed(f"{len(keys)} bytes of keys and {len(values)} of values in a map")
