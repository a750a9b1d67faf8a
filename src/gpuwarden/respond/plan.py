"""The plan for one target: its steps in order, what is refused and why, who else is there, advice.

Making a plan changes nothing; it may ask schedulers and runtimes.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from gpuwarden import __version__
from gpuwarden.errors import GpuwardenError
from gpuwarden.evidence.masks import mask_arguments
from gpuwarden.finding import DECISION_TREE, Evidence, Proof, Row, Verdict
from gpuwarden.model import Fact
from gpuwarden.node import Node
from gpuwarden.pattern import pattern
from gpuwarden.respond import advice, affected
from gpuwarden.respond.advice import Advice
from gpuwarden.respond.affected import Other
from gpuwarden.respond.doing import Confirmations, Means, refusal
from gpuwarden.respond.judged import gravest
from gpuwarden.respond.order import ENDING, NEEDS, UNDOING
from gpuwarden.respond.step import Actor, Identity, Step
from gpuwarden.respond.step_names import StepName
from gpuwarden.respond.target import Found

PLAN_SCHEMA = "gpuwarden.plan"
PLAN_VERSION = 1

_UNDO = pattern(r"(gpuwarden respond [0-9]{1,10}) (--do [a-z-]{1,20})")

MEANINGS: dict[Verdict, str] = {
    "expected": "it belongs here: the expected set names it, proven",
    "system": "it is a part of the system, proven by its binary or image",
    "wrong-gpu": "it belongs here, on a GPU that was given to another",
    "other-team": "its owner is known, and nobody expects it here; nothing speaks against it",
    "orphaned-job": "its job has ended, as the controller answered, and it has not",
    "zombie-context": "a dead or hung process keeps GPU memory",
    "leaked-memory": "memory is in use and nobody holds the GPU",
    "rogue-container": "it is in a container that nobody gave that GPU to",
    "suspicious": "nobody expects it, and one kind of evidence speaks against it",
    "cryptominer": "two or more independent kinds of evidence, or a whole miner command line",
    "unattributed": "nobody can be named for it, and nothing speaks against it",
    "unreadable": "not enough could be seen to judge it",
}


class PlanSubject(Fact, frozen=True, kw_only=True, omit_defaults=False):
    """What the plan is about, as a person names it."""

    pid: int | None
    identity: Identity | None
    gpus: tuple[str, ...]
    """``0``, ``0:1`` for a MIG device."""
    binary: str | None = None
    says: str | None = None
    argv: tuple[str, ...] = ()
    user: str | None = None
    place: str | None = None
    workload: str | None = None
    proof: Proof = "none"
    sm_percent: int | None = None
    memory_bytes: int | None = None
    started_at_ns: int | None = None


class PlannedStep(Fact, frozen=True, kw_only=True, omit_defaults=False):
    """A step with the command that does it; empty where only a person can."""

    step: Step
    command: str


class Plan(Fact, frozen=True, kw_only=True, omit_defaults=False):
    """What `gpuwarden respond` prints."""

    schema: str = PLAN_SCHEMA
    version: int = PLAN_VERSION
    tool_version: str = __version__
    node: str
    at_ns: int
    asked: str
    """The finding's id or the pid, as it was asked for."""
    finding: str | None
    rule: str | None
    title: str | None
    verdict: Verdict | None
    meaning: str
    subject: PlanSubject
    judged_again: str
    notes: tuple[str, ...]
    evidence: tuple[Evidence, ...]
    path: tuple[str, ...]
    unseen: tuple[str, ...]
    owner: str | None
    contact: str | None
    others: tuple[Other, ...]
    """Who else is on these GPUs or in its control group."""
    steps: tuple[PlannedStep, ...]
    """In the order in which they are to be done; those refused say why."""
    before_ending: tuple[str, ...]
    """What would start it again, and is to be disabled before a step that ends it."""
    verification: tuple[str, ...]
    """What is looked at after a step that ends something."""
    advice: tuple[Advice, ...]


