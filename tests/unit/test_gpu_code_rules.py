"""What unknown GPU code in a process makes of its verdict, and when nothing can be said of it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from gpuwarden.finding import Report
from gpuwarden.judge import exit_code, judge
from gpuwarden.model import CodeScan, GpuModule, SensorRun, Snapshot
from gpuwarden.snapshot import decode, encode
from tests.support.nodes import NodeBuilder, policy_of

POLICY = """
workloads:
  - name: serving
    match: {user: alice, binary: /usr/bin/python3.11}
    profile: known code
profiles:
  - name: known code
    baselines: [starter]
"""
RULES = ("gpu_module_hash_like", "gpu_module_unknown")
HASHES = "hash-like integer compute: 31% xor, 12% rotates, densest window 84%"


def module(**fields: Any) -> GpuModule:
    """Unknown code that does not hash, on the heap of pid 4242."""
    values: dict[str, Any] = {
        "pid": 4242,
        "start_time_ticks": 104_242,
        "digest": "a3" * 32,
        "kind": "cubin",
        "arch": "sm_90",
        "mapping": "[heap]",
        "offset": 0x7000,
        "in_no_mapped_file": True,
        "kernels": ("search",),
        "kernel_count": 1,
        "answer": "not hash-like",
        **fields,
    }
    return GpuModule(**values)


def hashing(**fields: Any) -> GpuModule:
    return module(**{"answer": "hash-like", "score": 4.2, "reasons": (HASHES,), **fields})


def snapshot(
    node: NodeBuilder, *modules: GpuModule, scan: CodeScan | None = None, state: str = ""
) -> Snapshot:
    """A process of alice's on GPU 0 with these modules; ``state`` of its code's look, if not ok."""
    if not node.processes or node.processes[-1].pid == 1:
        node.process(4242)
        node.client(4242)
    if scan is None:
        scan = CodeScan(pid=4242, start_time_ticks=104_242, profile="known code")
    if state:
        scan = replace(scan, state=state, reason="the child was ended by its deadline")
    taken = node.snapshot()
    run = SensorRun(name="code", state="ok")
    return replace(taken, modules=modules, code_scans=(scan,), sensors=(*taken.sensors, run))


def judged(taken: Snapshot, policy: str = POLICY) -> Report:
    return judge(taken, policy_of(policy))


def found(report: Report) -> dict[str, Any]:
    return {f.rule: f for f in report.findings if f.rule in RULES}


def test_unknown_code_in_an_expected_workload_is_a_warning_that_names_it(node: NodeBuilder) -> None:
    report = judged(snapshot(node, module()))
    (finding,) = found(report).values()
    assert (finding.rule, finding.severity) == ("gpu_module_unknown", "warning")
    told = finding.evidence[0].text
    for part in ("a3" * 32, "search", "[heap] at 0x7000", "in no mapped file", "known code"):
        assert part in told
    assert report.rows[0].verdict == "expected"
    assert exit_code(report, "error") == 0


def test_hash_like_code_is_an_error_and_never_a_miner_alone(node: NodeBuilder) -> None:
    report = judged(snapshot(node, hashing()))
    (finding,) = found(report).values()
    assert (finding.rule, finding.severity) == ("gpu_module_hash_like", "error")
    assert HASHES in finding.evidence[0].text
    assert report.rows[0].verdict == "expected"
    assert "expected_process_with_signs" not in {f.rule for f in report.findings}


def test_hash_like_code_of_nobody_is_one_kind_of_evidence(node: NodeBuilder) -> None:
    node.process(4242, exe="/opt/job/train")
    node.client(4242)
    report = judged(snapshot(node, hashing()))
    assert report.rows[0].verdict == "suspicious"
    assert found(report) == {}, "its verdict's own finding carries the evidence"
    (finding,) = (f for f in report.findings if f.rule == "gpu_process_suspicious")
    assert any("a3" * 32 in e.text for e in finding.evidence)


def test_with_a_second_kind_it_is_a_miner_even_inside_an_expected_workload(
    node: NodeBuilder,
) -> None:
    node.process(4242)
    node.client(4242)
    node.hidden(4242)
    report = judged(snapshot(node, hashing(), module(digest="c5" * 32)))
    assert report.rows[0].verdict == "cryptominer"
    assert report.rows[0].workload == "serving"
    assert set(found(report)) == {"gpu_module_unknown"}, "the other module is still told"


def test_many_hash_like_modules_are_one_kind(node: NodeBuilder) -> None:
    several = [hashing(digest=f"{n:064x}") for n in range(40)]
    report = judged(snapshot(node, *several))
    (finding,) = found(report).values()
    assert report.rows[0].verdict == "expected"
    assert "40 such modules" in " ".join(e.text for e in finding.evidence)
    assert len(finding.evidence) < 20


@pytest.mark.parametrize("standing", ["known", "rebuilt", "driver"])
def test_known_code_may_hash(node: NodeBuilder, standing: str) -> None:
    report = judged(snapshot(node, hashing(standing=standing)))
    assert found(report) == {}
    assert report.rows[0].verdict == "expected"


def test_a_jit_class_that_is_allowed_excuses_no_hashing(node: NodeBuilder) -> None:
    assert found(judged(snapshot(node, module(standing="jit")))) == {}
    assert set(found(judged(snapshot(node, hashing(standing="jit"))))) == {"gpu_module_hash_like"}


def _state(report: Report) -> set[tuple[str, str]]:
    return {(run.state, run.reason) for run in report.rules if run.rule in RULES}


@pytest.mark.parametrize("state", ["partial", "failed"])
def test_what_was_not_wholly_seen_is_not_evaluated(node: NodeBuilder, state: str) -> None:
    report = judged(snapshot(node, state=state))
    ((run, reason),) = _state(report)
    assert run == "not-evaluated"
    assert "pid 4242" in reason and "deadline" in reason
    assert exit_code(report, "error") == 2


def test_a_recording_without_code_is_not_clear_of_it(node: NodeBuilder) -> None:
    node.process(4242)
    node.client(4242)
    ((run, reason),) = _state(judged(node.snapshot()))
    assert (run, "was not looked for" in reason) == ("not-evaluated", True)


def test_another_profile_than_the_one_compared_with_is_not_evaluated(node: NodeBuilder) -> None:
    scan = CodeScan(pid=4242, start_time_ticks=104_242, profile="an older one")
    ((run, reason),) = _state(judged(snapshot(node, scan=scan)))
    assert (run, "an older one" in reason) == ("not-evaluated", True)


def test_a_workload_without_a_profile_asks_for_nothing(node: NodeBuilder) -> None:
    node.process(4242)
    node.client(4242)
    policy = POLICY.replace("    profile: known code\n", "")
    report = judged(node.snapshot(), policy)
    assert _state(report) == {("ok", "")}
    assert exit_code(report, "error") == 0


def test_a_recorded_node_keeps_its_modules(node: NodeBuilder) -> None:
    taken = snapshot(node, hashing(), module(digest="c5" * 32))
    again = decode(encode(taken))
    assert again.modules == taken.modules
    assert again.code_scans == taken.code_scans
    assert found(judged(again)) == found(judged(taken)) != {}
