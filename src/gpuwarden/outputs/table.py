"""Report → text: one line a process, then each finding with its evidence and the next steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from gpuwarden.finding import DECISION_TREE, Evidence, Finding, Report, Row, severity_rank
from gpuwarden.outputs.sheet import Sheet, cells, cut
from gpuwarden.outputs.words import age, escape, memory, moment, percent

NARROWEST = 60
# Title and the widest that a column may grow; BINARY and PLACE then share what is left.
COLUMNS = (
    ("GPU", 9),
    ("PID", 8),
    ("USER", 10),
    ("BINARY", 80),
    ("JOB, CONTAINER", 48),
    ("SM", 4),
    ("MEMORY", 9),
    ("VERDICT", 26),
)
BINARY, PLACE = 3, 4
RIGHT_ALIGNED = frozenset({1, 5, 6})
COLLAPSE_ABOVE = 3
"""More findings than this of one rule, below ``error``, are told together."""
SUBJECTS_SHOWN = 12
EVIDENCE_SHOWN = 12
NOTES_SHOWN = 6

STYLES = {"info": "green", "warning": "yellow", "error": "red", "critical": "bold red"}


def _row_style(row: Row) -> str:
    return "dim" if row.silenced_by else STYLES[row.severity]


def _verdict(row: Row) -> str:
    """The verdict with what qualifies it: claimed, silenced, inherited."""
    if row.silenced_by:
        return f"{row.verdict} (excepted)"
    if row.verdict == "system" and row.proof != "proven":
        return f"{row.verdict} (claimed)"
    return row.verdict


def _collapse_workers(rows: Sequence[Row]) -> Iterator[tuple[Row, int]]:
    """Rows with the number of inheritors that share each one's verdict and GPU."""
    workers: dict[tuple[int | None, str | None], int] = defaultdict(int)
    for row in rows:
        if row.inherited_from is not None:
            workers[(row.inherited_from, row.gpu_id)] += 1
    shown: set[tuple[int | None, str | None]] = set()
    for row in rows:
        if row.inherited_from is not None:
            continue
        key = (row.pid, row.gpu_id)
        yield row, 0 if key in shown else workers.get(key, 0)
        shown.add(key)


def _binary(row: Row) -> str:
    if row.binary is None:
        return "?" if row.pid is not None else "(the GPU itself)"
    return escape(row.binary)


def _cells(row: Row, workers: int) -> tuple[str, str, str, str, str, str, str, str]:
    is_process = row.pid is not None
    place = escape(row.place or ("-" if is_process else ""))
    if workers:
        place += f" (+{workers})"
    return (
        escape(row.gpu),
        str(row.pid) if is_process else "-",
        escape(row.user or ("?" if is_process else "")),
        _binary(row),
        place,
        percent(row.sm_percent),
        memory(row.memory_bytes),
        _verdict(row),
    )