def make_plan(
    found: Found,
    asked: str,
    actors: Iterable[tuple[StepName, Actor]],
    given: Confirmations,
    means: Means,
    *,
    flags: Sequence[str] = (),
    within_seconds: float,
) -> Plan:
    """The plan; ``flags`` are those that its commands need to mean the same. No errors."""
    target = found.target
    steps = tuple(_steps(found, asked, actors, given, means, flags=flags))
    row = gravest(target.rows)
    finding = found.finding
    evidence = row.evidence if row is not None and row.evidence else ()
    if not evidence and finding is not None and not found.judged_again:
        evidence = finding.evidence
    others = affected.others(found.report, target)
    return Plan(
        node=target.snapshot.node.hostname,
        at_ns=target.snapshot.taken_at_ns,
        asked=asked,
        finding=finding.id if finding is not None else None,
        rule=finding.rule if finding is not None else None,
        title=finding.title if finding is not None else None,
        verdict=target.verdict,
        meaning=MEANINGS[target.verdict] if target.verdict is not None else "there is no verdict",
        subject=_subject(found, row),
        judged_again=found.judged_again,
        notes=found.notes,
        evidence=tuple(one for one in evidence if one.source != DECISION_TREE),
        path=row.path if row is not None else (),
        unseen=row.unknown if row is not None else (),
        owner=target.owner,
        contact=target.contact,
        others=others,
        steps=steps,
        before_ending=tuple(map(advice.named, advice.autostarts(found))) if _ends(steps) else (),
        verification=_verification(steps, within_seconds),
        advice=advice.of(found, others),
    )


def _steps(
    found: Found,
    asked: str,
    actors: Iterable[tuple[StepName, Actor]],
    given: Confirmations,
    means: Means,
    *,
    flags: Sequence[str],
) -> Iterable[PlannedStep]:
    target = found.target
    for name, actor in actors:
        try:
            step = actor.step(target)
        except GpuwardenError as error:
            step = Step(
                name=name,
                power=NEEDS[name],
                title=name,
                changes="it is not known what it would do",
                refused=f"it could not be looked at: {error}",
            )
        if step is None:
            continue
        why = refusal(step, target, given, means)
        if not why and found.judged_again and name not in UNDOING:
            why = "it was judged again in this run: run the command anew to act on what is so now"
        step = replace(step, refused=why, undo=with_flags(step.undo, flags))
        command = ""
        if not why and step.automatic:
            words = ["gpuwarden", "respond", asked, *flags, "--do", name]
            if given.owner_confirmed:
                words.append("--owner-confirmed")
            command = shlex.join(words)
        yield PlannedStep(step=step, command=command)


def with_flags(undo: str, flags: Sequence[str]) -> str:
    """A command that undoes a step, with the flags that it needs to mean this machine's state."""
    found = _UNDO.fullmatch(undo)
    if found is None or not flags:
        return undo
    return f"{found[1]} {shlex.join(flags)} {found[2]}"


def _ends(steps: Sequence[PlannedStep]) -> bool:
    return any(one.step.name in ENDING and not one.step.refused for one in steps)


def _verification(steps: Sequence[PlannedStep], within_seconds: float) -> tuple[str, ...]:
    if not _ends(steps):
        return ()
    return (
        f"for {within_seconds:g} s after it: the process is gone, memory and utilisation of its "
        "GPU fall",
        "in the same time: nothing like it comes back; if something does, what started it",
    )


def _subject(found: Found, row: Row | None) -> PlanSubject:
    target = found.target
    node = Node(target.snapshot)
    process = target.process
    sure = [one for one in target.rows if one.memory_bytes is not None]
    busy = [one.sm_percent for one in target.rows if one.sm_percent is not None]
    pid = target.identity.pid if target.identity is not None else None
    if pid is None and row is not None:
        pid = row.pid
    if pid is None and found.finding is not None:
        pid = found.finding.subject.pid
    user = row.user if row is not None else None
    binary = row.binary if row is not None else None
    if process is not None and row is None:
        binary = process.exe.path if process.exe is not None else process.comm
        user = process.user
    return PlanSubject(
        pid=pid,
        identity=target.identity,
        gpus=tuple(dict.fromkeys(node.gpu_label(gpu.id) for gpu in target.gpus)),
        binary=binary,
        says=row.says if row is not None else None,
        argv=mask_arguments(process.argv or ()) if process is not None else (),
        user=user,
        place=row.place if row is not None else None,
        workload=row.workload if row is not None else None,
        proof=row.proof if row is not None else "none",
        sm_percent=max(busy) if busy else None,
        memory_bytes=sum(one.memory_bytes or 0 for one in sure) if sure else None,
        started_at_ns=process.started_at_ns if process is not None else None,
    )
