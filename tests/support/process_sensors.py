"""The process sensors run together, as a scan runs them."""

from __future__ import annotations

from gpuwarden.errors import GpuwardenError
from gpuwarden.host import Host
from gpuwarden.model import AnyFact
from gpuwarden.sensors import device_nodes, hidden, holders, sockets
from gpuwarden.sensors.process import details, stat_lines
from gpuwarden.sensors.seen import Seen


def look(host: Host, pids: list[int] | None = None) -> list[AnyFact]:
    """All process sensors once, each as the runner runs it: its own error costs it alone."""
    seen = Seen()
    facts: list[AnyFact] = []
    try:
        seen.table = stat_lines.read(host)
    except GpuwardenError:
        return facts
    wanted = list(seen.table) if pids is None else pids
    if pids is not None:
        seen.table = {pid: line for pid, line in seen.table.items() if pid in pids}
    for sensor in (
        device_nodes.read,
        holders.read,
        lambda h, s: details.read(h, s, wanted),
        lambda h, s: sockets.read(h, s, wanted),
        hidden.read,
    ):
        try:
            for fact in sensor(host, seen):
                seen.add(fact)
                facts.append(fact)
        except GpuwardenError:
            continue
    return facts
