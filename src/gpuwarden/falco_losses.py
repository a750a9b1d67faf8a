"""What was not seen: Falco's own losses, and what its listener here did not take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from gpuwarden.finding import Advisory, Evidence, Finding, about_source
from gpuwarden.sensors.falco import FalcoDrop, FalcoEvent


class ListenerCounts(Struct, frozen=True, kw_only=True):
    """What came so far, since the listener began."""

    requests: int = 0
    events: int = 0
    """Handed to the daemon; drops are not in them."""
    drops: int = 0
    """Times that Falco said it had lost something."""
    malformed: int = 0
    """Bodies, or events in one, that are none of Falco's."""
    refused: int = 0
    """Events that found the queue full: they are lost, since Falco sends nothing twice."""
    rejected: int = 0
    """Requests that are none: too large, too slow, the wrong path, method, type or token."""
    failed: int = 0
    """Events that the daemon could not work on."""
    last_trouble: str = ""


LOSSES_STAY_NS: Final = 3600 * 10**9
_HOSTS_LIMIT: Final = 8
_OTHERS: Final = "other machines"

FALCO_EVENTS_DROPPED = Advisory(
    id="falco_events_dropped",
    title="Falco did not see everything, or its events did not all arrive",
    severity="warning",
    explanation="While Falco's buffer is full it is blind: an open of a GPU in that time gives no "
    "event. What it sends and is not taken here is lost too, since Falco sends nothing twice. That "
    "nothing was reported for that time says nothing. gpuwarden's own sensors are not affected.",
    steps=(
        "gpuwarden scan",
        "falco.yaml: a larger engine.modern_ebpf.buf_size_preset, fewer rules, or only the system "
        "calls that the rules need",
    ),
)
OWN_RULES: Final = frozenset({FALCO_EVENTS_DROPPED.id})
"""Always evaluated by ``drop_findings``."""


class _Losses(Struct):
    """What one machine's Falco told of, while it is told."""

    first_ns: int
    last_ns: int
    times: int = 0
    drops: int = 0
    of: int = 0
    untold: int = 0
    """Times that it did not say how many."""
    alerts_total: int = 0
    alerts: int = 0


class FalcoLosses:
    """Keeps what one look at the drops does not show: how much, how often, since when.

    Whoever can post can make up machines: the first few are told apart, so that those make no flood
    of findings. Times are when it came, since an event's own time proves nothing. For one thread.
    """

    def __init__(self) -> None:
        self._hosts: dict[str, _Losses] = {}
        self._counts = ListenerCounts()
        self._ours_ns: int | None = None

    def add(self, taken: Iterable[FalcoEvent | FalcoDrop], received_ns: int) -> None:
        """Notes the drops among what was taken."""
        for drop in taken:
            if isinstance(drop, FalcoDrop):
                self._add(drop, received_ns)

    def _add(self, drop: FalcoDrop, at_ns: int) -> None:
        name = drop.hostname or "an unnamed machine"
        if name not in self._hosts and len(self._hosts) >= _HOSTS_LIMIT:
            name = self._room_for(name, at_ns)
        kept = self._hosts.get(name)
        alerts_before = kept.alerts_total if kept else 0
        if kept is None or at_ns - kept.last_ns >= LOSSES_STAY_NS:
            kept = _Losses(first_ns=at_ns, last_ns=at_ns)
        total = drop.alerts_dropped or 0
        # The total begins anew with Falco.
        alerts = total - alerts_before if total >= alerts_before else total
        kept.alerts_total = total or alerts_before
        if drop.drops != 0 or alerts:
            kept.last_ns = at_ns
            kept.times += 1
            kept.alerts += alerts
            if drop.drops is None:
                kept.untold += 1
            elif drop.of is None or drop.of >= drop.drops:
                kept.drops += drop.drops
                kept.of += drop.of or 0
            else:
                kept.drops += drop.drops
        self._hosts[name] = kept

    def _room_for(self, name: str, at_ns: int) -> str:
        for other, kept in list(self._hosts.items()):
            if at_ns - kept.last_ns >= LOSSES_STAY_NS:
                del self._hosts[other]
        return name if len(self._hosts) < _HOSTS_LIMIT else _OTHERS

    def look_at(self, counts: ListenerCounts, at_ns: int) -> None:
        """Notes what this listener itself did not take."""
        before = self._counts
        if (counts.refused, counts.failed, counts.malformed) != (
            before.refused, before.failed, before.malformed,
        ):  # fmt: skip
            self._ours_ns = at_ns
        self._counts = counts

    def told(self, at_ns: int) -> dict[str, list[str]]:
        """Whose sight was reduced within the last hour, and how; "" stands for this listener."""
        found = {}
        for name, kept in self._hosts.items():
            if kept.times and at_ns - kept.last_ns < LOSSES_STAY_NS:
                found[name] = _said(kept)
        if self._ours_ns is not None and at_ns - self._ours_ns < LOSSES_STAY_NS:
            counts = self._counts
            numbers = (
                (counts.refused, "events were refused, the queue was full"),
                (counts.failed, "events could not be worked on"),
                (counts.malformed, "bodies or events were not Falco's"),
            )
            lines = [f"{number} {what} since it began" for number, what in numbers if number]
            found[""] = [*lines, *([f"last: {counts.last_trouble}"] if counts.last_trouble else [])]
        return found


def _said(kept: _Losses) -> list[str]:
    lines = []
    if kept.drops:
        share = f", {100 * kept.drops / kept.of:.1f} % of {kept.of}" if kept.of else ""
        lines.append(f"{kept.drops} system calls lost{share}, told {kept.times} times")
    if kept.untold:
        lines.append(f"system calls lost {kept.untold} times, it did not say how many")
    if kept.alerts:
        lines.append(f"{kept.alerts} alerts lost in Falco's own queue")
    return lines


def drop_findings(losses: FalcoLosses, at_ns: int) -> list[Finding]:
    """A finding for each Falco that was blind within the last hour, one for this listener."""
    return [
        about_source(
            FALCO_EVENTS_DROPPED,
            f"falco on {name}" if name else "falco listener",
            (Evidence(source="falco", text=line) for line in lines),
        )
        for name, lines in losses.told(at_ns).items()
    ]
