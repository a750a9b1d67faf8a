"""What Slurm's commands print about jobs, steps and nodes, read without trusting job owners.

A job's name and comment are its owner's free text, newlines included, and ``scontrol`` prints them
as they are: a name can hold a whole forged ``Nodes=… GRES=…`` line. Text output is therefore used
only where each line that frames the answer occurs once; otherwise Malformed, and JSON decides.
Sources: squeue(1), scontrol(1); observed with 22.05 and 24.11.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from gpuwarden.errors import Malformed, Unavailable
from gpuwarden.expected.slurm.gres import Gres, host_position, parse_gres
from gpuwarden.host import CommandOutput
from gpuwarden.pattern import pattern

SQUEUE_FORMAT = "%A|%T|%U|%u|%a|%P|%S|%N"
_SQUEUE_HEADER = "JOBID|STATE|"
_SQUEUE_FIELDS = 8
ROW_LIMIT = 65_536
_JSON_LIMIT_BYTES = 32 << 20
_TEXT_LIMIT = 1 << 20

RUNNING_STATES = frozenset(
    {"RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING"}
    | {"STAGE_OUT"}
)
ENDED_STATES = frozenset(
    {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"}
    | {"DEADLINE", "OUT_OF_MEMORY", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"}
)

_JOB_ID = pattern(r"\d{1,10}\Z", re.ASCII)
_LINE_JOB = pattern(r"JobId=(\d{1,10})(?: |\Z)", re.ASCII)
_LINE_USER = pattern(r"   UserId=(.*)\((\d{1,10})\) GroupId=")
_LINE_STATE = pattern(r"   JobState=([A-Z_]+)")
_LINE_NODES = pattern(r" {3,5}Nodes=(\S+) CPU_IDs=\S* Mem=\S*(?: GRES=(\S*))?\s*\Z")
_ALLOCATION_START = "   Socks/Node="
_ALLOCATION_END = "   MinCPUsNode="
_NODE_GRES = pattern(r"^   Gres=(.*)$", re.MULTILINE)
_FAILURE = pattern(r"\berror\b|Unable to contact", re.IGNORECASE)
_UNKNOWN_JOB = "Invalid job id specified"


class Job(Struct, frozen=True):
    """One job as the controller tells it; ``gres`` is this node's share, None when not told."""

    id: str
    states: tuple[str, ...]
    uid: int | None = None
    user: str | None = None
    account: str | None = None
    partition: str | None = None
    started_at_ns: int | None = None
    nodes: str = ""
    gres: tuple[Gres, ...] | None = None

    @property
    def is_running(self) -> bool:
        """Whether it runs or is still being cleaned up (COMPLETING wins over its final state)."""
        return "COMPLETING" in self.states or (
            not self.is_ended and bool(RUNNING_STATES.intersection(self.states))
        )

    @property
    def is_ended(self) -> bool:
        """Whether the controller says that it is over, and has finished cleaning up."""
        return "COMPLETING" not in self.states and bool(ENDED_STATES.intersection(self.states))

    @property
    def is_elsewhere_or_waiting(self) -> bool:
        """Whether the controller knows it and it neither runs nor has ended."""
        return not self.is_running and not self.is_ended


def _optional(text: str) -> str | None:
    return None if text in ("", "(null)", "N/A", "Unknown") else text


def is_job_id(text: str) -> bool:
    """Whether ``text`` is a plain job number, safe to hand to a command."""
    return _JOB_ID.match(text) is not None


def refuse_failure(output: CommandOutput, command: str) -> None:
    """Raises Unavailable when a Slurm command failed, said so, or printed nothing.

    Slurm's commands have exited 0 with an error on stderr; nothing that they then print counts.
    """
    complaint = output.stderr.decode("utf-8", "backslashreplace").strip()
    if output.code != 0 or _FAILURE.search(complaint):
        said = " ".join(complaint.split())[:200] or f"exit code {output.code}"
        raise Unavailable(f"{command} failed: {said}")
    if not output.stdout.strip():
        raise Unavailable(f"{command} printed nothing, which is no answer")


