"""Which processes are on an accelerator: the driver's clients and holders of device nodes."""

from __future__ import annotations

from gpuwarden.code.module import Place, Problem
from gpuwarden.host import Host
from gpuwarden.scan import ScanOptions, take_snapshot

SENSORS = frozenset({"device_nodes", "nvml", "amd", "holders", "drm"})
ASKED = "all GPU processes"


def gpu_processes(
    host: Host, nvml_library: str | None = None
) -> tuple[list[int], tuple[Problem, ...]]:
    """Their pids, ascending, and what kept them from being all; never raises."""
    taken = take_snapshot(host, ScanOptions(sensors=SENSORS, nvml_library=nvml_library))
    pids = {client.pid for client in taken.clients} | {holder.pid for holder in taken.holders}
    here = Place(target=ASKED)
    problems = [
        Problem(place=here, what=f"sensor {run.name}", reason=run.reason)
        for run in taken.sensors
        if run.state == "failed"
    ]
    problems += [
        Problem(place=here, what=gap.what, reason=gap.reason)
        for gap in taken.gaps
        if gap.sensor == "holders"
    ]
    return sorted(pids), tuple(problems)
