"""Metrics say what is known, and nothing of what is not; whatever names hold, they can be read."""

from __future__ import annotations

import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from gpuwarden.finding import VERDICTS
from gpuwarden.model import Gap
from gpuwarden.outputs.metrics_catalogue import METRICS
from gpuwarden.outputs.metrics_state import BLIND_CAUSES, AgentState, blindness
from gpuwarden.outputs.metrics_values import MAX_PROCESSES
from gpuwarden.outputs.prometheus import (
    LABEL_CHARACTERS,
    MAX_SERIES,
    CudaState,
    EventCount,
    FindingCount,
    PartHealth,
    RefusedWay,
    RuleHealth,
    negotiated,
    render,
)
from gpuwarden.outputs.words import UNSEEN
from gpuwarden.sinks.dispatcher import SinkHealth
from tests.support.agent_state import SEVERITIES, miner_node, quiet_node, state_of
from tests.support.nodes import GIB, MIB, NodeBuilder, gpu_id, mig_id

WELL = state_of(quiet_node())
MINED = state_of(miner_node())

Found = dict[str, list[tuple[dict[str, str], float]]]


def read(state: AgentState, **options: Any) -> Found:
    """Every series by name, as the client library's own parser reads them."""
    found: Found = {}
    for family in plain(render(state, **options).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def strictly(body: bytes) -> Iterator[Any]:
    """The families of an OpenMetrics answer, by the client library's own strict parser."""
    families: Iterator[Any] = openmetrics.text_string_to_metric_families(body.decode())  # type: ignore[no-untyped-call]
    return families


def value(found: Found, name: str, **labels: str) -> float | None:
    """The one series whose labels hold these; None without one."""
    matching = [
        value for its, value in found.get(f"gpuwarden_{name}", []) if labels.items() <= its.items()
    ]
    assert len(matching) <= 1, (name, labels, matching)
    return matching[0] if matching else None


def test_the_miner_is_there_with_its_verdict_and_the_leak_with_its_bytes() -> None:
    found = read(state_of(miner_node()))
    ((labels, share),) = found["gpuwarden_process_sm_ratio"]
    assert share == 0.97
    assert labels == {
        "gpu": "0",
        "uuid": gpu_id(0),
        "pid": "4242",
        "binary": "/tmp/.cache/xmrig",
        "user": "bob",
        "workload": "",
        "verdict": "cryptominer",
    }
    assert value(found, "process_memory_bytes", pid="4242") == 6000 * MIB
    assert value(found, "gpu_memory_without_process_bytes", gpu="0") == 0
    assert value(found, "gpu_memory_without_process_bytes", gpu="1") == 30 * GIB
    assert value(found, "gpu_utilisation_ratio", gpu="0") == 0.99
    assert value(found, "gpu_temperature_celsius", gpu="1") == 35
    assert value(found, "gpu_clients", gpu="0") == 1
    assert value(found, "gpu_clients", gpu="1") == 0
    assert value(found, "unexpected_egress_processes") == 1
    assert value(found, "judged", verdict="cryptominer") == 1
    assert value(found, "judged", verdict="expected") == 0
    miner = {"rule": "gpu_cryptominer", "severity": "critical", "silenced": "false"}
    assert value(found, "findings", **miner, verdict="cryptominer") == 1
    assert value(found, "findings", **miner, verdict="") == 0


def test_every_rule_without_a_finding_is_zero_but_one_that_could_not_look_is_absent() -> None:
    node = quiet_node()
    node.sensor("hidden", "failed")
    found = read(state_of(node))
    told = {labels["rule"] for labels, _ in found["gpuwarden_findings"]}
    assert told == set(SEVERITIES) - {"process_hidden"}
    assert value(found, "rule_evaluated", rule="process_hidden") == 0
    assert value(found, "rule_evaluated", rule="gpu_cryptominer") == 1
    early = read(state_of(node, rules=(RuleHealth("gpu_cryptominer", "critical"),), findings=()))
    assert "gpuwarden_findings" not in early
    assert "gpuwarden_rule_evaluated" not in early


def test_what_a_policy_excepts_is_counted_apart() -> None:
    counts = (
        FindingCount("gpu_cryptominer", "critical", "cryptominer", silenced=True, count=2),
        FindingCount("gpu_cryptominer", "critical", "cryptominer", count=3),
        FindingCount("gpu_cryptominer", "critical", "cryptominer", count=4),
    )
    found = read(state_of(quiet_node(), findings=counts))
    assert value(found, "findings", verdict="cryptominer", silenced="true") == 2
    assert value(found, "findings", verdict="cryptominer", silenced="false") == 7


def test_egress_that_a_policy_excepts_is_not_unexpected() -> None:
    assert MINED.report is not None
    rows = tuple(msgspec.structs.replace(row, silenced_by="ours") for row in MINED.report.rows)
    report = msgspec.structs.replace(MINED.report, rows=rows)
    assert value(read(MINED), "unexpected_egress_processes") == 1
    excepted = msgspec.structs.replace(MINED, report=report)
    assert value(read(excepted), "unexpected_egress_processes") == 0


def test_lists_that_disagree_are_counted_where_both_were_seen() -> None:
    node = quiet_node()
    node.process(5000, user="bob")
    node.holds_gpu(5000)
    node.process(5001, user="bob")
    node.client(5001)
    found = read(state_of(node))
    assert value(found, "holders_not_listed") == 1
    assert value(found, "clients_without_device") == 1
    for sensor in ("nvml", "holders"):
        for state in ("failed", "partial", "absent"):
            blind = quiet_node()
            blind.sensor(sensor, state)
            unseen = read(state_of(blind))
            assert value(unseen, "holders_not_listed") is None, (sensor, state)
            assert value(unseen, "clients_without_device") is None, (sensor, state)


@pytest.mark.parametrize(
    ("sensor", "metric"),
    [
        ("sockets", "unexpected_egress_processes"),
        ("holders", "gpu_memory_without_process_bytes"),
    ],
)
def test_unknown_is_absent_and_not_zero(sensor: str, metric: str) -> None:
    node = quiet_node()
    assert value(read(state_of(node)), metric) == 0
    node.sensor(sensor, "partial")
    assert value(read(state_of(node)), metric) is None


def test_a_gpu_that_does_not_answer_has_no_numbers() -> None:
    node = NodeBuilder()
    node.gpu(0, error="GPU is lost")
    node.gpu(1, memory_used_bytes=0, unread={"processes": "no permission"})
    node.gpu(2, memory_used_bytes=None)
    found = read(state_of(node))
    assert value(found, "gpu_readable", gpu="0") == 0
    assert value(found, "gpu_readable", gpu="1") == 1
    for name in ("gpu_utilisation_ratio", "gpu_memory_used_bytes", "gpu_clients"):
        assert value(found, name, gpu="0") is None
    for name in ("gpu_clients", "more_processes", "gpu_memory_without_process_bytes"):
        assert value(found, name, gpu="1") is None
    assert value(found, "gpu_memory_without_process_bytes", gpu="2") is None
    assert value(found, "gpu_clients", gpu="2") == 0


def test_a_process_without_a_sample_has_no_share_and_one_not_judged_yet_has_no_names() -> None:
    node = quiet_node()
    report = node.judge()
    node.client(7777, sm_percent=None, memory_mib=None)
    node.client(7778, sm_percent=0)
    found = read(state_of(node, report))
    assert value(found, "process_sm_ratio", pid="7777") is None
    assert value(found, "process_memory_bytes", pid="7777") is None
    assert value(found, "process_sm_ratio", pid="7778", binary="", verdict="") == 0


def test_parts_of_a_gpu_have_their_own_lists() -> None:
    node = NodeBuilder()
    node.gpu(0, mig_enabled=True)
    node.mig(0, 3, memory_used_bytes=GIB)
    node.process(4000)
    node.client(4000, mig_id(0, 3))
    found = read(state_of(node))
    assert value(found, "gpu_clients", gpu="0:3", uuid=mig_id(0, 3)) == 1
    assert value(found, "gpu_clients", gpu="0") is None
    assert value(found, "gpu_memory_without_process_bytes", gpu="0:3") is None


def test_the_busiest_processes_are_listed_and_the_rest_are_summed() -> None:
    node = NodeBuilder()
    node.gpu(0)
    node.gpu(1)
    for pid in range(MAX_PROCESSES):
        node.client(1000 + pid, 0, sm_percent=2, memory_mib=10)
    node.client(10, 0, sm_percent=1, memory_mib=10)
    node.client(11, 0, sm_percent=None, memory_mib=5)
    node.client(12, 1, sm_percent=90, memory_mib=1)
    report = NodeBuilder().judge()
    found = read(state_of(node, report))
    assert len(found["gpuwarden_process_sm_ratio"]) == MAX_PROCESSES
    assert value(found, "process_sm_ratio", pid="12") == 0.9
    assert value(found, "more_processes", gpu="0") == 3
    assert value(found, "more_processes", gpu="1") == 0
    assert value(found, "more_processes_sm_ratio", gpu="0") == pytest.approx(0.03)
    assert value(found, "more_processes_sm_ratio", gpu="1") is None
    assert value(found, "more_processes_memory_bytes", gpu="0") == 25 * MIB


def test_no_list_grows_the_endpoint_without_end() -> None:
    events = tuple(EventCount(f"kind{i}", "opened", 1) for i in range(MAX_SERIES + 50))
    found = read(state_of(quiet_node(), events=events))
    assert len(found["gpuwarden_events_total"]) == MAX_SERIES


def test_own_health_is_told() -> None:
    at_ns = 1_700_000_000 * 10**9
    sinks = (
        SinkHealth(name="webhook https://x:443", delivered=5, dropped=2, waiting=1, repeated=4),
        SinkHealth(name="webhook https://x:443", failures=3, failing_since_ns=at_ns - 10**9),
    )
    aside = (Gap(sensor="store", what="samples.sqlite", reason="it was damaged"),)
    found = read(state_of(quiet_node(), at_ns=at_ns, sinks=sinks, store_set_aside=aside))
    first, second = "webhook https://x:443", "webhook https://x:443 (2)"
    assert value(found, "sink_up", sink=first) == 1
    assert value(found, "sink_delivered_total", sink=first) == 5
    assert value(found, "sink_dropped_total", sink=first) == 2
    assert value(found, "sink_failing_seconds", sink=first) == 0
    assert value(found, "sink_up", sink=second) == 0
    assert value(found, "sink_failing_seconds", sink=second) == 1
    assert value(found, "events_total", kind="open", state="denied") == 1
    assert value(found, "events_dropped_total", cause="ring_opens") == 3
    assert value(found, "events_dropped_total", cause="ring_exits") == 0
    assert value(found, "events_dropped_total", cause="malformed") == 2
    assert value(found, "events_dropped_total", cause="queue") == 4
    assert value(found, "device_uses_total") == 70
    assert value(found, "opens_denied_total", mode="enforce") == 1
    assert value(found, "opens_denied_total", mode="dry-run") == 2
    assert value(found, "ring_fill_ratio") == 0.25
    assert value(found, "sensor_state", sensor="sockets", state="failed") == 1
    assert value(found, "sensor_state", sensor="sockets", state="ok") == 0
    assert value(found, "sensor_errors_total", sensor="sockets") == 3
    assert value(found, "sensor_seconds", sensor="sockets") is None
    assert value(found, "source_state", source="slurm", state="ok") == 1
    assert value(found, "store_database_bytes", database="findings") == 4096
    assert value(found, "store_set_aside") == 1
    assert value(found, "agent_resident_memory_bytes") == 60 << 20
    assert value(found, "probe_info", way="eBPF (cgroup/dev)", kind="ebpf") == 1
    assert value(found, "probe_refused_info", reason="no tracefs") == 1
    assert value(found, "build_info", version="1.2.3") == 1


def test_a_poll_tells_nothing_that_only_the_probe_counts() -> None:
    state = state_of(quiet_node(), polling=True, way="polling /proc", probe=None,
                     ring_bytes=None, ring_fill_ratio=None)  # fmt: skip
    found = read(state)
    assert value(found, "probe_info", kind="poll") == 1
    for name in ("device_uses_total", "ring_bytes", "ring_fill_ratio", "events_limited_total"):
        assert value(found, name) is None
    dead = read(msgspec.structs.replace(state, watching=False))
    assert value(dead, "probe_info") is None
    assert value(dead, "blind", cause="probe") == 1


def test_of_the_cuda_layer_each_count_is_told_by_what_it_was() -> None:
    found = read(state_of(quiet_node()))
    assert value(found, "cuda_watching") == 1
    assert value(found, "cuda_unseen_info", reason="launches are not counted: the kernel is older "
                 "than 5.11") == 1  # fmt: skip
    assert value(found, "cuda_entry_points", place="+10") == 37
    assert value(found, "cuda_entry_points", place="+0") == 3
    assert value(found, "cuda_processes", seen="whole") == 7
    assert value(found, "cuda_processes", seen="late") == 2
    assert value(found, "cuda_modules_total", standing="known") == 900
    assert value(found, "cuda_modules_total", standing="hash-like") == 1
    assert value(found, "cuda_modules_total", standing="jit") == 0
    assert value(found, "cuda_loads_missed_total", reason="the ring was full") == 2
    assert value(found, "cuda_launches_total", what="graph") == 12
    assert value(found, "cuda_launch_profiles", fit="fits") == 4
    assert value(found, "cuda_launch_profiles", fit="does-not-fit") == 1


def test_an_agent_without_a_cuda_layer_says_nothing_of_it() -> None:
    found = read(state_of(quiet_node(), cuda=None))
    assert not [name for name in found if name.startswith("gpuwarden_cuda_")]
    idle = read(state_of(quiet_node(), cuda=CudaState(watching=False)))
    assert value(idle, "cuda_watching") == 0
    assert value(idle, "cuda_loads_total") == 0
    assert value(idle, "cuda_tracer_cpu_seconds") is None
    assert "gpuwarden_cuda_loads_missed_total" not in idle


BLIND: list[tuple[str, dict[str, Any]]] = [
    ("probe", {"watching": False}),
    ("sampling", {"sampling": "failed"}),
    ("sampling", {"sampling_age_seconds": 4.1}),
    ("sampling", {"sampling_age_seconds": None}),
    ("judgement", {"judgement_age_seconds": 16.1}),
    ("judgement", {"judgement_age_seconds": None}),
    ("store", {"store_troubles": (Gap(sensor="store", what="/var", reason="disk full"),)}),
    ("agent", {"monotonic_seconds": -11.0, "sampling": "no-driver", "judgement_age_seconds": 0.0}),
]


@pytest.mark.parametrize(("cause", "fields"), BLIND)
def test_each_kind_of_blindness_is_told_alone(cause: str, fields: dict[str, Any]) -> None:
    state = state_of(quiet_node(), **{"monotonic_seconds": 0.0, **fields})
    assert {one.cause for one in blindness(state, 0.0)} == {cause}
    found = read(state, monotonic_seconds=0.0)
    assert {
        labels["cause"] for labels, set_ in found["gpuwarden_blind"] if set_
    } == {cause}  # fmt: skip
    assert len(found["gpuwarden_blind"]) == len(BLIND_CAUSES)


def test_an_agent_that_sees_is_blind_in_nothing() -> None:
    well = state_of(quiet_node(), monotonic_seconds=0.0)
    assert blindness(well, 0.0) == ()
    no_driver = state_of(
        quiet_node(), monotonic_seconds=0.0, sampling="no-driver", sampling_age_seconds=None
    )
    assert blindness(no_driver, 1.0) == ()
    # A state that nobody fills any more ages by itself.
    hung = {one.cause for one in blindness(well, 20.0)}
    assert hung == {"agent", "sampling", "judgement"}
    assert value(read(well, monotonic_seconds=20.0), "judgement_age_seconds") == 22.0


def test_before_the_first_judgement_nothing_is_claimed() -> None:
    state = state_of(quiet_node())
    early = msgspec.structs.replace(state, report=None, findings=(), rules=(), gpus=(), clients=())
    found = read(early)
    for name in ("judged", "holders_not_listed", "findings", "unexpected_egress_processes"):
        assert f"gpuwarden_{name}" not in found
    assert value(found, "gpu_memory_without_process_bytes") is None


# ---------------------------------------------------------------- formats


def test_every_metric_of_the_catalogue_can_be_told_and_has_its_labels_and_its_documentation() -> (
    None
):
    node = miner_node()
    for pid in range(5000, 5001 + MAX_PROCESSES):
        node.client(pid, 0, sm_percent=1)
    state = state_of(node, node.judge())
    found = read(state)
    assert set(found) == {metric.name for metric in METRICS}
    for metric in METRICS:
        for labels, _ in found[metric.name]:
            assert tuple(labels) == tuple(sorted(metric.labels)), metric.name
    documented = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    for metric in METRICS:
        told = ", ".join(f"`{label}`" for label in metric.labels)
        assert f"| `{metric.name}` | {told or '–'} |" in documented, metric.name


def test_openmetrics_is_read_by_the_libraries_own_strict_parser() -> None:
    body = render(MINED, openmetrics=True)
    families = {family.name: family for family in strictly(body)}
    assert families["gpuwarden_events"].type == "counter"
    assert families["gpuwarden_build"].type == "info"
    assert body.endswith(b"# EOF\n")


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", "text/plain; version=0.0.4"),
        ("*/*", "text/plain; version=0.0.4"),
        ("application/openmetrics-text;version=1.0.0,text/plain;q=0.5", "application/openmetrics"),
        ("application/openmetrics-text; version=latest", "text/plain; version=0.0.4"),
    ],
)
def test_the_format_is_the_one_asked_for(accept: str, kind: str) -> None:
    content_type, body = negotiated(state_of(quiet_node()), accept)
    assert content_type.startswith(kind)
    assert body.endswith(b"# EOF\n") == kind.startswith("application/")


