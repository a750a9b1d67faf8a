"""`gpuwarden harden slurm --check`: what prolog and epilog call, between two jobs on a GPU.

It looks, waits a little for what is ending, looks again, and says what stays. It kills nothing.
Whatever hangs, it is done before its deadline, and what was not seen by then is unknown.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from types import FrameType

from msgspec import Struct, field

from gpuwarden.errors import GpuwardenError, Malformed, UsageError
from gpuwarden.expected.slurm import jobs
from gpuwarden.expected.slurm.controller import locate, reach
from gpuwarden.expected.slurm.draining import drain
from gpuwarden.expected.slurm.gres import Gres, GresLayout, gpu_references, parse_indices
from gpuwarden.expected.slurm.site import gres_layout
from gpuwarden.harden.slurm_left import Leftover, Look, OwnGpus, Phase, look
from gpuwarden.host import Host
from gpuwarden.judge import judge
from gpuwarden.model import Gpu, Snapshot
from gpuwarden.outputs.told import BLIND, CLEAR, FINDING, Told
from gpuwarden.outputs.words import escape
from gpuwarden.policy import Policy
from gpuwarden.scan import ScanOptions, take_snapshot

DEFAULT_SECONDS = 24
SETTLE_SECONDS = {"prolog": 3.0, "epilog": 5.0}
"""How long what is ending is waited for; an epilog comes right after the job's last process."""
PAUSE_SECONDS = 1.0
ENOUGH_LOOKS = 4
"""Where processes come and go, so that no two looks see the same."""
DRAIN_SECONDS = 6.0
COMMAND_SECONDS = 2.0
LINES = 16
LINE_LIMIT = 500
HINT_LIMIT = 4096


class _Late(BaseException):
    """The deadline. No Exception: what runs a sensor must not take it for the sensor's."""


class Found(Struct):
    """What several looks came to; what was seen at one look alone is not called left."""

    left: list[Leftover] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def run(arguments: argparse.Namespace, policy: Policy, policy_path: str | None) -> Told:
    """Looks at one job's GPUs; 0 they are empty, 1 something is left, 2 that is not known.

    Errors: UsageError.
    """
    phase: Phase = arguments.check
    job = arguments.job or ""
    seconds = arguments.deadline or DEFAULT_SECONDS
    ends_at = time.monotonic() + seconds
    if not jobs.is_job_id(job) or int(job) == 0:
        raise UsageError("--job: the number of a job, as in SLURM_JOB_ID")
    job = str(int(job))
    host = Host()
    found = Found()
    own = OwnGpus()
    look_ends_at = ends_at - (DRAIN_SECONDS if arguments.drain and seconds > DRAIN_SECONDS else 0)
    try:
        with _deadline(look_ends_at):
            layout = _layout(host)
            own = of_hint(arguments.gpus or "", layout, ())

            def once() -> Look:
                nonlocal own
                snapshot = take_snapshot(host, ScanOptions(nvml_library=arguments.nvml_library))
                report = judge(snapshot, policy, policy_path)
                hinted = of_hint(arguments.gpus or "", layout, snapshot.gpus)
                own = with_controllers_word(hinted, snapshot, job)
                return look(snapshot, report.rows, phase=phase, job=job, own=own)

            settle(once, found, settle_seconds=SETTLE_SECONDS[phase], ends_at=look_ends_at)
    except _Late:
        found.unknown.append(f"not done within {seconds} s")
    except GpuwardenError as error:
        found.unknown.append(str(error))
    drained = _drained(host, job, found, ends_at) if arguments.drain and found.left else ""
    return _told(phase, job, own, found, drained)


def settle(
    once: Callable[[], Look], found: Found, *, settle_seconds: float, ends_at: float
) -> None:
    """Looks until nothing is left or the time is up; fills ``found`` with what stays.

    What was there at two looks is left. What came and went between them is unknown.
    """
    begun = time.monotonic()
    before: set[object] = set()
    for number in count(1):
        at = time.monotonic()
        seen = once()
        now = time.monotonic()
        stays = [one for one in seen.left if one.key in before]
        passing = [one for one in seen.left if one.key not in before]
        found.left = stays
        found.unknown = [*seen.unknown, *(f"seen once: {one.text}" for one in passing)]
        before = {one.key for one in seen.left}
        if not seen.left or (now - begun >= settle_seconds and stays and not passing):
            return
        if number >= ENOUGH_LOOKS and now - begun >= 2 * settle_seconds:
            return
        if now + PAUSE_SECONDS + 1.5 * (now - at) > ends_at:
            return
        time.sleep(PAUSE_SECONDS)


