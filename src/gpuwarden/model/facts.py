"""What every fact is, and how sensors and sources fared."""

from __future__ import annotations

from typing import Literal

import msgspec

SensorState = Literal["ok", "partial", "absent", "failed", "skipped"]
SourceState = Literal["ok", "absent", "failed", "skipped"]


class Fact(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An observation; immutable, comparable, and encodable as JSON."""


class Gap(Fact, frozen=True, kw_only=True):
    """Something a sensor could not see, so that nothing unseen is taken for clean."""

    sensor: str
    what: str
    reason: str
    remedy: str = ""
    count: int = 1


class SensorRun(Fact, frozen=True, kw_only=True):
    """How one sensor fared: its state, the reason when not ``ok``, and its wall time."""

    name: str
    state: SensorState
    reason: str = ""
    remedy: str = ""
    seconds: float = 0.0
    facts: int = 0


class SourceRun(Fact, frozen=True, kw_only=True):
    """How one source of the expected set fared.

    ``running`` and ``ended`` are the job ids the controller confirmed as such when asked; an id
    in neither was not answered for. ``scheduled`` says that this source hands out this node's
    accelerators (so that what it did not hand out is not merely unlisted).
    """

    name: str
    state: SourceState
    reason: str = ""
    remedy: str = ""
    seconds: float = 0.0
    workloads: int = 0
    running: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    scheduled: bool = False


class NodeFacts(Fact, frozen=True, kw_only=True):
    """The machine and the vantage point: who looked, from which pid namespace, with what rights."""

    hostname: str
    boot_id: str | None = None
    boot_time_ns: int | None = None
    kernel: str | None = None
    clock_ticks_per_second: int = 100
    origin: str = "live"
    """``live``, ``root`` (a host mounted under --root) or the kind of dump: ``nvidia-smi-xml``…"""
    observer_uid: int | None = None
    observer_capabilities: int | None = None
    """Effective capability mask of the observer."""
    observer_pid_namespace: int | None = None
    host_pid_namespace: bool | None = None
    """Whether the observer sees the host's pids; None when it cannot tell."""
    driver_version: str | None = None
    cuda_version: str | None = None
    process_count: int | None = None
    unread: dict[str, str] = {}

    @property
    def is_dump(self) -> bool:
        """Whether this was read from a driver tool's output, which knows no owners."""
        return self.origin.startswith("nvidia-smi")
