"""Findings as Falco events, as falcosidekick takes them (its README, "Input").

It wants a known priority, a rule, an RFC 3339 time and at least one output field, one event a
request, and cuts texts of events over 4096 bytes.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from gpuwarden.finding import Severity
from gpuwarden.life import Transition, decode
from gpuwarden.sinks.fitting import fitting
from gpuwarden.sinks.http_post import Endpoint, post
from gpuwarden.sinks.sink import Outcome

EVENT_BYTES = 4096
PRIORITIES: dict[Severity, str] = {
    "critical": "Critical",
    "error": "Error",
    "warning": "Warning",
    "info": "Informational",
}
RESOLVED_PRIORITY = "Notice"
SOURCE = "syscalls"
"""Some of falcosidekick's outputs take no other source."""
TECHNIQUES = {"cryptominer": "T1496", "rogue-container": "T1496"}


def moment(at_ns: int) -> str:
    """RFC 3339 in UTC with nine digits, as Falco writes it."""
    seconds, nanoseconds = divmod(at_ns, 10**9)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{nanoseconds:09d}Z"


def event(finding: Transition) -> dict[str, Any]:
    """One event; all output fields are texts but ``evt.time``, and none is another's prefix."""
    resolved = finding.status == "resolved"
    priority = RESOLVED_PRIORITY if resolved else PRIORITIES[finding.severity]
    at = moment(finding.at_ns)
    subject = finding.subject
    fields = {
        "gpuwarden.id": finding.id,
        "gpuwarden.sequence": str(finding.sequence),
        "gpuwarden.stream": finding.stream,
        "gpuwarden.status": finding.status,
        "gpuwarden.severity": finding.severity,
        "gpuwarden.verdict": finding.verdict,
        "gpuwarden.owner": finding.owner,
        "gpuwarden.count": str(finding.count),
        "gpuwarden.first_seen": moment(finding.first_seen_ns),
        "gpuwarden.subject": subject.name,
        "gpuwarden.gpu": subject.gpu,
        "gpuwarden.evidence": "; ".join(item.text for item in finding.evidence),
        "proc.pid": None if subject.pid is None else str(subject.pid),
    }
    what = f"{finding.title} ({finding.status})"
    who = " ".join(
        f"{name}={text}"
        for name, text in (
            ("gpu", subject.gpu),
            ("pid", fields["proc.pid"]),
            ("verdict", finding.verdict),
            ("owner", finding.owner),
        )
        if text
    )
    technique = TECHNIQUES.get(finding.verdict or "")
    return {
        "time": at,
        "rule": finding.rule,
        "priority": priority,
        "source": SOURCE,
        "hostname": finding.node or "unknown",
        "output": f"{at}: {priority} {what}{' | ' if who else ''}{who}",
        "output_fields": {
            "evt.time": finding.at_ns,
            **{name: text for name, text in fields.items() if text},
        },
        "tags": sorted({"gpuwarden", finding.status, *([technique] if technique else [])}),
    }


class FalcoSink:
    """Posts each transition to falcosidekick, or to anything that takes Falco's events."""

    repeat_seconds = None

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.key = f"falco:{endpoint.digest}"
        self.name = f"falco {endpoint.shown}"

    def deliver(self, finding_json: bytes) -> Outcome:
        body = fitting(
            decode(finding_json), lambda version: msgspec.json.encode(event(version)), EVENT_BYTES
        )
        return post(self.endpoint, body, {})

    def close(self) -> None:
        pass