@contextmanager
def _deadline(ends_at: float) -> Iterator[None]:
    """Raises _Late in the middle of whatever is being done then."""

    def late(_signal: int, _frame: FrameType | None) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, max(ends_at - time.monotonic(), 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ------------------------------------------------------------------ which GPUs


def _layout(host: Host) -> GresLayout:
    """gres.conf's part for this node; empty where it cannot be read."""
    slurm = locate(host, command_seconds=COMMAND_SECONDS, total_seconds=COMMAND_SECONDS)
    if slurm is None or slurm.node is None:
        return GresLayout()
    try:
        return gres_layout(host, slurm.site, slurm.node)
    except GpuwardenError:
        return GresLayout()


def of_hint(text: str, layout: GresLayout, gpus: Sequence[Gpu]) -> OwnGpus:
    """The GPUs that SLURM_JOB_GPUS names: places in gres.conf (observed with 22.05), not minors."""
    if not text:
        return OwnGpus()
    try:
        indices = parse_indices(text[:HINT_LIMIT])
    except Malformed:
        return OwnGpus(("all",), "SLURM_JOB_GPUS is no list of numbers, so every GPU is looked at")
    asked = (Gres("gpu", indices=indices),)
    references, _, unsure = gpu_references(asked, layout, (), gpus)
    return OwnGpus(references, unsure)


def with_controllers_word(hinted: OwnGpus, snapshot: Snapshot, job: str) -> OwnGpus:
    """Those, and what the controller says; of a job that is completing it names none any more."""
    given = next(
        (
            workload.gpus
            for workload in snapshot.workloads
            if workload.source == "slurm" and workload.job_id == job
        ),
        (),
    )
    if not given or set(given) == set(hinted.references):
        return hinted
    both = tuple(dict.fromkeys((*hinted.references, *given)))
    if not hinted.references:
        return OwnGpus(both, hinted.unsure)
    said = f"SLURM_JOB_GPUS says {hinted}, the controller {', '.join(given)}"
    return OwnGpus(both, said)


# ------------------------------------------------------------------ what is done and said


def _drained(host: Host, job: str, found: Found, ends_at: float) -> str:
    """Drains the node with a reason of ours; what came of it. The exit code does the rest."""
    seconds = max(ends_at - time.monotonic() - 0.5, 0.5)
    try:
        with _deadline(ends_at):
            slurm = reach(host, command_seconds=seconds, total_seconds=seconds)
            if slurm is None or slurm.node is None or not slurm.answers:
                why = slurm.why if slurm is not None else "no node of Slurm is here"
                return f"not drained by scontrol: {why}"
            if slurm.site.other_nodes:
                return "not drained by scontrol: this host is several nodes of the cluster"
            came = drain(slurm.controller, slurm.node, reason(job, found.left))
    except _Late:
        return "not drained by scontrol: no time was left"
    except GpuwardenError as error:
        return f"not drained by scontrol: {error}"
    words = {"done": "drained", "already": "drained already", "unseen": "drained, not seen to be"}
    told = words.get(came.state, "not drained by scontrol")
    return f"{slurm.node} {told}" + (f": {came.why}" if came.why else "")


def reason(job: str, left: Sequence[Leftover]) -> str:
    """For `scontrol`: how many are left and of which verdicts, nothing that they say themselves."""
    verdicts = ", ".join(sorted({one.verdict for one in left}))
    pids = ", ".join(str(pid) for pid in sorted({one.key[0] or 0 for one in left}) if pid)
    who = f", pid {pids[:60]}" if pids else ""
    return f"gpuwarden: GPUs not empty at job {job}: {len(left)} left ({verdicts}){who}"


def _told(phase: Phase, job: str, own: OwnGpus, found: Found, drained: str) -> Told:
    head = f"gpuwarden {phase}: job {job}"
    lines = [f"{head}: left: {one.text}" for one in found.left]
    lines += [f"{head}: unknown: {one}" for one in found.unknown]
    if len(lines) > LINES:
        lines = [*lines[:LINES], f"{head}: and {len(lines) - LINES} more"]
    if own.unsure:
        lines.append(f"{head}: {own.unsure}")
    if not found.left and not found.unknown:
        lines.insert(0, f"{head}: {own}: nothing is left")
    if drained:
        lines.append(f"{head}: {drained}")
    text = "".join(escape(line)[:LINE_LIMIT] + "\n" for line in lines)
    return Told(text, FINDING if found.left else BLIND if found.unknown else CLEAR)
