"""One hit of a rule, before it becomes a finding."""

from __future__ import annotations

from collections.abc import Sequence
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


def gpu_phrase(node: Node, gpu_ids: Sequence[str]) -> str:
    """``GPU 0``, ``GPUs 0, 1``, or ``the GPU`` when it is not known which."""
    if not gpu_ids:
        return "the GPU"
    labels = sorted({node.gpu_label(i) for i in gpu_ids}, key=lambda s: (len(s), s))
    return f"GPU {labels[0]}" if len(labels) == 1 else f"GPUs {', '.join(labels)}"


def process_subject(
    node: Node, pid: int, process: Process | None, gpu_ids: Sequence[str]
) -> Subject:
    """The identity of a process: pid, start time, boot; its GPUs are told, not part of it.

    Which exec of it was judged is told as well, for whoever acts on it.
    """
    exe = process.exe if process else None
    return Subject(
        kind="process",
        name=process.comm if process else "",
        pid=pid,
        start_time_ticks=process.start_time_ticks if process else None,
        boot_id=node.snapshot.node.boot_id,
        gpu_ids=tuple(gpu_ids),
        gpu=gpu_phrase(node, gpu_ids),
        exe_device=exe.device if exe else None,
        exe_inode=exe.inode if exe else None,
        exec_mark=process.exec_mark if process else None,
    )


def gpu_subject(node: Node, gpu_id: str | None) -> Subject:
    """The identity of a GPU on this boot."""
    return Subject(
        kind="gpu",
        name=gpu_id or "",
        boot_id=node.snapshot.node.boot_id,
        gpu_ids=(gpu_id,) if gpu_id is not None else (),
        gpu=gpu_phrase(node, (gpu_id,) if gpu_id is not None else ()),
    )
