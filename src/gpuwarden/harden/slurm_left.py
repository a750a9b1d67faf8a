"""What is on a job's GPUs that should not be: pure, from one look at the node.

A prolog asks before the job begins, an epilog after it. What Slurm's controller would have to
confirm and did not is unknown: neither left nor clean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from gpuwarden.finding import Row, Verdict
from gpuwarden.model import Process, Snapshot
from gpuwarden.node import Node
from gpuwarden.outputs.words import memory
from gpuwarden.rules.membership import JOB_VARIABLES, slurm_claim

Phase = Literal["prolog", "epilog"]

BELONGS: frozenset[Verdict] = frozenset({"expected", "system"})
WITHOUT_CONTROLLER: frozenset[Verdict] = frozenset(
    {"cryptominer", "suspicious", "rogue-container", "zombie-context", "leaked-memory"}
)
"""Verdicts that need no word of Slurm's."""
SENSORS = ("processes", "holders", "nvml")
"""Those that see who is on a GPU; where one failed, an empty GPU is not known to be empty."""


class OwnGpus(NamedTuple):
    """The GPUs of the job, as Slurm's references; ``unsure`` says why they may be others."""

    references: tuple[str, ...] = ()
    unsure: str = ""

    @property
    def minors(self) -> frozenset[int]:
        """Numbers of /dev/nvidiaN, for nodes of GPUs that no driver tells of."""
        return frozenset(
            int(number)
            for kind, _, number in (reference.partition(":") for reference in self.references)
            if kind == "minor" and number.isdecimal() and len(number) < 10
        )

    def __str__(self) -> str:
        return ", ".join(self.references) or "no GPU"


class Leftover(NamedTuple):
    """One process (or a GPU's memory) that is there and should not be."""

    key: tuple[int | None, int | None, str]
    """pid, start time in ticks, GPU: what makes it the same at the next look."""
    text: str
    verdict: Verdict


class Look(NamedTuple):
    """One look at the node, held against one job."""

    left: tuple[Leftover, ...] = ()
    unknown: tuple[str, ...] = ()


def look(snapshot: Snapshot, rows: Sequence[Row], *, phase: Phase, job: str, own: OwnGpus) -> Look:
    """Everything on the job's GPUs that is neither expected nor the system's.

    After the job its own processes are left wherever they are.
    """
    node = Node(snapshot)
    left: list[Leftover] = []
    unknown = list(_unseen(node))
    source = node.source("slurm")
    answered = source is not None and source.state == "ok"
    if not answered:
        reason = source.reason if source is not None and source.reason else "it was not asked"
        unknown.append(f"what Slurm's jobs are: {reason}")
    ids = node.resolve(own.references)
    if own.references and ids == frozenset() and not own.minors:
        unknown.append(f"the job's GPUs: {own} is none that this look knows")
    for row in rows:
        process = node.processes.get(row.pid) if row.pid is not None else None
        mine = _job_of(node, process, job)
        over = phase == "epilog" and mine != "no"
        if not over and not _is_on(node, row, ids, own):
            continue
        if row.verdict == "system":
            continue
        whose = " of this job, which is over" if over else ""
        if over and (mine == "proven" or row.verdict not in BELONGS):
            left.append(_leftover(node, row, whose))
        elif row.verdict in BELONGS:
            continue
        elif row.verdict == "unreadable" or not (answered or row.verdict in WITHOUT_CONTROLLER):
            unknown.append(f"whose this is: {_text(node, row, '')}")
        else:
            left.append(_leftover(node, row, whose))
    return Look(tuple(left), tuple(dict.fromkeys(unknown)))


def _unseen(node: Node) -> Iterator[str]:
    for name in SENSORS:
        run = node.sensor(name)
        if run is None or run.state in ("failed", "skipped"):
            yield f"who is on the GPUs: {name}: {run.reason if run is not None else 'did not run'}"
        elif run.state == "partial" and name != "processes":
            yield f"whether all was seen: {name}: {run.reason}"


def _job_of(node: Node, process: Process | None, job: str) -> Literal["proven", "claimed", "no"]:
    """Whether a process is of this job: by what Slurm keeps, or by its environment alone."""
    if process is None:
        return "no"
    for workload in node.snapshot.workloads:
        if workload.source == "slurm" and process.pid in workload.pids:
            return "proven" if workload.job_id == job else "no"
    claim = slurm_claim(node, process)
    if claim is None or claim.name != f"job {job}":
        named = [process.environment.get(variable) for variable in JOB_VARIABLES]
        return "claimed" if claim is None and job in named else "no"
    return "proven" if claim.proof == "proven" else "claimed"


def _is_on(node: Node, row: Row, ids: frozenset[str] | None, own: OwnGpus) -> bool:
    if not own.references:
        return False
    if ids is None:
        return True
    if row.gpu_id is not None:
        gpu = node.gpus.get(row.gpu_id)
        return row.gpu_id in ids or (gpu is not None and gpu.parent_id in ids)
    held = node.holders_by_pid.get(row.pid, ()) if row.pid is not None else ()
    return any(one.kind == "nvidia-gpu" and one.minor in own.minors for one in held)


def _leftover(node: Node, row: Row, whose: str) -> Leftover:
    key = (row.pid, row.start_time_ticks, row.gpu_id or row.gpu)
    return Leftover(key, _text(node, row, whose), row.verdict)


def _text(node: Node, row: Row, whose: str) -> str:
    """One line about a row, for a log: whose it is, what it is, why."""
    held = node.holders_by_pid.get(row.pid, ()) if row.pid is not None else ()
    minors = sorted({one.minor for one in held if one.kind == "nvidia-gpu"})
    where = f"GPU {row.gpu}" if row.gpu_id is not None else _nodes(minors)
    if row.pid is None:
        return f"{where}: {memory(row.memory_bytes)} in use by nobody: {row.verdict}"
    name = row.binary or "a process"
    says = f", calls itself {row.says}" if row.says else ""
    used = f", {memory(row.memory_bytes)}" if row.memory_bytes is not None else ""
    place = f", {row.place}" if row.place else ""
    why = f" ({row.path[-1]})" if row.path else ""
    user = f" of {row.user}" if row.user else ""
    return f"{where}: pid {row.pid}, {name}{user}{says}{place}{used}{whose}: {row.verdict}{why}"


def _nodes(minors: Iterable[int]) -> str:
    return ", ".join(f"/dev/nvidia{minor}" for minor in minors) or "no GPU of its own"
