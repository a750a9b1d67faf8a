"""Rules over the CUDA layer: how grave, about whom, in which words; and any mix of facts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuwarden.finding import Finding
from gpuwarden.judge import judge
from gpuwarden.model import (
    CodeScan,
    CudaContext,
    CudaLibrary,
    CudaProcess,
    DriverLibrary,
    GpuModule,
    KernelUse,
    NodeFacts,
    Process,
    SensorRun,
    Snapshot,
)
from gpuwarden.rules.registry import CUDA_RULES, RULES
from gpuwarden.snapshot import decode, encode
from tests.rules.cuda_node import HASHES, CudaNode
from tests.rules.open_node import digest
from tests.support.nodes import SECOND_NS, TAKEN_AT_NS, policy_of

HASH = "module_loaded_hash_like"
UNKNOWN = "module_loaded_unknown"
CONTEXTS = "contexts_beyond_declared"
SECOND = "second_gpu_process_in_container"
NO_LIBRARY = "gpu_process_without_driver_library"
POLICY = f"""
workloads:
  - name: training
    owner: vision team
    contact: vision-oncall@example.org
    match: {{image_digest: "{digest("train")}"}}
    profile: torch
    MORE
profiles:
  - name: torch
    baselines: [starter]
"""
DECLARED = POLICY.replace("MORE", "contexts: 1")


@pytest.fixture
def training() -> CudaNode:
    """A container of the declared workload; pid 200 trains in it, in one primary context."""
    node = CudaNode()
    node.container("train", devices=("/dev/nvidia0",))
    node.process(200, container="train", user="root")
    node.watched(200)
    node.context(200)
    return node


def texts(finding: Finding) -> str:
    return "\n".join(e.text for e in finding.evidence)


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


# ------------------------------------------------------------------ contexts


def test_each_context_is_named_and_the_one_too_many_gives_the_time(training: CudaNode) -> None:
    training.context(200, kind="created")
    training.context(200, kind="green")
    training.context(200, device=1)
    found = training.one(CONTEXTS, DECLARED)
    assert found.severity == "warning"
    assert found.since_ns == TAKEN_AT_NS - 499 * SECOND_NS
    said = texts(found)
    for words in ("2 contexts on CUDA device 0; the workload declares 1",
                  "context 0x55000000 on device 0: the primary one, retained 2025-12-31 23:51:40Z",
                  "context 0x55000001 on device 0: created 2025-12-31 23:51:41Z",
                  "1 green context beside them"):  # fmt: skip
        assert words in said
    assert "0x55000003" not in said, "device 1 has one, as declared"


def test_a_primary_context_is_one_however_often_it_is_told(training: CudaNode) -> None:
    training.context(200, handle=0x5500_0000)
    assert not training.found(CONTEXTS, DECLARED)


def test_a_context_on_no_known_device_is_not_put_to_one_of_several(training: CudaNode) -> None:
    training.context(200, device=1)
    training.context(200, device=None)
    assert not training.found(CONTEXTS, DECLARED)
    training.context(200, device=None)
    assert "a device that the calls do not name" in texts(training.one(CONTEXTS, DECLARED))


def test_a_proven_entry_counts_before_one_that_a_process_can_claim(training: CudaNode) -> None:
    loose = "  - {name: loose, match: {user: root}, contexts: 64}\n"
    policy = DECLARED.replace("workloads:\n", f"workloads:\n{loose}")
    training.context(200, kind="created")
    found = training.one(CONTEXTS, policy)
    assert "workload training" in texts(found)


# ------------------------------------------------------------------ a second process

SINGLE = POLICY.replace("MORE", "single_process: true")


def second(node: CudaNode, **fields: Any) -> None:
    node.process(201, container="train", user="root", **{"ppid": 150, **fields})
    node.watched(201)
    node.context(201, made_ns=TAKEN_AT_NS - 30 * SECOND_NS)


def test_the_later_one_is_the_subject_and_the_first_is_named(training: CudaNode) -> None:
    second(training, exe="/tmp/solve", argv=("/tmp/solve",))
    found = training.one(SECOND, SINGLE)
    assert (found.subject.pid, found.severity) == (201, "warning")
    assert found.since_ns == TAKEN_AT_NS - 30 * SECOND_NS
    assert "the first one: pid 200 (python3.11), /usr/bin/python3.11, 1 context" in texts(found)
    assert "/tmp/solve" in texts(found)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ppid": 200}, "a fork of it, the same program"),
        ({"ppid": 200, "exe": "/tmp/solve"}, "started by it, another program"),
        ({"ppid": 1}, "both are children of pid 1"),
        ({"ppid": 77}, "this one: 1 context, since 2025-12-31 23:59:30Z"),
    ],
)
def test_how_they_are_related_is_said(
    training: CudaNode, fields: dict[str, Any], words: str
) -> None:
    second(training, **fields)
    found = training.one(SECOND, SINGLE)
    assert words in texts(found)


def test_who_was_there_before_it_was_watched_is_the_first(training: CudaNode) -> None:
    second(training)
    training.cuda[201] = replace(training.cuda[201], before=True, contexts=(), launches=9)
    found = training.one(SECOND, SINGLE)
    assert found.subject.pid == 200
    assert "9 launches" in texts(found)


def test_a_third_one_is_told_too_and_a_host_process_is_none(training: CudaNode) -> None:
    second(training)
    training.process(202, container="train", user="root")
    training.watched(202, graph_launches=1)
    training.process(300, user="root")
    training.watched(300)
    training.context(300)
    found = training.found(SECOND, SINGLE)
    assert {f.subject.pid for f in found} == {201, 202}


# ------------------------------------------------------------------ no driver library


def raw(**fields: Any) -> CudaNode:
    node = CudaNode()
    node.process(10, **{"exe": "/home/alice/solve", **fields})
    node.watched(10, libraries=())
    return node


def test_a_holder_of_the_compute_nodes_without_the_library_is_an_error() -> None:
    node = raw()
    node.uses_gpu(10)
    found = node.one(NO_LIBRARY)
    assert found.severity == "error"
    assert found.subject.gpu == "GPU 0"
    assert "holds nvidia-ctl, nvidia-gpu, nvidia-uvm; no CUDA driver library" in texts(found)


@pytest.mark.parametrize("part", ["driver_libraries", "exe", "environment"])
def test_what_could_not_be_read_makes_it_a_warning(part: str) -> None:
    node = raw(unread={part: "permission denied"})
    node.uses_gpu(10)
    found = node.one(NO_LIBRARY)
    assert found.severity == "warning"
    assert f"not sure: its {part.replace('_', ' ')} could not be read" in texts(found)
    node.processes.pop()
    assert node.one(NO_LIBRARY).severity == "warning"


def test_the_gpus_node_alone_is_a_warning_unless_it_only_asks_or_draws() -> None:
    node = raw()
    node.open(10)
    assert node.one(NO_LIBRARY).severity == "warning"
    node.open(10, kind="drm-render")
    assert not node.found(NO_LIBRARY)
    asks = raw(driver_libraries=(DriverLibrary(path="/usr/lib/libnvidia-ml.so.1"),))
    asks.open(10)
    assert not asks.found(NO_LIBRARY)


def test_a_copied_name_of_a_system_program_excuses_nothing() -> None:
    node = raw(exe="/tmp/nvidia-persistenced")
    node.uses_gpu(10)
    assert node.one(NO_LIBRARY).severity == "error"


def test_a_library_that_is_mapped_and_not_taken_up_yet_is_there() -> None:
    node = raw(driver_libraries=(DriverLibrary(path="/opt/x/libcuda.so.1"),))
    node.uses_gpu(10)
    assert not node.found(NO_LIBRARY)


# ------------------------------------------------------------------ any mix of facts

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