def controller_is_up(output: CommandOutput) -> bool:
    """Whether ``scontrol ping`` found a controller, primary or backup."""
    return re.search(rb"\bis UP\b", output.stdout[:65_536]) is not None


def parse_squeue(data: bytes) -> list[Job]:
    """The rows of ``squeue -o SQUEUE_FORMAT`` with its header. Errors: Malformed.

    No field of it is free text of a job's owner. A missing header or a cut last line is an answer
    that got lost, never "no jobs".
    """
    text = data.decode("utf-8", "backslashreplace")
    if not text.startswith(_SQUEUE_HEADER) or not text.endswith("\n"):
        raise Malformed("squeue's answer is cut off or is not a table of jobs")
    rows = text.split("\n")[1:-1]
    if len(rows) > ROW_LIMIT:
        raise Malformed("squeue lists too many jobs")
    jobs: list[Job] = []
    for row in rows:
        fields = [field.strip() for field in row.split("|", _SQUEUE_FIELDS - 1)]
        if len(fields) != _SQUEUE_FIELDS or not is_job_id(fields[0]):
            raise Malformed("squeue printed a row that is not a job")
        number, state, uid, user, account, partition, start, nodes = fields
        jobs.append(
            Job(
                id=number,
                states=(state.split(" ")[0],),
                uid=_number(uid),
                user=_optional(user),
                account=_optional(account),
                partition=_optional(partition),
                started_at_ns=_nanoseconds(_number(start)),
                nodes=_optional(nodes) or "",
            )
        )
    return jobs


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d{1,18}", text, re.ASCII) else None


def _nanoseconds(seconds: int | None) -> int | None:
    return seconds * 1_000_000_000 if seconds and seconds < 1 << 33 else None


def is_unknown_job(output: CommandOutput) -> bool:
    """Whether the controller answered that it has no such job."""
    return output.code != 0 and _UNKNOWN_JOB.encode() in output.stderr


def parse_scontrol_job(data: bytes, job_id: str, node: str) -> Job:
    """``scontrol show job -d ID`` as a Job with this node's GRES.

    Errors: Malformed when it is cut off, or when a line that frames the answer occurs twice (an
    array's or a heterogeneous job's several records, or a forged job name).
    """
    text = data[:_TEXT_LIMIT].decode("utf-8", "backslashreplace")
    lines = text.split("\n")
    header = _only(lines, "JobId=")
    match = _LINE_JOB.match(lines[header])
    if match is None or match[1] != job_id:
        raise Malformed(f"scontrol's answer is not about job {job_id}")
    user = _LINE_USER.match(lines[_only(lines, "   UserId=")])
    state = _LINE_STATE.match(lines[_only(lines, "   JobState=")])
    if user is None or state is None:
        raise Malformed(f"scontrol does not say whose job {job_id} is, or how it is")
    start = _only(lines, _ALLOCATION_START)
    end = _only(lines, _ALLOCATION_END)
    return Job(
        id=job_id,
        states=(state[1],),
        uid=int(user[2]),
        user=_optional(user[1]),
        gres=parse_allocation(lines[start + 1 : end], node),
    )


def _only(lines: Sequence[str], prefix: str) -> int:
    places = [place for place, line in enumerate(lines) if line.startswith(prefix)]
    if len(places) != 1:
        raise Malformed(f"scontrol's answer has {len(places)} lines that begin {prefix.strip()!r}")
    return places[0]


def parse_allocation(lines: Sequence[str], node: str) -> tuple[Gres, ...] | None:
    """The GRES of the ``Nodes=… CPU_IDs=… GRES=…`` line that covers ``node``; None without one.

    Errors: Malformed if two lines cover it.
    """
    found: list[tuple[Gres, ...]] = []
    for line in lines:
        match = _LINE_NODES.match(line.rstrip("\r"))
        if match is not None and host_position(match[1], node) is not None:
            found.append(parse_gres(match[2] or ""))
    if len(found) > 1:
        raise Malformed(f"scontrol gives two allocations on {node}")
    return found[0] if found else None


