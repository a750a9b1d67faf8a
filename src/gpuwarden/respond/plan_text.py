"""A plan, and what became of a step, as text for somebody who was woken up for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpuwarden.finding import VERDICT_SEVERITY, Evidence
from gpuwarden.outputs.sheet import Sheet, cut
from gpuwarden.outputs.words import age, escape, memory, moment
from gpuwarden.respond.affected import Other
from gpuwarden.respond.doing import Tried
from gpuwarden.respond.plan import Plan, PlannedStep
from gpuwarden.respond.step_names import StepName

NARROWEST = 60
EVIDENCE_SHOWN = 10
OTHERS_SHOWN = 8
ARGV_SHOWN = 200
COMMANDS = ("gpuwarden ", "scontrol ", "kubectl ", "env ")
"""How undoing by a command begins."""
STYLES = {"info": "green", "warning": "yellow", "error": "red", "critical": "bold red"}


def render(plan: Plan, *, width: int, colour: bool) -> str:
    """The whole plan; lines of at most ``width`` cells, but for commands."""
    sheet = Sheet(max(width, NARROWEST), colour=colour)
    _head(sheet, plan)
    _why(sheet, plan)
    _who_else(sheet, plan)
    _steps(sheet, plan)
    _not_done(sheet, plan)
    _advice(sheet, plan)
    return sheet.text()


def _head(sheet: Sheet, plan: Plan) -> None:
    subject = plan.subject
    verdict = plan.verdict
    style = STYLES[VERDICT_SEVERITY[verdict]] if verdict is not None else "bold"
    unnamed = "no GPU" if subject.pid is None else "the GPU"
    gpus = f"GPU {', '.join(subject.gpus)}" if subject.gpus else unnamed
    who = f"pid {subject.pid} on {gpus}" if subject.pid is not None else gpus
    lead = f"{verdict.upper() if verdict is not None else 'NO VERDICT'} "
    sheet.lead(lead, f"{who}, node {escape(plan.node)}, seen {moment(plan.at_ns)}", style=style)
    if plan.judged_again:
        sheet.add(
            f"Judged again: {plan.judged_again}. Nothing is done to it in this run; what follows "
            "is about what is there now.",
            indent=2,
            style="bold",
        )
    facts = list(_facts(plan))
    if facts:
        sheet.add(", ".join(facts), indent=2, hang=2)
    if subject.argv:
        sheet.add(f"$ {cut(' '.join(subject.argv), ARGV_SHOWN)}", indent=2, hang=2)
    sheet.add(f"{plan.verdict or 'no verdict'}: {plan.meaning}.", indent=2, hang=2)
    if plan.finding is not None:
        sheet.add(f"finding {plan.finding}, {plan.rule}", indent=2, style="dim")
    for note in plan.notes:
        sheet.add(f"Note: {note}.", indent=2, hang=2)
    sheet.blank()


def _facts(plan: Plan) -> Iterator[str]:
    subject = plan.subject
    if subject.binary:
        says = f' (calls itself "{cut(subject.says, 40)}")' if subject.says else ""
        yield subject.binary + says
    if subject.user:
        yield f"user {subject.user}"
    if subject.place:
        yield subject.place
    if subject.workload:
        yield f"{subject.workload} ({subject.proof})"
    if subject.sm_percent is not None:
        yield f"SM {subject.sm_percent}%"
    if subject.memory_bytes is not None:
        yield memory(subject.memory_bytes)
    if subject.started_at_ns is not None:
        yield f"runs for {age(subject.started_at_ns, plan.at_ns)}"


def _why(sheet: Sheet, plan: Plan) -> None:
    if plan.evidence or plan.path:
        sheet.add("Why", style="bold")
    for item in _sorted(plan.evidence)[:EVIDENCE_SHOWN]:
        kind = f"{item.kind}{' (weak)' if item.strength == 'weak' else ''}: " if item.kind else ""
        text = f"{item.text}  [{item.source}]"
        sheet.lead(f"- {kind}", escape(text), indent=2, hang=2, style="bold")
    if len(plan.evidence) > EVIDENCE_SHOWN:
        sheet.add(f"- and {len(plan.evidence) - EVIDENCE_SHOWN} more (--format json)", indent=2)
    if plan.path and not plan.evidence:
        sheet.add(" → ".join(plan.path), indent=2, hang=2)
    if plan.unseen:
        sheet.add(f"Not seen: {'; '.join(plan.unseen)}", indent=2, hang=2, style="yellow")
    if plan.evidence or plan.path or plan.unseen:
        sheet.blank()


def _sorted(evidence: Sequence[Evidence]) -> list[Evidence]:
    order = {"complete": 0, "strong": 1, "weak": 2, "fact": 3}
    return sorted(evidence, key=lambda one: order[one.strength])


def _who_else(sheet: Sheet, plan: Plan) -> None:
    for where, title in (
        ("gpu", "Also on its GPU"),
        ("group", "Also in its control group, and touched by freeze and deny"),
    ):
        found = [one for one in plan.others if where in one.where]
        if not found:
            continue
        sheet.add(title, style="bold")
        for one in found[:OTHERS_SHOWN]:
            sheet.add(_other(one), indent=2, hang=2)
        if len(found) > OTHERS_SHOWN:
            sheet.add(f"and {len(found) - OTHERS_SHOWN} more (--format json)", indent=2)
        sheet.blank()


def _other(one: Other) -> str:
    return f"- {one.text}"


# ---------------------------------------------------------------- steps


def _steps(sheet: Sheet, plan: Plan) -> None:
    open_ones = [one for one in plan.steps if not one.step.refused]
    if not open_ones:
        sheet.add("Nothing is to be done from here.", style="bold")
        sheet.blank()
        return
    sheet.add("What can be done, in this order", style="bold")
    sheet.add("Nothing was done yet. Each command asks before it acts.", indent=2)
    last = max((i for i, one in enumerate(open_ones) if _ends(one)), default=-1)
    first = next((i for i, one in enumerate(open_ones) if _ends(one)), -1)
    for number, one in enumerate(open_ones, start=1):
        _step(sheet, number, one)
        if number - 1 == first and plan.before_ending:
            entries = "; ".join(plan.before_ending[:OTHERS_SHOWN])
            text = f"before it: keep a copy of what starts it again, and disable it: {entries}"
            sheet.add(text, indent=5, hang=2, style="bold")
        if number - 1 == last:
            for line in plan.verification:
                sheet.add(f"looked at: {line}", indent=5, hang=2)
    sheet.blank()


def _ends(one: PlannedStep) -> bool:
    return one.step.power == "kill"


def _step(sheet: Sheet, number: int, planned: PlannedStep) -> None:
    step = planned.step
    sheet.lead(f"{number:>2}. {step.name}: ", escape(step.title), indent=1, hang=4, style="bold")
    sheet.add(f"changes: {step.changes}", indent=5, hang=2)
    hurts = step.hurts or ("nobody else",)
    sheet.add(f"touches: {hurts[0]}", indent=5, hang=2)
    for line in hurts[1:]:
        sheet.add(line, indent=7, hang=2)
    if step.undo:
        _undo(sheet, step.undo, indent=5)
    if planned.command:
        _whole(sheet, f"$ {planned.command}", indent=5)
    else:
        for command in step.commands:
            _whole(sheet, f"by hand: {command}", indent=5)


def _undo(sheet: Sheet, undo: str, *, indent: int) -> None:
    if undo.startswith(COMMANDS):
        _whole(sheet, f"undo: {undo}", indent=indent)
    else:
        sheet.add(f"undo: {undo}", indent=indent, hang=2)


def _whole(sheet: Sheet, line: str, *, indent: int) -> None:
    """A line with a command in it: not wrapped, so that it can be copied."""
    sheet.columns([[" " * indent + line]], [0], right=frozenset(), styles=["bold"])


def _not_done(sheet: Sheet, plan: Plan) -> None:
    refused: dict[str, list[StepName]] = {}
    for one in plan.steps:
        if one.step.refused:
            refused.setdefault(one.step.refused, []).append(one.step.name)
    if not refused:
        return
    sheet.add("Not done", style="bold")
    for why, names in refused.items():
        sheet.add(f"- {', '.join(names)}: {why}", indent=2, hang=2)
    sheet.blank()


def _advice(sheet: Sheet, plan: Plan) -> None:
    if not plan.advice:
        return
    sheet.add("By you", style="bold")
    for number, part in enumerate(plan.advice, start=1):
        sheet.lead(f"{number:>2}. {part.title} ", "", indent=1, hang=4, style="bold")
        for line in part.lines:
            sheet.add(f"- {line}", indent=5, hang=2)
    sheet.blank()


# ---------------------------------------------------------------- one step


def render_tried(name: StepName, tried: Tried, *, width: int, colour: bool) -> str:
    """What became of one step."""
    sheet = Sheet(max(width, NARROWEST), colour=colour)
    words = {
        "done": ("DONE ", "green"),
        "incomplete": ("DONE, BUT ", "yellow"),
        "refused": ("REFUSED ", "red"),
        "failed": ("FAILED ", "red"),
        "changed": ("NOT DONE ", "red"),
    }
    lead, style = words[tried.state]
    sheet.lead(lead, f"{name}{f': {tried.why}' if tried.why else ''}", style=style)
    if tried.archive:
        sheet.add(f"evidence: {tried.archive}", indent=2, hang=2)
    if tried.outcome is not None:
        for line in tried.outcome.lines:
            sheet.add(line, indent=2, hang=2)
        if tried.outcome.undo:
            _undo(sheet, tried.outcome.undo, indent=2)
    return sheet.text()
