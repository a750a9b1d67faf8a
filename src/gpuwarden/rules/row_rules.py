"""Rules over the verdicts: each verdict that is not clear becomes one finding a subject."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from gpuwarden.finding import DECISION_TREE, Evidence, Row, Verdict
from gpuwarden.node import Node
from gpuwarden.policy import Policy
from gpuwarden.rules.hit import Hit, gpu_subject, process_subject

HitFunction = Callable[[Node, Policy, Sequence[Row]], Iterator[Hit]]


def _hit(node: Node, rows: Sequence[Row]) -> Hit:
    """One hit for the rows of one process, or of one GPU, that share a verdict."""
    row = rows[0]
    if row.pid is None:
        subject = gpu_subject(node, row.gpu_id)
    else:
        gpu_ids = [r.gpu_id for r in rows if r.gpu_id is not None]
        subject = process_subject(node, row.pid, node.processes.get(row.pid), gpu_ids)
    evidence = tuple(dict.fromkeys(e for r in rows for e in r.evidence))
    path = tuple(dict.fromkeys(step for r in rows for step in r.path))
    tree = tuple(Evidence(source=DECISION_TREE, text=step) for step in path)
    return Hit(subject, evidence + tree, row.verdict, row.owner, row.started_at_ns)


def _by_subject(rows: Iterable[Row]) -> Iterator[list[Row]]:
    groups: dict[tuple[int | None, str | None], list[Row]] = {}
    for row in rows:
        key = (row.pid, None if row.pid is not None else row.gpu_id)
        groups.setdefault(key, []).append(row)
    yield from groups.values()


def _with(verdict: Verdict) -> HitFunction:
    def hits(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[Hit]:
        mine = (r for r in rows if r.verdict == verdict and r.inherited_from is None)
        for group in _by_subject(mine):
            yield _hit(node, group)

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
    """An expected process with one strong kind of evidence: not accused, not passed over.

    How it computes is none: an expected workload may keep its GPU busy as it likes. Its code is
    gpu_module_hash_like's to tell.
    """
    mine = [
        row
        for row in rows
        if row.verdict == "expected"
        and row.pid is not None
        and row.inherited_from is None
        and any(
            e.kind not in (None, "behaviour", "code") and e.strength == "strong"
            for e in row.evidence
        )
    ]
    for group in _by_subject(mine):
        signs = tuple(e for e in group[0].evidence if e.kind is not None)
        yield _hit(node, group)._replace(evidence=signs)
