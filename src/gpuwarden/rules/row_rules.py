"""Rules over the verdicts: each verdict that is not clear becomes one finding a subject."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from gpuwarden.finding import Evidence, Row, Verdict
from gpuwarden.node import Node
from gpuwarden.policy import Policy
from gpuwarden.rules.hit import Hit, gpu_subject, process_subject

HitFunction = Callable[[Node, Policy, Sequence[Row]], Iterator[Hit]]


def _hit(node: Node, row: Row) -> Hit:
    if row.pid is None:
        subject = gpu_subject(node, row.gpu_id)
    else:
        subject = process_subject(node, row.pid, node.processes.get(row.pid), row.gpu_id)
    tree = tuple(Evidence(source="decision tree", text=step) for step in row.path)
    return Hit(
        subject, row.evidence + tree, row.verdict, row.owner or row.contact, row.started_at_ns
    )


def _with(verdict: Verdict) -> HitFunction:
    def hits(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[Hit]:
        for row in rows:
            if row.verdict == verdict and row.inherited_from is None:
                yield _hit(node, row)

    return hits


gpu_cryptominer = _with("cryptominer")
gpu_process_suspicious = _with("suspicious")
gpu_container_without_allocation = _with("rogue-container")
gpu_process_on_wrong_gpu = _with("wrong-gpu")
gpu_process_of_other_team = _with("other-team")
gpu_process_of_ended_job = _with("orphaned-job")
gpu_zombie_context = _with("zombie-context")
gpu_memory_leaked = _with("leaked-memory")
gpu_process_unattributed = _with("unattributed")
gpu_unreadable = _with("unreadable")


def expected_process_with_signs(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[Hit]:
    """An expected process with one strong kind of evidence: not accused, not passed over."""
    for row in rows:
        if row.verdict != "expected" or row.pid is None or row.inherited_from is not None:
            continue
        signs = tuple(e for e in row.evidence if e.kind is not None and e.strength == "strong")
        if signs:
            yield _hit(node, row)._replace(evidence=signs)
