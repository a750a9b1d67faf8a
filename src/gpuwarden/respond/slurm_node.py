"""A step of a plan: this node is drained in Slurm; jobs that run on it go on.

Where the controller does not answer, its commands are not here or it refuses, the command is
printed, and nothing is said about jobs. Source: scontrol(1).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from gpuwarden.errors import GpuwardenError, Unavailable
from gpuwarden.expected.slurm import jobs
from gpuwarden.expected.slurm.controller import Reached, reach
from gpuwarden.expected.slurm.draining import drain, node_state, reason_argument
from gpuwarden.expected.slurm.site import Site
from gpuwarden.host import Host
from gpuwarden.respond.slurm_words import (
    ACT_SECONDS,
    COMMAND_SECONDS,
    LOOK_SECONDS,
    SHOWN,
    command_line,
    shortened,
)
from gpuwarden.respond.step import Outcome, Step, Target, Tell

_OURS = "gpuwarden: "
"""How the reason begins when this program drained the node."""


class DrainNode:
    """Drains this node, so that no new job starts on it."""

    def __init__(self, host: Host | None = None) -> None:
        self._host = host or Host()

    def step(self, target: Target) -> Step | None:
        """What draining means for who runs here; None where there is no Slurm."""
        found = reach(self._host, command_seconds=COMMAND_SECONDS, total_seconds=LOOK_SECONDS)
        if found is None:
            return None
        node = found.node or "NODE"
        order = _drain_command(found.site, node, target)
        step = partial(
            Step, name="drain-node", power="deny", title=f"drain {node} in Slurm", commands=(order,)
        )
        unseen = partial(step, undo=_resume(found.site, node), automatic=False)
        unsure = _unsure(found)
        if unsure:
            return unseen(changes=f"no new job starts here; who runs here is unknown: {unsure}")
        try:
            before = node_state(found.controller, node)
            running = _running(found, node)
        except GpuwardenError as error:
            return unseen(changes=f"no new job starts here; its state is unknown: {error}")
        if before.is_drained:
            return step(
                commands=(),
                changes="nothing",
                undo=_undo_of(found.site, node, before.reason),
                refused=f"it is drained already: {before.reason or 'no reason given'}",
            )
        return step(
            changes="no new job starts here; jobs that run here go on",
            hurts=_who_waits(running),
            undo=_resume(found.site, node, down=before.is_down),
        )

    def do(self, target: Target, tell: Tell) -> Outcome:
        """Drains the node and looks whether it is.

        Errors: Unavailable when there is no Slurm here, or nobody answers.
        """
        found = reach(self._host, command_seconds=COMMAND_SECONDS, total_seconds=ACT_SECONDS)
        if found is None:
            raise Unavailable("there is no Slurm here")
        unsure = _unsure(found)
        node = found.node or "NODE"
        by_hand = _drain_command(found.site, node, target)
        if unsure:
            raise Unavailable(f"{unsure}; nothing was drained", remedy=by_hand)
        came = drain(found.controller, node, _reason(target))
        undo = _resume(found.site, node, down=came.was_down)
        if came.state == "done":
            lines = (f"{node} is drained; jobs that run there go on",)
            return Outcome(step="drain-node", done=True, lines=lines, undo=undo)
        if came.state == "already":
            said = came.why or "no reason given"
            theirs = _undo_of(found.site, node, came.why)
            lines = (f"{node} was drained already ({said}); nothing was changed",)
            return Outcome(step="drain-node", done=True, lines=lines, undo=theirs)
        if came.state == "unseen":
            lines = (f"whether {node} is drained could not be seen: {came.why}",)
            return Outcome(step="drain-node", done=True, lines=lines, undo=undo, complete=False)
        return Outcome(
            step="drain-node",
            done=False,
            lines=(f"{node} was not drained: {came.why}", f"by hand: {by_hand}"),
        )


def _unsure(found: Reached) -> str:
    if not found.answers or found.node is None:
        return found.why or "no controller answers"
    if found.site.other_nodes:
        names = ", ".join((found.node, *found.site.other_nodes))
        return f"this host is several nodes of the cluster ({names})"
    return ""


def _running(found: Reached, node: str) -> list[jobs.Job]:
    output = found.controller.ask("squeue", "--all", "-w", node, "-o", jobs.SQUEUE_FORMAT)
    jobs.refuse_failure(output, "squeue")
    return [job for job in jobs.parse_squeue(output.stdout) if job.is_running]


def _who_waits(running: Sequence[jobs.Job]) -> tuple[str, ...]:
    by_user: dict[str, list[str]] = {}
    for job in running:
        by_user.setdefault(job.user or f"uid {job.uid}", []).append(job.id)
    lines = [
        f"{user}: {'job' if len(ids) == 1 else 'jobs'} {shortened(ids)} "
        f"{'goes' if len(ids) == 1 else 'go'} on; nothing new starts here"
        for user, ids in sorted(by_user.items())
    ]
    more = len(lines) - SHOWN
    return (*lines[:SHOWN], *((f"and {more} more users",) if more > 0 else ()))


def _reason(target: Target) -> str:
    pid = "" if target.process is None else f", pid {target.process.pid}"
    finding = "" if target.finding_id is None else f", finding {target.finding_id}"
    return f"gpuwarden: {target.verdict or 'asked for'}{pid}{finding}"


def _drain_command(site: Site, node: str, target: Target) -> str:
    words = (f"nodename={node}", "state=drain", reason_argument(_reason(target)))
    return command_line(site, "scontrol", "update", *words)


def _resume(site: Site, node: str, *, down: bool = False) -> str:
    # "resume" would also bring back a node that was down before; "undrain" leaves that alone.
    state = "undrain" if down else "resume"
    return command_line(site, "scontrol", "update", f"nodename={node}", f"state={state}")


def _undo_of(site: Site, node: str, reason: str) -> str:
    """What undoes a drain that stands already: our own by its command, nobody else's."""
    if reason.startswith(_OURS):
        return _resume(site, node)
    return "none: somebody else drained it"
