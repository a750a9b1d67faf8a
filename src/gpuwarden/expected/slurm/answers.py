"""What Slurm's commands print about a user's jobs, a node's state and the configuration.

Sources: squeue(1), scontrol(1), slurm.conf(5); observed with 22.05.
"""

from __future__ import annotations

import re
from typing import Literal

from msgspec import Struct

from gpuwarden.errors import Malformed
from gpuwarden.expected.slurm.jobs import ROW_LIMIT, is_job_id
from gpuwarden.pattern import pattern

QUEUE_FORMAT = "%A|%T|%U|%Q|%r"
_QUEUE_HEADER = "JOBID|STATE|UID|PRIORITY|REASON\n"
_QUEUE_FIELDS = 5
_TEXT_LIMIT = 8 << 20
_REASON_LIMIT = 200
_STATE_LINE = pattern(r"^   State=([A-Z_+*~#!%$@^\-]{1,200})(?: |$)", re.MULTILINE)
_REASON_LINE = pattern(r"^   Reason=(.{0,2000})$", re.MULTILINE)
_SETTING = pattern(r"^(\w{1,64})\s{0,64}= (.{0,4000})$", re.MULTILINE)
_SECONDS = pattern(r"(\d{1,9})(?: sec)?\Z", re.ASCII)
INFINITE_SECONDS = 65_533
"""From here on a time of 16 bits is one of Slurm's words for "no limit"."""

Hold = Literal["none", "user", "admin"]


class QueuedJob(Struct, frozen=True):
    """A job in the queue: whose, in which state, and who holds it."""

    id: str
    state: str
    uid: int
    hold: Hold = "none"

    @property
    def is_pending(self) -> bool:
        return self.state == "PENDING"


def parse_queue(data: bytes) -> list[QueuedJob]:
    """The rows of ``squeue -o QUEUE_FORMAT`` with its header. Errors: Malformed.

    A missing header or a cut last line is an answer that got lost, never "no jobs".
    """
    text = data[: _TEXT_LIMIT + 1].decode("utf-8", "backslashreplace")
    if len(data) > _TEXT_LIMIT or not text.startswith(_QUEUE_HEADER) or not text.endswith("\n"):
        raise Malformed("squeue's answer is cut off or is not a table of jobs")
    rows = text.split("\n")[1:-1]
    if len(rows) > ROW_LIMIT:
        raise Malformed("squeue lists too many jobs")
    found: list[QueuedJob] = []
    for row in rows:
        fields = [field.strip() for field in row.split("|", _QUEUE_FIELDS - 1)]
        if (
            len(fields) != _QUEUE_FIELDS
            or not is_job_id(fields[0])
            or re.fullmatch(r"[0-9]{1,10}", fields[2]) is None
        ):
            raise Malformed("squeue printed a row that is not a job")
        number, state, uid, priority, reason = fields
        found.append(QueuedJob(number, state, int(uid), _hold(priority, reason)))
    return found


def _hold(priority: str, reason: str) -> Hold:
    if reason == "JobHeldUser":
        return "user"
    # A job that Slurm itself holds ("launch failed requeued held") has no priority either.
    return "admin" if reason == "JobHeldAdmin" or priority == "0" else "none"


class NodeState(Struct, frozen=True):
    """A node as the controller has it."""

    states: tuple[str, ...]
    reason: str = ""
    """Who drained or downed it may have written anything there."""

    @property
    def is_drained(self) -> bool:
        """Whether no new job starts there because somebody drained it."""
        return any(state.startswith("DRAIN") for state in self.states)

    @property
    def is_down(self) -> bool:
        return "DOWN" in self.states


def parse_node_state(data: bytes, node: str) -> NodeState:
    """``scontrol show node NAME``: its state and reason. Errors: Malformed."""
    text = data[:_TEXT_LIMIT].decode("utf-8", "backslashreplace")
    if not text.startswith(f"NodeName={node} "):
        raise Malformed(f"scontrol's answer is not about node {node}")
    states = _STATE_LINE.findall(text)
    if len(states) != 1:
        raise Malformed(f"scontrol's answer has {len(states)} states of node {node}")
    reason = _REASON_LINE.search(text)
    return NodeState(
        tuple(word.strip("*~#!%$@^-") for word in states[0].split("+")),
        reason[1].strip()[:_REASON_LIMIT] if reason else "",
    )


def parse_settings(data: bytes) -> dict[str, str]:
    """``scontrol show config`` by name, "(null)" as "". Errors: Malformed."""
    text = data[:_TEXT_LIMIT].decode("utf-8", "backslashreplace")
    if not text.startswith("Configuration data as of"):
        raise Malformed("scontrol's answer is no configuration")
    found: dict[str, str] = {}
    for name, value in _SETTING.findall(text):
        bare = value.strip()
        found.setdefault(name, "" if bare == "(null)" else bare)
    return found


def seconds_of(value: str) -> int | None:
    """A time of the configuration in seconds; None without a limit, or when it is no number."""
    match = _SECONDS.match(value)
    if match is None or int(match[1]) >= INFINITE_SECONDS:
        return None
    return int(match[1])
