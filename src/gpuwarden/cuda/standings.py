"""Where one module stands in every profile at once: looked up in each, judged once."""

from __future__ import annotations

from collections.abc import Sequence

from gpuwarden.code.classify import judge
from gpuwarden.code.jit import jit_class
from gpuwarden.code.judgement import ModuleJudgement
from gpuwarden.code.module import Module
from gpuwarden.code.standing import Standing, judged_standing, known_standing, unreadable
from gpuwarden.codescan.tasks import Buffer, Said
from gpuwarden.cuda.open_profiles import OpenProfile
from gpuwarden.errors import Malformed
from gpuwarden.model import ProfileStanding


class StandingsAssessor:
    """To be made, with ``codescan.judging_data`` loaded, before a child is confined."""

    def __init__(self, profiles: Sequence[OpenProfile]) -> None:
        self._profiles = tuple(profiles)
        self._asks_for_classes = any(profile.jit for profile in profiles)

    def __call__(self, module: Module, image: Buffer) -> Said:
        """What ``Assess`` gives; the single standing is that of the first profile."""
        known = [_known(profile, module) for profile in self._profiles]
        judgement: ModuleJudgement | None = None
        name = ""
        if None in known or any(isinstance(one, str) for one in known):
            judgement = unreadable(module) if module.broken else judge(module.kind, image)
            if self._asks_for_classes and not module.broken:
                name = jit_class(module, image)
        standings = tuple(
            _standing(profile, found, judgement, name)
            for profile, found in zip(self._profiles, known, strict=True)
        )
        first = standings[0] if standings else ProfileStanding(profile="", standing="unknown")
        return first.standing, first.known_as, judgement, standings


def _known(profile: OpenProfile, module: Module) -> Standing | str | None:
    """A standing, None when nobody knows it, or why that cannot be told."""
    if profile.failed:
        return profile.failed
    try:
        return known_standing(module, profile.baselines)
    except Malformed as error:
        return str(error)


def _standing(
    profile: OpenProfile,
    found: Standing | str | None,
    judgement: ModuleJudgement | None,
    name: str,
) -> ProfileStanding:
    if isinstance(found, str):
        return ProfileStanding(profile=profile.name, standing="unknown", not_compared=found)
    if found is None:
        found = judged_standing(
            judgement or ModuleJudgement(answer="unreadable"), name, profile.jit
        )
    word = found.standing or "unknown"
    return ProfileStanding(profile=profile.name, standing=word, known_as=found.known_as)