def _print_processes(sheet: Sheet, report: Report) -> None:
    """One line a process; binary and place share what the other columns leave."""
    rows = [row for row in report.rows if not _is_bystander(row)]
    if not rows:
        return
    lines = [(row, _cells(row, workers)) for row, workers in _collapse_workers(rows)]
    widths = [
        min(max(len(title), *(cells(line[i]) for _, line in lines)), limit)
        for i, (title, limit) in enumerate(COLUMNS)
    ]
    spare = sheet.width - sum(widths) + widths[BINARY] + widths[PLACE] - (len(COLUMNS) - 1)
    if widths[BINARY] + widths[PLACE] > spare:
        # The place is usually short: it gets what it needs up to half, the binary's end the rest.
        widths[PLACE] = max(min(widths[PLACE], spare // 2), 4)
        widths[BINARY] = max(spare - widths[PLACE], 8)
    fitted = [
        [
            cut(cell, widths[i], keep="end" if i == BINARY else "start")
            for i, cell in enumerate(line)
        ]
        for _, line in lines
    ]
    sheet.columns([[title for title, _ in COLUMNS]], widths, right=RIGHT_ALIGNED, styles=[""])
    styles = [_row_style(row) for row, _ in lines]
    sheet.columns(fitted, widths, right=RIGHT_ALIGNED, styles=styles)


def _is_bystander(row: Row) -> bool:
    """A system program that only has the device open, as monitors do."""
    return row.verdict == "system" and not row.listed


def _bystanders(report: Report) -> str:
    """One line for all system programs that only have devices open."""
    held: dict[tuple[int | None, str], list[str]] = defaultdict(list)
    for row in report.rows:
        if _is_bystander(row):
            held[(row.pid, (row.binary or "?").rsplit("/", 1)[-1])].append(row.gpu)
    if not held:
        return ""
    parts = [
        f"{escape(name)} (pid {pid}, GPU {', '.join(gpus)})" for (pid, name), gpus in held.items()
    ]
    return "Holding devices without a context: " + "; ".join(parts)


def _idle(report: Report) -> str:
    """One line for the GPUs on which nothing was seen."""
    busy = {row.gpu_id for row in report.rows if not _is_bystander(row)}
    parents = {g.parent_id for g in report.gpus if g.id in busy}
    idle = [
        g for g in report.gpus
        if g.parent_id is None and g.id not in busy and g.id not in parents
    ]  # fmt: skip
    if not idle:
        return ""
    names: dict[str, list[str]] = defaultdict(list)
    for gpu in idle:
        label = gpu.index if gpu.index is not None else gpu.minor
        names[gpu.name or "unnamed"].append(str(label) if label is not None else gpu.id)
    parts = [f"{', '.join(ids)} ({escape(name)})" for name, ids in names.items()]
    return "Nothing seen on GPU " + "; ".join(parts)


def _print_evidence(sheet: Sheet, evidence: Sequence[Evidence]) -> None:
    order = {"complete": 0, "strong": 1, "weak": 2, "fact": 3}
    items = [e for e in evidence if e.source != DECISION_TREE]
    items.sort(key=lambda e: order[e.strength])
    for item in items[:EVIDENCE_SHOWN]:
        kind = f"{item.kind}{' (weak)' if item.strength == 'weak' else ''}: " if item.kind else ""
        text = f"{escape(item.text)}  [{escape(item.source)}]"
        sheet.lead(f"- {kind}", text, indent=2, hang=2, style="bold")
    if len(items) > EVIDENCE_SHOWN:
        sheet.add(f"- and {len(items) - EVIDENCE_SHOWN} more (in --format json)", indent=2)


def _subject_line(report: Report, finding: Finding) -> str:
    subject = finding.subject
    parts: list[str] = []
    if subject.pid is not None:
        row = next((r for r in report.rows if r.pid == subject.pid), None)
        parts.append(f"pid {subject.pid}")
        if row is not None and row.binary:
            said = f' (calls itself "{cut(escape(row.says), 40)}")' if row.says else ""
            parts.append(escape(row.binary) + said)
        elif subject.name:
            parts.append(escape(subject.name))
        if row is not None and row.user:
            parts.append(f"user {escape(row.user)}")
        if row is not None and row.place:
            parts.append(escape(row.place))
    elif subject.kind in ("persistence", "source", "node"):
        parts.append(escape(subject.name))
    if finding.since_ns is not None:
        parts.append(
            f"since {moment(finding.since_ns)} ({age(finding.since_ns, report.taken_at_ns)})"
        )
    if finding.owner:
        parts.append(f"owner: {escape(finding.owner)}")
    return ", ".join(parts)


def _print_finding(sheet: Sheet, report: Report, group: Sequence[Finding]) -> None:
    first = group[0]
    title = first.title if len(group) == 1 else f"{first.title} (and {len(group) - 1} more like it)"
    sheet.lead(f"{first.severity.upper()} ", escape(title), style=STYLES[first.severity])
    sheet.add(f"{first.rule}, id {first.id}", indent=2, style="dim")
    if first.silenced_by:
        sheet.add(escape(first.silenced_by), indent=2)
    for finding in group[:SUBJECTS_SHOWN]:
        line = _subject_line(report, finding)
        if len(group) > 1 and finding.subject.gpu:
            line = f"{finding.subject.gpu}: {line}" if line else finding.subject.gpu
        if line:
            sheet.add(line, indent=2)
    if len(group) > SUBJECTS_SHOWN:
        sheet.add(f"and {len(group) - SUBJECTS_SHOWN} more", indent=2)
    sheet.add(escape(first.explanation), indent=2)
    _print_evidence(sheet, first.evidence)
    path = [e.text for e in first.evidence if e.source == DECISION_TREE]
    if path:
        sheet.add("Decided by: " + escape(" → ".join(path)), indent=2, hang=2)
    if severity_rank(first.severity) > 0 and not first.silenced_by:
        sheet.add("Next steps", indent=2, style="bold")
        for number, step in enumerate(first.advice, start=1):
            sheet.add(f"{number}. {escape(step)}", indent=2, hang=len(f"{number}. "))
    sheet.blank()


def _groups(findings: Sequence[Finding]) -> Iterator[list[Finding]]:
    """Findings one by one; many of one mild rule together."""
    by_rule: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        by_rule[finding.rule].append(finding)
    told: set[str] = set()
    for finding in findings:
        same = [f for f in by_rule[finding.rule] if not f.silenced_by]
        mild = severity_rank(finding.severity) < severity_rank("error")
        if finding.silenced_by or not mild or len(same) <= COLLAPSE_ABOVE:
            yield [finding]
        elif finding.rule not in told:
            told.add(finding.rule)
            yield same


def _coverage(report: Report) -> Iterator[str]:
    """What could not be seen, and what that left unjudged; nothing unseen reads as clean."""
    for sensor in report.sensors:
        if sensor.state in ("failed", "partial"):
            remedy = f" → {sensor.remedy}" if sensor.remedy else ""
            yield f"{sensor.name} ({sensor.state}): {sensor.reason}{remedy}"
    for source in report.sources:
        if source.state == "failed":
            remedy = f" → {source.remedy}" if source.remedy else ""
            yield f"{source.name} (failed): {source.reason}{remedy}"
    blind = [run for run in report.rules if run.state != "ok"]
    if blind and report.node.is_dump:
        yield (
            "a dump holds the driver's list only: no owners, binaries, containers, sockets or "
            f"holders ({len(blind)} of {len(report.rules)} rules not evaluated)"
        )
    elif blind:
        reasons = list(dict.fromkeys(run.reason for run in blind))
        yield f"{len(blind)} of {len(report.rules)} rules not evaluated: {'; '.join(reasons)}"


def _set_line(report: Report) -> str:
    parts = []
    for source in report.sources:
        count = f", {source.workloads}" if source.state == "ok" else ""
        parts.append(f"{source.name} {source.state}{count}")
    policy = report.policy
    where = escape(policy.path) if policy.path else "none"
    parts.append(f"policy {where}" + (f", {policy.workloads}" if policy.path else ""))
    return "Expected set: " + "; ".join(parts)


def _head(report: Report) -> str:
    node = report.node
    when = moment(report.taken_at_ns) if report.taken_at_ns else "time unknown"
    parts = [f"gpuwarden {report.tool_version}", escape(node.hostname), when]
    if node.driver_version:
        parts.append(f"driver {escape(node.driver_version)}")
    whole = sum(1 for g in report.gpus if g.parent_id is None)
    parts.append(f"{whole} GPU{'' if whole == 1 else 's'}")
    if node.origin not in ("live", "root"):
        parts.append(f"read from {node.origin}")
    return ", ".join(parts)


def render(report: Report, *, width: int, colour: bool, exit_code: int | None = None) -> str:
    """The whole report as text ``width`` columns wide."""
    sheet = Sheet(max(width, NARROWEST), colour=colour)
    sheet.add(_head(report), style="bold")
    sheet.blank()
    _print_processes(sheet, report)
    for line in (_idle(report), _bystanders(report)):
        if line:
            sheet.add(line)
    if not report.rows and not report.gpus:
        sheet.add("No accelerator was seen on this node.")
    sheet.blank()
    for group in _groups([f for f in report.findings if f.severity != "info"]):
        _print_finding(sheet, report, group)
    infos = [f for f in report.findings if f.severity == "info"]
    if infos:
        noted = "; ".join(
            f"{f.title}: {f.evidence[0].text}" if f.evidence else f.title
            for f in infos[:NOTES_SHOWN]
        )
        sheet.add("Noted: " + escape(noted))
        sheet.blank()
    if not report.node.is_dump:
        sheet.add(_set_line(report))
    unseen = list(_coverage(report))
    if unseen:
        sheet.add("Could not be seen:", style="bold")
        for line in unseen:
            sheet.add("- " + escape(line), indent=2, hang=2)
    sheet.add(_summary(report, exit_code))
    return sheet.text()


def _summary(report: Report, exit_code: int | None) -> str:
    counts: dict[str, int] = defaultdict(int)
    for finding in report.findings:
        if not finding.silenced_by:
            counts[finding.severity] += 1
    told = [f"{counts[s]} {s}" for s in ("critical", "error", "warning") if counts[s]]
    text = "Findings: " + (", ".join(told) if told else "none")
    silenced = sum(1 for f in report.findings if f.silenced_by)
    if silenced:
        text += f" ({silenced} excepted by the policy)"
    if exit_code == 2:
        text += ". Not a clean result: something could not be evaluated (exit 2)"
    return text + "."
