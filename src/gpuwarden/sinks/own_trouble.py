"""Reduced sight is reported: findings about our own sinks and memory."""

from __future__ import annotations

from collections.abc import Sequence

from gpuwarden.finding import Advisory, Evidence, Finding, about_source
from gpuwarden.model import Gap
from gpuwarden.sinks.dispatcher import SinkHealth

SILENT_NS = 60 * 10**9
EVERY_SINK = "every sink"
EVENT_LINES = "events on stdout"
DROPS_STAY_NS = 3600 * 10**9

ALARMS_DROPPED = Advisory(
    id="alarms_dropped",
    title="Alarms were dropped before a sink got them",
    severity="error",
    explanation="More findings waited for this sink than the spool holds, or it would not take "
    "some of them. What was dropped is missing there; other sinks and the report have it.",
    steps=("gpuwarden scan", "compare the sequence numbers at the receiver: they show the gap"),
)
SINK_NOT_ANSWERING = Advisory(
    id="sink_not_answering",
    title="A sink does not take alarms",
    severity="warning",
    explanation="Deliveries to this sink have failed for over a minute. They wait in the spool, "
    "which is bounded, and are delivered once it answers.",
    steps=("look at the receiver, and at the way there",),
)
MEMORY_NOT_KEPT = Advisory(
    id="memory_not_kept",
    title="What gpuwarden remembers cannot be written, or was set aside",
    severity="warning",
    explanation="Findings are still delivered. What is not on disk is lost when gpuwarden ends: "
    "after a restart, alarms may come again, and history has a hole.",
    steps=("follow the remedy that the evidence names",),
)
OWN_ADVISORIES = (ALARMS_DROPPED, SINK_NOT_ANSWERING, MEMORY_NOT_KEPT)
OWN_RULES = frozenset(rule.id for rule in OWN_ADVISORIES)
"""Always evaluated by ``OwnTrouble``."""


class OwnTrouble:
    """Keeps what one look at the counters does not show: which of them grew, and when."""

    def __init__(self, *, silent_ns: int = SILENT_NS) -> None:
        """A sink that fails for ``silent_ns`` is told of."""
        self._silent_ns = silent_ns
        self._dropped: dict[str, int] = {}
        self._grew_at_ns: dict[str, int] = {}

    def findings(
        self,
        health: Sequence[SinkHealth],
        troubles: Sequence[Gap],
        at_ns: int,
        *,
        not_opened: int = 0,
        most_open: int = 0,
        unread_lines: int = 0,
    ) -> list[Finding]:
        """What holds now; a drop is told for an hour after the last one.

        ``not_opened`` counts findings that no sink got, since ``most_open`` others were open,
        ``unread_lines`` the events that found no room since nobody read standard output.
        """
        found = []
        if self._has_grown(EVENT_LINES, unread_lines, at_ns):
            text = f"{unread_lines} event lines dropped since the start: nobody read them in time"
            found.append(
                about_source(ALARMS_DROPPED, EVENT_LINES, [Evidence(source="stdout", text=text)])
            )
        if self._has_grown(EVERY_SINK, not_opened, at_ns):
            text = (
                f"{not_opened} times a finding was not told since the start: {most_open} others "
                "were open"
            )
            found.append(
                about_source(ALARMS_DROPPED, EVERY_SINK, [Evidence(source="findings", text=text)])
            )
        for sink in health:
            if self._has_grown(sink.name, sink.dropped, at_ns):
                text = f"{sink.dropped} dropped since the sink was set up"
                found.append(
                    about_source(ALARMS_DROPPED, sink.name, [Evidence(source="spool", text=text)])
                )
            since = sink.failing_since_ns
            if since is not None and at_ns - since >= self._silent_ns:
                evidence = [Evidence(source=sink.name, text=sink.error or "no answer")]
                found.append(about_source(SINK_NOT_ANSWERING, sink.name, evidence))
        by_path: dict[str, list[Evidence]] = {}
        for gap in troubles:
            text = f"{gap.reason} ({gap.remedy})" if gap.remedy else gap.reason
            by_path.setdefault(gap.what, []).append(Evidence(source=gap.sensor, text=text))
        found += [about_source(MEMORY_NOT_KEPT, path, texts) for path, texts in by_path.items()]
        return found

    def _has_grown(self, name: str, count: int, at_ns: int) -> bool:
        """Whether a count has grown within the last hour."""
        if count > self._dropped.get(name, 0):
            self._grew_at_ns[name] = at_ns
        self._dropped[name] = count
        grew = self._grew_at_ns.get(name)
        return grew is not None and at_ns - grew < DROPS_STAY_NS
