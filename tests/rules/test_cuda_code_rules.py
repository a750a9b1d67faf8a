"""Rules over GPU code that is loaded: how grave, about whom, in which words."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from gpuwarden.judge import judge
from gpuwarden.model import CodeScan, KernelUse, SensorRun, Snapshot
from gpuwarden.rules.registry import CUDA_RULES, RULES
from gpuwarden.snapshot import decode, encode
from tests.rules.cuda_node import DECLARED, HASHES, CudaNode
from tests.rules.open_node import texts
from tests.support.nodes import SECOND_NS, TAKEN_AT_NS, policy_of

HASH = "module_loaded_hash_like"
UNKNOWN = "module_loaded_unknown"


# ------------------------------------------------------------------ code that is loaded


def test_hash_like_code_in_a_declared_workload_is_told_in_an_operators_words(
    training: CudaNode,
) -> None:
    training.hashing(200)
    found = training.one(HASH, DECLARED)
    assert (found.severity, found.owner) == ("critical", "vision team")
    assert found.since_ns == TAKEN_AT_NS - 60 * SECOND_NS
    assert found.evidence[0].text == (
        "a miner inside a legitimate workload, until it is explained: cubin sm_90 "
        "a3a3a3a3a3a3a3a3 with kernel sha256d_search, since 2025-12-31 23:59:00Z, in workload "
        "training, whose profile torch does not know it"
    )
    said = texts(found)
    for words in ("a3" * 32, "cuModuleLoadData", HASHES, "SHA-256", "container train",
                  "image registry.example/train:1", "vision-oncall@example.org"):  # fmt: skip
        assert words in said
    assert [e.kind for e in found.evidence if e.strength == "strong"] == ["code"]


def test_without_a_profile_it_is_an_error_and_says_that_nobody_declared_it(
    training: CudaNode,
) -> None:
    training.hashing(200)
    policy = DECLARED.replace("    profile: torch\n", "")
    assert training.one(HASH, policy).severity == "error"
    found = training.one(HASH)
    assert found.severity == "error"
    assert "nobody declared what this process may load" in texts(found)
    assert found.owner == "root"


def test_one_finding_a_process_the_surest_first_since_the_first(training: CudaNode) -> None:
    for number in range(20):
        training.hashing(
            200,
            digest=f"{number:064x}",
            score=float(number),
            loaded_at_ns=TAKEN_AT_NS - number * SECOND_NS,
        )
    training.hashing(200, digest=f"{5:064x}", loaded_at_ns=TAKEN_AT_NS - 99 * SECOND_NS)
    training.hashing(200, digest=f"{19:064x}", loaded_at_ns=TAKEN_AT_NS)
    found = training.one(HASH, DECLARED)
    assert found.since_ns == TAKEN_AT_NS - 99 * SECOND_NS
    assert f"{19:064x}" in found.evidence[1].text
    assert "20 such modules in all" in texts(found)
    assert len(found.evidence) < 20


def test_a_load_by_name_says_from_which_file(training: CudaNode) -> None:
    training.hashing(200, loaded_by="cuModuleLoad", mapping="/tmp/x\x1b[2J.cubin", kernels=())
    said = texts(training.one(HASH, DECLARED))
    assert "by cuModuleLoad from /tmp/x" in said
    assert "its kernels have no names" in said


def test_the_finding_outlives_the_process(training: CudaNode) -> None:
    training.hashing(200)
    before = training.one(HASH)
    training.processes = [p for p in training.processes if p.pid != 200]
    after = training.one(HASH, DECLARED)
    assert after.id == before.id
    assert "could not be read in time" in texts(after)
    training.process(200, start_time_ticks=7)
    assert training.one(HASH, DECLARED).subject.start_time_ticks == before.subject.start_time_ticks


def test_what_could_not_be_seen_stands_in_the_finding(training: CudaNode) -> None:
    missed = {"missed_loads": 2, "missed": ("the ring was full",)}
    training.hashing(200)
    training.watched(200, before=True, **missed)
    said = texts(training.one(HASH, DECLARED))
    assert "earlier contexts and loads are not known" in said
    assert "the bytes of 2 of its loads were missed (the ring was full)" in said
    training.watched(200, before=True, limits=("kernels inside graphs are not seen",))
    said = texts(training.one(HASH, DECLARED))
    assert "kernels inside graphs" in said
    assert "earlier contexts" not in said, "its limits say what there is to say"


def test_unknown_code_is_a_warning_that_names_profile_and_module(training: CudaNode) -> None:
    training.module(200, known_as="looks like triton, to be reviewed")
    training.hashing(200, digest="c5" * 32)
    found = training.one(UNKNOWN, DECLARED)
    assert found.severity == "warning"
    assert "in no baseline of profile torch, looks like triton, to be reviewed" in texts(found)
    assert "c5" * 32 not in texts(found), "hash-like code has a finding of its own"


def test_how_often_its_kernels_were_launched_is_said_and_of_no_other_module(
    training: CudaNode,
) -> None:
    training.hashing(200)
    uses = (
        KernelUse(name="sha256d_search", digest="a3" * 32, launches=4096),
        KernelUse(name="gemm", digest="b4" * 32, launches=8192),
    )
    training.watched(200, kernels=uses, launches=12_288)
    said = texts(training.one(HASH, DECLARED))
    assert "kernel sha256d_search of module a3a3a3a3a3a3 was launched 4096 times" in said
    assert "gemm" not in said


def test_a_load_of_another_process_with_that_number_says_nothing_of_this_one(
    training: CudaNode,
) -> None:
    training.hashing(200, start_time_ticks=3)
    found = training.one(HASH, DECLARED)
    assert (found.subject.pid, found.subject.start_time_ticks) == (200, 3)
    assert found.severity == "error", "whose profile it has is not known"
    assert "container train" not in texts(found)


# ------------------------------------------------------------------ seen loading and in memory


def whole(node: CudaNode, *, scan: CodeScan | None) -> Snapshot:
    """The snapshot of a judgement of the whole node, with a look at the process's memory."""
    taken = node.snapshot()
    run = SensorRun(name="code", state="ok")
    scans = () if scan is None else (scan,)
    return replace(taken, sensors=(*taken.sensors, run), code_scans=scans)


