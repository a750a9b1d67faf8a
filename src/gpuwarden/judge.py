"""Snapshot and policy → Report: rows by the decision tree, findings by the rules, silences applied.

Pure and the same for a live scan and a replay.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from gpuwarden import __version__
from gpuwarden.finding import (
    VERDICT_SEVERITY,
    Finding,
    PolicyUse,
    Report,
    Row,
    RuleRun,
    Severity,
    finding_id,
    severity_rank,
)
from gpuwarden.model import Process, Snapshot
from gpuwarden.node import Node
from gpuwarden.policy import NARROWING_CONDITIONS, Match, Policy
from gpuwarden.rules.gpu_memory import judge_gpus
from gpuwarden.rules.hit import Hit
from gpuwarden.rules.membership import references_of, slurm_claim
from gpuwarden.rules.placement import binary_name, place_name, says
from gpuwarden.rules.policy_match import fit
from gpuwarden.rules.registry import RULES, Rule
from gpuwarden.rules.subjects import Answer, Subject, subjects
from gpuwarden.verdicts import decide

OWN_VERDICTS = frozenset({"cryptominer", "suspicious", "rogue-container", "system"})
"""Verdicts that a holder keeps although it inherited its descriptors from a listed process."""
KNOWN_WORKLOAD_RULES = frozenset(
    {
        "container_opens_accelerator",
        "gpu_tool_in_container",
        "gpu_container_without_allocation",
    }
)
"""Rules that the policy's ``user_known_gpu_workloads`` excuses from."""


def _user(process: Process | None) -> str | None:
    if process is None:
        return None
    return process.user or (str(process.uid) if process.uid is not None else None)


def _row(node: Node, subject: Subject, answer: Answer) -> Row:
    process = subject.process
    client = subject.clients[0] if subject.clients else None
    memory = [c.memory_bytes for c in subject.clients if c.memory_bytes is not None]
    busy = [c.sm_percent for c in subject.clients if c.sm_percent is not None]
    unknown: list[str] = []
    if process is not None:
        unknown += [f"{name}: {reason}" for name, reason in sorted(process.unread.items())]
    for c in subject.clients:
        unknown += [f"{name}: {reason}" for name, reason in sorted(c.unread.items())]
    claim = answer.claim
    return Row(
        gpu_id=subject.gpu_id,
        gpu=node.gpu_label(subject.gpu_id),
        pid=subject.pid,
        verdict=answer.verdict,
        severity=VERDICT_SEVERITY[answer.verdict],
        start_time_ticks=process.start_time_ticks if process else None,
        started_at_ns=process.started_at_ns if process else None,
        kinds=tuple(dict.fromkeys(k for c in subject.clients for k in c.kinds)),
        listed=bool(subject.clients),
        user=_user(process),
        binary=binary_name(process, client),
        says=says(process),
        place=place_name(node, process),
        sm_percent=max(busy) if busy else None,
        memory_bytes=sum(memory) if memory else None,
        workload=claim.name if claim else None,
        proof=answer.proof,
        owner=answer.owner,
        contact=answer.contact,
        path=answer.path,
        evidence=answer.evidence,
        unknown=tuple(dict.fromkeys(unknown)),
    )


def _kin(
    node: Node, process: Process, gpu_id: str | None, judged: dict[int, list[Row]]
) -> Row | None:
    """The row of the listed client whose descriptors this holder inherited, if there is one.

    A client on several GPUs lends the row of the holder's own GPU, or else the gravest.
    """
    pid = _listed_kin(node, process, judged)
    if pid is None:
        return None
    return min(
        judged[pid],
        key=lambda row: (row.gpu_id != gpu_id, -severity_rank(row.severity), row.gpu_id or ""),
    )


def _listed_kin(node: Node, process: Process, judged: dict[int, list[Row]]) -> int | None:
    for ancestor in node.ancestors(process.pid):
        if ancestor.pid in judged:
            return ancestor.pid
    # A dead client leaves its pid behind as its children's process group or session.
    for pid in (process.ppid, process.process_group, process.session_id):
        if pid in judged and pid not in node.processes:
            return pid
    for pid in sorted(judged):
        other = node.processes.get(pid)
        if (
            other is not None
            and other.session_id == process.session_id
            and other.uid == process.uid
            and other.process_group == process.process_group
            and other.exe is not None
            and process.exe is not None
            and (other.exe.device, other.exe.inode) == (process.exe.device, process.exe.inode)
        ):
            return pid
    return None


