"""What ``--sink`` takes: stdout, file:PATH, syslog:, webhook:URL, alertmanager:URL, falco:URL."""

from __future__ import annotations

import os
from collections.abc import Iterable

from gpuwarden.errors import UsageError
from gpuwarden.sinks.sink import Sink

KINDS = ("stdout", "file:PATH", "syslog:", "webhook:URL", "alertmanager:URL", "falco:URL")


def parse_sink(spec: str) -> Sink:
    """The sink that a specification names; nothing is opened or sent yet. Errors: UsageError."""
    kind, colon, rest = spec.partition(":")
    if kind in ("stdout", "syslog"):
        if rest or (kind == "stdout" and colon):
            raise UsageError(f"--sink {kind}: takes nothing after its name")
        if kind == "stdout":
            from gpuwarden.sinks.lines import StdoutSink

            return StdoutSink()
        from gpuwarden.sinks.syslog import SyslogSink

        return SyslogSink()
    if kind == "file":
        return _file(rest)
    if kind in ("webhook", "alertmanager", "falco"):
        return _http(kind, rest)
    # Only the part before the colon is repeated: what follows may be a secret.
    raise UsageError(f"--sink: '{kind[:40]}' is no sink; there are: {', '.join(KINDS)}")


def _file(path: str) -> Sink:
    from gpuwarden.sinks.lines import FileSink

    if not path or path.endswith("/") or "\0" in path:
        raise UsageError("--sink file: needs a path", remedy="--sink file:/var/log/gpuwarden.jsonl")
    return FileSink(os.path.abspath(path))


def _http(kind: str, url: str) -> Sink:
    from gpuwarden.sinks.http_post import parse_url

    if not url:
        raise UsageError(
            f"--sink {kind}: needs a URL", remedy=f"--sink {kind}:https://alerts.example.com/"
        )
    endpoint = parse_url(url, f"--sink {kind}")
    if kind == "webhook":
        from gpuwarden.sinks.webhook import WebhookSink

        return WebhookSink(endpoint)
    if kind == "alertmanager":
        from gpuwarden.sinks.alertmanager import AlertmanagerSink

        if "?" in endpoint.target:
            raise UsageError("--sink alertmanager: its URL has no ?query")
        return AlertmanagerSink(endpoint)
    from gpuwarden.sinks.falco import FalcoSink

    return FalcoSink(endpoint)


def parse_sinks(specs: Iterable[str]) -> list[Sink]:
    """All of them, in order. Errors: UsageError, also for one that is named twice."""
    sinks: list[Sink] = []
    for spec in specs:
        sink = parse_sink(spec)
        if any(sink.key == other.key for other in sinks):
            raise UsageError(f"--sink: {sink.name} is named twice")
        sinks.append(sink)
    return sinks
