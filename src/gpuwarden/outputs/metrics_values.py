"""The agent's state → the value of each series. What is not known tells none: 0 is a fact."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import get_args

from gpuwarden.finding import VERDICTS, Report, Row
from gpuwarden.model import Gpu, NodeFacts, SensorState, Snapshot, SourceState
from gpuwarden.node import Node
from gpuwarden.outputs import cuda_state
from gpuwarden.outputs.metrics_state import BLIND_CAUSES, AgentState, PartHealth, blindness

MAX_PROCESSES = 1024
NANOSECONDS = 1e9


Series = tuple[str, tuple[str, ...], float | None]
"""A metric's name without ``gpuwarden_``, its labels as the catalogue orders them, its value."""


def values(state: AgentState, monotonic_seconds: float) -> Iterator[Series]:
    """Every series of one state; a value of None is not known, and is to be left out."""
    now = monotonic_seconds
    yield "build_info", (state.tool_version,), 1
    blind = {one.cause for one in blindness(state, now)}
    for cause in BLIND_CAUSES:
        yield "blind", (cause,), cause in blind
    yield "state_timestamp_seconds", (), state.at_ns / NANOSECONDS
    yield from _gpus(state)
    yield from _processes(state)
    if state.report is not None:
        yield from _judged(state.report)
    yield from _findings(state)
    yield from _opens(state)
    if state.cuda is not None:
        yield from cuda_state.series(state.cuda)
    yield from _parts("sensor", state.sensors, get_args(SensorState))
    yield from _parts("source", state.sources, get_args(SourceState))
    yield from _sinks(state)
    yield from _own(state, now)


# ---------------------------------------------------------------- GPUs and processes


def _node(state: AgentState) -> Node:
    return Node(
        Snapshot(
            taken_at_ns=state.at_ns,
            node=NodeFacts(hostname=""),
            gpus=state.gpus,
            clients=state.clients,
        )
    )


def _ratio(percent: int | None) -> float | None:
    return None if percent is None else percent / 100


def _lists_processes(gpu: Gpu) -> bool:
    return gpu.error is None and "processes" not in gpu.unread


def _gpus(state: AgentState) -> Iterator[Series]:
    node = _node(state)
    unexplained = _memory_without_process(state.report)
    for gpu in state.gpus:
        key = (node.gpu_label(gpu.id), gpu.uuid or gpu.id)
        what = (gpu.vendor, gpu.name or "", gpu.pci_address or "")
        yield "gpu_info", (*key, *what), 1
        yield "gpu_readable", key, gpu.error is None
        yield "gpu_utilisation_ratio", key, _ratio(gpu.sm_percent)
        yield "gpu_memory_used_bytes", key, gpu.memory_used_bytes
        yield "gpu_memory_total_bytes", key, gpu.memory_total_bytes
        yield "gpu_temperature_celsius", key, gpu.temperature_celsius
        if _lists_processes(gpu) and gpu.id not in node.migs_by_parent:
            pids = {client.pid for client in node.clients_by_gpu.get(gpu.id, ())}
            yield "gpu_clients", key, len(pids)
        yield "gpu_memory_without_process_bytes", key, unexplained.get(gpu.id)


def _memory_without_process(report: Report | None) -> dict[str, int]:
    """Bytes by GPU; a GPU that could not be judged in this is not in it."""
    if report is None or not _saw(report, "holders") or not _evaluated(report, "gpu_memory_leaked"):
        return {}
    own = {row.gpu_id: row for row in report.rows if row.pid is None}
    found: dict[str, int] = {}
    for gpu in report.gpus:
        row = own.get(gpu.id)
        if gpu.parent_id is not None or gpu.memory_used_bytes is None or gpu.memory_is_numa:
            continue
        if not _lists_processes(gpu):
            continue
        if row is None:
            found[gpu.id] = 0
        elif row.verdict == "leaked-memory" and row.memory_bytes is not None:
            found[gpu.id] = row.memory_bytes
    return found


