"""Every source of the expected set that is asked while looking; the policy joins at judging.

Each is imported when it is first asked.
"""

from __future__ import annotations

from collections.abc import Callable

from gpuwarden.host import Host
from gpuwarden.model import SourceRun, Workload
from gpuwarden.sensors.seen import Seen

Answer = tuple[SourceRun, list[Workload]]
ReadSource = Callable[[Host, Seen], Answer]


def _slurm(host: Host, seen: Seen) -> Answer:
    from gpuwarden.expected import slurm

    return slurm.read(host, seen)


def _kubernetes(host: Host, seen: Seen) -> Answer:
    from gpuwarden.expected import kubernetes

    return kubernetes.read(host, seen)


def _systemd(host: Host, seen: Seen) -> Answer:
    from gpuwarden.expected import systemd

    return systemd.read(host, seen)


SOURCES: tuple[tuple[str, ReadSource], ...] = (
    ("slurm", _slurm),
    ("kubernetes", _kubernetes),
    ("systemd", _systemd),
)
