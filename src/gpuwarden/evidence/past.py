"""What the daemon remembers of the subjects: samples, findings, when modules were first seen."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from gpuwarden.evidence.masks import mask_json, mask_text
from gpuwarden.evidence.shelf import Shelf
from gpuwarden.evidence.wanted import Wanted
from gpuwarden.history import STATE_DIRECTORY, remembered

HOURS = 24
SIGHTINGS_LIMIT = 8192


def collect(
    shelf: Shelf, wanted: Wanted, whom: Sequence[tuple[int, int]], digests: Sequence[str]
) -> None:
    """``pid-N.json`` of each (pid, start time), ``gpu.json``, ``sightings.json``."""
    directory = wanted.state or STATE_DIRECTORY
    since_ns = time.time_ns() - HOURS * 3_600_000_000_000
    for pid, start_time_ticks in whom:
        found = remembered.read(directory, pid=pid, since_ns=since_ns)
        of_it = msgspec.structs.replace(
            found,
            series=tuple(
                one for one in found.series if one.start_time_ticks in (None, start_time_ticks)
            ),
            findings=tuple(
                one
                for one in found.findings
                if one.finding.subject.start_time_ticks in (None, start_time_ticks)
            ),
        )
        _put(shelf, f"pid-{pid}.json", of_it, f"of pid {pid}")
        if found.state == "none":
            shelf.unread(directory, "watch keeps no memory here")
            return
    if wanted.gpu is not None:
        for gpu_id in sorted(remembered.gpus(directory)):
            if wanted.gpu in gpu_id:
                found = remembered.read(directory, gpu_id=gpu_id, since_ns=since_ns)
                _put(shelf, "gpu.json", found, f"of {gpu_id}")
                break
    if digests:
        seen = remembered.sightings_of(directory, digests[:SIGHTINGS_LIMIT])
        what = "first sightings of its GPU modules"
        shelf.put_json("sightings.json", mask_json(msgspec.to_builtins(seen), mask_text), what)


def _put(shelf: Shelf, name: str, found: remembered.Remembered, what: str) -> None:
    for trouble in found.troubles:
        shelf.unread(trouble.what, trouble.reason)
    if found.state != "none":
        shelf.put_json(name, mask_json(msgspec.to_builtins(found), mask_text), what)
