"""Doing one step: every check in one place and in one order, and the record of the try.

The order is: the table of verdicts, what must be confirmed, whom nothing is ever done to, the
process's identity, evidence, the person's word. Only then the actor acts, while the process's
identity is held.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

from msgspec import Struct

from gpuwarden.errors import GpuwardenError
from gpuwarden.respond import allowed
from gpuwarden.respond.identity import Changed
from gpuwarden.respond.order import NEEDS, UNDOING, WITHOUT_EVIDENCE
from gpuwarden.respond.step import Actor, Identity, Outcome, Step, Target, Tell
from gpuwarden.respond.step_names import StepName


class Confirmations(Struct, frozen=True, kw_only=True):
    """What a person said on the command line, and what was seen of a hung process."""

    owner_confirmed: bool = False
    hung_confirmed: bool = False
    yes: bool = False


State = Literal["done", "incomplete", "refused", "failed", "changed"]


class Tried(Struct, frozen=True, kw_only=True):
    """What became of a try: ``refused`` by a check, ``changed`` when it is to be judged again."""

    state: State
    why: str = ""
    outcome: Outcome | None = None
    archive: str = ""
    """Of the evidence that was there or was taken."""


class Means(Protocol):
    """What a step is held against, kept in and written to."""

    def protected(self, target: Target) -> str:
        """Why nothing is ever done to this process; empty when something may be."""
        ...

    def hold(self, identity: Identity) -> AbstractContextManager[object]:
        """Keeps the process from being another one unnoticed. Errors: Changed, Unavailable."""
        ...

    def evidence(self, target: Target, tell: Tell) -> str:
        """The archive of this process identity: the one there is, else one taken now.

        Errors: GpuwardenError when there is none and none could be taken.
        """
        ...

    def intent(self, step: StepName, target: Target) -> object:
        """Writes down what is about to be tried; what names it. Errors: GpuwardenError."""
        ...

    def outcome(self, intent: object, step: StepName, target: Target, tried: Tried) -> None:
        """Writes down what came of it. Errors: GpuwardenError."""
        ...


def refusal(step: Step, target: Target, given: Confirmations, means: Means) -> str:
    """Why a step is not to be done now, by the table and by whom it concerns; empty: it may be."""
    for power in dict.fromkeys((NEEDS[step.name], step.power)):
        if step.name in UNDOING:
            break
        why = allowed.refusal(
            target.verdict,
            power,
            owner_confirmed=given.owner_confirmed,
            hung_confirmed=given.hung_confirmed,
        )
        if why:
            return why
    if step.name in WITHOUT_EVIDENCE:
        return step.refused
    return means.protected(target) or step.refused


def do(
    actor: Actor,
    name: StepName,
    target: Target,
    given: Confirmations,
    means: Means,
    *,
    tell: Tell,
    ask: Callable[[str], bool],
) -> Tried:
    """One step, checked and written down. Errors: GpuwardenError when it cannot be written down.

    A step that is undone is undone also where nothing can be written.
    """
    try:
        intent = means.intent(name, target)
    except GpuwardenError as error:
        if name not in UNDOING:
            raise
        tell(f"not in the journal: {error}")
        intent = None
    try:
        tried = _checked(actor, name, target, given, means, tell=tell, ask=ask)
    except Changed as error:
        tried = Tried(state="changed", why=str(error))
    except GpuwardenError as error:
        tried = Tried(state="failed", why=str(error))
    except BaseException as error:
        # Half of it may be done: the journal must not end with the intent alone.
        if intent is not None:
            why = f"broken off: {type(error).__name__}"
            means.outcome(intent, name, target, Tried(state="failed", why=why))
        raise
    if intent is not None:
        try:
            means.outcome(intent, name, target, tried)
        except GpuwardenError as error:
            tell(f"what came of it is not in the journal: {error}")
    return tried


def _checked(
    actor: Actor,
    name: StepName,
    target: Target,
    given: Confirmations,
    means: Means,
    *,
    tell: Tell,
    ask: Callable[[str], bool],
) -> Tried:
    step = actor.step(target)
    if step is None:
        return Tried(state="refused", why="it does not apply here")
    if step.name != name:
        return Tried(state="refused", why=f"the step is {step.name}")
    why = refusal(step, target, given, means)
    if not why and not step.automatic:
        why = "it is not done from here: run the commands that the plan prints"
    if why:
        return Tried(state="refused", why=why)
    if target.identity is None and name not in WITHOUT_EVIDENCE:
        return Tried(state="refused", why="there is no process to do it to")
    # Reading and undoing are safe whatever became of the process.
    held = None if name in WITHOUT_EVIDENCE else target.identity
    with nullcontext() if held is None else means.hold(held):
        archive = ""
        if name not in WITHOUT_EVIDENCE:
            try:
                archive = means.evidence(target, tell)
            except GpuwardenError as error:
                return Tried(state="refused", why=f"without evidence nothing is done: {error}")
        if not given.yes and not ask(_question(step, target)):
            why = "nobody said yes at a terminal; --yes says it on the command line"
            return Tried(state="refused", why=why, archive=archive)
        if held is not None:
            # Evidence and an answer took their time.
            with means.hold(held):
                pass
        outcome = actor.do(target, tell)
    if not outcome.done:
        return Tried(state="failed", outcome=outcome, archive=archive)
    return Tried(
        state="done" if outcome.complete else "incomplete", outcome=outcome, archive=archive
    )


def _question(step: Step, target: Target) -> str:
    pid = "" if target.identity is None else f" (pid {target.identity.pid})"
    hurts = f" Also touched: {'; '.join(step.hurts)}." if step.hurts else ""
    return f"{step.title}{pid}: {step.changes}{hurts} Do it?"