def _processes(state: AgentState) -> Iterator[Series]:
    node = _node(state)
    rows: dict[tuple[str | None, int], Row] = {}
    for row in () if state.report is None else state.report.rows:
        if row.pid is not None:
            rows.setdefault((row.gpu_id, row.pid), row)
    busy: dict[tuple[str, int], int | None] = {}
    memory: dict[tuple[str, int], int | None] = {}
    for client in state.clients:
        key = (client.gpu_id, client.pid)
        busy[key] = _sum(busy.get(key), client.sm_percent)
        memory[key] = _sum(memory.get(key), client.memory_bytes)
    order = sorted(busy, key=lambda key: (-(busy[key] or 0), -(memory[key] or 0), key))
    for gpu_id, pid in order[:MAX_PROCESSES]:
        found = rows.get((gpu_id, pid))
        labels = (
            *_gpu_key(node, gpu_id),
            str(pid),
            *(
                ("", "", "", "")
                if found is None
                else (
                    found.binary or "",
                    found.user or "",
                    found.workload or "",
                    found.verdict,
                )
            ),
        )
        yield "process_sm_ratio", labels, _ratio(busy[gpu_id, pid])
        yield "process_memory_bytes", labels, memory[gpu_id, pid]
    rest: dict[str, list[int]] = defaultdict(list)
    for gpu_id, pid in order[MAX_PROCESSES:]:
        rest[gpu_id].append(pid)
    for gpu in state.gpus:
        if not _lists_processes(gpu) or gpu.id in node.migs_by_parent:
            continue
        pids = rest.get(gpu.id, [])
        where = _gpu_key(node, gpu.id)
        yield "more_processes", where, len(pids)
        shares = [b for pid in pids if (b := busy[gpu.id, pid]) is not None]
        yield "more_processes_sm_ratio", where, sum(shares) / 100 if shares else None
        sizes = [m for pid in pids if (m := memory[gpu.id, pid]) is not None]
        yield "more_processes_memory_bytes", where, sum(sizes) if sizes else None


def _gpu_key(node: Node, gpu_id: str) -> tuple[str, str]:
    gpu = node.gpus.get(gpu_id)
    return node.gpu_label(gpu_id), gpu_id if gpu is None else gpu.uuid or gpu.id


