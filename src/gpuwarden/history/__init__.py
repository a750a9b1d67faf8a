"""Since when: what one snapshot knows of a past, and what `gpuwarden watch` remembers of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from gpuwarden.errors import UsageError
from gpuwarden.finding import Row
from gpuwarden.history import moments, remembered
from gpuwarden.history.moments import Moment
from gpuwarden.history.remembered import KnownFinding, Remembered
from gpuwarden.history.summary import SECOND_NS, Past, summarised
from gpuwarden.judge import judge_rows
from gpuwarden.model import Fact, Gap, Gpu, Snapshot
from gpuwarden.node import Node
from gpuwarden.outputs.words import escape, json_text
from gpuwarden.policy import Policy
from gpuwarden.store import Series

HISTORY_SCHEMA = "gpuwarden.history"
HISTORY_VERSION = 1

STATE_DIRECTORY = "/var/lib/gpuwarden"
"""Where watch keeps its memory unless told otherwise; its own word is in watch/options.py."""

GPU_SECONDS = 86_400
"""How far back a GPU's memory is read unless more is asked for: many processes use one."""
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


class Memory(Fact, frozen=True, kw_only=True, omit_defaults=False):
    """Where was looked, since when, and how that went."""

    directory: str
    state: remembered.State
    since_ns: int
    troubles: tuple[Gap, ...]


class History(Fact, frozen=True, kw_only=True, omit_defaults=False):
    """The past of one pid or one GPU; what `--format json` prints."""

    schema: str = HISTORY_SCHEMA
    version: int = HISTORY_VERSION
    node: str
    boot_id: str | None
    taken_at_ns: int
    pid: int | None
    gpu: str | None
    gpu_name: str | None
    is_here: bool
    """The snapshot has it: the pid as a process on a GPU, or the GPU."""
    start_time_ticks: int | None
    started_at_ns: int | None
    accounting: bool
    """The driver keeps account of processes that have ended."""
    rows: tuple[Row, ...]
    moments: tuple[Moment, ...]
    memory: Memory
    pasts: tuple[Past, ...]
    findings: tuple[KnownFinding, ...]

    @property
    def found(self) -> bool:
        """Whether anything is known at all."""
        return bool(self.moments or self.rows or self.pasts or self.findings)


class Told(NamedTuple):
    """The past as text, whether there is any, and what of the memory could not be read."""

    text: str
    found: bool
    complaint: str = ""
    """Lines for standard error; empty when all was read."""


class Asked(Fact, frozen=True, kw_only=True):
    """What the command line asks for; ``since_seconds`` is how far back."""

    pid: int | None = None
    gpu: str | None = None
    state: str | None = None
    """The directory of the memory; None: the one that is usual, unless a recording is named."""
    recording: str | None = None
    since: str | None = None
    format: Literal["table", "json"] = "table"
    since_seconds: int | None = None

    @property
    def directory(self) -> str | None:
        """Where to look for a memory; None when there is none to look for."""
        return self.state if self.state or self.recording else STATE_DIRECTORY


def asked(arguments: Mapping[str, object]) -> Asked:
    """What the flags ask for. Errors: UsageError."""
    wanted = msgspec.convert(arguments, Asked)
    if (wanted.pid is None) == (wanted.gpu is None):
        raise UsageError("history: expected a PID or --gpu N, one of them")
    if wanted.state is not None and not os.path.lexists(wanted.state):
        raise UsageError(f"--state {wanted.state}: no such directory, or not to be seen by you")
    if wanted.since is None:
        # A pid is one process or a few; a GPU may have had thousands.
        return wanted if wanted.gpu is None else replace(wanted, since_seconds=GPU_SECONDS)
    return replace(wanted, since_seconds=seconds_ago(wanted.since))


def seconds_ago(text: str) -> int:
    """``90s``, ``30m``, ``2h``, ``7d``, ``4w`` in seconds. Errors: UsageError."""
    found = re.fullmatch(r"([0-9]{1,6})(s|m|h|d|w)", text)
    if found is None or not int(found[1]):
        raise UsageError(f"--since {text}: expected a time such as 30m, 2h or 7d")
    return int(found[1]) * UNITS[found[2]]


