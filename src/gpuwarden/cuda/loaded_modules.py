"""What a confined child answered of one load becomes facts, bounded, whatever it said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpuwarden.code.module import Problem
from gpuwarden.codescan.tasks import Answer, Found, Trouble
from gpuwarden.model import LoadedModule, ProfileStanding

MODULES_LIMIT = 1024
"""Modules of one load that are told, those that some profile does not know first."""
PROBLEMS_LIMIT = 8
KERNELS_OF_KNOWN, KERNELS_OF_UNKNOWN = 8, 64
TEXT_LIMIT = 512
LIST_LIMIT = 16
DIGEST_LIMIT = 128
HASH_LIKE = "hash-like"
CUT = "its bytes were not all copied"


class Examined(NamedTuple):
    """What the bytes of a load hold, and what of them could not be read."""

    modules: tuple[LoadedModule, ...] = ()
    problems: tuple[str, ...] = ()


class LoadAnswers:
    """Gathers the answers for one load of ``size`` bytes; ``profiles`` are all that are asked."""

    def __init__(self, size: int, profiles: Sequence[str], *, is_cut: bool) -> None:
        """``is_cut``: more was loaded than these bytes."""
        self._size = size
        self._profiles = profiles
        self._is_cut = is_cut
        self._unknown: dict[tuple[str, str], LoadedModule] = {}
        self._known: dict[tuple[str, str], LoadedModule] = {}
        self._problems: list[str] = []
        self._left_out = self._more_problems = self._cut = 0

    def take(self, answer: Answer) -> None:
        """One answer; those that say nothing of modules are passed over."""
        if isinstance(answer, Trouble):
            self.trouble(_told(answer.problem))
        elif isinstance(answer, Found):
            self._take(answer)

    def trouble(self, problem: str) -> None:
        """Something that could not be read."""
        if len(self._problems) < PROBLEMS_LIMIT:
            self._problems.append(problem[:TEXT_LIMIT])
        else:
            self._more_problems += 1

    def _take(self, found: Found) -> None:
        module = loaded_module(found, self._profiles)
        if self._is_cut and self._touches_the_end(found):
            # Its digest is that of a part: nobody could know it. What it computes holds all the
            # same.
            if module.answer != HASH_LIKE:
                self._cut += 1
                return
            module = loaded_module(found, self._profiles, broken=CUT)
        is_known = all(one.standing != "unknown" for one in module.standings)
        kept = self._known if is_known else self._unknown
        if len(kept) < MODULES_LIMIT:
            kept.setdefault((module.digest, module.kind), module)
        else:
            self._left_out += 1

    def _touches_the_end(self, found: Found) -> bool:
        module = found.module
        end = (module.place.offset or 0) + module.stored_bytes
        return bool(module.broken) or end >= self._size

    def answer(self) -> Examined:
        """All that was answered."""
        told = [*self._unknown.values(), *self._known.values()]
        left_out = self._left_out + len(told[MODULES_LIMIT:])
        problems = list(self._problems)
        if self._more_problems:
            problems.append(f"{self._more_problems} more pieces could not be read")
        if self._cut:
            problems.append(f"{self._cut} modules of which not all bytes were copied are left out")
        if left_out:
            problems.append(f"{left_out} more modules: {MODULES_LIMIT} of one load are told")
        return Examined(tuple(told[:MODULES_LIMIT]), tuple(problems))


def loaded_module(found: Found, profiles: Sequence[str], broken: str = "") -> LoadedModule:
    """The fact; a profile that was not told of does not know the module."""
    module, judged = found.module, found.judgement
    told = {one.profile: one for one in found.standings}
    standings = tuple(_standing(name, told.get(name)) for name in profiles)
    kernels = [kernel.name for kernel in module.kernels]
    if judged is not None:
        # The one that decided it comes first.
        kernels = list(dict.fromkeys([*(one.name for one in judged.kernels), *kernels]))
    is_known = all(one.standing != "unknown" for one in standings)
    kept = KERNELS_OF_KNOWN if is_known else KERNELS_OF_UNKNOWN
    return LoadedModule(
        digest=module.digest[:DIGEST_LIMIT],
        code_digest=module.code_digest[:DIGEST_LIMIT],
        kind=module.kind,
        arch=module.arch[:TEXT_LIMIT],
        image_bytes=module.image_bytes,
        offset=module.place.offset,
        kernels=tuple(name[:TEXT_LIMIT] for name in kernels[:kept]),
        kernel_count=module.kernel_count,
        standings=standings,
        answer=judged.answer if judged is not None else "",
        score=judged.score if judged is not None else None,
        judged=judged.judged if judged is not None else 0,
        kernel_scores=_scores(found),
        reasons=_listed(judged.reasons if judged is not None else ()),
        consistent_with=_listed(judged.consistent_with if judged is not None else ()),
        broken=(broken or module.broken)[:TEXT_LIMIT],
    )


def _standing(profile: str, told: ProfileStanding | None) -> ProfileStanding:
    if told is None:
        return ProfileStanding(profile=profile, standing="unknown")
    return ProfileStanding(
        profile=profile,
        standing=told.standing,
        known_as=told.known_as[:TEXT_LIMIT],
        not_compared=told.not_compared[:TEXT_LIMIT],
    )


def _scores(found: Found) -> tuple[float, ...]:
    judged = found.judgement
    if judged is None or judged.score is None:
        return ()
    return tuple(kernel.score or 0.0 for kernel in judged.kernels[:LIST_LIMIT])


def _listed(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(text[:TEXT_LIMIT] for text in texts[:LIST_LIMIT])


def _told(problem: Problem) -> str:
    at = f" at {problem.place.offset:#x}" if problem.place.offset is not None else ""
    return f"{problem.what}{at}: {problem.reason}"