def _sum(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else one + other


# ---------------------------------------------------------------- judgements and findings


def _saw(report: Report, *sensors: str) -> bool:
    """Whether these sensors saw all there was to see."""
    states = {run.name: run.state for run in report.sensors}
    return all(states.get(sensor) == "ok" for sensor in sensors)


def _evaluated(report: Report, rule: str) -> bool:
    return any(run.rule == rule and run.state == "ok" for run in report.rules)


def _pids(report: Report, rule: str, *sensors: str) -> float | None:
    """How many processes a rule found; None when it could not look at all of them."""
    if not _saw(report, *sensors) or not _evaluated(report, rule):
        return None
    return len({finding.subject.pid for finding in report.findings if finding.rule == rule})


def _judged(report: Report) -> Iterator[Series]:
    verdicts = Counter(row.verdict for row in report.rows)
    for verdict in VERDICTS:
        yield "judged", (verdict,), verdicts[verdict]
    yield "holders_not_listed", (), _pids(report, "holder_not_listed", "nvml", "holders")
    yield (
        "clients_without_device",
        (),
        _pids(report, "client_without_device", "nvml", "holders"),
    )
    if _saw(report, "sockets"):
        egress = {
            row.pid
            for row in report.rows
            if row.pid is not None
            and row.silenced_by is None
            and any(one.kind == "egress" for one in row.evidence)
        }
        yield "unexpected_egress_processes", (), len(egress)


def _findings(state: AgentState) -> Iterator[Series]:
    counts: dict[tuple[str, ...], int] = defaultdict(int)
    for one in state.findings:
        silenced = "true" if one.silenced else "false"
        counts[(one.rule, one.severity, one.verdict or "", silenced)] += one.count
    for rule in state.rules:
        if rule.state is not None:
            yield "rule_evaluated", (rule.rule,), rule.state == "ok"
        if rule.state == "ok":
            # A rule that was not evaluated is not said to have found nothing.
            counts.setdefault((rule.rule, rule.severity, "", "false"), 0)
    for labels, count in counts.items():
        yield "findings", labels, count


# ---------------------------------------------------------------- our own health


def _opens(state: AgentState) -> Iterator[Series]:
    if state.watching:
        yield "probe_info", (state.way, "poll" if state.polling else "ebpf"), 1
    for refused in state.refused:
        yield "probe_refused_info", (refused.way, refused.reason), 1
    for event in state.events:
        yield "events_total", (event.kind, event.state), event.count
    dropped = dict(state.dropped)
    if state.probe is not None:
        for field in state.probe.__struct_fields__:
            if field.startswith("dropped_"):
                cause = f"ring_{field.removeprefix('dropped_')}"
                dropped[cause] = getattr(state.probe, field)
        dropped["malformed"] = state.probe.malformed
        yield "device_uses_total", (), state.probe.hits
        yield "events_limited_total", (), state.probe.limited
        yield "limiter_full_total", (), state.probe.limiter_full
    for cause, count in dropped.items():
        yield "events_dropped_total", (cause,), count
    yield "events_merged_total", (), state.merged
    yield "opens_denied_total", ("enforce",), state.denied
    yield "opens_denied_total", ("dry-run",), state.would_deny
    yield "tool_runs_total", (), state.tool_runs
    yield "ring_fill_ratio", (), state.ring_fill_ratio
    yield "ring_bytes", (), state.ring_bytes
    yield "metadata_pending", (), state.metadata_pending
    yield "metadata_unknown_total", (), state.metadata_unknown
    yield "metadata_failures_total", (), state.metadata_failures


def _parts(what: str, parts: Iterable[PartHealth], states: Iterable[str]) -> Iterator[Series]:
    for part in parts:
        for state in states:
            yield f"{what}_state", (part.name, state), part.state == state
        yield f"{what}_seconds", (part.name,), part.seconds
        yield f"{what}_errors_total", (part.name,), part.errors


def _sinks(state: AgentState) -> Iterator[Series]:
    names: dict[str, int] = defaultdict(int)
    for sink in state.sinks:
        # Two webhooks of one host are shown alike, since a path may be a secret.
        names[sink.name] += 1
        number = names[sink.name]
        key = (sink.name if number == 1 else f"{sink.name} ({number})",)
        failing = 0.0
        if sink.failing_since_ns is not None:
            failing = max(state.at_ns - sink.failing_since_ns, 0) / NANOSECONDS
        yield "sink_up", key, sink.failures == 0
        yield "sink_delivered_total", key, sink.delivered
        yield "sink_repeated_total", key, sink.repeated
        yield "sink_dropped_total", key, sink.dropped
        yield "sink_waiting", key, sink.waiting
        yield "sink_failing_seconds", key, failing


def _own(state: AgentState, now: float) -> Iterator[Series]:
    since = max(now - state.monotonic_seconds, 0.0)
    age = state.judgement_age_seconds
    yield "judgements_total", (), state.judgements
    yield "judgement_failures_total", (), state.judgement_failures
    yield "judgement_seconds", (), state.judgement_seconds
    yield "judgement_age_seconds", (), None if age is None else age + since
    yield "judgement_interval_seconds", (), state.judgement_interval_seconds
    yield "store_troubles", (), len(state.store_troubles)
    yield "store_set_aside", (), len(state.store_set_aside)
    for database, size in state.database_bytes.items():
        yield "store_database_bytes", (database,), size
    yield "samples_lost_total", (), state.lost_samples
    use = state.agent
    yield "agent_cpu_seconds_total", (), use.cpu_seconds
    yield "agent_resident_memory_bytes", (), use.resident_bytes
    yield "agent_open_files", (), use.open_files
    if use.started_at_ns is not None:
        yield "agent_start_time_seconds", (), use.started_at_ns / NANOSECONDS
