"""A step of a plan: a user's pending jobs are held in Slurm; what runs is not touched.

Where the controller does not answer, its commands are not here or it refuses, what would have been
done is printed, and nothing is said about jobs. Sources: scontrol(1), squeue(1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from gpuwarden.errors import GpuwardenError, TimedOut, Unavailable
from gpuwarden.expected.slurm import jobs
from gpuwarden.expected.slurm.answers import QUEUE_FORMAT, QueuedJob, parse_queue
from gpuwarden.expected.slurm.controller import Controller, Reached, reach, refusal_of
from gpuwarden.expected.slurm.site import Site
from gpuwarden.host import Host
from gpuwarden.node import Node
from gpuwarden.respond.slurm_words import (
    ACT_SECONDS,
    COMMAND_SECONDS,
    LOOK_SECONDS,
    SHOWN,
    command_line,
    count,
    shortened,
)
from gpuwarden.respond.step import Outcome, Step, Target, Tell
from gpuwarden.rules.membership import slurm_claim

JOB_LIMIT = 500
"""Jobs that are held one by one in one go; what is beyond is said."""
_hold_step = partial(
    Step,
    name="hold-jobs",
    power="deny",
    changes="none of that user's pending jobs starts",
    undo="scontrol release of each job that was held",
)
_TOLD_APART = "a controller that does not answer says nothing about jobs"


class _User(NamedTuple):
    """Whose jobs: by a uid that the kernel keeps; ``uid`` None with the reason in ``why``."""

    uid: int | None
    name: str
    why: str


def user_of(target: Target) -> _User:
    """The proven user of the target's job, else the owner of its process.

    A process in a container runs as whom its runtime was told, which proves nobody.
    """
    process = target.process
    if process is None:
        return _User(None, "", "the finding is about no process")
    node = Node(target.snapshot)
    claim = slurm_claim(node, process)
    if claim is not None and claim.proof == "proven" and claim.workload is not None:
        job = claim.workload
        if job.uid:
            return _User(job.uid, job.user or f"uid {job.uid}", f"the user of {job.name}")
    contained = process.cgroup is not None and process.cgroup.container_id is not None
    if contained or node.container_of(process) is not None:
        return _User(None, "", "it is in a container, where a uid proves nobody")
    if process.uid is None:
        return _User(None, "", "who owns the process could not be read")
    if process.uid == 0:
        return _User(None, "", "it runs as root")
    return _User(process.uid, process.user or f"uid {process.uid}", "the owner of the process")


class HoldJobs:
    """Holds the pending jobs of one user, so that none of them starts."""

    def __init__(self, host: Host | None = None) -> None:
        self._host = host or Host()

    def step(self, target: Target) -> Step | None:
        """The jobs as the queue has them now; None where there is no Slurm or no process."""
        if target.process is None:
            return None
        found = reach(self._host, command_seconds=COMMAND_SECONDS, total_seconds=LOOK_SECONDS)
        if found is None:
            return None
        user = user_of(target)
        if user.uid is None:
            return _hold_step(
                title="hold the pending jobs of its user", refused=f"whose: {user.why}"
            )
        queue, why = _queue_or_why(found, user.uid)
        if queue is None:
            return _hold_step(
                title=f"hold the pending jobs of {user.name} ({user.why})",
                changes=f"none of them starts; which there are is unknown: {why}; {_TOLD_APART}",
                commands=_by_hand(found.site, user.uid),
                automatic=False,
            )
        wanted = [job for job in queue if job.is_pending and job.hold != "admin"]
        return _hold_step(
            title=f"hold {count(len(wanted), 'pending job')} of {user.name} ({user.why})",
            changes=_changes(queue, wanted),
            hurts=(f"{user.name}: not started until released: {_jobs(wanted)}",) if wanted else (),
            undo=_release(found.site, wanted),
            commands=tuple(command_line(found.site, "scontrol", "hold", job.id) for job in wanted),
            refused="" if wanted else _nothing(queue, user.name),
        )

    def do(self, target: Target, tell: Tell) -> Outcome:
        """Holds job by job and looks at the queue again.

        Errors: Unavailable when there is no Slurm here, or nobody answers.
        """
        found = reach(self._host, command_seconds=COMMAND_SECONDS, total_seconds=ACT_SECONDS)
        user = user_of(target)
        if found is None or user.uid is None:
            raise Unavailable(user.why if found is not None else "there is no Slurm here")
        queue, why = _queue_or_why(found, user.uid)
        if queue is None:
            raise Unavailable(
                f"the jobs of {user.name} are unknown: {why}; nothing was held",
                remedy="; ".join(_by_hand(found.site, user.uid)),
            )
        wanted = [job for job in queue if job.is_pending and job.hold != "admin"]
        if not wanted:
            return Outcome(step="hold-jobs", done=False, lines=(_nothing(queue, user.name),))
        if len(wanted) > JOB_LIMIT:
            tell(f"{len(wanted)} jobs wait; the first {JOB_LIMIT} are held now, the rest next time")
        tried, refusals = _hold(found.controller, wanted[:JOB_LIMIT])
        return self._outcome(found, user, wanted, tried, refusals)

    def _outcome(
        self,
        found: Reached,
        user: _User,
        wanted: Sequence[QueuedJob],
        tried: Sequence[QueuedJob],
        refusals: list[str],
    ) -> Outcome:
        """What the queue says after the orders; what cannot be seen is not called held."""
        lines = list(refusals[:SHOWN])
        left = [job for job in wanted if job not in tried]
        if left:
            lines.append(f"not held: {_jobs(left)}")
        now, why = _queue_or_why(found, user.uid or 0)
        if now is None:
            lines.append(f"not seen, whether it is held: {_jobs(tried)}: {why}")
            return Outcome(
                step="hold-jobs",
                done=bool(tried),
                lines=tuple(lines),
                undo=_release(found.site, tried),
                complete=False,
            )
        by_id = {job.id: job for job in now}
        held = [job for job in tried if job.id in by_id and by_id[job.id].hold == "admin"]
        started = [job for job in held if not by_id[job.id].is_pending]
        waiting = [job for job in held if job not in started]
        if waiting:
            lines.insert(0, f"held: {_jobs(waiting)} of {user.name}")
        if started:
            lines.append(f"started before the order came, and running on: {_jobs(started)}")
        gone = [job for job in tried if job.id not in by_id]
        if gone:
            lines.append(f"no longer in the queue: {_jobs(gone)}")
        loose = [job for job in now if job.is_pending and job.hold != "admin"]
        if loose:
            lines.append(f"still free to start: {_jobs(loose)}")
        return Outcome(
            step="hold-jobs",
            done=bool(waiting),
            lines=tuple(lines),
            undo=_release(found.site, held),
            complete=not loose and not left,
        )


# ------------------------------------------------------------------ the queue


def _queue_or_why(found: Reached, uid: int) -> tuple[list[QueuedJob] | None, str]:
    """A user's jobs, or None with why they are unknown."""
    if not found.answers:
        return None, found.why
    try:
        output = found.controller.ask("squeue", "--all", f"--user={uid}", "-o", QUEUE_FORMAT)
        jobs.refuse_failure(output, "squeue")
        queue = parse_queue(output.stdout)
    except GpuwardenError as error:
        return None, str(error)
    return [job for job in queue if job.uid == uid], ""


