"""Doctor: which sensors and sources work here, which do not, why, and what to do about it."""

from __future__ import annotations

import time

from gpuwarden.host import Host
from gpuwarden.model import Fact, NodeFacts, SensorRun, Snapshot, SourceRun
from gpuwarden.outputs.sheet import cut
from gpuwarden.outputs.words import escape, json_text

DOCTOR_SCHEMA = "gpuwarden.doctor"

# Capabilities by bit (linux/capability.h) and what needs them.
CAPABILITY_USES = (
    (19, "CAP_SYS_PTRACE", "real binaries, descriptors and mappings of other users' processes"),
    (2, "CAP_DAC_READ_SEARCH", "cron tables, unit files and shell profiles of all users"),
    (21, "CAP_SYS_ADMIN", "process lists of MIG devices, mapped device files"),
    (34, "CAP_SYSLOG", "the kernel log"),
)


class Diagnosis(Fact, frozen=True, kw_only=True, omit_defaults=False):
    """What the doctor found."""

    schema: str = DOCTOR_SCHEMA
    version: int = 1
    node: NodeFacts
    sensors: tuple[SensorRun, ...]
    sources: tuple[SourceRun, ...]
    vantage: tuple[str, ...]
    opens: SensorRun | None = None
    """How `watch` would see device opens here; None when it was not tried."""


def device_opens(host: Host) -> SensorRun:
    """Tries to load what `watch` sees device opens with, and unloads it."""
    from gpuwarden.probes.choose import chosen, watched_numbers
    from gpuwarden.sensors.device_nodes import assigned_majors

    begun = time.perf_counter()
    with chosen(watched_numbers(assigned_majors()), host=host) as choice:
        refused = "; ".join(f"{one.way}: {one.reason}" for one in choice.refused)
        best = choice.probe is not None and not choice.refused
        return SensorRun(
            name="opens",
            state="ok" if best else "partial",
            reason=f"by {choice.way}" + (f"; {refused}" if refused else ""),
            remedy=next((one.remedy for one in choice.refused if one.remedy), ""),
            seconds=round(time.perf_counter() - begun, 6),
        )


def vantage(node: NodeFacts) -> tuple[str, ...]:
    """What the place and the rights of this process let it see, in sentences."""
    lines: list[str] = []
    if node.host_pid_namespace is False:
        lines.append(
            "This is not the host's pid namespace: the driver's pids cannot be looked up here. "
            "Run on the host, or with hostPID: true."
        )
    elif node.host_pid_namespace:
        lines.append("The host's pid namespace: every process can be looked up.")
    mask = node.observer_capabilities
    if mask is not None:
        for bit, name, use in CAPABILITY_USES:
            if not mask >> bit & 1:
                lines.append(f"Without {name}: {use} cannot all be read.")
    if node.observer_uid not in (0, None) and mask == 0:
        lines.append("Run as root, or with the capabilities above, to see all of it.")
    return tuple(lines)


def examine(
    snapshot: Snapshot, *, as_json: bool, width: int, opens: SensorRun | None = None
) -> tuple[str, bool]:
    """The diagnosis as text or JSON, and whether nothing that is here failed."""
    diagnosis = Diagnosis(
        node=snapshot.node,
        sensors=snapshot.sensors,
        sources=snapshot.sources,
        vantage=vantage(snapshot.node),
        opens=opens,
    )
    sound = all(run.state != "failed" for run in snapshot.sensors) and all(
        source.state != "failed" for source in snapshot.sources
    )
    if as_json:
        return json_text(diagnosis), sound
    lines = [f"{'sensor':<13} {'state':<8} {'seconds':>8} {'facts':>6}  reason"]
    for run in snapshot.sensors:
        lines.append(_line(run, run.facts, width))
        lines += _remedy(run.state, run.remedy)
    lines.append("")
    lines.append(f"{'source':<13} {'state':<8} {'seconds':>8} {'count':>6}  reason")
    for source in snapshot.sources:
        lines.append(_line(source, source.workloads, width))
        lines += _remedy(source.state, source.remedy)
    if opens is not None:
        lines += ["", f"{'watch':<13} {'state':<8} {'seconds':>8} {'':>6}  way"]
        lines.append(_line(opens, None, width))
        lines += _remedy(opens.state, opens.remedy)
    if diagnosis.vantage:
        lines.append("")
        lines += [escape(line) for line in diagnosis.vantage]
    gaps = [gap for gap in snapshot.gaps if gap.reason]
    if gaps:
        lines.append("")
        lines.append("Not seen:")
        for gap in gaps[:40]:
            times = f" ({gap.count})" if gap.count > 1 else ""
            remedy = f" → {gap.remedy}" if gap.remedy else ""
            lines.append(escape(f"  {gap.sensor}: {gap.what}{times}: {gap.reason}{remedy}"))
    return "\n".join(lines) + "\n", sound


def _line(run: SensorRun | SourceRun, count: int | None, width: int) -> str:
    shown = "" if count is None else str(count)
    head = f"{escape(run.name):<13} {run.state:<8} {run.seconds:>8.3f} {shown:>6}  "
    return (head + cut(escape(run.reason), max(width - len(head), 24))).rstrip()


def _remedy(state: str, remedy: str) -> list[str]:
    return [f"{'':<13} → {escape(remedy)}"] if remedy and state != "ok" else []
