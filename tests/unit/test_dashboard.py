"""The Grafana dashboard: every metric in it is there, and no Grafana of its own is needed."""

from __future__ import annotations

import json
import re
from itertools import combinations

from gpuwarden.outputs.metrics_catalogue import METRICS
from gpuwarden.watch.state import SEVERITIES
from tests.support.dashboard import FILE, dashboard, queries

LABELS = {metric.name: set(metric.labels) for metric in METRICS}
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_METRIC = re.compile(r"\bgpuwarden_\w+")
_SELECTOR = re.compile(r"(gpuwarden_\w+)\{([^}]*)\}")
_AGGREGATION = re.compile(r"by \(([^)]*)\)")
ALERTS = FILE.parents[1] / "prometheus/alerts.yaml"
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")


def test_every_metric_and_label_in_it_is_in_the_catalogue() -> None:
    for query in queries():
        names = set(_METRIC.findall(query.written))
        assert names and names <= set(LABELS), query
        known = set().union(*(LABELS[name] for name in names)) | {"instance"}
        for name, selector in _SELECTOR.findall(query.written):
            used = set(re.findall(r"(\w+)=", selector))
            assert used <= LABELS[name] | {"instance"}, query
            # A panel that left the variable out would show nodes that nobody asked for.
            assert 'instance=~"$node"' in selector, query
        assert len(_SELECTOR.findall(query.written)) == len(_METRIC.findall(query.written)), query
        for labels in _AGGREGATION.findall(query.written):
            assert {label.strip() for label in labels.split(",")} <= known, query


def test_legends_and_columns_name_labels_that_the_query_leaves() -> None:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"]
            left = set().union(*(LABELS[name] for name in _METRIC.findall(expression)))
            left.add("instance")
            for labels in _AGGREGATION.findall(expression):
                left = {label.strip() for label in labels.split(",")}
            shown = set(_PLACEHOLDER.findall(target["legendFormat"]))
            for step in panel.get("transformations", ()):
                if step["id"] == "filterFieldsByName":
                    shown |= set(step["options"]["include"]["names"]) - {"Value"}
            assert shown <= left, panel["title"]


def test_the_alarms_and_every_part_of_the_agent_are_on_it() -> None:
    shown = {name for query in queries() for name in _METRIC.findall(query.written)}
    assert shown >= {
        "gpuwarden_findings", "gpuwarden_blind", "gpuwarden_gpu_utilisation_ratio",
        "gpuwarden_process_sm_ratio", "gpuwarden_judged", "gpuwarden_events_total",
        "gpuwarden_opens_denied_total", "gpuwarden_cuda_modules_total", "gpuwarden_sink_waiting",
        "gpuwarden_agent_cpu_seconds_total",
    }  # fmt: skip


def test_it_belongs_to_no_grafana_in_particular() -> None:
    board = dashboard()
    assert (board["uid"], board["title"]) == ("gpuwarden", "gpuwarden")
    assert board["version"] >= 1 and board["schemaVersion"] >= 36
    assert "id" not in board and "__inputs" not in board
    variables = {one["name"]: one for one in board["templating"]["list"]}
    assert list(variables) == ["datasource", "node"]
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    assert variables["node"]["datasource"] == DATASOURCE
    found = re.findall(r'"uid": "([^"]*)"', FILE.read_text())
    assert set(found) == {"gpuwarden", "${datasource}"}


def test_panels_are_whole_and_none_lies_on_another() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["x"] + place["w"] <= 24
        if panel["type"] == "row":
            continue
        assert panel["type"] in ("stat", "table", "timeseries")
        assert panel["datasource"] == DATASOURCE
        assert panel["targets"]
        for target in panel["targets"]:
            assert target["datasource"] == DATASOURCE
            assert target["instant"] is not target["range"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        # A table's rows are what is so now.
        assert (panel["type"] == "timeseries") is panel["targets"][0]["range"]
    for one, other in combinations((panel["gridPos"] for panel in panels), 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)
    assert json.dumps(panels).count('"datasource": null') == 0


def test_alerts_name_metrics_labels_and_rules_that_are_there() -> None:
    text = ALERTS.read_text()
    assert set(_METRIC.findall(text)) <= set(LABELS)
    for name, selector in _SELECTOR.findall(text):
        assert set(re.findall(r"(\w+)!?=", selector)) <= LABELS[name], selector
    rules = set(re.findall(r'rule="(\w+)"', text))
    assert rules == {"evidence_failed", "journal_broken"}
    assert rules <= set(SEVERITIES)