def _hold(controller: Controller, wanted: Iterable[QueuedJob]) -> tuple[list[QueuedJob], list[str]]:
    """Those that the order was given for, and what was complained of."""
    tried: list[QueuedJob] = []
    refusals: list[str] = []
    for job in wanted:
        try:
            refused = refusal_of(controller.ask("scontrol", "hold", job.id), "scontrol hold")
        except TimedOut as error:
            # The order may have arrived all the same: it is looked for, and undone with the others.
            tried.append(job)
            refusals.append(f"job {job.id}: {error}")
            break
        except GpuwardenError as error:
            refusals.append(f"job {job.id}: {error}")
            break
        if refused:
            refusals.append(f"job {job.id}: {refused}")
        else:
            tried.append(job)
    return tried, refusals


def _changes(queue: Sequence[QueuedJob], wanted: Sequence[QueuedJob]) -> str:
    running = [job for job in queue if not job.is_pending]
    held = [job for job in queue if job.is_pending and job not in wanted]
    parts = ["none of them starts before somebody with Slurm's rights releases it"]
    if running:
        parts.append(f"of the same user, running on untouched: {_jobs(running)}")
    if held:
        parts.append(f"held by somebody else already: {_jobs(held)}")
    parts.append("what the user submits later is not held")
    return "; ".join(parts)


def _nothing(queue: Sequence[QueuedJob], name: str) -> str:
    waiting = [job for job in queue if job.is_pending]
    if waiting:
        return f"all pending jobs of {name} are held already: {_jobs(waiting)}"
    return f"{name} has no pending jobs now"


def _by_hand(site: Site, uid: int) -> tuple[str, ...]:
    listing = ("squeue", "--all", f"--user={uid}", "--states=PENDING", "-o", "%A %r")
    return (command_line(site, *listing), command_line(site, "scontrol", "hold", "JOBID"))


def _release(site: Site, held: Sequence[QueuedJob]) -> str:
    """The command that gives each job back the hold that it had before: none, or its user's own."""
    freed = ",".join(job.id for job in held if job.hold == "none")
    given_back = ",".join(job.id for job in held if job.hold == "user")
    lines = []
    if freed:
        lines.append(command_line(site, "scontrol", "release", freed))
    if given_back:
        lines.append(command_line(site, "scontrol", "uhold", given_back))
    return " && ".join(lines)


def _jobs(some: Sequence[QueuedJob]) -> str:
    return f"{'job' if len(some) == 1 else 'jobs'} {shortened([job.id for job in some])}"
