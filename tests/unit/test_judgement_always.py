"""What holds for every judgement, over generated nodes: hostile, contradictory, half seen."""

from __future__ import annotations

import random
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.finding import VERDICTS, Evidence, Report, severity_rank
from gpuwarden.judge import judge
from gpuwarden.model import SensorState, Snapshot, SourceState
from gpuwarden.node import Node
from gpuwarden.outputs import json_output
from gpuwarden.policy import Policy
from gpuwarden.rules.membership import claims
from gpuwarden.rules.signs import weigh
from gpuwarden.snapshot import decode, encode
from tests.support.nodes import NodeBuilder, executable, gpu_id, mig_id, policy_of

POLICIES = (
    Policy(),
    policy_of(
        """
        workloads:
          - {name: alice, match: {user: alice}, gpus: [0]}
          - {name: serve, match: {binary: "/srv/*"}, egress: [10.0.0.0/8, "192.0.2.1:443"]}
        exceptions:
          - {rule: gpu_process_of_other_team, reason: r, match: {user: bob}, expires: 2026-02-01}
          - {rule: gpu_cryptominer, reason: r, gpu: 1, expires: 2020-01-01}
          - {rule: autostart_suspicious, reason: r, path: /etc/cron.d/x}
        allow_activities: [plotting]
        """
    ),
)

PIDS = st.integers(10, 16)
WORDS = st.sampled_from(
    ["", "7", "0", "x", "\u00b2", "9" * 30, "a:b", "\x1b[31m", "1000", "/tmp/x"]
)
ARGVS = st.sampled_from(
    [
        None,
        (),
        ("python3", "train.py"),
        ("python3" + " " * 60, "-a", "kawpow", "-o", "stratum+tcp://pool.example:1", "-u", "W"),
        ("./xmrig",),
        ("hashcat", "-m", "22000", "-a", "3", "f.hc22000", "?d?d"),
        ("sshd: bob",),
    ]
)
PATHS = st.sampled_from(
    [
        "/usr/bin/python3.11",
        "/usr/bin/Xorg",
        "/tmp/.x/y",
        "/srv/serve",
        "/home/alice/xmrig",
        "/memfd:a",
    ]
)
STATES = st.sampled_from(get_args(SensorState))
SOURCE_STATES = st.sampled_from(get_args(SourceState))


