"""The agent's state → metrics for Prometheus, by its own client library.

What is not known tells no series: an absent one is unknown, 0 is a fact. What others can choose
(names, users, workloads) is escaped and cut, and the number of series is bounded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpuwarden.outputs.cuda_state import CudaState
from gpuwarden.outputs.metrics_catalogue import METRICS
from gpuwarden.outputs.metrics_state import (
    AgentState,
    AgentUse,
    EventCount,
    FindingCount,
    PartHealth,
    RefusedWay,
    RuleHealth,
    blindness,
    counted,
    rule_health,
)
from gpuwarden.outputs.metrics_values import values
from gpuwarden.outputs.words import escape

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

__all__ = [
    "AgentState",
    "AgentUse",
    "CudaState",
    "EventCount",
    "FindingCount",
    "PartHealth",
    "RefusedWay",
    "RuleHealth",
    "blindness",
    "counted",
    "negotiated",
    "render",
    "rule_health",
]

MAX_SERIES = 2048
"""Of one metric; a damaged or hostile list must not grow the endpoint without end."""
LABEL_CHARACTERS = 128
BY_NAME = {metric.name: metric for metric in METRICS}


def render(
    state: AgentState, *, openmetrics: bool = False, monotonic_seconds: float | None = None
) -> bytes:
    """All metrics of one state, in Prometheus' text format 0.0.4 or in OpenMetrics 1.0.

    ``monotonic_seconds`` is now, for how old the state is; without it, it counts as fresh.
    """
    accept = "application/openmetrics-text; version=1.0.0" if openmetrics else ""
    return negotiated(state, accept, monotonic_seconds=monotonic_seconds)[1]


def negotiated(
    state: AgentState, accept: str, *, monotonic_seconds: float | None = None
) -> tuple[str, bytes]:
    """The content type that an HTTP Accept header asks for, and the metrics in it."""
    # Imported here: only an agent that serves metrics pays for the library.
    from prometheus_client.exposition import choose_encoder

    try:
        encode, content_type = choose_encoder(accept)
    except (ValueError, TypeError):  # a version that is no number
        encode, content_type = choose_encoder("")
    now = state.monotonic_seconds if monotonic_seconds is None else monotonic_seconds
    return content_type, encode(_Collector(state, now))


class _Collector:
    """One state as the client library wants it; in no registry."""

    def __init__(self, state: AgentState, monotonic_seconds: float) -> None:
        self._state = state
        self._now = monotonic_seconds

    def collect(self) -> Iterator[Family]:
        from prometheus_client.metrics_core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            InfoMetricFamily,
        )

        found: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
        for name, labels, value in values(self._state, self._now):
            metric = BY_NAME[f"gpuwarden_{name}"]
            number = _number(value)
            series = found[metric.name]
            if metric.type == "counter" and number is not None and number < 0:
                continue  # no count of anything: it would spoil the whole answer
            if number is not None and len(series) < MAX_SERIES:
                # Two things that a cut made alike must not spoil the whole answer.
                series.setdefault(tuple(map(_label, metric.labels, labels)), number)
        for metric in METRICS:
            family: CounterMetricFamily | GaugeMetricFamily | InfoMetricFamily
            series = found[metric.name]
            if not series:
                continue
            if metric.type == "info":
                name = metric.name.removesuffix("_info")
                family = InfoMetricFamily(name, metric.text, labels=[])
                for key in series:
                    family.add_metric([], dict(zip(metric.labels, key, strict=True)))
            elif metric.type == "counter":
                family = CounterMetricFamily(metric.name, metric.text, labels=metric.labels)
                for key, number in series.items():
                    family.add_metric(key, number)
            else:
                family = GaugeMetricFamily(metric.name, metric.text, labels=metric.labels)
                for key, number in series.items():
                    family.add_metric(key, number)
            yield family


def _number(value: float | None) -> float | None:
    try:
        return None if value is None else float(value)
    except OverflowError:
        return None  # no measure of anything is that large


def _label(name: str, text: str) -> str:
    """Escaped as on a terminal, and cut; of a path the end is kept, which holds the name."""
    if name == "binary":
        shown = escape(text[-LABEL_CHARACTERS - 1 :])
        return shown if len(shown) <= LABEL_CHARACTERS else "…" + shown[1 - LABEL_CHARACTERS :]
    shown = escape(text[: LABEL_CHARACTERS + 1])
    return shown if len(shown) <= LABEL_CHARACTERS else shown[: LABEL_CHARACTERS - 1] + "…"
