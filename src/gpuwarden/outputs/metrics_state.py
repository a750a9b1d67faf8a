"""How the agent fares at one moment, as the Prometheus endpoint and its health check tell it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec

from gpuwarden.finding import Finding, Report, Severity, Verdict
from gpuwarden.model import Gap, Gpu, GpuClient, SensorState, SourceState
from gpuwarden.outputs.cuda_state import CudaState
from gpuwarden.probes.settings import Counters
from gpuwarden.sinks.dispatcher import SinkHealth

INTERVALS_UNTIL_STALE = 3
FILLED_EVERY_SECONDS = 1.0
STALE_STATE_SECONDS = 10.0
"""The state is filled every second; one this old comes from an agent that hangs."""

BlindCause = Literal["probe", "sampling", "judgement", "store", "agent"]
BLIND_CAUSES: tuple[BlindCause, ...] = ("probe", "sampling", "judgement", "store", "agent")
Sampling = Literal["ok", "no-driver", "failed"]
RuleState = Literal["ok", "not-evaluated", "failed"]


class FindingCount(msgspec.Struct, frozen=True):
    """So many open findings that agree in all of this."""

    rule: str
    severity: Severity
    verdict: Verdict | None = None
    silenced: bool = False
    count: int = 1


class EventCount(msgspec.Struct, frozen=True):
    """Events since the start: ``kind`` as open, mknod, access, held, exec; ``state`` of an open."""

    kind: str
    state: str
    count: int


class PartHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How a sensor, or a source of the expected set, fares."""

    name: str
    state: SensorState | SourceState
    seconds: float | None = None
    """Of its last run."""
    errors: int = 0
    """Runs that failed, since the start."""


class RuleHealth(msgspec.Struct, frozen=True):
    """Whether a rule could be evaluated; ``state`` None until the first judgement."""

    rule: str
    severity: Severity
    """Of its advisory."""
    state: RuleState | None = None


class RefusedWay(msgspec.Struct, frozen=True):
    """A way of seeing device opens that does not work here."""

    way: str
    reason: str


class AgentUse(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent itself takes; None is not known."""

    started_at_ns: int | None = None
    cpu_seconds: float | None = None
    resident_bytes: int | None = None
    open_files: int | None = None


class AgentState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that ``/metrics`` and ``/healthz`` tell; one value, filled once a second.

    Counts are since the agent's start. None is not known, and tells no series.
    """

    tool_version: str
    at_ns: int
    """When it was filled, by the wall clock, and by the clock that nobody sets."""
    monotonic_seconds: float

    # What is seen.
    report: Report | None = None
    """The last judgement."""
    gpus: tuple[Gpu, ...] = ()
    clients: tuple[GpuClient, ...] = ()
    """Of the newest sampling round, as ``gpus``."""
    findings: tuple[FindingCount, ...] = ()
    rules: tuple[RuleHealth, ...] = ()
    """Every rule that is judged, also those without a finding."""

    # Device opens.
    watching: bool
    """The probe, or the poll in its place, is alive."""
    way: str = ""
    polling: bool = False
    """That way is a poll: what ends between two looks is not seen."""
    refused: tuple[RefusedWay, ...] = ()
    probe: Counters | None = None
    """None without eBPF."""
    ring_bytes: int | None = None
    ring_fill_ratio: float | None = None
    events: tuple[EventCount, ...] = ()
    dropped: Mapping[str, int] = {}
    """By cause, beyond what ``probe`` counts: in the agent's own queues."""
    merged: int = 0
    metadata_pending: int = 0
    """Events that wait for a container's name, now."""
    metadata_unknown: int = 0
    """Events that were told without it."""
    metadata_failures: int = 0
    tool_runs: int = 0
    denied: int = 0
    would_deny: int = 0

    cuda: CudaState | None = None
    """None where calls of the CUDA driver are not to be watched."""

    # Health.
    sampling: Sampling
    sampling_seconds: float = 1.0
    """The interval between two rounds."""
    sampling_age_seconds: float | None = None
    """Since the newest round, at the time this was filled."""
    judgement_interval_seconds: float
    judgement_age_seconds: float | None = None
    """Since the last judgement, or since the start before there is one."""
    judgement_seconds: float | None = None
    """How long the last one took."""
    judgements: int = 0
    judgement_failures: int = 0
    sensors: tuple[PartHealth, ...] = ()
    sources: tuple[PartHealth, ...] = ()
    sinks: tuple[SinkHealth, ...] = ()
    store_troubles: tuple[Gap, ...] = ()
    """What keeps the store from being written now."""
    store_set_aside: tuple[Gap, ...] = ()
    """What was set aside when it was opened."""
    lost_samples: int = 0
    database_bytes: Mapping[str, int] = {}
    """By database: ``findings``, ``samples``."""
    agent: AgentUse = AgentUse()


def counted(findings: Iterable[Finding]) -> tuple[FindingCount, ...]:
    """Open findings as an ``AgentState`` holds them."""
    counts: dict[tuple[str, Severity, Verdict | None, bool], int] = {}
    for finding in findings:
        silenced = finding.silenced_by is not None
        key = (finding.rule, finding.severity, finding.verdict, silenced)
        counts[key] = counts.get(key, 0) + 1
    return tuple(FindingCount(*key, count) for key, count in counts.items())


def rule_health(
    severities: Mapping[str, Severity], report: Report | None, *, always: Iterable[str] = ()
) -> tuple[RuleHealth, ...]:
    """Every rule of ``severities`` with its state in the report.

    ``always`` are rules that no report lists, since nothing can keep them from being evaluated.
    """
    states: dict[str, RuleState] = dict.fromkeys(always, "ok")
    for run in () if report is None else report.rules:
        states[run.rule] = run.state
    return tuple(
        RuleHealth(rule, severity, states.get(rule)) for rule, severity in severities.items()
    )


class Blindness(NamedTuple):
    """Something that the agent should see or do, and does not."""

    cause: BlindCause
    reason: str


def blindness(state: AgentState, monotonic_seconds: float) -> tuple[Blindness, ...]:
    """Why the agent does not see at this moment; empty when it does."""
    found: list[Blindness] = []
    since = max(monotonic_seconds - state.monotonic_seconds, 0.0)
    if since > STALE_STATE_SECONDS:
        found.append(Blindness("agent", f"it hangs: its state is {since:.0f} s old"))
    if not state.watching:
        found.append(Blindness("probe", "device opens are not watched"))
    if state.sampling == "failed":
        found.append(Blindness("sampling", "the GPUs are not sampled"))
    elif state.sampling == "ok":
        age = _grown(state.sampling_age_seconds, since)
        found += _stale("sampling", "the GPUs were", "sampled", age, state.sampling_seconds)
    age = _grown(state.judgement_age_seconds, since)
    found += _stale("judgement", "the node was", "judged", age, state.judgement_interval_seconds)
    for gap in state.store_troubles:
        found.append(Blindness("store", f"{gap.what}: {gap.reason}"))
    return tuple(found)


def _grown(age: float | None, since: float) -> float | None:
    return None if age is None else age + since


def _stale(
    cause: BlindCause, what: str, done: str, age: float | None, interval: float
) -> list[Blindness]:
    if age is None:
        return [Blindness(cause, f"{what} not {done} yet")]
    # The state is up to a second old by itself.
    if age <= INTERVALS_UNTIL_STALE * interval + FILLED_EVERY_SECONDS:
        return []
    return [Blindness(cause, f"{what} last {done} {age:.0f} s ago, every {interval:g} s is wanted")]