def tell(snapshot: Snapshot, policy: Policy, asked: Asked, *, width: int = 140) -> Told:
    """The past of a pid or of a GPU.

    Errors: UsageError for a GPU that neither the snapshot nor the memory knows.
    """
    history = _history(snapshot, policy, asked)
    if asked.format == "json":
        text = json_text(history)
    else:
        from gpuwarden.history import page

        text = page.render(history, width)
    return Told(text, history.found, "".join(map(_complaint, history.memory.troubles)))


def _complaint(gap: Gap) -> str:
    remedy = f"  {escape(gap.remedy)}\n" if gap.remedy else ""
    return escape(f"gpuwarden: {gap.what}: {gap.reason}") + "\n" + remedy


def _history(snapshot: Snapshot, policy: Policy, asked: Asked) -> History:
    node = Node(snapshot)
    rows = judge_rows(node, policy)
    pid, directory = asked.pid, asked.directory
    process = None if pid is None else node.processes.get(pid)
    found: Gpu | None = None
    gpu_id: str | None = None
    if pid is None:
        gpu_id, found = _find_gpu(node, asked.gpu or "", directory)
    since_ns = 0
    if asked.since_seconds is not None:
        since_ns = max(snapshot.taken_at_ns - asked.since_seconds * SECOND_NS, 0)
    memory = Remembered()
    if directory is not None:
        memory = remembered.read(directory, pid=pid, gpu_id=gpu_id, since_ns=since_ns)
    if process is not None:
        known = moments.in_order(moments.of_process(node, process))
    else:
        known = moments.in_order(moments.of_gpu(node, found)) if found is not None else ()
    return History(
        node=snapshot.node.hostname,
        boot_id=snapshot.node.boot_id,
        taken_at_ns=snapshot.taken_at_ns,
        pid=pid,
        gpu=None if gpu_id is None else node.gpu_label(gpu_id),
        gpu_name=None if found is None else found.name,
        is_here=process is not None or found is not None,
        start_time_ticks=None if process is None else process.start_time_ticks,
        started_at_ns=None if process is None else process.started_at_ns,
        accounting=bool(snapshot.accounted),
        rows=tuple(
            row for row in rows if (row.pid == pid if pid is not None else row.gpu_id == gpu_id)
        ),
        moments=known,
        memory=Memory(
            directory=memory.directory,
            state=memory.state,
            since_ns=since_ns,
            troubles=memory.troubles,
        ),
        pasts=tuple(_pasts(node, memory.series)),
        findings=memory.findings,
    )


def _find_gpu(node: Node, wanted: str, directory: str | None) -> tuple[str, Gpu | None]:
    for gpu in node.snapshot.gpus:
        if wanted in (gpu.id, gpu.uuid, node.gpu_label(gpu.id), gpu.pci_address):
            return gpu.id, gpu
    kept = set() if directory is None else remembered.gpus(directory)
    if wanted in kept:
        return wanted, None
    known = ", ".join(node.gpu_label(g.id) for g in node.snapshot.gpus) or "none"
    # A driver that hangs lists no GPU, and then its number is not known, but its name still is.
    unlisted = ", ".join(sorted(kept - {g.id for g in node.snapshot.gpus}))
    more = f"; remembered: {unlisted}" if unlisted else ""
    raise UsageError(f"history: no GPU is called '{wanted}'; there are: {known}{more}")


def _pasts(node: Node, every: Iterable[Series]) -> list[Past]:
    """Processes of a pid in the order in which they were there; the GPU itself first."""
    pasts = [_past(node, series) for series in every]
    return sorted(pasts, key=lambda one: (one.pid is not None, one.first_ns or 0, one.gpu_id))


def _past(node: Node, series: Series) -> Past:
    facts = node.snapshot.node
    ticks = series.start_time_ticks
    this_boot = series.boot_id is not None and series.boot_id == facts.boot_id
    process = node.processes.get(series.pid) if series.pid is not None else None
    if process is not None and not (this_boot and process.start_time_ticks == ticks):
        process = None
    started_at_ns = None if process is None else process.started_at_ns
    if process is None and this_boot and ticks is not None and facts.boot_time_ns is not None:
        started_at_ns = facts.boot_time_ns + ticks * SECOND_NS // facts.clock_ticks_per_second
    return summarised(
        series,
        gpu=node.gpu_label(series.gpu_id),
        now_ns=node.snapshot.taken_at_ns,
        started_at_ns=started_at_ns,
        is_current=series.pid is None or process is not None,
    )
