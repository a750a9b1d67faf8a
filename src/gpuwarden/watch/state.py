"""What the agent tells of itself, filled once a second: for /metrics and /healthz."""

from __future__ import annotations

import os
import resource
import time
from typing import TYPE_CHECKING

from gpuwarden import __version__
from gpuwarden.finding import Advisory, Severity
from gpuwarden.outputs.metrics_state import (
    AgentState,
    AgentUse,
    EventCount,
    PartHealth,
    RefusedWay,
    Sampling,
    counted,
    rule_health,
)
from gpuwarden.rules.registry import OPEN_RULES, RULES, TIME_RULES
from gpuwarden.sinks.own_trouble import OWN_ADVISORIES
from gpuwarden.watch.denial_findings import DENYING_ADVISORIES
from gpuwarden.watch.evidence_findings import EVIDENCE_ADVISORIES
from gpuwarden.watch.falco_unmatched import FALCO_ADVISORIES
from gpuwarden.watch.journal_head import JOURNAL_ADVISORIES
from gpuwarden.watch.own_sight import SIGHT_ADVISORIES

if TYPE_CHECKING:
    from gpuwarden.watch.agent import Agent

ALWAYS: tuple[Advisory, ...] = (
    *(rule.advisory for rule in OPEN_RULES),
    *OWN_ADVISORIES,
    *SIGHT_ADVISORIES,
    *FALCO_ADVISORIES,
    *DENYING_ADVISORIES,
    *JOURNAL_ADVISORIES,
    *EVIDENCE_ADVISORIES,
)
"""Advisories that no judgement lists, since nothing can keep them from being evaluated."""
SEVERITIES: dict[str, Severity] = {
    advisory.id: advisory.severity
    for advisory in (*(rule.advisory for rule in (*RULES, *TIME_RULES)), *ALWAYS)
}


class PartErrors:
    """How often each sensor and source failed, since the start."""

    def __init__(self) -> None:
        self._errors: dict[str, int] = {}

    def judged(self, parts: list[tuple[str, str]]) -> None:
        for name, state in parts:
            self._errors[name] = self._errors.get(name, 0) + (state == "failed")

    def of(self, name: str) -> int:
        return self._errors.get(name, 0)


def agent_state(agent: Agent, part_errors: PartErrors) -> AgentState:
    """One frozen value; takes well under a millisecond."""
    now, now_ns = time.monotonic(), time.time_ns()
    judged = agent.judging.last
    report = None if judged is None else judged.report
    watch, sampling, choice = agent.watch, agent.sampling, agent.choice
    probe = choice.probe
    telling = agent.telling.view
    return AgentState(
        tool_version=__version__,
        at_ns=now_ns,
        monotonic_seconds=now,
        report=report,
        gpus=sampling.gpus,
        clients=sampling.clients,
        findings=counted(telling.findings),
        rules=rule_health(SEVERITIES, report, always=[one.id for one in ALWAYS]),
        watching=probe is not None or choice.poll is not None,
        way=choice.way,
        polling=choice.poll is not None,
        refused=tuple(RefusedWay(one.way, one.reason) for one in choice.refused),
        probe=None if probe is None else probe.counters(),
        ring_bytes=None if probe is None else probe.settings.ring_bytes,
        ring_fill_ratio=None,
        events=tuple(EventCount(*key, count) for key, count in watch.counts.by_kind.items()),
        dropped=agent.devices.own_losses(),
        merged=watch.book.merged_twins,
        metadata_pending=watch.pending,
        metadata_unknown=watch.counts.unknown,
        metadata_failures=watch.counts.ask_failures,
        tool_runs=watch.counts.tools,
        denied=0 if probe is None else probe.counters().denied,
        would_deny=watch.counts.would_deny,
        sampling=_sampling(agent),
        sampling_seconds=agent.options.interval_seconds,
        sampling_age_seconds=None if not sampling.at_ns else max(now_ns - sampling.at_ns, 0) / 1e9,
        judgement_interval_seconds=agent.options.scan_interval_seconds,
        judgement_age_seconds=now - agent.judging.ended_at,
        judgement_seconds=None if judged is None else judged.seconds,
        judgements=agent.judging.count,
        judgement_failures=agent.judging.failures,
        sensors=tuple(
            PartHealth(
                name=run.name,
                state=run.state,
                seconds=run.seconds,
                errors=part_errors.of(run.name),
            )
            for run in (() if report is None else report.sensors)
        ),
        sources=tuple(
            PartHealth(
                name=run.name,
                state=run.state,
                seconds=run.seconds,
                errors=part_errors.of(run.name),
            )
            for run in watch.surroundings.sources
        ),
        sinks=telling.sinks,
        store_troubles=telling.troubles,
        store_set_aside=telling.set_aside,
        lost_samples=telling.lost_samples,
        database_bytes={
            "findings": telling.findings_bytes,
            "samples": telling.samples_bytes,
        },
        cuda=None if agent.cuda is None else agent.cuda.metrics(),
        agent=_use(agent),
    )


def _sampling(agent: Agent) -> Sampling:
    if agent.sampling.error is None:
        return "ok"
    return "failed" if agent.sampling.has_driver else "no-driver"


def _use(agent: Agent) -> AgentUse:
    own, children = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    try:
        with open("/proc/self/statm", "rb") as file:
            resident = int(file.read().split()[1]) * resource.getpagesize()
        files = len(os.listdir("/proc/self/fd"))
    except OSError:
        return AgentUse(started_at_ns=agent.started_at_ns)
    seconds = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
    return AgentUse(
        started_at_ns=agent.started_at_ns,
        cpu_seconds=seconds,
        resident_bytes=resident,
        open_files=files,
    )
