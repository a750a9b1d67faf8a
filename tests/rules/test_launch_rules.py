"""Rules over launches: one finding a process, how grave, and launches told with hash-like code."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from gpuwarden.finding import Finding
from gpuwarden.model import KernelUse, LaunchFit
from gpuwarden.node import Node
from gpuwarden.rules.launched_kernels import kernel_lines
from tests.rules.cuda_node import CudaNode
from tests.support.nodes import SECOND_NS, TAKEN_AT_NS

OUTSIDE = "kernels_outside_profile"
SECOND = "second_kernel_stream"
UNEXPLAINED = "launches_unexplained"
POLICY = """
workloads: [{name: training, owner: vision, match: {user: alice}, profile: torch}]
profiles: [{name: torch, baselines: [starter], launches: /etc/gpuwarden/torch.launches}]
"""
MINER = KernelUse(name="_Z12sha256d_scanPKjPjj", digest="a3" * 32, launches=300)
GEMM = KernelUse(name="gemm", digest="11" * 32, launches=700)
TRITON = KernelUse(name="triton_scan_7", digest="b4" * 32, launches=200)


@pytest.fixture
def node() -> CudaNode:
    made = CudaNode()
    made.process(10, user="alice")
    made.watched(10, kernels=(GEMM, MINER), launches=1000)
    made.context(10)
    return made


def fitted(node: CudaNode, **fields: Any) -> CudaNode:
    known = node.cuda[10]
    values = {
        "profile": "torch",
        "launches": 1000,
        "explained_share": 0.7,
        "words": ("kernel x is 30% of launches",),
        "since_ns": TAKEN_AT_NS - 60 * SECOND_NS,
        **fields,
    }
    fit = LaunchFit(pid=10, start_time_ticks=known.start_time_ticks, **values)
    node.cuda[10] = replace(known, fit=fit)
    return node


def findings(node: CudaNode) -> dict[str, Finding]:
    return {
        f.rule: f for f in node.judge(POLICY).findings if f.rule in (OUTSIDE, SECOND, UNEXPLAINED)
    }


def test_one_finding_a_process_the_gravest(node: CudaNode) -> None:
    fitted(node, outside=(MINER,), second_stream=(MINER, TRITON), unexplained=(TRITON,))
    assert set(findings(node)) == {OUTSIDE}
    fitted(node, second_stream=(TRITON,), unexplained=(TRITON,))
    assert set(findings(node)) == {SECOND}
    fitted(node, unexplained=(TRITON,))
    assert set(findings(node)) == {UNEXPLAINED}
    fitted(node)
    assert findings(node) == {}


def test_it_says_what_in_which_workload_of_whom_since_when(node: CudaNode) -> None:
    fitted(node, second_stream=(TRITON,))
    found = findings(node)[SECOND]
    assert (found.severity, found.owner) == ("error", "vision")
    assert found.since_ns == TAKEN_AT_NS - 60 * SECOND_NS
    texts = [line.text for line in found.evidence]
    assert texts[0] == "kernel x is 30% of launches"
    assert "70% of the last launches are explained, of 1000 seen" in texts[1]
    assert any("workload training, of vision" in text for text in texts)


@pytest.mark.parametrize(
    ("answer", "fields", "severity"),
    [
        ("not hash-like", {}, None),
        ("not hash-like", {"second_stream": (MINER,)}, "error"),
        ("architecture too old", {}, "error"),
        (None, {}, "error"),
    ],
)
def test_a_judged_module_in_step_is_told_as_a_module(
    node: CudaNode, answer: str | None, fields: dict[str, Any], severity: str | None
) -> None:
    fitted(node, outside=(MINER,), **fields)
    if answer is not None:
        node.module(10, digest=MINER.digest, answer=answer)
    found = findings(node)
    assert (found[OUTSIDE].severity if OUTSIDE in found else None) == severity
    if severity is None:
        (told,) = [f for f in node.judge(POLICY).findings if f.rule == "module_loaded_unknown"]
        assert any("was launched 300 times" in line.text for line in told.evidence)


def test_hash_like_code_is_told_once_with_its_launches(node: CudaNode) -> None:
    fitted(node, outside=(MINER,), second_stream=(MINER,))
    node.hashing(10, digest=MINER.digest)
    assert findings(node) == {}
    (found,) = [f for f in node.judge(POLICY).findings if f.rule == "module_loaded_hash_like"]
    text = (
        "kernel _Z12sha256d_scanPKjPjj of module a3a3a3a3a3a3 was launched 300 times, 30% of the "
        "process's launches; it comes steadily, out of step with the workload's own launches"
    )
    assert text in [line.text for line in found.evidence]


def test_launches_of_modules_are_told_the_most_first_and_bounded(node: CudaNode) -> None:
    process = node.snapshot().processes[-1]
    assert process.pid == 10
    many = tuple(KernelUse(name="k" * 300 + str(n), digest="cc" * 32, launches=n) for n in range(9))
    node.cuda[10] = replace(node.cuda[10], kernels=(GEMM, *many), launches=100_000)
    lines = [line.text for line in kernel_lines(Node(node.snapshot()), process, {"cc" * 32})]
    assert len(lines) == 5
    assert lines[0].endswith("was launched 8 times, under 1% of the process's launches")
    assert "k" * 80 + " of module" in lines[0]
    assert lines[4] == "4 more kernels of these modules were launched"
    assert kernel_lines(Node(node.snapshot()), process, {"dd" * 32}) == ()
    node.cuda.clear()
    assert kernel_lines(Node(node.snapshot()), process, {"cc" * 32}) == ()