def judge_rows(node: Node, policy: Policy) -> list[Row]:
    """One row a (process, GPU) and one a GPU that has a verdict of its own."""
    listed: dict[int, list[Row]] = {}
    rows: list[Row] = []
    for subject in subjects(node):
        try:
            answer = decide(node, policy, subject)
        except Exception as error:  # noqa: BLE001
            # A defect in judging one process must neither clear it nor hide the others.
            answer = Answer("unreadable", (f"judged? no: {type(error).__name__}: {error}",))
        row = _row(node, subject, answer)
        if subject.clients:
            listed.setdefault(subject.pid, []).append(row)
        elif subject.process is not None and answer.verdict not in OWN_VERDICTS:
            kin = _kin(node, subject.process, subject.gpu_id, listed)
            if kin is not None:
                row = replace(
                    row,
                    verdict=kin.verdict,
                    severity=kin.severity,
                    workload=kin.workload,
                    proof=kin.proof,
                    owner=kin.owner,
                    contact=kin.contact,
                    inherited_from=kin.pid,
                    path=(f"listed by the driver? no: holds descriptors of pid {kin.pid}",),
                    evidence=(),
                )
        rows.append(row)
    for answer_gpu in judge_gpus(node, policy):
        gpu = answer_gpu.gpu
        rows.append(
            Row(
                gpu_id=gpu.id,
                gpu=node.gpu_label(gpu.id),
                pid=None,
                verdict=answer_gpu.verdict,
                severity=VERDICT_SEVERITY[answer_gpu.verdict],
                memory_bytes=gpu.memory_used_bytes,
                sm_percent=gpu.sm_percent,
                path=answer_gpu.path,
                evidence=answer_gpu.evidence,
            )
        )
    return rows


# ------------------------------------------------------------------ rules


def _not_evaluated(node: Node, policy: Policy, rows: Sequence[Row], rule: Rule) -> str:
    """Why a rule cannot be evaluated on this snapshot; empty when it can."""
    for name in rule.advisory.needs:
        run = node.sensor(name)
        if run is None:
            return f"sensor {name} did not run"
        if run.state == "failed" or (run.state == "absent" and node.snapshot.node.is_dump):
            return f"sensor {name}: {run.reason or run.state}"
        if run.state == "skipped":
            return f"sensor {name} was not asked for"
    for name in rule.advisory.needs_sources:
        source = node.source(name)
        if source is not None and source.state == "failed":
            return f"source {name}: {source.reason or 'failed'}"
    return rule.unseen(node, policy, rows) if rule.unseen is not None else ""


