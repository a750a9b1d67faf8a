"""Rules over the CUDA layer judge any mix of facts."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.judge import judge
from gpuwarden.model import (
    CudaContext,
    CudaLibrary,
    CudaProcess,
    GpuModule,
    NodeFacts,
    Process,
    Snapshot,
)
from gpuwarden.rules.registry import CUDA_RULES, RULES
from tests.support.nodes import TAKEN_AT_NS, policy_of

HASH = "module_loaded_hash_like"
PIDS = st.sampled_from([1, 2, 10])
TICKS = st.sampled_from([5, 100_002])
TEXT = st.text(max_size=12)
NUMBER = st.integers(0, 3)


def maybe(strategy: Any) -> Any:
    return st.none() | strategy


def several(strategy: Any) -> Any:
    return st.lists(strategy, max_size=4).map(tuple)


CUDA_CONTEXTS = st.builds(
    CudaContext,
    pid=PIDS,
    start_time_ticks=TICKS,
    kind=st.sampled_from(["created", "primary", "green"]),
    handle=NUMBER,
    device=maybe(st.integers(-1, 2)),
    made_ns=st.integers(-5, TAKEN_AT_NS * 9),
    ended_ns=maybe(NUMBER),
)
CUDA = st.builds(
    CudaProcess,
    pid=PIDS,
    start_time_ticks=TICKS,
    libraries=several(st.builds(CudaLibrary, device=TEXT, inode=NUMBER, path=TEXT)),
    before=st.booleans(),
    contexts=several(CUDA_CONTEXTS),
    loads=NUMBER,
    missed_loads=NUMBER,
    missed=several(TEXT),
    launches=NUMBER,
    has_descriptors=maybe(st.booleans()),
    limits=several(TEXT),
)
MODULES = st.builds(
    GpuModule,
    pid=PIDS,
    start_time_ticks=TICKS,
    digest=st.sampled_from(["", "a" * 64, "b" * 64]),
    kind=st.sampled_from(["cubin", "ptx"]),
    mapping=TEXT,
    kernels=several(TEXT),
    kernel_count=NUMBER,
    standing=st.sampled_from(["known", "rebuilt", "driver", "jit", "unknown"]),
    answer=st.sampled_from(["", "hash-like", "not hash-like"]),
    score=maybe(st.floats(0, 9)),
    reasons=several(TEXT),
    broken=TEXT,
    loaded_at_ns=maybe(st.integers(-5, TAKEN_AT_NS * 9)),
    loaded_by=TEXT,
)
PROCESSES = st.builds(Process, pid=PIDS, start_time_ticks=TICKS, ppid=PIDS, uid=maybe(NUMBER))
LOOSE = "workloads: [{name: all, match: {user: '1'}, single_process: true, profile: torch}]\n"
LOOSE += "profiles: [{name: torch, baselines: [starter]}]\n"


@given(
    st.builds(
        Snapshot,
        taken_at_ns=st.just(TAKEN_AT_NS),
        node=st.just(NodeFacts(hostname="n", host_pid_namespace=True)),
        processes=several(PROCESSES),
        cuda=several(CUDA),
        modules=several(MODULES),
    )
)
def test_any_mix_of_facts_is_judged_and_only_hash_like_loads_are_critical(
    snapshot: Snapshot,
) -> None:
    report = judge(snapshot, policy_of(LOOSE), None, (*RULES, *CUDA_RULES))
    assert [run for run in report.rules if run.state == "failed"] == []
    loads = {
        (m.pid, m.start_time_ticks)
        for m in snapshot.modules
        if m.loaded_at_ns is not None and m.answer == "hash-like"
    }
    watched = {(c.pid, c.start_time_ticks) for c in snapshot.cuda} | {
        (m.pid, m.start_time_ticks) for m in snapshot.modules if m.loaded_at_ns is not None
    }
    ids = [f.id for f in report.findings]
    assert len(ids) == len(set(ids))
    for finding in report.findings:
        assert finding.evidence
        identity = (finding.subject.pid, finding.subject.start_time_ticks)
        assert identity in watched
        if finding.severity == "critical":
            assert (finding.rule, identity in loads) == (HASH, True)
