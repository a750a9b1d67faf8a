"""Whether a zombie-context's process is shown to be dead or hung, as its kill asks for."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpuwarden.errors import GpuwardenError
from gpuwarden.host import Host
from gpuwarden.respond.step import Target
from gpuwarden.sensors.process import stat_lines

HUNG_SECONDS = 10.0
"""In state D at the beginning and at the end of that time."""
_DEAD = "ZX"


def shown(
    host: Host, target: Target, *, sleep: Callable[[float], None] = time.sleep
) -> tuple[bool, str]:
    """(whether it is dead or hung, why that is so or is not shown). Waits only for state D."""
    if target.verdict != "zombie-context" or target.identity is None:
        return False, ""
    for row in target.rows:
        heir = row.inherited_from
        if heir is not None and not row.listed and stat_lines.read_one(host, heir) is None:
            return True, f"it only holds descriptors of pid {heir}, which is gone"
    first = _state(host, target)
    if first == "":
        return True, "it is gone from /proc"
    if first in _DEAD:
        return True, f"it is dead (state {first})"
    if first != "D":
        return False, f"it is in state {first}, which is neither dead nor hung"
    sleep(HUNG_SECONDS)
    last = _state(host, target)
    if last == "D":
        return True, f"it was in state D twice, {HUNG_SECONDS:g} s apart"
    return False, f"it was in state D, and {HUNG_SECONDS:g} s later in state {last or 'none'}"


def _state(host: Host, target: Target) -> str:
    """Of the process, or of a thread that goes on where the first has ended; empty: gone."""
    identity = target.identity
    if identity is None:
        return ""
    try:
        line = stat_lines.read_line(host, identity.pid)
    except GpuwardenError:
        return ""
    if line.start_time_ticks != identity.start_time_ticks:
        return ""
    living = stat_lines.living_thread(host, line)
    return (living or line).state
