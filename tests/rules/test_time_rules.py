"""Rules over time, fed by what rounds add up to; who belongs here is left alone by all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuwarden.finding import Finding, Report
from gpuwarden.judge import judge
from gpuwarden.model import ExitedClient, Fact, GpuClient, Respawn, Usage, UtilisationSample
from gpuwarden.rules.registry import RULES, TIME_RULES
from gpuwarden.usage import UsageTracker
from tests.support.nodes import (
    GIB,
    SECOND_NS,
    TAKEN_AT_NS,
    NodeBuilder,
    executable,
    gpu_id,
    policy_of,
)

TIME_IDS = {rule.advisory.id for rule in TIME_RULES}


def judged(node: NodeBuilder, policy: str = "", **facts: Sequence[Fact]) -> Report:
    snapshot = replace(node.snapshot(), **{name: tuple(values) for name, values in facts.items()})
    return judge(snapshot, policy_of(policy), rules=(*RULES, *TIME_RULES))


def over_time(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.rule in TIME_IDS]


def rounds(tracker: UsageTracker, node: NodeBuilder, seconds: int, percent: int) -> None:
    """So many seconds, up to the moment of the snapshot, in which every client was that busy."""
    for second in range(seconds):
        at_ns = TAKEN_AT_NS - (seconds - second) * SECOND_NS
        clients = [
            replace(c, samples=(UtilisationSample(at_ns=at_ns, sm_percent=percent),))
            for c in node.clients
        ]
        starts = {p.pid: p.start_time_ticks for p in node.processes}
        tracker.sample(at_ns, node.gpus, clients, starts, {}, None)


def usage_of(node: NodeBuilder, seconds: int, percent: int) -> tuple[Usage, ...]:
    tracker = UsageTracker()
    rounds(tracker, node, seconds, percent)
    return tracker.usage(TAKEN_AT_NS)


# ------------------------------------------------------------------ saturation as a sign


def miner(node: NodeBuilder, **process: Any) -> NodeBuilder:
    node.process(10, **{"exe": "/home/alice/solve", **process})
    node.client(10, memory_mib=3000, sm_percent=99)
    return node


def test_minutes_of_load_with_small_memory_make_an_unexpected_process_suspicious(
    node: NodeBuilder,
) -> None:
    miner(node)
    report = judged(node, usage=usage_of(node, 700, 99))
    (row,) = report.rows
    assert row.verdict == "suspicious"
    (sign,) = [e for e in row.evidence if e.kind == "behaviour"]
    assert sign.strength == "strong"
    assert sign.text == (
        "keeps the GPU 80% busy or more for 11 min with only 4% of its memory, unchanged"
    )
    # The verdict tells it; a second finding would be a second id for one thing.
    assert over_time(report) == []


@pytest.mark.parametrize(("seconds", "percent"), [(580, 99), (700, 70)])
def test_too_short_or_too_little_is_what_it_is_in_one_scan(
    node: NodeBuilder, seconds: int, percent: int
) -> None:
    miner(node)
    (row,) = judged(node, usage=usage_of(node, seconds, percent)).rows
    assert row.verdict == "other-team"
    assert {e.strength for e in row.evidence if e.kind == "behaviour"} == {"weak"}


def test_with_a_peer_like_a_pools_it_is_a_miner(node: NodeBuilder) -> None:
    miner(node, argv=("./solve",))
    node.process(11, exe="/usr/bin/socat")
    node.connection(10, "127.0.0.1", 7273, peer_pid=11)
    node.connection(11, "203.0.113.9", 3333)
    assert judged(node).rows[0].verdict == "suspicious"
    assert judged(node, usage=usage_of(node, 700, 99)).rows[0].verdict == "cryptominer"


def test_a_simulation_that_cron_starts_is_looked_at_and_not_accused(node: NodeBuilder) -> None:
    miner(node, argv=("./solve",))
    node.autostart("cron", "/etc/cron.d/x", "* * * * * /home/alice/solve", user="alice")
    assert judged(node).rows[0].verdict == "suspicious"
    (row,) = judged(node, usage=usage_of(node, 700, 99)).rows
    assert row.verdict == "suspicious"
    assert "as honest work may be" in " ".join(row.path)


def test_an_expected_process_may_compute_as_it_likes(node: NodeBuilder) -> None:
    miner(node, cgroup=node.job("7", ["index:0"]))
    report = judged(node, usage=usage_of(node, 700, 99))
    assert report.rows[0].verdict == "expected"
    assert {e.strength for e in report.rows[0].evidence if e.kind == "behaviour"} == {"strong"}
    assert report.findings == ()


def test_an_expected_process_with_another_sign_is_not_passed_over(node: NodeBuilder) -> None:
    miner(
        node, cgroup=node.job("7", ["index:0"]), exe=executable("/home/alice/solve", deleted=True)
    )
    report = judged(node, usage=usage_of(node, 700, 99))
    assert [f.rule for f in report.findings] == ["expected_process_with_signs"]


def test_a_system_program_computes_for_others(node: NodeBuilder) -> None:
    miner(node, user="root", exe="/usr/bin/nvidia-cuda-mps-server")
    report = judged(node, usage=usage_of(node, 700, 99))
    assert report.rows[0].verdict == "system"
    assert report.findings == ()


def test_the_load_of_another_process_of_that_number_says_nothing(node: NodeBuilder) -> None:
    miner(node)
    other = [replace(u, start_time_ticks=1) for u in usage_of(node, 700, 99) if u.pid]
    assert judged(node, usage=other).rows[0].verdict == "other-team"


def test_memory_that_is_not_told_is_not_small(node: NodeBuilder) -> None:
    miner(node)
    unknown = [
        replace(u, memory_min_bytes=None, memory_max_bytes=None) for u in usage_of(node, 700, 99)
    ]
    report = judged(node, usage=unknown)
    assert report.rows[0].verdict == "other-team"
    assert over_time(report) == []


def test_a_threshold_within_a_decile_counts_only_what_is_surely_above(node: NodeBuilder) -> None:
    miner(node)
    usage = usage_of(node, 700, 84)
    assert judged(node, usage=usage).rows[0].verdict == "suspicious"
    policy = "thresholds: {busy_sm_percent: 83}"
    assert judged(node, policy, usage=usage).rows[0].verdict == "other-team"


# ------------------------------------------------------------------ single conditions


BURSTS = Usage(
    gpu_id=gpu_id(0),
    pid=10,
    start_time_ticks=100_010,
    from_ns=TAKEN_AT_NS - 3500 * SECOND_NS,
    until_ns=TAKEN_AT_NS,
    covered_seconds=3500,
    seconds_by_decile=(2900.0, *[0.0] * 8, 600.0),
)


@pytest.mark.parametrize(
    ("changed", "hits"),
    [
        ({}, True),
        ({"bursts": 1}, False),
        ({"busy_nobody_seconds": 599.0}, False),
        ({"logged_in_seconds": 599.0}, False),
        ({"busy_logged_in_seconds": 30.0}, False),
        ({"start_time_ticks": 7}, False),
    ],
)
def test_pausing_when_looked_at_needs_every_part(
    node: NodeBuilder, changed: dict[str, Any], hits: bool
) -> None:
    miner(node)
    usage = replace(BURSTS, bursts=2, busy_nobody_seconds=700.0, logged_in_seconds=900.0)
    found = over_time(judged(node, usage=[replace(usage, **changed)]))
    assert bool(found) is hits


def test_a_burst_a_quarter_of_an_hour_is_one_too_few_in_two_hours(node: NodeBuilder) -> None:
    miner(node, user="root", exe="/opt/x/agent", cgroup="/system.slice/x.service")
    long = replace(BURSTS, from_ns=TAKEN_AT_NS - 7200 * SECOND_NS)
    assert over_time(judged(node, usage=[replace(long, bursts=7)])) == []
    (finding,) = over_time(judged(node, usage=[replace(long, bursts=8)]))
    assert finding.rule == "gpu_bursts_on_idle_node"


def test_a_gpu_that_was_given_to_somebody_is_not_meant_to_be_idle(node: NodeBuilder) -> None:
    miner(node)
    node.source("slurm", scheduled=True)
    usage = [replace(BURSTS, bursts=6)]
    assert len(over_time(judged(node, usage=usage))) == 1
    node.job("8", ["index:0"], user="bob")
    assert over_time(judged(node, usage=usage)) == []


EXITED = ExitedClient(
    gpu_id=gpu_id(0),
    pid=99,
    exited_at_ns=TAKEN_AT_NS - 60 * SECOND_NS,
    memory_bytes=8 * GIB,
    unexplained_before_bytes=1 * GIB,
    unexplained_bytes=int(1.5 * GIB),
)


@pytest.mark.parametrize(
    ("changed", "hits"),
    [
        ({}, True),
        ({"exited_at_ns": TAKEN_AT_NS - 59 * SECOND_NS}, False),
        ({"unexplained_bytes": int(1.4 * GIB)}, False),
        ({"memory_bytes": GIB // 4}, False),
        ({"memory_bytes": None}, True),
        ({"unexplained_before_bytes": None}, False),
        ({"unexplained_bytes": None}, False),
        ({"gpu_id": "GPU-gone"}, False),
        ({"pid": 10}, False),
    ],
)
def test_kept_memory_needs_every_part(
    node: NodeBuilder, changed: dict[str, Any], hits: bool
) -> None:
    node.process(10)
    node.client(10)
    found = over_time(judged(node, exited=[replace(EXITED, **changed)]))
    assert bool(found) is hits


def test_a_monitors_descriptors_do_not_explain_memory(node: NodeBuilder) -> None:
    node.process(10)
    node.client(10)
    node.process(11, user="root", exe="/usr/bin/nv-hostengine")
    node.holds_gpu(11)
    assert len(over_time(judged(node, exited=[EXITED]))) == 1
    node.process(12)
    node.holds_gpu(12)
    assert over_time(judged(node, exited=[EXITED])) == []


def respawn(lives: Sequence[float], pause: float = 1.0) -> Respawn:
    binary = executable("/opt/x/agent")
    starts, at = [], 0.0
    for life in (*lives, 0.0):
        starts.append(TAKEN_AT_NS - 3600 * SECOND_NS + int(at * SECOND_NS))
        at += life + pause
    return Respawn(
        gpu_id=gpu_id(0),
        binary=binary.path,
        device=binary.device,
        inode=binary.inode,
        starts_ns=tuple(starts),
        pids=tuple(range(11 - len(starts), 11)),
        lifetimes_seconds=tuple(lives),
    )


@pytest.mark.parametrize(
    ("line", "hits"),
    [
        (respawn([60, 60, 61, 59]), True),
        (respawn([60, 60, 61]), False),
        (respawn([60, 60, 61, 9]), False),
        # An honest first run, or an irregular one, does not hide the regular ones after it.
        (respawn([300, 60, 60, 61, 59]), True),
        (respawn([60, 60, 61, 59], pause=30), False),
        (respawn([60, 60, 61, 59], pause=-30), False),
        (respawn([2, 3, 2, 2]), True),
        (respawn([700, 700, 700, 700]), False),
        (replace(respawn([60, 60, 61, 59]), inode=1), False),
        (replace(respawn([60, 60, 61, 59]), lifetimes_seconds=()), False),
    ],
)
def test_respawning_is_regular_and_at_once(node: NodeBuilder, line: Respawn, hits: bool) -> None:
    miner(node, user="root", exe="/opt/x/agent", cgroup="/system.slice/x.service")
    assert bool(over_time(judged(node, respawns=[line]))) is hits


def test_a_respawner_is_one_finding_however_often_its_pid_changes(node: NodeBuilder) -> None:
    found = set()
    for pid in (10, 11):
        each = NodeBuilder()
        each.init()
        each.gpu(0)
        each.process(pid, user="root", exe="/opt/x/agent", cgroup="/system.slice/x.service")
        each.client(pid)
        line = respawn([60, 60, 61, 59])
        line = replace(line, pids=tuple(p + pid - 10 for p in line.pids))
        found |= {f.id for f in over_time(judged(each, respawns=[line]))}
    assert len(found) == 1


def test_the_binary_that_an_exception_names_is_silent(node: NodeBuilder) -> None:
    miner(node, user="root", exe="/opt/x/agent", cgroup="/system.slice/x.service")
    policy = "exceptions: [{rule: gpu_process_respawns, reason: r, path: /opt/x/agent}]"
    (finding,) = over_time(judged(node, policy, respawns=[respawn([60, 60, 61, 59])]))
    assert finding.silenced_by is not None


# ------------------------------------------------------------------ whatever is remembered


NUMBERS = st.one_of(
    st.integers(-(1 << 63), 1 << 63), st.sampled_from([0, TAKEN_AT_NS, TAKEN_AT_NS - 10**12])
)
AMOUNTS = st.one_of(st.none(), st.sampled_from([0, GIB, 3 * GIB, 80 * GIB]), NUMBERS)
SECONDS = st.one_of(
    st.floats(0, 4000), st.floats(allow_nan=True, allow_infinity=True), st.just(3600.0)
)
GPUS = st.sampled_from([gpu_id(0), gpu_id(1), "", "GPU-unknown"])
PIDS = st.sampled_from([None, 10, 11, 12, 99])
USAGES = st.builds(
    Usage,
    gpu_id=GPUS,
    pid=PIDS,
    start_time_ticks=st.sampled_from([None, 100_010, 100_011, 100_012]),
    from_ns=NUMBERS,
    until_ns=NUMBERS,
    covered_seconds=SECONDS,
    seconds_by_decile=st.one_of(
        st.just((*[0.0] * 9, 3600.0)), st.lists(SECONDS, max_size=12).map(tuple)
    ),
    memory_min_bytes=AMOUNTS,
    memory_max_bytes=AMOUNTS,
    bursts=NUMBERS,
    busy_logged_in_seconds=SECONDS,
    busy_nobody_seconds=SECONDS,
    logged_in_seconds=SECONDS,
    covered_without_client_seconds=SECONDS,
    busy_without_client_seconds=SECONDS,
)
EXITS = st.builds(
    ExitedClient,
    gpu_id=GPUS,
    pid=st.integers(9, 13),
    binary=st.sampled_from([None, "", "/x"]),
    exited_at_ns=NUMBERS,
    memory_bytes=AMOUNTS,
    unexplained_before_bytes=AMOUNTS,
    unexplained_bytes=AMOUNTS,
)
RESPAWNS = st.one_of(
    st.just(respawn([60, 60, 61, 59])),
    st.builds(
        Respawn,
        gpu_id=GPUS,
        binary=st.sampled_from(["", "/", "/opt/x/agent", "/usr/bin/python3.11"]),
        device=st.sampled_from([None, "8:1"]),
        inode=st.one_of(st.none(), st.just(executable("/opt/x/agent").inode)),
        starts_ns=st.lists(NUMBERS, max_size=8).map(tuple),
        pids=st.lists(st.integers(9, 13), max_size=8).map(tuple),
        lifetimes_seconds=st.lists(SECONDS, max_size=8).map(tuple),
    ),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(USAGES, max_size=4), st.lists(EXITS, max_size=3), st.lists(RESPAWNS, max_size=3))
def test_whatever_is_remembered_is_judged_and_who_belongs_here_is_left_alone(
    usage: list[Usage], exited: list[ExitedClient], respawns: list[Respawn]
) -> None:
    node = NodeBuilder()
    node.init()
    node.gpu(0)
    node.gpu(1)
    job = node.job("7", ["index:0"])
    node.process(10, exe="/opt/x/agent", cgroup=job)
    node.process(11, user="root", exe="/usr/bin/nvidia-cuda-mps-server")
    node.process(12, exe="/opt/x/agent")
    for pid in (10, 11, 12):
        node.client(pid, sm_percent=None)
    # The job's process has spread to a GPU that it was not given.
    node.client(10, 1)
    report = judged(node, usage=usage, exited=exited, respawns=respawns)
    assert [run for run in report.rules if run.state == "failed"] == []
    assert {f.subject.pid for f in over_time(report)} <= {None, 12}
    verdicts = {(row.pid, row.gpu): row.verdict for row in report.rows}
    assert verdicts[(10, "0")] == "expected"
    assert verdicts[(11, "0")] == "system"


@settings(max_examples=50, deadline=None)
@given(st.lists(RESPAWNS, max_size=3))
def test_what_an_expected_job_starts_again_and_again_is_its_own(respawns: list[Respawn]) -> None:
    node = NodeBuilder()
    node.init()
    node.gpu(0)
    job = node.job("7", ["index:0"])
    for pid in range(9, 14):
        node.process(pid, exe="/opt/x/agent", cgroup=job)
        node.client(pid)
    assert over_time(judged(node, respawns=respawns)) == []


def test_every_rule_over_time_says_which_of_a_clients_facts_it_needs() -> None:
    for rule in TIME_RULES:
        assert "processes" in rule.advisory.needs


def test_a_client_that_only_draws_is_no_computer(node: NodeBuilder) -> None:
    node.process(10, exe="/home/alice/game")
    node.client(10, kinds=("G",), memory_mib=3000, sm_percent=99)
    assert isinstance(node.clients[0], GpuClient)
    report = judged(node, usage=usage_of(node, 700, 99))
    assert report.rows[0].verdict == "other-team"
    assert over_time(report) == []
