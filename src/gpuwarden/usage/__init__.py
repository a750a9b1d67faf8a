"""How GPUs are used over time: what `watch` remembers of its rounds, and tells as facts.

Pure state: no I/O and no clock; the daemon says what it saw and when. What was not seen in a round
is unknown for that round, never idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from gpuwarden.errors import Malformed
from gpuwarden.model import ExitedClient, Gpu, GpuClient, Respawn, Usage
from gpuwarden.usage.departures import ClientKey, Departures, DepartureState, MemoryInUse
from gpuwarden.usage.series import IDLE_BELOW_PERCENT, Series, SeriesState
from gpuwarden.usage.successions import Binary, LineState, RunState, Successions

STATE_VERSION = 1
STATE_LIMIT_BYTES = 16 << 20
MAX_SERIES = 4096
HOUR_SECONDS = 3600
UNSEEN_NS = 600 * 10**9
"""A process that no readable list has shown for so long is not remembered as living."""
QUIET_NS = 3 * 10**9
"""So long after a process's last sample its GPU's figure may speak for it."""
CLOCK_SET_BACK_NS = 60 * 10**9
TIDY_NS = 60 * 10**9


class TrackerState(msgspec.Struct, array_like=True):
    """Everything that a restarted daemon needs to go on."""

    version: int
    boot_id: str | None
    last_ns: int
    series: list[SeriesState]
    departures: list[DepartureState]
    lines: list[LineState]


class _Round(NamedTuple):
    """What holds for everything that one round saw."""

    at_ns: int
    span_ms: int
    """Since the round before, as far as a figure may speak for it."""
    login: bool | None
    gpus: dict[str, Gpu]
    counts: Counter[str]
    """Clients by GPU id."""
    readable: frozenset[str]
    """GPUs whose process list was read: who is not on it is not there."""


def windows_for(sustained_minutes: int) -> tuple[int, int]:
    """The windows, in seconds, that rules with this threshold look at.

    The shorter one is a quarter longer than the threshold, so that it can be full although a round
    was missed; the longer one is an hour, or more where the threshold is near that.
    """
    short = max(60, sustained_minutes * 75)
    return short, max(HOUR_SECONDS, 2 * short)


class UsageTracker:
    """Fed once a round; gives what the rules over time judge. One thread uses it."""

    def __init__(
        self,
        *,
        boot_id: str | None = None,
        sustained_minutes: int = 10,
        interval_seconds: float = 1.0,
    ) -> None:
        """``interval_seconds`` is the time between rounds: a figure speaks for two at most."""
        self.boot_id = boot_id
        self.windows_seconds = windows_for(sustained_minutes)
        self.refused = 0
        """Processes that were not followed because 4,096 others are."""
        self._span_limit_ms = max(1000, int(2000 * interval_seconds))
        self._clear()

    def _clear(self) -> None:
        self._last_ns = self._tidied_ns = 0
        self._live: dict[ClientKey, Series] = {}
        self._ended: dict[ClientKey, Series] = {}
        self._starts: dict[int, int | None] = {}
        self._binaries: dict[ClientKey, Binary] = {}
        self._departures = Departures()
        self._successions = Successions()
        self._memory: dict[str, MemoryInUse] = {}
        self._memory_before: dict[str, MemoryInUse] = {}
        self._without_client: set[str] = set()

    # ------------------------------------------------------------------ a round

    def sample(  # noqa: PLR0917 - one round's sights, in the order in which they were seen
        self,
        at_ns: int,
        gpus: Sequence[Gpu],
        clients: Sequence[GpuClient],
        starts: Mapping[int, int],
        binaries: Mapping[int, tuple[str, str | None, int | None, int | None]],
        somebody_logged_in: bool | None,
        *,
        unread_lists: Collection[str] = (),
    ) -> None:
        """What one round saw.

        ``starts`` holds start times in clock ticks by pid, ``binaries`` path, ``device``
        (``major:minor``), inode and uid by pid. ``somebody_logged_in`` is None when that could not
        be told. ``unread_lists`` names GPUs whose process list was not read in this round: nobody
        ends there, nor on a GPU with an ``error`` or with its ``processes`` unread.
        """
        if at_ns <= self._last_ns:
            if self._last_ns - at_ns > CLOCK_SET_BACK_NS:
                # Times before and after cannot be compared: better to know nothing.
                self._clear()
            return
        span_ms = 0
        if self._last_ns:
            span_ms = min(self._span_limit_ms, (at_ns - self._last_ns) // 1_000_000)
        self._last_ns = at_ns
        now = _Round(
            at_ns,
            span_ms,
            somebody_logged_in,
            {gpu.id: gpu for gpu in gpus},
            Counter([client.gpu_id for client in clients]),
            frozenset(g.id for g in gpus if _is_readable(g)).difference(unread_lists),
        )
        seen: set[ClientKey] = set()
        live = self._live
        now_starts: dict[int, int | None] = {}
        for client in clients:
            pid = client.pid
            start = starts.get(pid)
            if start is None:
                # Its last thread may be gone from /proc while the driver still lists it.
                start = self._starts.get(pid)
            now_starts[pid] = start
            key = (client.gpu_id, pid, start)
            if key in seen:
                continue
            seen.add(key)
            series = live.get(key) or self._series(at_ns, key)
            if series is None:
                continue
            if series.binary is None and pid in binaries:
                self._learn(series, key, Binary(*binaries[pid]))
            series.seen(at_ns, span_ms, client.memory_bytes, 1)
            samples = client.samples
            if samples and series.sampled(samples, at_ns, somebody_logged_in):
                continue
            self._without_sample(series, client, now)
        self._starts = now_starts
        self._whole_gpus(now, gpus, clients)
        seen.update((gpu.id, None, None) for gpu in gpus)
        self._ends(now, seen, starts)
        self._departures.look(at_ns, self._memory)
        if at_ns - self._tidied_ns > TIDY_NS:
            self._tidied_ns = at_ns
            self._successions.forget(at_ns)

    def _series(self, at_ns: int, key: ClientKey) -> Series | None:
        series = self._live.get(key)
        if series is not None:
            return series
        gpu_id, pid, start = key
        series = self._ended.pop(key, None)
        if series is not None:
            self._departures.cancel(key)
            series.again(at_ns)
            binary = self._binaries.get(key)
            if binary is not None and pid is not None:
                self._successions.began(gpu_id, binary, RunState(pid, start, at_ns))
        else:
            if len(self._live) + len(self._ended) >= MAX_SERIES:
                if not self._ended:
                    self.refused += 1
                    return None
                self._drop(next(iter(self._ended)))
            series = Series(gpu_id, pid, start, at_ns, self.windows_seconds)
        self._live[key] = series
        return series

    def _learn(self, series: Series, key: ClientKey, binary: Binary) -> None:
        """What a process runs: often known a little later than that it is there."""
        gpu_id, pid, start = key
        series.binary = binary.path
        self._binaries[key] = binary
        if pid is not None:
            self._successions.began(gpu_id, binary, RunState(pid, start, series.first_ns))

    def _drop(self, key: ClientKey) -> None:
        del self._ended[key]
        self._binaries.pop(key, None)

    @staticmethod
    def _without_sample(series: Series, client: GpuClient, now: _Round) -> None:
        """Another source's figure, or what the GPU's own says of a process; else it is unknown."""
        # With samples, sm_percent is the newest of them: perhaps minutes old.
        if not client.samples and client.sm_percent is not None:
            series.measured(client.sm_percent, now.at_ns, now.span_ms, now.login)
            return
        if now.at_ns - series.sampled_ns < QUIET_NS:
            return
        gpu = now.gpus.get(client.gpu_id)
        percent = gpu.sm_percent if gpu is not None else None
        # A GPU that is used by one process is as busy as that; an idle one has idle processes.
        if percent is not None and (now.counts[client.gpu_id] == 1 or percent < IDLE_BELOW_PERCENT):
            series.measured(percent, now.at_ns, now.span_ms, now.login)

    def _whole_gpus(self, now: _Round, gpus: Sequence[Gpu], clients: Sequence[GpuClient]) -> None:
        explained: dict[str, int | None] = {}
        for client in clients:
            sum_before = explained.get(client.gpu_id, 0)
            memory = client.memory_bytes
            told = sum_before is not None and memory is not None
            explained[client.gpu_id] = (sum_before or 0) + (memory or 0) if told else None
        parts: dict[str, list[Gpu]] = {}
        for gpu in gpus:
            if gpu.parent_id is not None:
                parts.setdefault(gpu.parent_id, []).append(gpu)
        before, self._without_client = self._without_client, set()
        memory_now: dict[str, MemoryInUse] = {}
        for gpu in gpus:
            series = self._series(now.at_ns, (gpu.id, None, None))
            if series is None:
                continue
            mine = [gpu.id, *(part.id for part in parts.get(gpu.id, ()))]
            count = sum(now.counts[each] for each in mine)
            series.seen(now.at_ns, now.span_ms, gpu.memory_used_bytes, count)
            if gpu.sm_percent is not None:
                series.measured(gpu.sm_percent, now.at_ns, now.span_ms, now.login)
            if gpu.id not in now.readable:
                continue
            if not count:
                self._without_client.add(gpu.id)
                # A process that ended within the last second explains that second's load.
                if gpu.sm_percent is not None and gpu.id in before:
                    series.without_client(gpu.sm_percent, now.span_ms)
            known = [explained.get(each, 0) for each in mine]
            used = gpu.memory_used_bytes
            unexplained = None
            if used is not None and None not in known:
                unexplained = max(0, used - sum(filter(None, known)))
            memory_now[gpu.id] = MemoryInUse(used, unexplained)
        self._memory_before, self._memory = self._memory, memory_now

    def _ends(self, now: _Round, seen: set[ClientKey], starts: Mapping[int, int]) -> None:
        at_ns = now.at_ns
        for key in self._live.keys() - seen:
            gpu_id, pid, start = key
            readable = gpu_id in now.readable
            series = self._live[key]
            if not readable and at_ns - series.last_ns <= UNSEEN_NS:
                continue
            del self._live[key]
            self._ended[key] = series
            series.end(at_ns)
            if pid is None or not readable:
                continue
            if start is not None and starts.get(pid) == start:
                continue  # It let go of the GPU and lives on.
            binary = self._binaries.get(key)
            if binary is not None:
                # When it ended is not known exactly; after a restart not even nearly.
                self._successions.ended(gpu_id, binary, pid, start, series.last_ns)
            before = self._memory_before.get(gpu_id, MemoryInUse(None, None))
            self._departures.add(
                DepartureState(
                    gpu_id, pid, start, series.binary, at_ns, series.memory_bytes, *before
                )
            )
        while self._ended:
            oldest = next(iter(self._ended))
            if at_ns - self._ended[oldest].last_ns <= self.windows_seconds[-1] * 10**9:
                break
            self._drop(oldest)

    # ------------------------------------------------------------------ what is told

    def usage(self, now_ns: int) -> tuple[Usage, ...]:
        """How each living client and each GPU was used, once for each window.

        As of the last full ten seconds, so a process is told of after its first ten. A series that
        was not seen within the shorter window is left out: nothing is known of it now.
        """
        oldest_ns = now_ns - self.windows_seconds[0] * 10**9
        found: list[Usage] = []
        for series in self._live.values():
            if series.last_ns >= oldest_ns:
                found.extend(series.usages())
        return tuple(found)

    def exited(self) -> tuple[ExitedClient, ...]:
        """Clients that ended: for an hour, or for as long as their memory is not accounted for."""
        return tuple(self._departures.facts())

    def respawns(self) -> tuple[Respawn, ...]:
        """Binaries that came to one GPU three times or more, the last time within an hour."""
        return tuple(self._successions.facts(self._last_ns))

    # ------------------------------------------------------------------ over a restart

    def export(self) -> bytes:
        """Everything as MessagePack, at most 16 MiB; what ended longest ago is left out first."""
        living = [self._live[key].state() for key in reversed(self._live)]
        ended = [self._ended[key].state() for key in reversed(self._ended)]
        state = TrackerState(
            STATE_VERSION,
            self.boot_id,
            self._last_ns,
            [*living, *ended],
            self._departures.state(),
            self._successions.state(),
        )
        encoded = msgspec.msgpack.encode(state)
        while len(encoded) > STATE_LIMIT_BYTES and state.series:
            del state.series[len(state.series) // 2 :]
            encoded = msgspec.msgpack.encode(state)
        return encoded

    def restore(self, encoded: bytes) -> bool:
        """Goes on from an exported state; False, and unchanged, when that is of another boot.

        Errors: Malformed for anything that is no exported state of this version.
        """
        if len(encoded) > STATE_LIMIT_BYTES:
            raise Malformed("the remembered use of GPUs is larger than it can be")
        try:
            state = msgspec.msgpack.decode(encoded, type=TrackerState)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Malformed(f"the remembered use of GPUs cannot be read: {error}") from error
        if state.version != STATE_VERSION:
            raise Malformed(f"the remembered use of GPUs has version {state.version}")
        if state.boot_id != self.boot_id:
            return False
        series = [Series.restored(kept, self.windows_seconds) for kept in state.series]
        if None in series or len(series) > MAX_SERIES:
            raise Malformed("the remembered use of GPUs contradicts itself")
        self._clear()
        self._last_ns = state.last_ns
        for one in reversed(series):
            if one is not None:
                where = self._ended if one.ended_ns else self._live
                where[(one.gpu_id, one.pid, one.start_time_ticks)] = one
        self._departures.restore(state.departures)
        self._successions.restore(state.lines)
        self._name_binaries(state.lines)
        return True

    def _name_binaries(self, lines: list[LineState]) -> None:
        """So that the end of a process that began before the restart is told, too."""
        for line in lines:
            binary = Binary(line.path, line.device, line.inode, line.uid)
            for run in line.runs:
                key = (line.gpu_id, run.pid, run.start_time_ticks)
                if key in self._live or key in self._ended:
                    self._binaries[key] = binary


def _is_readable(gpu: Gpu) -> bool:
    """Whether a GPU itself says that its process list was read."""
    return gpu.error is None and "processes" not in gpu.unread