@given(st.text(st.characters(codec="latin-1"), max_size=60))
def test_any_accept_header_gets_an_answer(accept: str) -> None:
    state = AgentState(tool_version="1", at_ns=0, monotonic_seconds=0.0, watching=True,
                       sampling="ok", judgement_interval_seconds=1.0)  # fmt: skip
    for wanted in (
        accept,
        f"application/openmetrics-text;version={accept}",
        f"text/plain;{accept}",
    ):
        content_type, body = negotiated(state, wanted)
        assert b"gpuwarden_build_info" in body
        assert "\n" not in content_type or "\n" in accept


HOSTILE = st.text(
    st.characters(codec=None, categories=None) | st.sampled_from('"\\\n\r{}\x00\x1b\udcff\u202e'),
    max_size=300,
)


@settings(deadline=None, max_examples=50)
@given(HOSTILE, HOSTILE, HOSTILE, st.integers() | st.just(10**400))
def test_any_names_and_numbers_give_metrics_that_can_be_read(
    name: str, user: str, way: str, number: int
) -> None:
    assert MINED.report is not None
    rows = tuple(
        msgspec.structs.replace(row, binary=name, user=user, workload=way)
        for row in MINED.report.rows
    )
    state = msgspec.structs.replace(
        MINED,
        rules=(),
        report=msgspec.structs.replace(MINED.report, rows=rows),
        refused=(RefusedWay(way, name),),
        events=(EventCount(name, user, number),),
        dropped={name: number},
        cuda=CudaState(watching=True, problems=(name,), missed={name: number}, loads=number),
        sinks=(SinkHealth(name=name), SinkHealth(name=name)),
        sensors=(PartHealth(name=name, state="ok"), PartHealth(name=name, state="failed")),
        database_bytes={user: number},
    )
    found = read(state)
    ((labels, share),) = found["gpuwarden_process_sm_ratio"]
    assert (labels["pid"], labels["verdict"], share) == ("4242", "cryptominer", 0.97)
    for series in found.values():
        for its, _ in series:
            for text in its.values():
                assert len(text) <= LABEL_CHARACTERS
                assert not UNSEEN.intersection(map(unicodedata.category, text))
        keys = [tuple(sorted(its.items())) for its, _ in series]
        assert len(keys) == len(set(keys))
    assert list(strictly(render(state, openmetrics=True)))


def test_of_a_long_path_the_name_is_kept_and_of_a_long_reason_the_beginning() -> None:
    report = miner_node().judge()
    rows = tuple(
        msgspec.structs.replace(row, binary="/tmp/" + "x" * 300 + "/xmrig") for row in report.rows
    )
    found = read(
        state_of(
            miner_node(),
            msgspec.structs.replace(report, rows=rows),
            refused=(RefusedWay("w", "denied: " + "y" * 300),),
        )
    )
    binary = found["gpuwarden_process_sm_ratio"][0][0]["binary"]
    assert binary.startswith("…x")
    assert binary.endswith("/xmrig")
    reason = found["gpuwarden_probe_refused_info"][0][0]["reason"]
    assert reason.startswith("denied: y")
    assert reason.endswith("y…")


def test_all_verdicts_are_told() -> None:
    found = read(state_of(quiet_node()))
    assert [labels["verdict"] for labels, _ in found["gpuwarden_judged"]] == list(VERDICTS)


def test_the_client_library_is_imported_only_by_an_agent_that_is_scraped() -> None:
    code = (
        "import sys, gpuwarden.metrics_server, gpuwarden.outputs.prometheus; "
        "sys.exit('prometheus_client' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
