"""Who else is where a step would act: on the same GPUs, or in the same control group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from gpuwarden.finding import Report, Row, Verdict
from gpuwarden.model import Fact, Process
from gpuwarden.node import Node
from gpuwarden.respond.step import Target

SHOWN = 12


class Other(Fact, frozen=True, kw_only=True, omit_defaults=False):
    """A GPU client or holder beside the one that the plan is about."""

    pid: int
    verdict: Verdict
    where: tuple[Literal["gpu", "group"], ...]
    gpus: tuple[str, ...] = ()
    binary: str | None = None
    user: str | None = None
    owner: str | None = None
    place: str | None = None

    @property
    def text(self) -> str:
        """One clause for a person."""
        who = self.owner or self.user
        parts = [f"pid {self.pid}", self.binary or "?"]
        parts += [f"of {who}"] if who else []
        parts += [f"({self.place})"] if self.place else []
        return f"{' '.join(parts)}: {self.verdict}"


def others(report: Report, target: Target) -> tuple[Other, ...]:
    """The other processes of a report that share a GPU or a control group with the target."""
    node = Node(target.snapshot)
    pid = target.identity.pid if target.identity is not None else None
    own_ids = {gpu.id for gpu in target.gpus}
    own_ids |= {gpu.parent_id for gpu in target.gpus if gpu.parent_id is not None}
    by_pid: dict[int, list[Row]] = {}
    for row in report.rows:
        if row.pid is not None and row.pid != pid:
            by_pid.setdefault(row.pid, []).append(row)
    found = []
    for other, rows in by_pid.items():
        where: list[Literal["gpu", "group"]] = []
        if any(row.gpu_id in own_ids for row in rows):
            where.append("gpu")
        process = node.processes.get(other)
        if share_a_group(target.process, process):
            where.append("group")
        if where:
            found.append(_other(other, rows, tuple(where)))
    return tuple(sorted(found, key=lambda one: one.pid))


def _other(pid: int, rows: list[Row], where: tuple[Literal["gpu", "group"], ...]) -> Other:
    first = rows[0]
    return Other(
        pid=pid,
        verdict=first.verdict,
        where=where,
        gpus=tuple(dict.fromkeys(row.gpu for row in rows)),
        binary=first.binary,
        user=first.user,
        owner=first.owner,
        place=first.place,
    )


def share_a_group(one: Process | None, other: Process | None) -> bool:
    """Whether two processes are in one container, or in one control group that is no root."""
    if one is None or other is None:
        return False
    mine, theirs = one.cgroup, other.cgroup
    if mine is not None and theirs is not None and mine.container_id is not None:
        return mine.container_id == theirs.container_id
    return bool(set(_lines(one)) & set(_lines(other)))


def _lines(process: Process) -> Iterator[str]:
    for line in process.cgroup_lines:
        if not line.rstrip("\n").endswith(":/"):
            yield line.rstrip("\n")
