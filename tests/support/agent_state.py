"""States of an agent for tests of its endpoint: it is well; on its node is a miner, or is not."""

from __future__ import annotations

import time
from typing import Any

from gpuwarden.finding import Report, Severity
from gpuwarden.outputs.cuda_state import CudaState
from gpuwarden.outputs.metrics_state import (
    AgentState,
    AgentUse,
    EventCount,
    PartHealth,
    RefusedWay,
    counted,
    rule_health,
)
from gpuwarden.probes.settings import Counters
from gpuwarden.rules.registry import RULES
from gpuwarden.sinks.dispatcher import SinkHealth
from gpuwarden.sinks.own_trouble import OWN_RULES
from tests.support.nodes import GIB, NodeBuilder

SEVERITIES: dict[str, Severity] = {
    rule.advisory.id: rule.advisory.severity for rule in RULES
} | dict.fromkeys(sorted(OWN_RULES), "error")

CUDA = CudaState(
    watching=True,
    problems=("launches are not counted: the kernel is older than 5.11",),
    libraries=2,
    entry_points=40,
    dear_entry_points=3,
    processes=9,
    late_processes=2,
    contexts=11,
    context_calls=80,
    loads=31,
    modules={"known": 900, "unknown": 4, "hash-like": 1},
    missed={"the ring was full": 2},
    captured_bytes=70 << 20,
    dropped=1,
    stops=1,
    launches=120_400,
    graph_launches=12,
    compared_processes=5,
    unfit_processes=1,
    tracer_restarts=1,
    tracer_cpu_seconds=0.5,
    tracer_resident_bytes=30 << 20,
)


def state_of(node: NodeBuilder, report: Report | None = None, **fields: Any) -> AgentState:
    """An agent that is well and saw this node; ``fields`` say what is otherwise."""
    report = report or node.judge()
    snapshot = node.snapshot()
    values: dict[str, Any] = {
        "tool_version": "1.2.3",
        "at_ns": time.time_ns(),
        "monotonic_seconds": time.monotonic(),
        "report": report,
        "gpus": snapshot.gpus,
        "clients": snapshot.clients,
        "findings": counted(report.findings),
        "rules": rule_health(SEVERITIES, report, always=OWN_RULES),
        "watching": True,
        "way": "eBPF (cgroup/dev)",
        "refused": (RefusedWay("eBPF (cgroup/dev, return values)", "no tracefs"),),
        "probe": Counters(hits=70, limited=7, dropped_opens=3, malformed=2),
        "ring_bytes": 8 << 20,
        "ring_fill_ratio": 0.25,
        "events": (EventCount("open", "opened", 5), EventCount("open", "denied", 1)),
        "dropped": {"queue": 4},
        "merged": 6,
        "denied": 1,
        "would_deny": 2,
        "cuda": CUDA,
        "sampling": "ok",
        "sampling_age_seconds": 0.5,
        "judgement_interval_seconds": 5.0,
        "judgement_age_seconds": 2.0,
        "judgement_seconds": 0.04,
        "judgements": 12,
        "sensors": (
            PartHealth(name="nvml", state="ok", seconds=0.02),
            PartHealth(name="sockets", state="failed", errors=3),
        ),
        "sources": (PartHealth(name="slurm", state="ok", seconds=0.1),),
        "sinks": (SinkHealth(name="syslog", delivered=9),),
        "database_bytes": {"findings": 4096, "samples": 1 << 20},
        "agent": AgentUse(
            started_at_ns=time.time_ns() - 60 * 10**9,
            cpu_seconds=1.5,
            resident_bytes=60 << 20,
            open_files=20,
        ),
        **fields,
    }
    return AgentState(**values)


def quiet_node() -> NodeBuilder:
    """A GPU with a training run on it that systemd does not know and nobody complains of."""
    node = NodeBuilder()
    node.init()
    node.gpu(0, sm_percent=50, memory_used_bytes=20 * GIB, temperature_celsius=61)
    node.process(4000)
    node.client(4000, 0, memory_mib=20_000, sm_percent=50)
    node.holds_gpu(4000, 0)
    return node


def miner_node() -> NodeBuilder:
    """A miner on GPU 0; on GPU 1 memory that nobody holds."""
    node = NodeBuilder()
    node.init()
    node.gpu(0, sm_percent=99, memory_used_bytes=6 * GIB, temperature_celsius=84)
    node.gpu(1, sm_percent=0, memory_used_bytes=30 * GIB, temperature_celsius=35)
    node.process(
        4242,
        user="bob",
        exe="/tmp/.cache/xmrig",
        argv=("xmrig", "-o", "stratum+tcp://203.0.113.7:3333", "-u", "4" + "A" * 94, "-p", "x"),
    )
    node.client(4242, 0, memory_mib=6000, sm_percent=97)
    node.holds_gpu(4242, 0)
    node.connection(4242, "203.0.113.7", 3333)
    return node
