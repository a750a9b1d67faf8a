"""Device events as JSON lines: who, with what, where, how it ended; for `watch --events`."""

from __future__ import annotations

import msgspec

from gpuwarden.model import Container, DeviceOpen, Process
from gpuwarden.outputs.line_parts import container_part, parent_part, process_part, time_text

EVENT_SCHEMA = "gpuwarden.event"
EVENT_VERSION = 1

_encoder = msgspec.json.Encoder()


def event_line(
    event: DeviceOpen,
    process: Process,
    parent: Process | None,
    container: Container | None,
    *,
    node: str,
    at_ns: int,
) -> bytes:
    """One event as JSON, without a newline; what is not known is null, with its reason."""
    document = {
        "schema": EVENT_SCHEMA,
        "version": EVENT_VERSION,
        "node": node,
        "time": time_text(at_ns),
        "at_ns": at_ns,
        "device": {
            "major": event.major,
            "minor": event.minor,
            "kind": event.kind,
            "path": event.path,
            "path_is_claimed": event.path_is_claimed,
            "renamed": event.renamed,
        },
        "how": event.how,
        "state": event.state,
        "error": event.error,
        "denial": event.denial,
        "flags": event.open_flags,
        "reads": event.reads,
        "writes": event.writes,
        "io_uring": event.io_uring,
        "count": event.count,
        "source": event.source,
        "process": process_part(process),
        "parent": parent_part(process, parent),
        "container": container_part(event.container_state, process, container),
        "unread": {**process.unread, **event.unread},
    }
    return _encoder.encode(document)
