"""One round a second: GPUs, clients and their use, remembered; says when who is there changed."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from gpuwarden.errors import GpuwardenError, Unavailable
from gpuwarden.host import Host
from gpuwarden.model import Gap, Gpu, GpuClient
from gpuwarden.policy import Thresholds
from gpuwarden.sensors import logins
from gpuwarden.sensors.nvml.sampler import Round, Sampler
from gpuwarden.sensors.process import stat_lines
from gpuwarden.store import Sample
from gpuwarden.usage import STATE_LIMIT_BYTES, UsageTracker
from gpuwarden.watch.judgement import Kin, Memory

CHECKED_SECONDS = 10.0
"""How often it is looked whether a pid still is the same process."""
LOGINS_SECONDS = 5.0
RECORDED_NS = 10 * 10**9
"""A mean is kept of so long: at one a second, memory for days would hold half a day."""

Binary = tuple[str, str | None, int | None, int | None]


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
        self._starts: dict[int, int] = {}
        self._stale: set[int] = set()
        self._checked_at = 0.0
        self._binaries: dict[int, Binary] = {}
        self._sums: dict[tuple[str, int | None], list[int]] = {}
        self._recorded_ns = 0
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
        self._join()

    def take(self) -> tuple[bool, list[Sample]]:
        """Takes a round if one is there: whether the clients changed, and what to record of it."""
        told = self.sampler.take()
        if told is None:
            return False, []
        if told.error is not None:
            self.error = told.error
            if _is_absent(told.error):
                self.failing_since_ns = None
            elif self.failing_since_ns is None:
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
        who = frozenset((client.gpu_id, client.pid) for client in self.clients)
        changed, self._who = who != self._who, who
        self._follow({pid for _, pid in who}, changed=changed)
        self.tracker.sample(
            told.at_ns,
            self.gpus,
            self.clients,
            self._starts,
            self._binaries,
            self._somebody(),
            unread_lists=_unread_lists(told),
        )
        self._add_up()
        # A clock that was set back must not keep anything from being recorded.
        if 0 <= told.at_ns - self._recorded_ns < RECORDED_NS:
            return changed, []
        self._recorded_ns = told.at_ns
        return changed, self._samples(told.at_ns)

    def _follow(self, pids: set[int], *, changed: bool) -> None:
        """Keeps the start times: a pid is the same process only with the same start."""
        now = time.monotonic()
        if not changed and not self._stale and now - self._checked_at < CHECKED_SECONDS:
            return
        again = now - self._checked_at >= CHECKED_SECONDS
        if again:
            self._checked_at = now
        kept = {} if again else {p: t for p, t in self._starts.items() if p in pids - self._stale}
        for pid in pids - kept.keys():
            line = stat_lines.read_one(self._host, pid)
            if line is not None:
                kept[pid] = line.start_time_ticks
        self._stale.clear()
        if kept != self._starts:
            self._starts = kept
            self._join()

    def _join(self) -> None:
        self._binaries = {
            pid: (kin.path, kin.device, kin.inode, kin.uid)
            for pid, kin in self._kin.items()
            if kin.path is not None and self._starts.get(pid) == kin.start_time_ticks
        }

    def ended(self, pid: int) -> None:
        """A process has ended: its pid may be another's from now on."""
        self._stale.add(pid)

    def _somebody(self) -> bool | None:
        now = time.monotonic()
        if now - self._logins_at >= LOGINS_SECONDS or not self._logins_at:
            self._logged_in, self._logins_at = logins.somebody_logged_in(self._host), now
        return self._logged_in

    def _add_up(self) -> None:
        """Every sample that the driver kept counts in the mean that is recorded."""
        of_clients = self._sums
        for client in self.clients:
            samples = client.samples
            if samples:
                total, count = sum(sample.sm_percent for sample in samples), len(samples)
            elif client.sm_percent is not None:
                total, count = client.sm_percent, 1
            else:
                continue
            sums = of_clients.get((client.gpu_id, client.pid))
            if sums is None:
                of_clients[client.gpu_id, client.pid] = [total, count]
            else:
                sums[0] += total
                sums[1] += count
        for gpu in self.gpus:
            if gpu.sm_percent is not None:
                sums = self._sums.setdefault((gpu.id, None), [0, 0])
                sums[0] += gpu.sm_percent
                sums[1] += 1

    def _mean(self, gpu_id: str, pid: int | None) -> int | None:
        total, count = self._sums.get((gpu_id, pid), (0, 0))
        return round(total / count) if count else None

    def _samples(self, at_ns: int) -> list[Sample]:
        found = [
            Sample(
                at_ns=at_ns,
                gpu_id=gpu.id,
                boot_id=self._boot_id,
                sm_percent=self._mean(gpu.id, None),
                memory_bytes=gpu.memory_used_bytes,
            )
            for gpu in self.gpus
        ]
        for client in self.clients:
            start = self._starts.get(client.pid)
            kin = self._kin.get(client.pid)
            if kin is not None and kin.start_time_ticks != start:
                kin = None
            found.append(
                Sample(
                    at_ns=at_ns,
                    gpu_id=client.gpu_id,
                    pid=client.pid,
                    start_time_ticks=start,
                    boot_id=self._boot_id,
                    sm_percent=self._mean(client.gpu_id, client.pid),
                    memory_bytes=client.memory_bytes,
                    verdict=None if kin is None else kin.verdicts.get(client.gpu_id),
                    binary=None if kin is None else kin.path,
                    parents=() if kin is None else kin.parents,
                    peers=() if kin is None else kin.peers,
                )
            )
        self._sums.clear()
        return found

    def resume(self, path: str) -> Gap | None:
        """Goes on from what an earlier run kept at ``path``; why not, if it is there and cannot."""
        try:
            with open(path, "rb") as file:
                self.tracker.restore(file.read(STATE_LIMIT_BYTES + 1))
        except FileNotFoundError:
            return None
        except (OSError, GpuwardenError) as error:
            return Gap(sensor="store", what=path, reason=f"not gone on from: {error}")
        return None

    def keep(self, path: str) -> None:
        """Writes what the rounds add up to, whole or not at all. Errors: OSError."""
        descriptor = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(self.tracker.export())
        os.replace(f"{path}.new", path)

    def memory(self, now_ns: int) -> Memory:
        """What the rules over time are judged with."""
        return Memory(
            usage=tuple(self.tracker.usage(now_ns)),
            exited=tuple(self.tracker.exited()),
            respawns=tuple(self.tracker.respawns()),
        )


def _unread_lists(told: Round) -> frozenset[str]:
    """GPUs whose list of processes could not be read: who is not on it has not ended."""
    if not told.gaps:
        return frozenset()
    gaps = [gap.what for gap in told.gaps if "process list of" in gap.what]
    return frozenset(gpu.id for gpu in told.gpus if any(what.endswith(gpu.id) for what in gaps))


def _is_absent(error: GpuwardenError) -> bool:
    return type(error) is Unavailable
