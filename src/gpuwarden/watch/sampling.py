"""One round a second: GPUs, clients and their use, remembered; says when who is there changed."""

from __future__ import annotations

import time
from collections.abc import Mapping

from msgspec import Struct

from gpuwarden.errors import GpuwardenError, Unavailable
from gpuwarden.host import Host
from gpuwarden.model import Gpu, GpuClient
from gpuwarden.policy import Thresholds
from gpuwarden.sensors import logins
from gpuwarden.sensors.nvml.sampler import Round, Sampler
from gpuwarden.sensors.process import stat_lines
from gpuwarden.store import Sample
from gpuwarden.usage import UsageTracker
from gpuwarden.watch.judgement import Kin, Memory

CHECKED_SECONDS = 10.0
"""How often it is looked whether a pid still is the same process."""
LOGINS_SECONDS = 5.0


class _Start(Struct):
    ticks: int
    checked: float


class Sampling:
    """The newest round and what the rounds add up to; one thread."""

    def __init__(
        self,
        host: Host,
        sampler: Sampler,
        boot_id: str | None,
        thresholds: Thresholds,
        *,
        interval_seconds: float = 1.0,
    ) -> None:
        self._host = host
        self._boot_id = boot_id
        self.sampler = sampler
        self.tracker = UsageTracker(
            boot_id=boot_id,
            sustained_minutes=thresholds.sustained_minutes,
            interval_seconds=interval_seconds,
        )
        self.gpus: tuple[Gpu, ...] = ()
        self.clients: tuple[GpuClient, ...] = ()
        self.at_ns = 0
        self.rounds = 0
        self.error: GpuwardenError | None = None
        self.failing_since_ns: int | None = None
        self._starts: dict[int, _Start] = {}
        self._kin: Mapping[int, Kin] = {}
        self._who: frozenset[tuple[str, int]] = frozenset()
        self._logged_in: bool | None = None
        self._logins_at = 0.0

    @property
    def has_driver(self) -> bool:
        """Whether there is a driver that should answer."""
        return self.error is None or not _is_absent(self.error)

    def judged(self, kin: Mapping[int, Kin]) -> None:
        """What the last judgement knows of the clients: their binaries, parents, peers."""
        self._kin = kin

    def take(self) -> tuple[bool, list[Sample]]:
        """Takes a round if one is there: whether the clients changed, and what to record of it."""
        told = self.sampler.take()
        if told is None:
            return False, []
        if told.error is not None:
            self.error = told.error
            if not _is_absent(told.error) and self.failing_since_ns is None:
                self.failing_since_ns = told.at_ns
            if not told.gpus:
                return False, []
        else:
            self.error, self.failing_since_ns = None, None
        return self._taken(told)

    def _taken(self, told: Round) -> tuple[bool, list[Sample]]:
        self.rounds += 1
        self.at_ns = told.at_ns
        self.gpus, self.clients = tuple(told.gpus), tuple(told.clients)
        starts = self._now({client.pid for client in self.clients})
        who = frozenset((client.gpu_id, client.pid) for client in self.clients)
        changed, self._who = who != self._who, who
        binaries = {
            pid: (kin.path, kin.device, kin.inode, kin.uid)
            for pid, kin in self._kin.items()
            if kin.path is not None and starts.get(pid) == kin.start_time_ticks
        }
        self.tracker.sample(told.at_ns, self.gpus, self.clients, starts, binaries, self._somebody())
        return changed, list(self._samples(told.at_ns, starts))

    def _now(self, pids: set[int]) -> dict[int, int]:
        now = time.monotonic()
        for pid in pids:
            known = self._starts.get(pid)
            if known is not None and now - known.checked < CHECKED_SECONDS:
                continue
            line = stat_lines.read_one(self._host, pid)
            if line is None:
                self._starts.pop(pid, None)
            else:
                self._starts[pid] = _Start(line.start_time_ticks, now)
        self._starts = {pid: one for pid, one in self._starts.items() if pid in pids}
        return {pid: one.ticks for pid, one in self._starts.items()}

    def ended(self, pid: int) -> None:
        """A process has ended: its pid may be another's from now on."""
        self._starts.pop(pid, None)

    def _somebody(self) -> bool | None:
        now = time.monotonic()
        if now - self._logins_at >= LOGINS_SECONDS or not self._logins_at:
            self._logged_in, self._logins_at = logins.somebody_logged_in(self._host), now
        return self._logged_in

    def _samples(self, at_ns: int, starts: Mapping[int, int]) -> list[Sample]:
        found = [
            Sample(
                at_ns=at_ns,
                gpu_id=gpu.id,
                boot_id=self._boot_id,
                sm_percent=gpu.sm_percent,
                memory_bytes=gpu.memory_used_bytes,
            )
            for gpu in self.gpus
        ]
        for client in self.clients:
            kin = self._kin.get(client.pid)
            if kin is not None and kin.start_time_ticks != starts.get(client.pid):
                kin = None
            busy = [sample.sm_percent for sample in client.samples]
            found.append(
                Sample(
                    at_ns=at_ns,
                    gpu_id=client.gpu_id,
                    pid=client.pid,
                    start_time_ticks=starts.get(client.pid),
                    boot_id=self._boot_id,
                    sm_percent=round(sum(busy) / len(busy)) if busy else client.sm_percent,
                    memory_bytes=client.memory_bytes,
                    verdict=None if kin is None else kin.verdicts.get(client.gpu_id),
                    binary=None if kin is None else kin.path,
                    parents=() if kin is None else kin.parents,
                    peers=() if kin is None else kin.peers,
                )
            )
        return found

    def memory(self, now_ns: int) -> Memory:
        """What the rules over time are judged with."""
        return Memory(
            usage=tuple(self.tracker.usage(now_ns)),
            exited=tuple(self.tracker.exited()),
            respawns=tuple(self.tracker.respawns()),
        )


def _is_absent(error: GpuwardenError) -> bool:
    return type(error) is Unavailable
