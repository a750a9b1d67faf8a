"""Every source of the expected set that is asked while looking; the policy joins at judging."""

from __future__ import annotations

from collections.abc import Callable

from gpuwarden.expected import kubernetes, slurm, systemd
from gpuwarden.host import Host
from gpuwarden.model import SourceRun, Workload
from gpuwarden.sensors.seen import Seen

ReadSource = Callable[[Host, Seen], tuple[SourceRun, list[Workload]]]

SOURCES: tuple[tuple[str, ReadSource], ...] = (
    ("slurm", slurm.read),
    ("kubernetes", kubernetes.read),
    ("systemd", systemd.read),
)
