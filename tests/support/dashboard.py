"""The Grafana dashboard that ships: its panels and their expressions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).parents[2] / "deploy/grafana/gpuwarden.json"
WINDOW = "10s"


class Query(NamedTuple):
    panel: str
    written: str
    """As it stands in the file, with Grafana's variables."""

    @property
    def expression(self) -> str:
        """For Prometheus: every node, and a window that holds some scrapes of a test."""
        text = self.written.replace("$node", ".*")
        return text.replace("$__rate_interval", WINDOW)


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def queries() -> Iterator[Query]:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield Query(panel["title"], target["expr"])
