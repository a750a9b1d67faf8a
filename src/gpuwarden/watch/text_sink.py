"""Findings as lines for a person at a terminal; where no other sink is named."""

from __future__ import annotations

import os

from gpuwarden.life import Transition, decode
from gpuwarden.outputs.sheet import Sheet
from gpuwarden.outputs.table import NARROWEST, STYLES
from gpuwarden.outputs.words import moment
from gpuwarden.pattern import pattern
from gpuwarden.sinks.lines import StdoutSink
from gpuwarden.sinks.sink import Outcome

SHOWN = 10
"""Paragraphs of evidence; the JSON sinks have all."""
STEPS_SHOWN = 3
TEXT_LIMIT = 1000
"""Characters of one text that are shown: what a process says of itself can be very long."""
WIDTH_WITHOUT_TERMINAL = 140
WIDEST = 140
"""Longer lines do not read well."""
ORDINARY = pattern(r"^[\w.+:@/=()-]*$")


def render(finding: Transition, *, width: int, colour: bool = False) -> str:
    """A finding's news: what, who, since when; with evidence and advice when it is opened.

    Lines are at most ``width`` columns, not below 60; a blank one ends each.
    """
    sheet = Sheet(max(width, NARROWEST), colour=colour)
    style = "dim" if finding.status == "resolved" else STYLES[finding.severity]
    head = f"{moment(finding.at_ns)}  {finding.status}  {_cut(finding.title)}"
    sheet.lead(f"{finding.severity.upper()}  ", head, hang=2, style=style)
    who = _who(finding)
    if who:
        sheet.add(who, indent=2, hang=2)
    if finding.status != "resolved":
        for one in finding.evidence[:SHOWN]:
            sheet.add(f"- {_cut(one.text)}", indent=2, hang=2)
        more = len(finding.evidence) - SHOWN
        if more > 0:
            sheet.add(f"- and {more} more", indent=2)
    if finding.status == "opened":
        for number, step in enumerate(finding.advice[:STEPS_SHOWN], start=1):
            sheet.add(f"{number}. {_cut(step)}", indent=2, hang=3)
    sheet.add(f"[{finding.rule} {finding.id}]", indent=2, style="dim")
    sheet.blank()
    return sheet.text()


def _who(finding: Transition) -> str:
    subject = finding.subject
    name = _cut(subject.name)
    if subject.pid is not None:
        # A process chooses its name: with a comma in it, it could tell a verdict of its own.
        name = f"pid {subject.pid} {name if ORDINARY.search(name) else repr(name)}"
    who = [name]
    if subject.gpu:
        who.append(_cut(subject.gpu))
    if finding.verdict is not None:
        who.append(f"verdict {finding.verdict}")
    if finding.owner:
        who.append(f"owner {_cut(finding.owner)}")
    if finding.count > 1:
        who.append(f"{finding.count} times")
    if finding.status != "opened":
        who.append(f"since {moment(finding.first_seen_ns)}")
    return ", ".join(part for part in who if part)


def _cut(text: str) -> str:
    # Blanks at the ends and runs of them would move what stands beside them.
    shown = " ".join(part for part in text[:TEXT_LIMIT].split(" ") if part)
    return shown if len(text) <= TEXT_LIMIT else f"{shown}…"


class TextSink(StdoutSink):
    """Lines to a descriptor that is open already; wrapped to its terminal, if it is one."""

    key = "text"
    name = "text on stdout"

    def deliver(self, finding_json: bytes) -> Outcome:
        columns = self._columns()
        text = render(
            decode(finding_json),
            width=min(columns or WIDTH_WITHOUT_TERMINAL, WIDEST),
            colour=columns is not None and "NO_COLOR" not in os.environ,
        )
        return self.write(text.encode("utf-8", "backslashreplace"))

    def _columns(self) -> int | None:
        """Of the terminal, now; None if it is none."""
        try:
            return os.get_terminal_size(self._descriptor).columns or 80
        except OSError:
            return None
