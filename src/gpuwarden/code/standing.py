"""Where one module stands: known, known code rebuilt, the driver's, JIT code, or unknown.

The one place that decides it, for every command. A known module is never judged; one of a JIT
class always is, since anyone can make a module look so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from gpuwarden.code.baseline.known import Baselines, Known
from gpuwarden.code.judgement import ModuleJudgement
from gpuwarden.code.module import Kind, Module, Record
from gpuwarden.code.report import Standing as StandingWord
from gpuwarden.errors import Malformed

Buffer = bytes | memoryview
JitRule = Literal["allow", "review"]
Judge = Callable[[Kind, Buffer], ModuleJudgement]
JitClass = Callable[[Module, Buffer], str]

ALLOWANCE_HOLDS = frozenset({"not hash-like", "not enough code"})
"""Answers with which an allowed JIT class is one; whatever could not be judged is not clean."""


class Standing(Record, frozen=True, kw_only=True):
    """What is known of a module, or what it computes if nothing is."""

    standing: StandingWord
    known_as: str = ""
    """``torch 2.9.1 libtorch_cuda.so``; for JIT code its class and what the profile says of it."""
    known: Known | None = None
    jit: str = ""
    """The JIT class that it looks like."""
    judgement: ModuleJudgement | None = None

    @property
    def is_known(self) -> bool:
        return self.standing in ("known", "rebuilt", "driver")


def standing_of(
    module: Module,
    image: Buffer,
    baselines: Baselines,
    jit: Mapping[str, JitRule] | None = None,
    *,
    judge: Judge | None = None,
    jit_class: JitClass | None = None,
) -> Standing:
    """Where ``module`` stands; ``image`` is its decompressed image.

    ``jit`` is what a profile says of JIT classes. ``judge`` and ``jit_class`` are those of
    ``gpuwarden.code`` unless given. Errors: Malformed when a baseline is damaged where it is asked.
    """
    found = known_standing(module, baselines)
    if found is not None:
        return found
    if module.broken:
        return judged_standing(unreadable(module))
    judgement = (judge or _judge())(module.kind, image)
    name = (jit_class or _jit_class())(module, image) if jit else ""
    return judged_standing(judgement, name, jit)


def known_standing(module: Module, baselines: Baselines) -> Standing | None:
    """Where a module stands that a baseline knows, None when none does. Errors: Malformed."""
    # A broken module's digest is that of its stored bytes, which a baseline never holds.
    if module.broken:
        return None
    known = baselines.lookup(module.digest)
    if known is not None:
        word: StandingWord = "driver" if known.provenance.source == "driver" else "known"
        return Standing(standing=word, known_as=known.provenance.title, known=known)
    known = baselines.lookup_code(module.code_digest)
    if known is not None:
        title = f"code of {known.provenance.title}"
        return Standing(standing="rebuilt", known_as=title, known=known)
    return None


def unreadable(module: Module) -> ModuleJudgement:
    """What is said of a module that could not be read to its end."""
    return ModuleJudgement(answer="unreadable", reasons=(module.broken,))


def judged_standing(
    judgement: ModuleJudgement, name: str = "", jit: Mapping[str, JitRule] | None = None
) -> Standing:
    """Where a module stands that no baseline knows: ``name`` is the JIT class it looks like."""
    rule = jit.get(name) if jit and name else None
    if rule is None:
        return Standing(standing="unknown", jit=name, judgement=judgement)
    if rule == "allow" and judgement.answer in ALLOWANCE_HOLDS:
        return Standing(
            standing="jit", known_as=f"looks like {name}, allowed", jit=name, judgement=judgement
        )
    why = "to be reviewed" if rule == "review" else f"allowed, but: {judgement.answer}"
    return Standing(
        standing="unknown", known_as=f"looks like {name}, {why}", jit=name, judgement=judgement
    )


def _judge() -> Judge:
    # Imported here: where everything is known, nothing is judged and no model is read.
    from gpuwarden.code.classify import judge

    return judge


def _jit_class() -> JitClass:
    from gpuwarden.code.jit import jit_class

    return jit_class


class Assessor:
    """``standing_of`` with all that it needs loaded: to be made before a child is confined."""

    def __init__(
        self,
        baselines: Baselines,
        jit: Mapping[str, JitRule] | None = None,
        *,
        judge: Judge | None = None,
        jit_class: JitClass | None = None,
    ) -> None:
        self._baselines, self._jit = baselines, jit
        self._judge = judge or _judge()
        self._jit_class = jit_class or (_jit_class() if jit else None)

    def __call__(
        self, module: Module, image: Buffer
    ) -> tuple[StandingWord, str, ModuleJudgement | None]:
        found = standing_of(
            module,
            image,
            self._baselines,
            self._jit,
            judge=self._judge,
            jit_class=self._jit_class,
        )
        return found.standing, found.known_as, found.judgement

    def knows(self, digest: str) -> bool:
        """Whether a baseline has exactly this module; damage is told when it is assessed."""
        try:
            return self._baselines.lookup(digest) is not None
        except Malformed:
            return False
