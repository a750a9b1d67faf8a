"""All modules that one process has loaded, against one profile: judged together, as facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

from msgspec import Struct

from gpuwarden.code.judgement import Answer, KernelJudgement, ModuleJudgement
from gpuwarden.code.module import Kind, Module, Place
from gpuwarden.code.report import FoundModule, Sighting
from gpuwarden.code.set_bar import load_set_bar
from gpuwarden.codescan.judged_sets import (
    KERNELS_KEPT,
    MODULES_LIMIT,
    PROCESS,
    Together,
    answer_of,
    judged_together,
)
from gpuwarden.model import GpuModule, LoadedModule, ModuleLoad, Process, ProfileStanding
from gpuwarden.rules.gpu_code import HASH_LIKE

UNDECLARED = ""
"""The profile of processes that declare none: only hash-like modules of theirs are told."""
_SET = f"{PROCESS}0"
_TOLD = ("unknown", "jit")


class LoadedCounts(Struct, frozen=True, kw_only=True):
    """Distinct modules that a process loaded; each is one of these."""

    known: int = 0
    rebuilt: int = 0
    driver: int = 0
    jit: int = 0
    unknown: int = 0
    not_compared: int = 0
    """The profile's baselines could not be asked."""

    @property
    def modules(self) -> int:
        return self.known + self.rebuilt + self.driver + self.jit + self.unknown + self.not_compared


class _First(NamedTuple):
    """The load that a module was first seen in."""

    load: ModuleLoad
    module: LoadedModule


def standing_in(module: LoadedModule, profile: str) -> ProfileStanding:
    """Where a module stands against a profile; one that was not there then could not be asked."""
    found = next((one for one in module.standings if one.profile == profile), None)
    if found is not None:
        return found
    why = "this profile was not in the policy when the module was loaded"
    return ProfileStanding(profile=profile, standing="unknown", not_compared=why)


def judged(
    modules: Sequence[LoadedModule], profile: str, together: Together | None = None
) -> list[tuple[LoadedModule, str]]:
    """Each distinct module with what it computes, judged among all of its process.

    The answer is as of a look at memory: empty for what the profile knows. Of a module that is
    there twice the last counts, since baselines may have been replaced between.
    """
    distinct = {(one.digest, one.kind): one for one in modules}
    standings = {key: standing_in(one, profile) for key, one in distinct.items()}
    asked = {key: one for key, one in distinct.items() if standings[key].standing in _TOLD}
    found = judged_together(
        [_found(one, standings[key]) for key, one in asked.items()], together or load_set_bar()
    )
    answers = dict(zip(asked, map(answer_of, found), strict=True))
    return [(one, answers.get(key, "")) for key, one in distinct.items()]


def gpu_modules(
    process: Process, loads: Sequence[ModuleLoad], profile: str
) -> tuple[GpuModule, ...]:
    """What of all that a process loaded is not simply known to its profile, the gravest first.

    Without a profile, or with one that could not be asked, only what is hash-like is told.
    """
    firsts: dict[tuple[str, str], _First] = {}
    for load in loads:
        for module in load.modules:
            firsts.setdefault((module.digest, module.kind), _First(load, module))
    told: list[GpuModule] = []
    for module, answer in judged(_all(loads), profile):
        standing = standing_in(module, profile)
        is_asked = profile != UNDECLARED and not standing.not_compared
        if standing.standing in _TOLD and (is_asked or answer == HASH_LIKE):
            load = firsts[module.digest, module.kind].load
            told.append(_gpu_module(process, load, module, standing, answer))
    told.sort(
        key=lambda one: (one.answer != HASH_LIKE, one.standing != "unknown", -(one.score or 0.0))
    )
    return tuple(told[:MODULES_LIMIT])


def counted(loads: Iterable[ModuleLoad], profile: str) -> LoadedCounts:
    """How many distinct modules a process loaded, by their standing."""
    distinct = {(one.digest, one.kind): one for one in _all(loads)}
    counts: Counter[str] = Counter()
    for module in distinct.values():
        standing = standing_in(module, profile)
        counts["not_compared" if standing.not_compared else standing.standing] += 1
    return LoadedCounts(**counts)


def _all(loads: Iterable[ModuleLoad]) -> list[LoadedModule]:
    return [module for load in loads for module in load.modules]


def _found(module: LoadedModule, standing: ProfileStanding) -> FoundModule:
    """The module as a look at memory would have found it."""
    place = Place(target=_SET)
    return FoundModule(
        module=Module(
            kind=cast(Kind, module.kind),
            arch=module.arch,
            digest=module.digest,
            stored_bytes=module.image_bytes,
            image_bytes=module.image_bytes,
            place=place,
        ),
        standing=standing.standing,
        known_as=standing.known_as,
        judgement=_judgement(module),
        sightings=(Sighting(place=place),),
    )


def _judgement(module: LoadedModule) -> ModuleJudgement | None:
    if not module.answer:
        return None
    answer = cast(Answer, module.answer)
    return ModuleJudgement(
        answer=answer,
        score=module.score,
        judged=module.judged,
        kernels=tuple(
            KernelJudgement(name="", answer=answer, score=score) for score in module.kernel_scores
        ),
    )


def _gpu_module(
    process: Process,
    load: ModuleLoad,
    module: LoadedModule,
    standing: ProfileStanding,
    answer: str,
) -> GpuModule:
    return GpuModule(
        pid=process.pid,
        start_time_ticks=process.start_time_ticks,
        digest=module.digest,
        code_digest=module.code_digest,
        kind=module.kind,
        arch=module.arch,
        image_bytes=module.image_bytes,
        mapping=load.path or "",
        offset=module.offset if load.path else None,
        standing="jit" if standing.standing == "jit" else "unknown",
        known_as=standing.known_as,
        kernels=module.kernels[:KERNELS_KEPT],
        kernel_count=module.kernel_count,
        answer=answer,
        score=module.score,
        reasons=module.reasons,
        consistent_with=module.consistent_with,
        broken=module.broken,
        not_compared=standing.not_compared,
        loaded_at_ns=load.at_ns,
        loaded_by=load.function,
    )