class _Number(msgspec.Struct):
    set: bool = False
    infinite: bool = False
    number: int | float = 0


class _JsonJob(msgspec.Struct):
    job_id: int
    job_state: str | list[str] = ""
    user_id: int | None = None
    user_name: str | None = None
    account: str | None = None
    partition: str | None = None
    nodes: str | None = None
    start_time: int | _Number | None = None
    gres_detail: list[str] | None = None


class _JsonAnswer(msgspec.Struct):
    jobs: list[_JsonJob]
    errors: list[object] = []


def parse_squeue_json(data: bytes, node: str) -> dict[str, Job]:
    """``squeue --json`` by job id, each with its GRES on ``node``. Errors: Malformed, Unavailable.

    Takes the older plain values and the newer ``{set, infinite, number}`` and lists of states.
    """
    if len(data) >= _JSON_LIMIT_BYTES:
        raise Malformed("squeue's JSON is too long")
    try:
        answer = msgspec.json.decode(data, type=_JsonAnswer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"squeue's JSON cannot be read: {str(error)[:200]}") from error
    if answer.errors:
        raise Unavailable("squeue's JSON reports an error instead of jobs")
    jobs: dict[str, Job] = {}
    for entry in answer.jobs:
        states = (entry.job_state,) if isinstance(entry.job_state, str) else entry.job_state
        start = entry.start_time
        if isinstance(start, _Number):
            start = int(start.number) if start.set and not start.infinite else None
        jobs[str(entry.job_id)] = Job(
            id=str(entry.job_id),
            states=tuple(states),
            uid=entry.user_id,
            user=_optional(entry.user_name or ""),
            account=_optional(entry.account or ""),
            partition=_optional(entry.partition or ""),
            started_at_ns=_nanoseconds(start if start is not None and start > 0 else None),
            nodes=entry.nodes or "",
            gres=_detail_on(node, entry),
        )
    return jobs


def _detail_on(node: str, entry: _JsonJob) -> tuple[Gres, ...] | None:
    """The entry of ``gres_detail`` at this node's place in the job's host list."""
    details = entry.gres_detail
    if not details:
        return None if details is None else ()
    try:
        place = host_position(entry.nodes, node) if entry.nodes else 0
        if place is None or place >= len(details) or (not entry.nodes and len(details) > 1):
            return None
        return parse_gres(details[place])
    except Malformed:
        # One job that cannot be read must not cost the others.
        return None


def parse_listpids(data: bytes) -> dict[str, tuple[int, ...]]:
    """``scontrol listpids`` as job id → pids. Errors: Malformed without its header.

    Slurm's own placeholder pid -1 is left out.
    """
    lines = data[:_JSON_LIMIT_BYTES].decode("utf-8", "backslashreplace").split("\n")
    if lines[0].split()[:3] != ["PID", "JOBID", "STEPID"]:
        raise Malformed("scontrol listpids printed no table")
    pids: dict[str, list[int]] = {}
    for line in lines[1 : ROW_LIMIT + 1]:
        fields = line.split()
        if len(fields) >= 3 and _JOB_ID.match(fields[0]) and is_job_id(fields[1]):
            pids.setdefault(fields[1], []).append(int(fields[0]))
    return {job: tuple(dict.fromkeys(found)) for job, found in pids.items()}


def parse_node_gres(data: bytes) -> tuple[Gres, ...]:
    """The ``Gres=`` of ``scontrol show node NAME``: what the node has. Errors: Malformed."""
    text = data[:_TEXT_LIMIT].decode("utf-8", "backslashreplace")
    if not text.startswith("NodeName="):
        raise Malformed("scontrol's answer is not about a node")
    match = _NODE_GRES.search(text)
    return parse_gres(match[1]) if match is not None else ()
