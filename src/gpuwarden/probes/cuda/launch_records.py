"""The byte layouts of cuda_launches.bpf.c, and the samples in its ring, decoded."""

from __future__ import annotations

from collections.abc import Iterable

from gpuwarden.probes import layouts
from gpuwarden.probes.cuda.records import SampledLaunch

LAYOUTS: layouts.Layouts = {
    "launch_slot": (("start_ns", "Q"), ("handle", "Q"), ("launches", "Q"), ("owner", "Q")),
    "launching_process": (
        ("start_ns", "Q"),
        ("owner", "Q"),
        ("graphs", "Q"),
        ("others", "Q"),
        ("handles", "Q"),
        ("told", "Q"),
        ("untold", "Q"),
        ("told_before", "Q"),
    ),
    "launch_settings": (
        ("seed", "Q"),
        ("until_ns", "Q"),
        ("most_of_one_process", "Q"),
        ("ring_half_bytes", "Q"),
        ("handles_freed", "Q"),
        ("processes_freed", "Q"),
        ("handles_limit", "I"),
        ("handles_mask", "I"),
        ("processes_limit", "I"),
        ("processes_mask", "I"),
        ("stretch", "I"),
        ("reserved", "I"),
    ),
    "launch_sample": (
        ("time_ns", "Q"),
        ("start_ns", "Q"),
        ("handle", "Q"),
        ("stream", "Q"),
        ("tgid", "I"),
        ("pid", "I"),
        ("shape", "6I"),
    ),
}

SETTINGS = layouts.packed("launch_settings", among=LAYOUTS)
SAMPLE = layouts.packed("launch_sample", among=LAYOUTS)
COUNTER_BYTES = 8
COUNTERS = ("handles", "processes", "uncounted")
"""By their numbers in the kernel."""
_PID_AT = layouts.offset("launch_sample", "tgid", among=LAYOUTS)


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
