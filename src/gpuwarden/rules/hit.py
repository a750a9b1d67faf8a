"""One hit of a rule, before it becomes a finding."""

from __future__ import annotations

from typing import NamedTuple

from gpuwarden.finding import Evidence, Severity, Subject, Verdict
from gpuwarden.model import Process
from gpuwarden.node import Node


class Hit(NamedTuple):
    """What a rule found: about what, by which evidence."""

    subject: Subject
    evidence: tuple[Evidence, ...]
    verdict: Verdict | None = None
    owner: str | None = None
    since_ns: int | None = None
    severity: Severity | None = None
    """Only when a hit is milder or graver than its advisory says."""


def gpu_phrase(node: Node, gpu_id: str | None) -> str:
    """``GPU 0``, or ``the GPU`` when it is not known which."""
    return "the GPU" if gpu_id is None else f"GPU {node.gpu_label(gpu_id)}"


def process_subject(node: Node, pid: int, process: Process | None, gpu_id: str | None) -> Subject:
    """The identity of a process on a GPU: pid, start time, boot."""
    return Subject(
        kind="process",
        name=process.comm if process else "",
        pid=pid,
        start_time_ticks=process.start_time_ticks if process else None,
        boot_id=node.snapshot.node.boot_id,
        gpu_id=gpu_id,
        gpu=gpu_phrase(node, gpu_id),
    )


def gpu_subject(node: Node, gpu_id: str | None) -> Subject:
    """The identity of a GPU on this boot."""
    return Subject(
        kind="gpu",
        name=gpu_id or "",
        boot_id=node.snapshot.node.boot_id,
        gpu_id=gpu_id,
        gpu=gpu_phrase(node, gpu_id),
    )