def _fill(step: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        step = step.replace("{" + name + "}", value)
    return step


def _finding(rule: Rule, hit: Hit) -> Finding:
    advisory = rule.advisory
    values = {
        "pid": str(hit.subject.pid) if hit.subject.pid is not None else "PID",
        "gpu": hit.subject.gpu or "the GPU",
        "owner": hit.owner or "its owner",
    }
    return Finding(
        id=finding_id(advisory.id, hit.subject),
        rule=advisory.id,
        severity=hit.severity or advisory.severity,
        title=_fill(advisory.title, values),
        explanation=_fill(advisory.explanation, values),
        subject=hit.subject,
        verdict=hit.verdict,
        owner=hit.owner,
        evidence=hit.evidence,
        advice=tuple(_fill(step, values) for step in advisory.steps),
        since_ns=hit.since_ns,
    )


def _line_of(name: str) -> str | None:
    """The file in ``FILE:LINE``. A file's own name may hold colons."""
    path, _, line = name.rpartition(":")
    return path if line.isascii() and line.isdigit() else None


def _fits(node: Node, match: Match, process: Process) -> bool:
    """Whether a match holds for a process, by what cannot be forged."""
    claim = slurm_claim(node, process)
    job = claim.workload if claim is not None and claim.proof == "proven" else None
    result = fit(node, match, process, job)
    return result.fits and result.proof == "proven"


def _is_known(node: Node, match: Match, process: Process) -> bool:
    """Whether a known GPU workload's match holds: its container proven, the rest fitting.

    What binary runs in a container and as whom is its root's word. It may narrow what the proven
    container excuses already.
    """
    container = replace(match, **dict.fromkeys(NARROWING_CONDITIONS))
    return _fits(node, container, process) and fit(node, match, process, None).fits


def _why_silent(what: str, reason: str, expires: datetime.date | None) -> str:
    until = f" (until {expires})" if expires else ""
    return f"{what} of the policy: {reason}{until}"


def _silence(node: Node, policy: Policy, finding: Finding, today: datetime.date) -> str | None:
    """What of the policy covers a finding, with its reason: not expired, everything it names fits.

    An exception of the same rule, or a known GPU workload for the rules that ask for an allocation.
    """
    process = node.processes.get(finding.subject.pid or -1)
    began = finding.subject.start_time_ticks
    if process is not None and began not in (None, process.start_time_ticks):
        # The process is gone; another has its number.
        process = None
    for exception in policy.exceptions:
        if exception.rule != finding.rule:
            continue
        if exception.expires is not None and exception.expires < today:
            continue
        if exception.path is not None and not (
            # A process's name is its own claim; only a file's name is its place.
            finding.subject.kind in ("persistence", "node")
            and (
                finding.subject.name == exception.path
                or _line_of(finding.subject.name) == exception.path
            )
        ):
            continue
        if exception.gpu is not None:
            covered = node.resolve(references_of([exception.gpu])) or frozenset()
            if not finding.subject.gpu_ids or not covered.issuperset(finding.subject.gpu_ids):
                continue
        if not exception.match.is_empty and (
            process is None or not _fits(node, exception.match, process)
        ):
            continue
        return _why_silent("exception", exception.reason, exception.expires)
    if finding.rule in KNOWN_WORKLOAD_RULES and process is not None:
        for known in policy.user_known_gpu_workloads:
            if known.expires is not None and known.expires < today:
                continue
            if _is_known(node, known.match, process):
                return _why_silent("known GPU workload", known.reason, known.expires)
    return None


def _judge_rules(
    node: Node, policy: Policy, rows: Sequence[Row], rules: Sequence[Rule]
) -> Iterator[tuple[RuleRun, list[Finding]]]:
    for rule in rules:
        # A rule reports what it found even when a sensor it needs saw nothing: a miner's name in
        # a dump is a finding although the dump holds no /proc. It is only never called clear.
        try:
            found = [_finding(rule, hit) for hit in rule.hits(node, policy, rows)]
            not_evaluated = _not_evaluated(node, policy, rows, rule)
        except Exception as error:  # noqa: BLE001
            # A defect of one rule must not take the others' findings away.
            reason = f"{type(error).__name__}: {error}"
            yield RuleRun(rule=rule.advisory.id, state="failed", reason=reason), []
            continue
        unique = list({f.id: f for f in found}.values())
        run = RuleRun(
            rule=rule.advisory.id,
            state="not-evaluated" if not_evaluated else "ok",
            reason=not_evaluated,
            findings=len(unique),
        )
        yield run, unique


def judge(
    snapshot: Snapshot,
    policy: Policy,
    policy_path: str | None = None,
    rules: Sequence[Rule] | None = None,
) -> Report:
    """Everything that can be said of a snapshot under a policy; by ``RULES`` unless told."""
    node = Node(snapshot)
    rows = judge_rows(node, policy)
    today = datetime.datetime.fromtimestamp(snapshot.taken_at_ns / 1e9, tz=datetime.UTC).date()
    runs: list[RuleRun] = []
    findings: list[Finding] = []
    silenced: dict[tuple[int | None, str, str], str] = {}
    for run, found in _judge_rules(node, policy, rows, RULES if rules is None else rules):
        runs.append(run)
        for finding in found:
            why = _silence(node, policy, finding, today)
            if why is None:
                findings.append(finding)
                continue
            if finding.verdict is not None:
                for gpu_id in finding.subject.gpu_ids or ("",):
                    silenced[(finding.subject.pid, gpu_id, finding.verdict)] = why
            findings.append(replace(finding, silenced_by=why))
    findings.sort(key=lambda f: -severity_rank(f.severity))
    findings = [replace(f, sequence=i) for i, f in enumerate(findings, start=1)]
    rows = [
        replace(row, silenced_by=silenced.get((row.pid, row.gpu_id or "", row.verdict)))
        for row in rows
    ]
    return Report(
        tool_version=__version__,
        taken_at_ns=snapshot.taken_at_ns,
        node=snapshot.node,
        policy=PolicyUse(
            path=policy_path, workloads=len(policy.workloads), exceptions=len(policy.exceptions)
        ),
        sensors=snapshot.sensors,
        sources=snapshot.sources,
        rules=tuple(runs),
        gaps=snapshot.gaps,
        gpus=snapshot.gpus,
        rows=tuple(sorted(rows, key=_row_order)),
        findings=tuple(findings),
    )


def _row_order(row: Row) -> tuple[int, str, int, int]:
    number = row.gpu.split(":")[0]
    return (
        # What no GPU is known for keeps its id as its label, and that can be anything.
        int(number) if number.isascii() and number.isdigit() and len(number) < 10 else 1 << 30,
        row.gpu,
        -severity_rank(row.severity),
        row.pid if row.pid is not None else -1,
    )


def exit_code(report: Report, fail_on: Severity) -> int:
    """1 for a finding at or above ``fail_on``; else 2 if something was not evaluated; else 0."""
    for finding in report.findings:
        if finding.silenced_by is None and severity_rank(finding.severity) >= severity_rank(
            fail_on
        ):
            return 1
    if any(run.state != "ok" for run in report.rules):
        return 2
    if any(source.state == "failed" for source in report.sources):
        return 2
    return 0