SCAN = CodeScan(pid=200, start_time_ticks=100_200, profile="torch")


@pytest.mark.parametrize("kind", ["hashing", "module"])
def test_a_module_that_was_seen_loading_and_is_in_memory_is_told_once(
    training: CudaNode, kind: str
) -> None:
    training.client(200)
    put = getattr(training, kind)
    put(200)
    put(200, loaded_at_ns=None, loaded_by="", mapping="[heap]", in_no_mapped_file=True)
    put(200, digest="c5" * 32, loaded_at_ns=None, loaded_by="", mapping="[heap]")
    report = judge(whole(training, scan=SCAN), policy_of(DECLARED), None, (*RULES, *CUDA_RULES))
    told = [f for f in report.findings if "a3" * 32 in texts(f)]
    assert [f.rule for f in told] == [HASH if kind == "hashing" else UNKNOWN]
    memory = [f for f in report.findings if "c5" * 32 in texts(f)]
    assert [f.rule for f in memory] == [told[0].rule.replace("module_loaded", "gpu_module")]


def test_code_that_was_seen_loading_is_one_kind_of_evidence(training: CudaNode) -> None:
    training.client(200)
    training.hashing(200)
    training.hashing(200, loaded_at_ns=None, loaded_by="", mapping="[heap]")
    taken = whole(training, scan=SCAN)
    (row,) = judge(taken, policy_of(DECLARED)).rows
    assert row.verdict == "expected"
    (sign,) = [e for e in row.evidence if e.kind == "code"]
    assert "loaded 2025-12-31 23:59:00Z by cuModuleLoadData" in sign.text
    assert "more like it" not in sign.text


def test_with_a_peer_like_a_pools_it_is_a_miner_inside_a_legitimate_workload(
    training: CudaNode,
) -> None:
    training.client(200)
    training.hashing(200)
    training.process(11, exe="/usr/bin/socat")
    training.connection(200, "127.0.0.1", 7273, peer_pid=11)
    training.connection(11, "203.0.113.9", 3333)
    report = judge(whole(training, scan=SCAN), policy_of(DECLARED))
    (finding,) = [f for f in report.findings if f.rule == "gpu_cryptominer"]
    assert finding.severity == "critical"
    steps = [e.text for e in finding.evidence if e.source == "decision tree"]
    assert steps == [
        "signs? two independent kinds of evidence: code and egress, inside training",
        "a miner inside a legitimate workload? yes, cubin sm_90 a3a3a3a3a3a3a3a3 with kernel "
        "sha256d_search, since 2025-12-31 23:59:00Z",
    ]
    assert (finding.owner, report.rows[0].workload) == ("vision team", "training")


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, "ok"),
        ({"before": True}, "not-evaluated"),
        ({"missed_loads": 1}, "not-evaluated"),
        ({"libraries": ()}, "not-evaluated"),
        ({"seen_since_ns": None}, "not-evaluated"),
    ],
)
def test_whose_every_load_was_seen_need_not_be_looked_for_in_memory(
    training: CudaNode, fields: dict[str, Any], state: str
) -> None:
    training.client(200)
    training.watched(200, **fields)
    report = judge(whole(training, scan=None), policy_of(DECLARED))
    runs = {run.rule: run.state for run in report.rules}
    assert runs["gpu_module_unknown"] == runs["gpu_module_hash_like"] == state


def test_a_recording_keeps_what_was_seen(training: CudaNode) -> None:
    training.hashing(200)
    taken = training.snapshot()
    assert decode(encode(taken)) == taken