@st.composite
def nodes(draw: st.DrawFn) -> NodeBuilder:
    node = NodeBuilder(
        host_pid_namespace=draw(st.sampled_from([True, False, None])),
        origin=draw(st.sampled_from(["live", "root", "nvidia-smi-xml"])),
    )
    some = st.integers(0, 4)
    if draw(st.booleans()):
        node.init()
    for index in range(draw(st.integers(0, 3))):
        node.gpu(
            index,
            sm_percent=draw(st.sampled_from([None, 0, 100])),
            memory_used_bytes=draw(st.sampled_from([None, 0, 30 << 30])),
            error=draw(st.sampled_from([None, None, None, "GPU is lost"])),
        )
    for instance in range(draw(st.integers(0, 2))):
        node.mig(0, instance, parent_id=draw(st.sampled_from([gpu_id(0), mig_id(0, 1)])))
    gpus = st.sampled_from([*(g.id for g in node.gpus), "GPU-unknown", "\u00b2", "9" * 5000])
    for name in draw(st.sets(st.sampled_from(["c0", "c1"]))):
        if draw(st.booleans()):
            node.pod(name, confirmed=draw(st.booleans()))
            if draw(st.booleans()):
                node.pod_given(name, [f"uuid:{draw(gpus)}"])
        else:
            node.container(name, confirmed=draw(st.booleans()), visible_devices=draw(WORDS))
    for job in draw(st.sets(st.sampled_from(["7", "8"]))):
        node.job(
            job,
            [draw(st.sampled_from(["index:0", "minor:1", "all", "mig:0/1", "mig:0/9/9", "pci:x"]))],
            user=draw(st.sampled_from(["alice", "bob"])),
        )
    for source in ("slurm", "kubernetes", "systemd"):
        if draw(st.booleans()):
            node.source(source, draw(SOURCE_STATES), scheduled=draw(st.booleans()), ended=("9",))
    for sensor in draw(st.sets(st.sampled_from(sorted(node.sensors)), max_size=3)):
        node.sensor(sensor, draw(STATES))
    places: list[dict[str, Any]] = [{}, {"cgroup": "/"}, {"cgroup": "/system.slice/a.service"}]
    places += [{"cgroup": node.job_path(job)} for job in ("7", "9")]
    places += [{"container": c.name} for c in node.containers]
    for pid in draw(st.sets(PIDS, max_size=5)):
        path = draw(PATHS)
        node.process(
            pid,
            user=draw(st.sampled_from(["root", "alice", "bob"])),
            exe=draw(
                st.sampled_from(
                    [
                        None,
                        executable(path),
                        executable(path, deleted=True),
                        executable(path, memfd=path.startswith("/memfd")),
                    ]
                )
            ),
            argv=draw(ARGVS),
            state=draw(st.sampled_from("SRDZ")),
            ppid=draw(st.sampled_from([1, 10, 11, pid])),
            session_id=draw(st.sampled_from([10, pid, None])),
            environment=draw(
                st.dictionaries(
                    st.sampled_from(["SLURM_JOB_ID", "LD_PRELOAD", "SSH_CONNECTION"]),
                    WORDS,
                    max_size=2,
                )
            ),
            **draw(st.sampled_from(places)),
        )
    for pid, gpu in draw(st.sets(st.tuples(PIDS, gpus), max_size=6)):
        node.client(
            pid,
            gpu,
            sm_percent=draw(st.sampled_from([None, 3, 99])),
            reported_name=draw(st.one_of(st.none(), WORDS, PATHS)),
            source=draw(st.sampled_from(["nvml", "drm", "kfd"])),
        )
    for _ in range(draw(some)):
        node.holder(
            draw(PIDS),
            draw(st.integers(0, 3)),
            kind=draw(st.sampled_from(["nvidia-gpu", "nvidia-ctl", "nvidia-uvm", "kfd", "accel"])),
            renamed=draw(st.booleans()),
        )
    for pid in draw(st.sets(PIDS, max_size=1)):
        node.hidden(pid)
    for _ in range(draw(some)):
        node.connection(
            draw(PIDS),
            draw(st.sampled_from(["192.0.2.1", "10.0.0.9", "::1", "", "nonsense"])),
            draw(st.sampled_from([0, 443, 3333])),
            peer_pid=draw(st.one_of(st.none(), PIDS)),
        )
    for _ in range(draw(some)):
        node.xid(
            draw(st.sampled_from([13, 79, 119, 999])),
            pci_address=draw(st.sampled_from([None, "00000000:10:00.0", "x"])),
            trusted=draw(st.booleans()),
            at_ns=draw(st.one_of(st.none(), st.integers(0, 2**63))),
        )
    for _ in range(draw(some)):
        node.autostart(
            draw(st.sampled_from(["cron", "preload", "systemd-service", "container-restart"])),
            draw(st.sampled_from(["/etc/cron.d/x", "/etc/ld.so.preload"])),
            draw(st.sampled_from(["* * * * * /tmp/.x/y", "/usr/lib/libx.so", "/srv/serve", ""])),
            line=draw(st.one_of(st.none(), st.integers(1, 9))),
        )
    return node


def _shuffled(snapshot: Snapshot, seed: int) -> Snapshot:
    shuffle = random.Random(seed)
    changed = {}
    for name in snapshot.__struct_fields__:
        value = getattr(snapshot, name)
        if isinstance(value, tuple):
            changed[name] = tuple(shuffle.sample(value, len(value)))
    return msgspec.structs.replace(snapshot, **changed)


