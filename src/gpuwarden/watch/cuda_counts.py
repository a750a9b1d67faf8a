"""What the CUDA layer counts since the agent's start, whatever became of the tracer since."""

from __future__ import annotations

from collections import Counter

from msgspec import Struct, field

from gpuwarden.cuda.book import CudaBook
from gpuwarden.cuda.messages import (
    ContextSeen,
    LaunchesSeen,
    LoadSeen,
    Message,
    TracerState,
)
from gpuwarden.model import GpuModule, ModuleLoad
from gpuwarden.outputs.cuda_state import CudaState, Standing
from gpuwarden.probes.cuda.records import CallCounters
from gpuwarden.rules.gpu_code import HASH_LIKE

REASONS_LIMIT = 16
REASON_LIMIT = 80
OTHER = "other"
COUNTED_LIMIT = 1 << 17

Module = tuple[int, int, str]
"""(pid, start in ticks, digest)."""


class CudaCounts(Struct):
    """One thread counts."""

    loads: int = 0
    context_calls: int = 0
    launches: int = 0
    graph_launches: int = 0
    missed: Counter[str] = field(default_factory=Counter)
    modules: Counter[Standing] = field(default_factory=Counter)
    before: CallCounters = CallCounters()
    """Of tracers that are gone."""
    dropped_before: int = 0
    tracer: TracerState = TracerState()
    _counted: dict[Module, None] = field(default_factory=dict)

    def take(self, message: Message) -> None:
        """Counts what the tracer said."""
        if isinstance(message, ContextSeen):
            self.context_calls += 1
        elif isinstance(message, LoadSeen):
            self.loads += 1
            if message.load.missed:
                self._missed(message.load.missed)
        elif isinstance(message, LaunchesSeen):
            self.launches += sum(one.launches for one in message.window.kernels)
            self.graph_launches += message.window.graph_launches

    def _missed(self, reason: str) -> None:
        reason = reason[:REASON_LIMIT]
        if reason not in self.missed and len(self.missed) >= REASONS_LIMIT:
            reason = OTHER
        self.missed[reason] += 1

    def state(self, state: TracerState) -> None:
        """What the tracer says of itself; one that was started anew counts from zero."""
        old, new = self.tracer.counters, state.counters
        if new.loads < old.loads or new.copied_bytes < old.copied_bytes:
            self.before = _sum(self.before, old)
            self.dropped_before += self.tracer.dropped_messages
        self.tracer = state

    @property
    def calls(self) -> CallCounters:
        """The probes' counters of all tracers together."""
        return _sum(self.before, self.tracer.counters)

    @property
    def dropped(self) -> int:
        """Calls and messages of which not even the event found room."""
        return self.calls.dropped + self.dropped_before + self.tracer.dropped_messages

    def judged(self, load: ModuleLoad, profile: str, told: tuple[GpuModule, ...]) -> None:
        """Counts the modules of a load by their standing, each of a process once."""
        hash_like = {one.digest for one in told if one.answer == HASH_LIKE}
        for module in load.modules:
            name = (load.pid, load.start_time_ticks, module.digest)
            if name in self._counted:
                continue
            self._counted[name] = None
            if len(self._counted) > COUNTED_LIMIT:
                del self._counted[next(iter(self._counted))]
            found = next((one for one in module.standings if one.profile == profile), None)
            standing: Standing = "not-compared"
            if module.digest in hash_like:
                standing = "hash-like"
            elif found is not None and not found.not_compared:
                standing = found.standing
            self.modules[standing] += 1


def _sum(one: CallCounters, other: CallCounters) -> CallCounters:
    return CallCounters(
        **{name: getattr(one, name) + getattr(other, name) for name in one.__struct_fields__}
    )


def cuda_state(
    counts: CudaCounts, book: CudaBook, *, restarts: int, error: str, unfit: tuple[int, int]
) -> CudaState:
    """One frozen value; ``unfit``: how many processes are compared, and how many do not fit."""
    tracer = counts.tracer
    used = [one for key in book.known() if (one := book.used(key)) is not None and not one.ended]
    mapping = [one for one in used if one.libraries]
    libraries = book.libraries.values()
    return CudaState(
        watching=not error and not (tracer.problems and not tracer.attached),
        problems=tuple(filter(None, (error, *tracer.problems, *tracer.unread))),
        libraries=len(book.libraries),
        entry_points=sum(len(one.probed) for one in libraries),
        dear_entry_points=sum(len(one.at_start) for one in libraries),
        processes=len(mapping),
        late_processes=sum(one.before for one in mapping),
        contexts=sum(c.ended_ns is None for one in used for c in one.contexts.values()),
        context_calls=counts.context_calls,
        loads=counts.loads,
        modules=dict(counts.modules),
        missed=dict(counts.missed),
        captured_bytes=counts.calls.copied_bytes,
        dropped=counts.dropped,
        stops=counts.calls.stops,
        launches=counts.launches,
        graph_launches=counts.graph_launches,
        compared_processes=unfit[0],
        unfit_processes=unfit[1],
        tracer_restarts=restarts,
        tracer_cpu_seconds=tracer.cpu_seconds or None,
        tracer_resident_bytes=tracer.resident_bytes or None,
    )
