"""What a look at targets found → the entries of a baseline, each with its origin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from msgspec import Struct

from gpuwarden.code.baseline.entries import Entries
from gpuwarden.code.report import CodeReport, FoundModule
from gpuwarden.codescan.origins import Label, Origins


class Built(Struct):
    """The entries, and what was left out of them: reason → how many modules."""

    entries: Entries
    left_out: Counter[str]


def entries_of(
    report: CodeReport,
    label: Label,
    *,
    digest_bytes: int,
    modules: Iterable[FoundModule] | None = None,
) -> Built:
    """The entries for the modules of a report, or for these of them.

    A module that could not be read to its end is left out: its digest is not that of its image. So
    is one that no container of an image would find. Errors: Unavailable, Malformed, as a target
    that was read is asked for its package.
    """
    targets = {target.name: target for target in report.targets}
    origins = Origins(label)
    built = Built(Entries(digest_bytes), Counter())
    for found in report.modules if modules is None else modules:
        module = found.module
        if module.broken:
            built.left_out[f"cannot be read: {module.broken}"] += 1
            continue
        if found.is_hidden:
            built.left_out["hidden by a later layer of its image"] += 1
            continue
        digest, code = bytes.fromhex(module.digest), bytes.fromhex(module.code_digest)
        for sighting in found.sightings:
            if not sighting.hidden:
                target = targets[sighting.place.target]
                built.entries.add(digest, code, origins.of(target, sighting.place))
    return built
