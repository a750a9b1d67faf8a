"""What a judgement is made of: severities, verdicts, evidence, advisories, findings, the report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

from gpuwarden.model import (
    Fact,
    Gap,
    Gpu,
    NodeFacts,
    SensorRun,
    SourceRun,
)

REPORT_SCHEMA = "gpuwarden.report"
REPORT_VERSION = 1

Severity = Literal["info", "warning", "error", "critical"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)

Verdict = Literal[
    "expected",
    "system",
    "wrong-gpu",
    "other-team",
    "orphaned-job",
    "zombie-context",
    "leaked-memory",
    "rogue-container",
    "suspicious",
    "cryptominer",
    "unattributed",
    "unreadable",
]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

VERDICT_SEVERITY: dict[Verdict, Severity] = {
    "expected": "info",
    "system": "info",
    "wrong-gpu": "warning",
    "other-team": "warning",
    "orphaned-job": "warning",
    "zombie-context": "warning",
    "leaked-memory": "warning",
    "rogue-container": "critical",
    "suspicious": "error",
    "cryptominer": "critical",
    "unattributed": "warning",
    "unreadable": "warning",
}

EvidenceKind = Literal[
    "masquerade", "signature", "egress", "persistence", "behaviour", "hiding", "code"
]
Strength = Literal["complete", "strong", "weak", "fact"]
"""``complete`` decides alone; ``strong`` is one kind; ``weak`` only supports; ``fact`` explains."""
Proof = Literal["proven", "claimed", "none"]
Status = Literal["opened", "updated", "resolved"]

DECISION_TREE = "decision tree"
"""The source that evidence names for the steps of a verdict's path."""


def severity_rank(severity: Severity) -> int:
    """0 for info up to 3 for critical."""
    return SEVERITIES.index(severity)


class Evidence(Fact, frozen=True, kw_only=True):
    """One observed fact with its source, as used in a judgement."""

    text: str
    source: str
    kind: EvidenceKind | None = None
    strength: Strength = "fact"


class Subject(Fact, frozen=True, kw_only=True):
    """What a finding is about; a process by (pid, start time, boot id), never by pid alone."""

    kind: Literal["process", "gpu", "node", "persistence", "source"]
    name: str = ""
    pid: int | None = None
    start_time_ticks: int | None = None
    boot_id: str | None = None
    gpu_ids: tuple[str, ...] = ()
    """The GPUs concerned. A process keeps its identity when it spreads to another GPU."""
    gpu: str | None = None
    """The GPUs as a person names them: ``GPU 0``, ``GPUs 0, 1``."""
    exe_device: str | None = None
    """``major:minor`` of a process's binary. This and what follows say which exec of the process
    was judged: what an action is held against, and no part of the finding's id."""
    exe_inode: int | None = None
    exec_mark: str | None = None
    exec_count: int | None = None
    """The kernel's own count of execs, where a probe read it."""


class Advisory(NamedTuple):
    """The constant text of a rule; ``steps`` may hold ``{pid}``, ``{gpu}``, ``{owner}``."""

    id: str
    title: str
    severity: Severity
    explanation: str
    steps: tuple[str, ...]
    needs: tuple[str, ...] = ()
    """Sensors without which the rule says "not evaluated"."""
    needs_sources: tuple[str, ...] = ()


class Finding(Fact, frozen=True, kw_only=True, omit_defaults=False):
    """One hit of an advisory."""

    id: str
    sequence: int = 0
    rule: str
    severity: Severity
    status: Status = "opened"
    title: str
    explanation: str
    subject: Subject
    verdict: Verdict | None = None
    owner: str | None = None
    evidence: tuple[Evidence, ...] = ()
    advice: tuple[str, ...] = ()
    since_ns: int | None = None
    silenced_by: str | None = None
    """The exception of the policy that applies, with its reason; such a finding never fails."""
    occurrences: int = 1
    """How often it happened since it was last told of; an event may have come many times."""


class Row(Fact, frozen=True, kw_only=True, omit_defaults=False):
    """The judgement of one (process, GPU), or of a GPU alone (then ``pid`` is None)."""

    gpu_id: str | None
    gpu: str
    pid: int | None
    verdict: Verdict
    severity: Severity
    start_time_ticks: int | None = None
    started_at_ns: int | None = None
    kinds: tuple[str, ...] = ()
    listed: bool = True
    """The driver lists it; False for a holder of the device node only."""
    user: str | None = None
    binary: str | None = None
    says: str | None = None
    """What the process calls itself, when that is not its binary."""
    place: str | None = None
    """Its job, pod, container, unit or session."""
    sm_percent: int | None = None
    memory_bytes: int | None = None
    workload: str | None = None
    proof: Proof = "none"
    owner: str | None = None
    contact: str | None = None
    inherited_from: int | None = None
    path: tuple[str, ...] = ()
    """The questions of the decision tree with the answers that led to the verdict."""
    evidence: tuple[Evidence, ...] = ()
    unknown: tuple[str, ...] = ()
    """What could not be seen of it."""
    silenced_by: str | None = None


class RuleRun(Fact, frozen=True, kw_only=True):
    """Whether a rule could be evaluated."""

    rule: str
    state: Literal["ok", "not-evaluated", "failed"]
    reason: str = ""
    findings: int = 0


class PolicyUse(Fact, frozen=True, kw_only=True):
    """Which policy was in force."""

    path: str | None = None
    workloads: int = 0
    exceptions: int = 0


class Report(Fact, frozen=True, kw_only=True, omit_defaults=False):
    """Everything that any output shows; renders again from its own JSON."""

    schema: str = REPORT_SCHEMA
    version: int = REPORT_VERSION
    tool_version: str
    taken_at_ns: int
    node: NodeFacts
    policy: PolicyUse
    sensors: tuple[SensorRun, ...]
    sources: tuple[SourceRun, ...]
    rules: tuple[RuleRun, ...]
    gaps: tuple[Gap, ...]
    gpus: tuple[Gpu, ...]
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
    seconds: float = 0.0


def finding_id(rule: str, subject: Subject) -> str:
    """A stable id: the rule and the identity of its subject, 16 hex digits."""
    identity = (
        rule,
        subject.kind,
        subject.boot_id or "",
        "" if subject.pid is None else str(subject.pid),
        "" if subject.start_time_ticks is None else str(subject.start_time_ticks),
        "" if subject.pid is not None else ",".join(subject.gpu_ids),
        "" if subject.pid is not None else subject.name,
    )
    # Imported here: a scan without findings needs no cryptography library.
    import hashlib

    encoded = "\x00".join(identity).encode("utf-8", "backslashreplace")
    return hashlib.sha256(encoded).hexdigest()[:16]


def about_source(advisory: Advisory, name: str, evidence: Iterable[Evidence]) -> Finding:
    """A finding about a part of gpuwarden, or about something that it listens to."""
    subject = Subject(kind="source", name=name)
    return Finding(
        id=finding_id(advisory.id, subject),
        rule=advisory.id,
        severity=advisory.severity,
        title=advisory.title,
        explanation=advisory.explanation,
        subject=subject,
        evidence=tuple(evidence),
        advice=advisory.steps,
    )
