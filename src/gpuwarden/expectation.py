"""The expected set as a person reads it, and a policy drafted from what runs now."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec
import yaml

from gpuwarden.finding import Row
from gpuwarden.judge import judge_rows
from gpuwarden.model import Fact, Snapshot, SourceRun, Workload
from gpuwarden.node import Node
from gpuwarden.outputs.words import escape, json_text, moment
from gpuwarden.policy import Policy
from gpuwarden.rules.membership import policy_references

EXPECTATION_SCHEMA = "gpuwarden.expected"
LEARNT_VERDICTS = frozenset({"other-team", "unattributed"})
REFUSED_VERDICTS = frozenset({"cryptominer", "suspicious", "rogue-container"})


class Expectation(Fact, frozen=True, kw_only=True, omit_defaults=False):
    """The expected set of one moment, with how each source fared."""

    schema: str = EXPECTATION_SCHEMA
    version: int = 1
    taken_at_ns: int
    sources: tuple[SourceRun, ...]
    workloads: tuple[Workload, ...]


def expected_set(snapshot: Snapshot, policy: Policy, policy_path: str | None) -> Expectation:
    """Workloads of every source, the policy's included."""
    listed = tuple(
        Workload(
            source="policy",
            name=entry.name,
            owner=entry.owner,
            contact=entry.contact,
            gpus=policy_references(entry),
        )
        for entry in policy.workloads
    )
    source = SourceRun(
        name="policy",
        state="ok" if policy_path else "absent",
        reason="" if policy_path else "no policy file",
        workloads=len(listed),
    )
    return Expectation(
        taken_at_ns=snapshot.taken_at_ns,
        sources=(*snapshot.sources, source),
        workloads=(*snapshot.workloads, *listed),
    )


def _workload_line(workload: Workload) -> str:
    gpus = ", ".join(workload.gpus) or "no GPU"
    parts = [f"  {workload.name}", f"GPUs: {gpus}{' (shared)' if workload.shared else ''}"]
    if workload.pod_name:
        parts.append(f"pod {workload.pod_namespace}/{workload.pod_name}")
    owner = workload.owner or workload.user
    if owner:
        parts.append(f"owner: {owner}" + (f" <{workload.contact}>" if workload.contact else ""))
    if workload.account:
        parts.append(f"account {workload.account}")
    if workload.started_at_ns is not None:
        parts.append(f"since {moment(workload.started_at_ns)}")
    return escape("; ".join(parts))


def render(
    snapshot: Snapshot, policy: Policy, policy_path: str | None, *, as_json: bool
) -> tuple[str, bool]:
    """The set as text or JSON, and whether every source that is here answered."""
    expected = expected_set(snapshot, policy, policy_path)
    complete = all(source.state != "failed" for source in expected.sources)
    if as_json:
        return json_text(expected), complete
    by_source: dict[str, list[Workload]] = defaultdict(list)
    for workload in expected.workloads:
        by_source[workload.source].append(workload)
    lines: list[str] = []
    for source in expected.sources:
        detail = f": {source.reason}" if source.reason else ""
        lines.append(escape(f"{source.name}: {source.state}{detail}"))
        if source.remedy and source.state == "failed":
            lines.append(escape(f"  what to do: {source.remedy}"))
        lines += [_workload_line(w) for w in by_source.get(source.name, ())]
    if not complete:
        lines.append("A source failed: what it would have named is unknown, not unexpected.")
    return "\n".join(lines) + "\n", complete


def _match_of(node: Node, row: Row) -> dict[str, Any]:
    """The narrowest identity of a process that it cannot forge, as a policy match."""
    process = node.processes.get(row.pid or -1)
    if process is None:
        return {}
    container = node.container_of(process)
    if container is not None:
        match: dict[str, Any] = {}
        if container.pod_namespace:
            match["pod_namespace"] = container.pod_namespace
        if container.image_digest:
            match["image_digest"] = container.image_digest
        elif container.image:
            match["image"] = container.image
        return match
    match = {}
    place = process.cgroup
    if place is not None and place.unit and not place.unit_transient and not place.session:
        match["unit"] = place.unit
    if process.user is not None:
        match["user"] = process.user
    if process.exe is not None:
        if process.exe.path.endswith("*"):
            # In a policy a star at the end is a pattern: a file may not name itself into one.
            return {}
        match["binary"] = process.exe.path
    return match


def learn(snapshot: Snapshot, policy: Policy) -> str:
    """A policy draft from what runs now; what shows signs is refused and said so in comments."""
    node = Node(snapshot)
    rows = [row for row in judge_rows(node, policy) if row.pid is not None]
    drafts: dict[str, dict[str, Any]] = {}
    gpus: dict[str, set[str]] = defaultdict(set)
    refused: list[str] = []
    for row in rows:
        if row.verdict in REFUSED_VERDICTS or (
            row.verdict in LEARNT_VERDICTS
            and any(e.kind is not None and e.strength == "strong" for e in row.evidence)
        ):
            why = next((e.text for e in row.evidence if e.kind is not None), row.path[-1])
            refused.append(
                f"pid {row.pid} ({row.binary or '?'}) on GPU {row.gpu}, {row.verdict}: {why}"
            )
            continue
        if row.verdict not in LEARNT_VERDICTS or row.inherited_from is not None:
            continue
        match = _match_of(node, row)
        if not match:
            refused.append(f"pid {row.pid} on GPU {row.gpu}: nothing identifies it that holds")
            continue
        key = msgspec.json.encode(match, order="sorted").decode()
        name = row.place or (row.binary or "process").rsplit("/", 1)[-1]
        drafts.setdefault(key, {"name": name, "owner": row.owner or "TO BE NAMED", "match": match})
        gpu = node.gpus.get(row.gpu_id or "")
        if gpu is not None:
            gpus[key].add(gpu.uuid or gpu.id)
    for key, draft in drafts.items():
        draft["gpus"] = sorted(gpus[key]) or "all"
    names: dict[str, int] = defaultdict(int)
    for draft in drafts.values():
        names[draft["name"]] += 1
        if names[draft["name"]] > 1:
            draft["name"] += f" {names[draft['name']]}"
    lines = [
        f"# Drafted from what ran on {escape(snapshot.node.hostname)} at "
        f"{moment(snapshot.taken_at_ns)}.",
        "# A draft is not a decision: for each entry, ask its owner, name them, narrow the match.",
    ]
    if refused:
        lines.append("# Not taken in, because of what they show:")
        lines += [f"#   {escape(item)}" for item in refused]
    document: dict[str, Any] = {"version": 1, "workloads": list(drafts.values())}
    body = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)
    if any(escape(line) != line for line in body.split("\n")):
        # PyYAML counts what turns the reading direction as printable.
        body = yaml.safe_dump(document, sort_keys=False, allow_unicode=False, width=100)
    return "\n".join(lines) + "\n" + body
