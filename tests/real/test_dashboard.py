"""Every expression of the Grafana dashboard and of the alert rules, run by a real Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import yaml

from gpuwarden.metrics_server import Address, MetricsServer
from gpuwarden.model import Gap, SensorRun
from gpuwarden.outputs.metrics_state import AgentState
from gpuwarden.sinks.dispatcher import SinkHealth
from tests.support.agent_state import CUDA, miner_node, state_of
from tests.support.dashboard import Query, dashboard, queries
from tests.support.packages import require
from tests.support.prometheus import PROMETHEUS, answers, running
from tests.support.receivers import wait_until

pytestmark = pytest.mark.real

RULES = Path(__file__).parents[2] / "deploy/prometheus/alerts.yaml"
EMPTY = {"GPUs that do not answer": "both GPUs of the node answer"}
"""Panels that show nothing for the node of this test, and why that is right."""
ENOUGH = (
    "rate(gpuwarden_cuda_launches_total[10s]) > 0",
    "count_over_time(up[8s]) > 4 and min_over_time(up[8s]) > 0",
)
"""Rates need some scrapes, and none that failed because the machine stood still."""


class Scraped(NamedTuple):
    """A Prometheus, and a moment at which it had seen enough."""

    url: str
    at: float


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """One that has scraped an agent with a miner, a sink that is down and a disk that is full."""
    require("prometheus")
    directory = tmp_path_factory.mktemp("dashboard")
    begun = time.monotonic()
    down = SinkHealth(
        name="syslog",
        delivered=9,
        dropped=1,
        waiting=3,
        failing_since_ns=time.time_ns() - 130 * 10**9,
    )
    full = Gap(sensor="store", what="findings", reason="the disk is full")
    node = miner_node()
    node.sensors["kernel_log"] = SensorRun(name="kernel_log", state="failed", reason="refused")
    state = state_of(node, sinks=(down,), store_troubles=(full,))

    def now() -> AgentState:
        passed = time.monotonic() - begun
        cuda = msgspec.structs.replace(CUDA, launches=CUDA.launches + int(1000 * passed))
        return msgspec.structs.replace(
            state, at_ns=time.time_ns(), monotonic_seconds=time.monotonic(), cuda=cuda
        )

    with ExitStack() as open_ones:
        server = open_ones.enter_context(MetricsServer(Address("127.0.0.1", 0), now))
        config = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [
                {"job_name": "gpuwarden", "static_configs": [{"targets": [str(server.address)]}]}
            ],
        }
        (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
        url = open_ones.enter_context(running(PROMETHEUS, "--web.listen-address", directory))
        found: list[Scraped] = []

        def is_enough() -> bool:
            # A scrape ends within a second: what is known of that moment changes no more.
            found[:] = [Scraped(url, time.time() - 2)]
            return all(result(found[0], one) for one in ENOUGH)

        wait_until(is_enough, 60)
        yield found[0]


def result(prometheus: Scraped, expression: str) -> list[dict[str, Any]]:
    """What an instant query found. Errors: AssertionError where Prometheus refuses it."""
    url = f"{prometheus.url}/api/v1/query"
    found = answers(url, query=expression, time=f"{prometheus.at:.3f}")
    assert found is not None and found["status"] == "success", expression
    series: list[dict[str, Any]] = found["data"]["result"]
    return series


def test_every_expression_finds_data_or_is_rightly_empty(prometheus: Scraped) -> None:
    bare: list[Query] = []
    for query in queries():
        found = result(prometheus, query.expression)
        assert all(series["value"][1] != "NaN" for series in found), query
        if not found:
            bare.append(query)
    assert {query.panel for query in bare} == set(EMPTY), bare


def test_a_node_that_is_not_chosen_is_not_shown(prometheus: Scraped) -> None:
    for query in queries():
        elsewhere = query.written.replace("$node", "another").replace("$__rate_interval", "10s")
        found = result(prometheus, elsewhere)
        # Where nothing is to be counted there are none.
        assert not found or " or vector(0)" in query.written, query


def test_the_variable_lists_the_agents(prometheus: Scraped) -> None:
    (node,) = (one for one in dashboard()["templating"]["list"] if one["name"] == "node")
    name, label = node["definition"].removeprefix("label_values(").rstrip(")").split(", ")
    found = {series["metric"][label] for series in result(prometheus, name)}
    assert len(found) == 1 and next(iter(found)).startswith("127.0.0.1:")


def test_every_rule_runs_and_those_fire_that_should(prometheus: Scraped) -> None:
    rules = yaml.safe_load(RULES.read_text())
    fired = {
        rule["alert"]
        for group in rules["groups"]
        for rule in group["rules"]
        if result(prometheus, rule["expr"])
    }
    assert fired == {
        "GpuwardenCriticalFinding", "GpuwardenMemoryWithoutProcess", "GpuwardenUnexpectedEgress",
        "GpuwardenBlind", "GpuwardenRuleNotEvaluated", "GpuwardenSinkDown",
    }  # fmt: skip
