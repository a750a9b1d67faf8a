"""Findings as JSON to a URL, one a request."""

from __future__ import annotations

from gpuwarden.life import decode, encode
from gpuwarden.sinks.fitting import fitting
from gpuwarden.sinks.http_post import (
    DEADLINE_SECONDS,
    TIMEOUT_SECONDS,
    Endpoint,
    post,
)
from gpuwarden.sinks.sink import Outcome

BODY_BYTES = 64 << 10


class WebhookSink:
    """Posts each transition; ``Idempotency-Key`` is the same when one is sent again."""

    repeat_seconds = None

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        self.endpoint = endpoint
        self.key = f"webhook:{endpoint.digest}"
        self.name = f"webhook {endpoint.shown}"
        self._timeout_seconds = timeout_seconds
        self._deadline_seconds = deadline_seconds

    def deliver(self, finding_json: bytes) -> Outcome:
        finding = decode(finding_json)
        return post(
            self.endpoint,
            fitting(finding, encode, BODY_BYTES),
            {"Idempotency-Key": f"{finding.stream}-{finding.sequence}"},
            timeout_seconds=self._timeout_seconds,
            deadline_seconds=self._deadline_seconds,
        )

    def close(self) -> None:
        pass
