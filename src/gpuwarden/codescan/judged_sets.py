"""The unknown cubins of one file, or of one process, judged together, each architecture apart.

Of thousands of modules some look like a hash by chance: each is one more try. So one alarm has a
bar for all of them together; a module that only passes its own is told and is no alarm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from gpuwarden.code.judgement import ModuleJudgement
from gpuwarden.code.module import Place
from gpuwarden.code.report import FoundModule
from gpuwarden.rules.gpu_code import BY_ITSELF, HASH_LIKE

Together = Callable[[Iterable[ModuleJudgement]], tuple[float, bool]]
"""The judgements of a set → its score, and whether it is hash-like."""

PROCESS = "pid "
MODULES_LIMIT = 256
"""Modules of one process that a snapshot keeps; all are counted."""
KERNELS_KEPT = 8


def judged_together(modules: Sequence[FoundModule], together: Together) -> tuple[FoundModule, ...]:
    """The modules with what their sets come to: see ``FoundModule.together``."""
    sets: dict[tuple[str, ...], list[int]] = {}
    for index, one in enumerate(modules):
        if _counts(one):
            for place in _files(one):
                sets.setdefault((*place, one.module.arch), []).append(index)
    alarming: set[int] = set()
    for members in sets.values():
        judgements = {index: modules[index].judgement for index in members}
        scored = {index: one for index, one in judgements.items() if one is not None}
        if not together(scored.values())[1]:
            continue
        by_themselves = {i for i, one in scored.items() if one.answer == "hash-like"}
        alarming |= by_themselves or {max(scored, key=lambda i: scored[i].score or 0.0)}
    in_sets = {index for members in sets.values() for index in members}
    return tuple(
        replace(one, together="hash-like" if index in alarming else "not hash-like")
        if index in in_sets
        else one
        for index, one in enumerate(modules)
    )


def answer_of(found: FoundModule) -> str:
    """What it computes, judged among all unknown modules of its process and architecture."""
    if found.is_alarming:
        return HASH_LIKE
    answer = found.judgement.answer if found.judgement is not None else ""
    return BY_ITSELF if answer == HASH_LIKE else answer


def _counts(one: FoundModule) -> bool:
    """Whether it is one of those that are judged together: PTX has a score of another kind."""
    judged = one.judgement is not None and one.judgement.score is not None
    return judged and one.module.kind == "cubin" and one.standing in ("unknown", "jit", "")


def _files(one: FoundModule) -> set[tuple[str, ...]]:
    return {_file(sighting.place) for sighting in one.sightings}


def _file(place: Place) -> tuple[str, ...]:
    is_process = place.target.startswith(PROCESS)
    return (place.target,) if is_process else (place.target, *place.members)
