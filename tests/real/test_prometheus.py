"""The distribution's Prometheus scrapes us, its promtool finds no fault, Alertmanager is told."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from gpuwarden.metrics_server import Address, MetricsServer
from gpuwarden.outputs.prometheus import AgentState, render
from tests.support.agent_state import miner_node, state_of
from tests.support.packages import require
from tests.support.prometheus import PROMETHEUS, answers, running
from tests.support.receivers import wait_until

pytestmark = pytest.mark.real

DEPLOY = Path(__file__).parents[2] / "deploy" / "prometheus"
ALERTMANAGER = "route: {receiver: nobody, group_wait: 0s}\nreceivers: [{name: nobody}]\n"


@pytest.fixture(autouse=True, scope="module")
def packages() -> None:
    require("prometheus", "prometheus-alertmanager")


def promtool(*arguments: str, data: bytes | None = None) -> str:
    done = subprocess.run(
        ["promtool", *arguments],
        cwd=DEPLOY,
        input=data,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        check=False,
    )
    said = done.stdout.decode()
    assert done.returncode == 0, said
    return said


def test_promtool_finds_no_fault_with_the_metrics_that_are_served() -> None:
    state = state_of(miner_node())
    with MetricsServer(Address("127.0.0.1", 0), lambda: state) as server:
        served = answers(f"http://{server.address}/metrics")
    assert promtool("check", "metrics", data=served) == ""
    # It does look: a counter without its ending is a fault.
    with pytest.raises(AssertionError, match="_total"):
        promtool("check", "metrics", data=render(state).replace(b"_merged_total", b"_merged"))


def test_promtool_finds_no_fault_with_the_rules_and_each_of_them_fires_as_it_should() -> None:
    rules = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    assert f"{len(alerts)} rules found" in promtool("check", "rules", "alerts.yaml")
    promtool("check", "config", "prometheus.example.yaml")
    promtool("test", "rules", "alerts_test.yaml")
    tests = yaml.safe_load((DEPLOY / "alerts_test.yaml").read_text())["tests"]
    fired = {
        case["alertname"]
        for test in tests
        for case in test["alert_rule_test"]
        if case.get("exp_alerts")
    }
    quiet = {case["alertname"] for case in tests[0]["alert_rule_test"]}
    assert fired == quiet == alerts


def test_a_miner_is_scraped_and_alertmanager_is_told(tmp_path: Path) -> None:
    state = state_of(miner_node())

    def now() -> AgentState:
        # A daemon that lives fills it anew; one that does not would be told of.
        return msgspec.structs.replace(
            state, at_ns=time.time_ns(), monotonic_seconds=time.monotonic()
        )

    (tmp_path / "alertmanager.yaml").write_text(ALERTMANAGER)
    manager_command = [
        "prometheus-alertmanager",
        "--config.file=alertmanager.yaml",
        "--storage.path=alertmanager",
        "--cluster.listen-address=",
    ]
    with (
        MetricsServer(Address("127.0.0.1", 0), now) as server,
        running(manager_command, "--web.listen-address", tmp_path) as manager,
    ):
        config = yaml.safe_load((DEPLOY / "prometheus.example.yaml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["scrape_configs"][0]["static_configs"] = [{"targets": [str(server.address)]}]
        config["alerting"]["alertmanagers"][0]["static_configs"] = [
            {"targets": [manager.removeprefix("http://")]}
        ]
        (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
        shipped = (DEPLOY / "alerts.yaml").read_text()
        without_waits, waits = re.subn(r"(?m)^    for: .*\n", "", shipped)
        assert waits > 3
        (tmp_path / "alerts.yaml").write_text(without_waits)
        with running(PROMETHEUS, "--web.listen-address", tmp_path) as prometheus:

            def series(query: str) -> list[dict[str, Any]]:
                found = answers(f"{prometheus}/api/v1/query", query=query)
                return found["data"]["result"] if found else []

            wait_until(lambda: bool(series('gpuwarden_process_sm_ratio{pid="4242"}')), 30)
            (miner,) = series('gpuwarden_process_sm_ratio{pid="4242"}')
            assert miner["metric"]["binary"] == "/tmp/.cache/xmrig"
            assert miner["metric"]["verdict"] == "cryptominer"
            assert miner["value"][1] == "0.97"
            (target,) = answers(f"{prometheus}/api/v1/targets")["data"]["activeTargets"]
            assert (target["health"], target["lastError"]) == ("up", "")

            def told() -> dict[str, Any]:
                found = answers(f"{manager}/api/v2/alerts") or []
                return {alert["labels"]["alertname"]: alert for alert in found}

            expected = {
                "GpuwardenCriticalFinding",
                "GpuwardenMemoryWithoutProcess",
                "GpuwardenUnexpectedEgress",
            }
            wait_until(lambda: expected <= set(told()), 30)
            alert = told()["GpuwardenCriticalFinding"]
            assert alert["labels"]["rule"] == "gpu_cryptominer"
            assert alert["labels"]["severity"] == "critical"
            assert alert["labels"]["instance"] == str(server.address)
            assert "gpuwarden scan" in alert["annotations"]["action"]
            # Nothing that is not so is told: the agent is there, sees, judges, and its sinks work.
            wait_until(lambda: set(told()) == expected, 30)
