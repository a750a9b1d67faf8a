"""The distribution's Alertmanager takes our alerts, tells them on, and ends them."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuwarden.life import FindingLife
from gpuwarden.sinks.dispatcher import Dispatcher
from gpuwarden.sinks.specs import parse_sink
from gpuwarden.store import Store
from tests.support.packages import require
from tests.support.receivers import Receiver, wait_until
from tests.support.small_agent import RULE, thing

pytestmark = pytest.mark.real

CONFIG = """
route:
  receiver: us
  group_by: [alertname, finding_id]
  group_wait: 0s
  group_interval: 1s
  repeat_interval: 1h
receivers:
- name: us
  webhook_configs:
  - url: {url}
    send_resolved: true
"""


def answers(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            body = answer.read()
            return json.loads(body) if body[:1] in b"[{" else body
    except (urllib.error.URLError, OSError):
        return None


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as up:
        yield up


@pytest.fixture
def alertmanager(tmp_path: Path, receiver: Receiver) -> Iterator[str]:
    """Its URL."""
    require("prometheus-alertmanager")
    reserved = Receiver()
    config = tmp_path / "alertmanager.yml"
    config.write_text(CONFIG.format(url=receiver.url))
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus-alertmanager",
                f"--config.file={config}",
                f"--storage.path={tmp_path / 'storage'}",
                f"--web.listen-address=127.0.0.1:{reserved.port}",
                "--cluster.listen-address=",
            ],
            stdout=log,
            stderr=log,
        )
    url = reserved.url
    try:
        wait_until(lambda: answers(f"{url}/-/ready") is not None, 30)
        yield url
    finally:
        process.kill()
        process.wait()


def test_an_alert_fires_and_ends_with_the_finding(
    tmp_path: Path, receiver: Receiver, alertmanager: str
) -> None:
    rules = frozenset({RULE})
    at_ns = 1_700_000_000 * 10**9

    def told(status: str) -> list[str]:
        alerts = [a for request in receiver.accepted for a in request.json()["alerts"]]
        return [a["labels"]["severity"] for a in alerts if a["status"] == status]

    with Store(str(tmp_path / "memory")) as store:
        life = FindingLife(store, node="gpu-01", rounds_to_resolve=1)
        dispatcher = Dispatcher(
            store.findings, [parse_sink(f"alertmanager:{alertmanager}")], current=life.current
        )
        dispatcher.start()
        warning = thing(7, 0)
        life.observe([warning], at_ns, rules)
        assert dispatcher.drain(20), dispatcher.health()
        wait_until(lambda: told("firing") == ["warning"], 30)
        (alert,) = answers(f"{alertmanager}/api/v2/alerts")
        assert alert["labels"]["finding_id"] == warning.id
        assert alert["startsAt"].startswith("2023-11-14T22:13:20")

        life.observe([msgspec.structs.replace(warning, severity="critical")], at_ns + 1, rules)
        assert dispatcher.drain(20), dispatcher.health()
        wait_until(lambda: "critical" in told("firing") and "warning" in told("resolved"), 30)

        life.observe([], at_ns + 2, rules)
        assert dispatcher.drain(20), dispatcher.health()
        wait_until(lambda: "critical" in told("resolved"), 30)
        assert answers(f"{alertmanager}/api/v2/alerts") == []
        assert dispatcher.stop(10)
