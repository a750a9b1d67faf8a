"""Reduced sight is reported: findings about what the agent itself could not see."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from gpuwarden.finding import Advisory, Evidence, Finding, about_source

GREW_STAYS_NS = 3600 * 10**9
BLIND_NS = 30 * 10**9

DEVICE_EVENTS_DROPPED = Advisory(
    id="device_events_dropped",
    title="Device opens were dropped: not all were seen",
    severity="error",
    explanation="Events came faster than they could be taken, so some device opens of this time "
    "are not known. A flood can be made on purpose, to hide one open among many.",
    steps=(
        "gpuwarden scan shows who holds a device now.",
        "Find who makes so many opens: the findings with the highest counts.",
        "Give the agent more CPU, or leave the limit of events for a process on.",
    ),
)
DEVICE_OPENS_POLLED = Advisory(
    id="device_opens_polled",
    title="Device opens are polled, not seen as they happen",
    severity="warning",
    explanation="No eBPF probe could be loaded here, so /proc is looked through instead. What "
    "opens a device and closes it again between two looks is not seen.",
    steps=("Follow what the evidence says of each way that was refused.", "gpuwarden doctor."),
)
SAMPLING_BLIND = Advisory(
    id="sampling_blind",
    title="The driver is not answering: GPUs are not sampled",
    severity="warning",
    explanation="Utilisation, memory and the driver's own list of processes are not known "
    "meanwhile. Device opens and holders still are.",
    steps=(
        "Look for Xid lines in the kernel log (dmesg).",
        "nvidia-smi, with a timeout: it may hang as well.",
    ),
)
JUDGEMENT_FAILED = Advisory(
    id="judgement_failed",
    title="The node could not be judged",
    severity="error",
    explanation="Taking a snapshot and judging it failed, so verdicts are those of the last one "
    "that worked. Device opens are still judged.",
    steps=("gpuwarden scan, and report what it says if it fails as well.",),
)
SIGHT_ADVISORIES = (
    DEVICE_EVENTS_DROPPED,
    DEVICE_OPENS_POLLED,
    SAMPLING_BLIND,
    JUDGEMENT_FAILED,
)
SIGHT_RULES = frozenset(rule.id for rule in SIGHT_ADVISORIES)


class Sight(Struct, frozen=True, kw_only=True):
    """How well the agent sees at one moment."""

    dropped: Mapping[str, int] = {}
    """Events lost since the start, by cause."""
    way: str = ""
    polled: bool = False
    refused: tuple[str, ...] = ()
    """Ways of seeing opens that did not work here, each with its reason."""
    sampling_error: str = ""
    sampling_failing_since_ns: int | None = None
    judgement_error: str = ""


class OwnSight:
    """Keeps what one look does not show: which counts grew, and when."""

    def __init__(self) -> None:
        self._dropped: dict[str, int] = {}
        self._grew_at_ns: int | None = None

    def findings(self, sight: Sight, at_ns: int) -> list[Finding]:
        """What holds now; a drop is told for an hour after the last one."""
        if any(count > self._dropped.get(cause, 0) for cause, count in sight.dropped.items()):
            self._grew_at_ns = at_ns
        self._dropped = dict(sight.dropped)
        found = []
        if self._grew_at_ns is not None and at_ns - self._grew_at_ns < GREW_STAYS_NS:
            lost = (
                Evidence(source="probe", text=f"{count} lost since the start: {cause}")
                for cause, count in sorted(sight.dropped.items())
                if count
            )
            found.append(about_source(DEVICE_EVENTS_DROPPED, "device opens", lost))
        if sight.polled:
            why = (Evidence(source="probe", text=reason) for reason in (sight.way, *sight.refused))
            found.append(about_source(DEVICE_OPENS_POLLED, "device opens", why))
        since = sight.sampling_failing_since_ns
        if since is not None and at_ns - since >= BLIND_NS:
            texts = [Evidence(source="nvml", text=sight.sampling_error)]
            found.append(about_source(SAMPLING_BLIND, "nvml", texts))
        if sight.judgement_error:
            texts = [Evidence(source="judgement", text=sight.judgement_error)]
            found.append(about_source(JUDGEMENT_FAILED, "judgement", texts))
        return found