def _judged(node: NodeBuilder, policy: Policy) -> tuple[Snapshot, Report]:
    snapshot = node.snapshot()
    return snapshot, judge(snapshot, policy)


def _one_verdict_each(snapshot: Snapshot, policy: Policy, report: Report) -> None:
    listed = {(c.pid, c.gpu_id) for c in snapshot.clients}
    keys = [(row.pid, row.gpu_id) for row in report.rows]
    assert len(keys) == len(set(keys))
    assert listed <= set(keys)
    assert {row.verdict for row in report.rows} <= set(VERDICTS)
    assert all(row.path for row in report.rows)


def _expected_is_proven(snapshot: Snapshot, policy: Policy, report: Report) -> None:
    joined = Node(snapshot)
    for row in report.rows:
        if row.verdict != "expected":
            continue
        assert row.proof == "proven"
        process = joined.processes[row.inherited_from or row.pid or -1]
        assert any(c.proof == "proven" for c in claims(joined, policy, process))


@settings(max_examples=60, deadline=None)
@given(nodes(), st.sampled_from(POLICIES), st.integers(0, 9))
def test_the_order_of_facts_changes_neither_verdicts_nor_ids(
    node: NodeBuilder, policy: Policy, seed: int
) -> None:
    snapshot, report = _judged(node, policy)
    again = judge(_shuffled(snapshot, seed), policy)
    assert {f.id for f in again.findings} == {f.id for f in report.findings}
    verdicts = {(r.pid, r.gpu_id): (r.verdict, r.inherited_from) for r in report.rows}
    assert {(r.pid, r.gpu_id): (r.verdict, r.inherited_from) for r in again.rows} == verdicts


def _replays(snapshot: Snapshot, policy: Policy, report: Report) -> None:
    assert judge(decode(encode(snapshot)), policy) == report


def _findings_are_told_apart(snapshot: Snapshot, policy: Policy, report: Report) -> None:
    assert len({f.id for f in report.findings}) == len(report.findings)
    assert [f.sequence for f in report.findings] == list(range(1, len(report.findings) + 1))
    ranks = [severity_rank(f.severity) for f in report.findings]
    assert ranks == sorted(ranks, reverse=True)
    assert json_output.parse(json_output.render(report).encode()) == report


CHECKS = (_one_verdict_each, _expected_is_proven, _replays, _findings_are_told_apart)


@settings(max_examples=120, deadline=None)
@given(nodes(), st.sampled_from(POLICIES))
def test_any_node_is_judged_and_the_judgement_holds_together(
    node: NodeBuilder, policy: Policy
) -> None:
    snapshot, report = _judged(node, policy)
    for check in CHECKS:
        check(snapshot, policy, report)


EVIDENCE = st.builds(
    Evidence,
    text=st.just("t"),
    source=st.just("s"),
    kind=st.sampled_from(
        [None, "masquerade", "signature", "egress", "persistence", "behaviour", "hiding", "code"]
    ),
    strength=st.sampled_from(["complete", "strong", "weak", "fact"]),
)
WEIGHTS = ("none", "suspicious", "cryptominer")


@given(
    st.lists(EVIDENCE, max_size=6),
    EVIDENCE,
    st.sampled_from(["none", "mining", "hash-cracking", "volunteer-computing", "plotting"]),
)
def test_more_evidence_never_weighs_less(
    evidence: list[Evidence], more: Evidence, activity: str
) -> None:
    before, _ = weigh(evidence, activity)
    after, _ = weigh([*evidence, more], activity)
    assert WEIGHTS.index(after) >= WEIGHTS.index(before)
    assert weigh(evidence[::-1], activity)[0] == before
    if activity not in ("none", "mining"):
        assert after != "cryptominer"


@pytest.mark.parametrize("kind", ["masquerade", "behaviour"])
def test_looking_odd_in_one_way_however_often_is_one_kind(kind: Any) -> None:
    once = Evidence(text="a", source="s", kind=kind, strength="strong")
    assert weigh([once, once, once], "none")[0] == "suspicious"
