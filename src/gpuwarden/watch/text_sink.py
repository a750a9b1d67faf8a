"""Findings as lines for a person at a terminal; where no other sink is named."""

from __future__ import annotations

import os

from gpuwarden.life import Transition, decode
from gpuwarden.outputs.words import escape, moment
from gpuwarden.sinks.sink import DELIVERED, Outcome

SHOWN = 6
"""Lines of evidence; the JSON sinks have all."""


def render(finding: Transition) -> str:
    """A finding's news: what, who, since when; with evidence and advice when it is opened."""
    severity = finding.severity.upper()
    lines = [f"{moment(finding.at_ns)}  {finding.status:<8}  {severity:<8}  {finding.title}"]
    subject = finding.subject
    who = [f"pid {subject.pid} {subject.name}" if subject.pid is not None else subject.name]
    if subject.gpu:
        who.append(subject.gpu)
    if finding.verdict is not None:
        who.append(f"verdict {finding.verdict}")
    if finding.owner:
        who.append(f"owner {finding.owner}")
    if finding.count > 1:
        who.append(f"{finding.count} times")
    lines.append("  " + ", ".join(part for part in who if part))
    if finding.status != "resolved":
        lines += [f"  - {one.text}" for one in finding.evidence[:SHOWN]]
        more = len(finding.evidence) - SHOWN
        if more > 0:
            lines.append(f"  - and {more} more")
    if finding.status == "opened":
        lines += [f"  > {step}" for step in finding.advice[:3]]
    lines.append(f"  [{finding.rule} {finding.id}]")
    return "\n".join(escape(line) for line in lines) + "\n"


class TextSink:
    """Lines to a descriptor that is open already."""

    repeat_seconds = None
    key = "text"
    name = "text on stdout"

    def __init__(self, descriptor: int = 1) -> None:
        self._descriptor = descriptor

    def deliver(self, finding_json: bytes) -> Outcome:
        data = memoryview(render(decode(finding_json)).encode("utf-8", "backslashreplace"))
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            return Outcome("retry", error.strerror or "cannot be written")
        return DELIVERED

    def close(self) -> None:
        pass
