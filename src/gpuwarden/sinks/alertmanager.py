"""Findings as alerts of Alertmanager, API v2 (its api/v2/openapi.yaml, ``postAlerts``)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec

from gpuwarden.life import Transition, decode
from gpuwarden.sinks.fitting import fitting
from gpuwarden.sinks.http_post import Endpoint, post
from gpuwarden.sinks.sink import Outcome

PATH = "/api/v2/alerts"
BODY_BYTES = 32 << 10
REPEAT_SECONDS = 60.0
LIFETIME = timedelta(seconds=5 * REPEAT_SECONDS)
"""An alert ends by itself after this long without a repetition: our death must not keep it."""
REMEMBERED = 10_000


def _moment(at_ns: int) -> datetime:
    return datetime.fromtimestamp(at_ns / 1e9, tz=UTC)


class Alert(msgspec.Struct, rename="camel"):
    """One alert; times as RFC 3339."""

    labels: dict[str, str]
    annotations: dict[str, str]
    starts_at: datetime
    ends_at: datetime


def alert(finding: Transition, now: datetime, *, severity: str | None = None) -> Alert:
    """The alert of a transition; ``severity`` overrides it, and ends the alert of that name.

    Labels are its identity in Alertmanager: they hold what stays the same over a finding's life,
    and the severity, since routes go by it.
    """
    over = finding.status == "resolved" or severity is not None
    annotations = {
        "summary": finding.title,
        "description": finding.explanation,
        "status": finding.status,
        "sequence": str(finding.sequence),
        "verdict": finding.verdict or "",
        "owner": finding.owner or "",
        "gpu": finding.subject.gpu or "",
        "pid": "" if finding.subject.pid is None else str(finding.subject.pid),
        "subject": finding.subject.name,
        "evidence": "\n".join(f"{item.text} ({item.source})" for item in finding.evidence),
        "advice": "\n".join(finding.advice),
    }
    return Alert(
        labels={
            "alertname": finding.rule,
            "severity": severity or finding.severity,
            "instance": finding.node or "unknown",
            "finding_id": finding.id,
        },
        annotations={name: text for name, text in annotations.items() if text},
        starts_at=min(_moment(finding.first_seen_ns), now),
        ends_at=now if over else now + LIFETIME,
    )


class AlertmanagerSink:
    """Posts each transition, and every open finding again each minute, as Prometheus does."""

    repeat_seconds = REPEAT_SECONDS

    def __init__(self, endpoint: Endpoint) -> None:
        target = endpoint.target.rstrip("/")
        if not target.endswith(PATH):
            target += PATH
        self.endpoint = endpoint._replace(target=target)
        self.key = f"alertmanager:{self.endpoint.digest}"
        self.name = f"alertmanager {endpoint.shown}"
        self._severities: dict[str, str] = {}

    def deliver(self, finding_json: bytes) -> Outcome:
        finding = decode(finding_json)
        now = datetime.now(UTC)
        before = self._severities.get(finding.id)

        def render(version: Transition) -> bytes:
            alerts = [alert(version, now)]
            if before is not None and before != version.severity:
                # Another severity is another alert: without its end, the old one would fire on.
                alerts.insert(0, alert(version, now, severity=before))
            return msgspec.json.encode(alerts)

        outcome = post(self.endpoint, fitting(finding, render, BODY_BYTES), {})
        if outcome.kind == "delivered":
            if finding.status == "resolved":
                self._severities.pop(finding.id, None)
            elif len(self._severities) < REMEMBERED:
                self._severities[finding.id] = finding.severity
        return outcome

    def close(self) -> None:
        pass
