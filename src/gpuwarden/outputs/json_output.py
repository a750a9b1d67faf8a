"""Report → JSON: all of it, stable, documented in docs/report.md."""

from __future__ import annotations

import msgspec

from gpuwarden.errors import Malformed
from gpuwarden.finding import REPORT_SCHEMA, REPORT_VERSION, Report
from gpuwarden.outputs.words import json_text


def render(report: Report) -> str:
    """The whole report as indented JSON, ending in a newline."""
    return json_text(report)


def parse(data: bytes) -> Report:
    """A saved report, to render again. Errors: Malformed."""
    try:
        report = msgspec.json.decode(data, type=Report)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"not a gpuwarden report: {error}") from error
    if report.schema != REPORT_SCHEMA:
        raise Malformed(f"not a gpuwarden report: its schema is '{report.schema}'")
    if report.version > REPORT_VERSION:
        raise Malformed(f"a report of version {report.version}; this gpuwarden reads up to 1")
    return report


def schema() -> str:
    """The JSON Schema of a report, generated from the types."""
    return json_text(msgspec.json.schema(Report))
