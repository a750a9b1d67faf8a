"""What `gpuwarden respond` does; it returns what is to be printed."""

from __future__ import annotations

import argparse

from msgspec import Struct
from msgspec.structs import replace

from gpuwarden import control
from gpuwarden.errors import GpuwardenError, UsageError
from gpuwarden.finding import Report, Row
from gpuwarden.host import Host
from gpuwarden.inputs import node_of
from gpuwarden.judge import judge
from gpuwarden.model import Fact, Snapshot
from gpuwarden.outputs.told import BLIND, CLEAR, FINDING, Call, Told
from gpuwarden.outputs.words import escape, json_text
from gpuwarden.policy import Policy
from gpuwarden.respond import denied_command, hung, plan_text
from gpuwarden.respond.doing import Confirmations, State, Tried, do
from gpuwarden.respond.flags import check_flags
from gpuwarden.respond.means import RealMeans
from gpuwarden.respond.order import UNDOING
from gpuwarden.respond.plan import Plan, make_plan, with_flags
from gpuwarden.respond.registry import actors
from gpuwarden.respond.settings import STATE_DIRECTORY, Settings
from gpuwarden.respond.step import Outcome, Target
from gpuwarden.respond.step_names import STEPS, StepName
from gpuwarden.respond.target import Finder, Found

OUTCOME_SCHEMA = "gpuwarden.response"
OUTCOME_VERSION = 1

CODES: dict[State, int] = {
    "done": CLEAR,
    "incomplete": FINDING,
    "refused": FINDING,
    "changed": FINDING,
    "failed": BLIND,
}


class Response(Fact, frozen=True, kw_only=True, omit_defaults=False):
    """What became of one step; what ``--do STEP --format json`` prints."""

    schema: str = OUTCOME_SCHEMA
    version: int = OUTCOME_VERSION
    step: StepName
    state: State
    why: str
    evidence: str
    outcome: Outcome | None


class _Judge:
    """Judges snapshots under one policy; keeps what it said of the newest."""

    def __init__(self, policy: Policy, policy_path: str | None) -> None:
        self._policy = policy
        self._path = policy_path
        self._newest: tuple[int, Report] | None = None

    def __call__(self, snapshot: Snapshot) -> Report:
        report = judge(snapshot, self._policy, self._path)
        self._newest = snapshot.taken_at_ns, report
        return report

    def rows(self, target: Target) -> tuple[Row, ...]:
        """The rows of everybody in a target's snapshot."""
        if self._newest is not None and self._newest[0] == target.snapshot.taken_at_ns:
            return self._newest[1].rows
        return self(target.snapshot).rows


class _Asked(Struct, frozen=True):
    """The command line in the words of the steps."""

    arguments: argparse.Namespace
    settings: Settings
    given: Confirmations
    means: RealMeans


def run(call: Call) -> Told:
    """The command.

    Errors: GpuwardenError.
    """
    arguments = call.arguments
    check_flags(arguments)
    settings = Settings(
        host=Host(arguments.root),
        state_directory=arguments.state,
        control_socket=control.socket_of(arguments.state),
        evidence_directory=arguments.evidence_dir,
        within_seconds=arguments.within,
        reason=arguments.reason,
        nvml_library=arguments.nvml_library,
        policy_path=call.policy_path,
    )
    given = Confirmations(owner_confirmed=arguments.owner_confirmed, yes=arguments.yes)
    if arguments.denied:
        return denied_command.listed(settings, as_json=arguments.format == "json")
    means = RealMeans(settings, call.policy, given)
    if arguments.allow is not None:
        return denied_command.allowed(arguments.allow, settings, means, given, ask=call.ask)
    judging = _Judge(call.policy, call.policy_path)
    finder = Finder(
        settings.host,
        call.policy,
        settings.state_directory,
        look=lambda: node_of(arguments, call.policy),
        judge=judging,
    )
    found = finder.find(arguments.what)
    complaint = _note_judged_again(found, means, arguments.what)
    is_hung, why = hung.shown(settings.host, found.target)
    if why:
        found = replace(found, notes=(*found.notes, why))
    given = replace(given, hung_confirmed=is_hung)
    asked = _Asked(arguments, settings, given, means)
    # Undoing what was done is right whatever became of the process since.
    if arguments.do is None or (found.judged_again and arguments.do not in UNDOING):
        told = _plan(found, asked, judging, call)
    else:
        told = _do(found, asked, judging, call)
    return replace(told, complaint=told.complaint + complaint)


def _note_judged_again(found: Found, means: RealMeans, asked: str) -> str:
    """A complaint when it could not be written down: a plan is shown all the same."""
    if not found.judged_again:
        return ""
    try:
        means.judged_again(found.target, asked, found.judged_again)
    except GpuwardenError as error:
        return f"gpuwarden: not in the journal: {escape(str(error))}\n"
    return ""


def _plan(found: Found, asked: _Asked, judging: _Judge, call: Call) -> Told:
    arguments = asked.arguments
    plan = make_plan(
        found,
        arguments.what,
        actors(asked.settings, judging.rows),
        asked.given,
        asked.means,
        flags=_flags(arguments),
        within_seconds=arguments.within,
    )
    text = (
        json_text(plan)
        if arguments.format == "json"
        else plan_text.render(plan, width=call.width, colour=call.colour)
    )
    complaint = ""
    if arguments.do is not None:
        complaint = f"gpuwarden: {arguments.do} was not done: {escape(found.judged_again)}\n"
    return Told(text, _code(plan), complaint)


def _code(plan: Plan) -> int:
    clear = plan.verdict in (None, "expected", "system") and not plan.judged_again
    return CLEAR if clear else FINDING


def _do(found: Found, asked: _Asked, judging: _Judge, call: Call) -> Told:
    name: StepName = asked.arguments.do
    actor = next((one for step, one in actors(asked.settings, judging.rows) if step == name), None)
    if actor is None:
        raise UsageError(f"--do {name}: not in this build; there are: {', '.join(STEPS)}")
    tried = do(actor, name, found.target, asked.given, asked.means, tell=call.tell, ask=call.ask)
    if tried.outcome is not None:
        undo = with_flags(tried.outcome.undo, _flags(asked.arguments))
        tried = replace(tried, outcome=replace(tried.outcome, undo=undo))
    if asked.arguments.format == "json":
        return Told(json_text(_response(name, tried)), CODES[tried.state])
    text = plan_text.render_tried(name, tried, width=call.width, colour=call.colour)
    return Told(text, CODES[tried.state])


def _response(name: StepName, tried: Tried) -> Response:
    return Response(
        step=name,
        state=tried.state,
        why=tried.why,
        evidence=tried.archive,
        outcome=tried.outcome,
    )


def _flags(arguments: argparse.Namespace) -> list[str]:
    """The flags that a printed command needs to mean the same."""
    words: list[str] = []
    for flag, value, usual in (
        ("--root", arguments.root, "/"),
        ("--policy", arguments.policy, None),
        ("--nvml-library", arguments.nvml_library, None),
        ("--state", arguments.state, STATE_DIRECTORY),
        ("--evidence-dir", arguments.evidence_dir, None),
    ):
        if value != usual:
            words += [flag, value]
    return words
