"""The CUDA side of the agent: the tracer's child, what it told, and what of it is judged."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from gpuwarden.cuda.book import CudaBook
from gpuwarden.cuda.child import TracerChild
from gpuwarden.cuda.fits import Digests, Fits
from gpuwarden.cuda.messages import (
    ContextSeen,
    LaunchesSeen,
    LoadSeen,
    Message,
    ProcessMaps,
    TracerState,
)
from gpuwarden.cuda.options import TracerOptions
from gpuwarden.finding import Finding
from gpuwarden.model import CudaProcess, GpuModule, ModuleLoad, Process, Snapshot
from gpuwarden.node import Node
from gpuwarden.outputs.cuda_state import CudaState
from gpuwarden.policy import Policy
from gpuwarden.probes.events import ProcessIdentity
from gpuwarden.rules.cuda_processes import declared
from gpuwarden.rules.gpu_code import profile_of
from gpuwarden.store_modules import Whose
from gpuwarden.watch.accused import Accused
from gpuwarden.watch.cuda_counts import CudaCounts, cuda_state
from gpuwarden.watch.cuda_facts import NamedKey, StartKey
from gpuwarden.watch.identity import Identities
from gpuwarden.watch.judgement import Judged, Memory
from gpuwarden.watch.library_less import LibraryLess
from gpuwarden.watch.open_watch import OpenWatch
from gpuwarden.watch.waiting import HELD_SECONDS

if TYPE_CHECKING:
    from gpuwarden.watch.agent import Agent

FORGOTTEN_SECONDS = 30.0
"""How long an ended process is kept for what comes late."""
UNTOLD_LIMIT = 1 << 14
LIFE_ROUNDS = 5
LEAST_SECONDS = 0.05
SHARE = 10.0
"""A judgement of a process is followed by so many times its own length without one."""
LOOKS_LIMIT = 256
"""Processes that are looked at at once; a round looks at all."""
SIBLINGS_LIMIT = 16

TellEvent = Callable[[Message, str], None]
"""Takes a message of a process and the name of its profile, empty for none."""


Sighted = Callable[[ModuleLoad, Whose], None]


class _Judged(Struct):
    """What the last judgement of a process made of it."""

    modules: tuple[GpuModule, ...] = ()
    process: CudaProcess | None = None
    whose: Whose = Whose()
    not_before: float = 0.0
    """When it may be judged again."""
    told: int = 0
    """Loads and contexts that were told as uses of a finding."""

    @property
    def profile(self) -> str:
        """The code profile of its workload; empty for none."""
        return self.whose.profile


class CudaSide:
    """Feeds an ``OpenWatch`` with what processes do by CUDA; one thread; waits for nothing."""

    def __init__(self, options: TracerOptions, policy: Policy) -> None:
        self.child = TracerChild(options, policy)
        self.book = CudaBook()
        self.counts = CudaCounts()
        self.policy = policy
        self._fits = Fits(policy)
        self.tell: TellEvent | None = None
        """Takes each event once its process is judged, or two seconds after it."""
        self.sighted: Sighted | None = None
        """Takes each load at that time, with whose it was."""
        self._untold: deque[tuple[float, NamedKey, Message]] = deque()
        self._judged: dict[NamedKey, _Judged] = {}
        self._names: dict[StartKey, NamedKey] = {}
        self._ended: deque[tuple[float, NamedKey]] = deque()
        self._later: dict[StartKey, float] = {}
        """Processes with news that were judged a moment ago, and when they may be again."""
        self.untold_dropped = 0
        self._library_less = LibraryLess()
        self._accused = Accused()
        self._starts = self._rounds = 0

    @property
    def launch_problems(self) -> tuple[str, ...]:
        """Launch profiles that the policy names and that could not be read."""
        return self._fits.problems

    @property
    def state(self) -> TracerState:
        """What the tracer said of itself last."""
        return self.counts.tracer

    def metrics(self) -> CudaState:
        """How the layer fares, for the metrics."""
        return cuda_state(
            self.counts,
            self.book,
            restarts=max(self.child.starts - 1, 0),
            error=self.child.error,
            unfit=self._fits.counts,
        )

    def attend(self, watch: OpenWatch, identities: Identities) -> None:
        """Whom to tell that a process is to be judged."""
        self._watch, self._identities = watch, identities
        watch.cuda = self

    # ---------------------------------------------------------------- what was told

    def take(self, opened: Collection[int]) -> None:
        """Takes what the tracer said; processes with news are judged soon.

        ``opened``: processes that have opened a device since this was called last.
        """
        self.child.look(tuple(sorted(opened)[:LOOKS_LIMIT]))
        for message in self.child.take():
            if isinstance(message, TracerState):
                self.counts.state(message)
                continue
            self.counts.take(message)
            key = self.book.take(message)
            if isinstance(message, LaunchesSeen):
                key = key if self._fits_anew(message) else None
            if key is not None:
                self._changed(key)
            self._keep_event(message)
        now = time.monotonic()
        for start in [one for one, due in self._later.items() if due <= now]:
            del self._later[start]
            self._watch.enqueue(start)
        self._tell_settled()

    def seconds_to_wait(self) -> float | None:
        """Until something that waits is due; None when nothing does."""
        due = list(self._later.values())
        if self._untold:
            due.append(self._untold[0][0] + HELD_SECONDS)
        return None if not due else max(min(due) - time.monotonic(), 0.0)

    def _changed(self, key: NamedKey) -> None:
        used = self.book.used(key)
        if used is not None and used.identity is not None:
            start = (key[0], used.identity.start_time_ns)
            self._names[start] = key
            judged = self._judged.get(key)
            if judged is not None and time.monotonic() < judged.not_before:
                self._later[start] = judged.not_before
            else:
                self._watch.enqueue(start)

    def _fits_anew(self, message: LaunchesSeen) -> bool:
        """Compares a window with the launch profile of its process; whether that says else now."""
        window = message.window
        key = (window.pid, window.start_time_ticks)
        judged = self._judged.get(key)
        if judged is None or not judged.profile:
            return False
        return self._fits.add(key, judged.profile, window, partial(self.digests_of, key))

    def digests_of(self, key: NamedKey) -> Digests:
        """Modules that the process loaded and its profile does not object to."""
        used, judged = self.book.used(key), self._judged.get(key)
        if used is None or judged is None:
            return Digests()
        standings = {
            module.digest: one.standing
            for module in used.modules.values()
            for one in module.standings
            if one.profile == judged.profile and not one.not_compared
        }
        return Digests(
            frozenset(digest for digest, one in standings.items() if one != "unknown"),
            frozenset(digest for digest, one in standings.items() if one == "jit"),
        )

    def _keep_event(self, message: Message) -> None:
        wanted = self.tell is not None or isinstance(message, LoadSeen)
        if not wanted or isinstance(message, TracerState):
            return
        if len(self._untold) >= UNTOLD_LIMIT:
            self._untold.popleft()
            self.untold_dropped += 1
        self._untold.append((time.monotonic(), key_of(message), message))

    def _tell_settled(self) -> None:
        """Tells events in order; one whose process is not judged yet holds those after it."""
        now = time.monotonic()
        while self._untold:
            since, key, message = self._untold[0]
            used = self.book.used(key)
            identity = None if used is None else used.identity
            waits = identity is not None and self._watch.is_open((key[0], identity.start_time_ns))
            if waits and now - since < HELD_SECONDS:
                return
            self._untold.popleft()
            judged = self._judged.get(key) or _Judged()
            if self.tell is not None:
                self.tell(message, judged.profile)
            if isinstance(message, LoadSeen):
                self.counts.judged(message.load, judged.profile, judged.modules)
                if self.sighted is not None:
                    self.sighted(message.load, judged.whose)

    # ---------------------------------------------------------------- what is judged

    def identity(self, key: StartKey) -> ProcessIdentity | None:
        """Who called the driver library; None for nobody."""
        named = self._names.get(key)
        used = None if named is None else self.book.used(named)
        if used is None or used.identity is None:
            return self._library_less.identity(key, self._watch)
        return used.identity

    def wants(self, finding: Finding, process: Process) -> bool:
        """Whether a finding is this process's, and not told by a verdict already."""
        subject = finding.subject
        is_its = subject.pid in (None, process.pid)
        return is_its and not self._accused.has_told(finding)

    def judged(self, judged: Judged) -> None:
        """Takes the verdicts of the whole node: who is accused by one is judged anew."""
        for key in self._accused.judged(judged.kin):
            self._changed(key)

    def added(self, snapshot: Snapshot, process: Process) -> Snapshot:
        """The snapshot with what the process did by CUDA, and those in its container."""
        key = (process.pid, process.start_time_ticks)
        used = self.book.used(key)
        known = self.book.process(key, has_descriptors=any(snapshot.opens))
        if used is None or known is None:
            return self._library_less.added(snapshot, process, self._watch)
        # Imported here: what judges GPU code is much, and on most nodes nobody loads any.
        from gpuwarden.cuda.judged_loads import counted, gpu_modules

        begun = time.monotonic()
        node = Node(snapshot)
        profile = profile_of(node, self.policy, process) or ""
        claim, container = declared(node, self.policy, process), node.container_of(process)
        judged = self._judged.setdefault(key, _Judged())
        judged.whose = Whose(
            process=process,
            image="" if container is None else container.image or "",
            workload="" if claim is None else claim.name,
            profile=profile,
        )
        loads = tuple(used.loads.values())
        judged.modules = gpu_modules(process, loads, profile)
        counts = counted(loads, profile)
        judged.process = replace(
            known,
            known_loads=counts.modules - counts.unknown - counts.not_compared,
            fit=self._fits.of(key, profile, used.windows, partial(self.digests_of, key)),
        )
        siblings = list(self._siblings(process))
        # Every module is one more to be judged with all others: a burst is judged together.
        now = time.monotonic()
        judged.not_before = now + max(LEAST_SECONDS, SHARE * (now - begun))
        return replace(
            snapshot,
            cuda=(judged.process, *(fact for fact, _ in siblings)),
            modules=judged.modules,
            processes=(*snapshot.processes, *(one for _, one in siblings)),
        )

    def _siblings(self, process: Process) -> Iterator[tuple[CudaProcess, Process]]:
        """Other processes of its container that use CUDA."""
        placement = process.cgroup
        container = None if placement is None else placement.container_id
        if container is None:
            return
        found = 0
        for key in self.book.known():
            used = self.book.used(key)
            if key[0] == process.pid or used is None or used.identity is None or used.ended:
                continue
            other = self._identities.process(used.identity)
            if other.cgroup is None or other.cgroup.container_id != container:
                continue
            fact = self.book.process(key)
            if fact is not None and (fact.contexts or fact.loads):
                yield fact, other
                found += 1
            if found >= SIBLINGS_LIMIT:
                return

    def modules(self, key: NamedKey) -> tuple[GpuModule, ...]:
        """What a process loaded that is not simply known, as it was last judged."""
        judged = self._judged.get(key)
        return () if judged is None else judged.modules

    def whose(self, key: NamedKey) -> Whose:
        """Whose a process is, as it was last judged; its ``profile`` is empty for none."""
        judged = self._judged.get(key)
        return Whose() if judged is None else judged.whose

    def untold(self, key: StartKey) -> int:
        """Loads and contexts since this was asked last."""
        named = self._names.get(key)
        used = None if named is None else self.book.used(named)
        judged = None if named is None else self._judged.get(named)
        if used is None or judged is None:
            return 0
        total = used.load_count + len(used.contexts)
        more, judged.told = total - judged.told, total
        return max(more, 0)

    def calling(self) -> Iterable[NamedKey]:
        """Processes that are there and use CUDA: what was found of them holds."""
        for key in self.book.known():
            used = self.book.used(key)
            if used is not None and not used.ended:
                yield key
        yield from self._library_less.named()

    def remembered(self, memory: Memory) -> Memory:
        """What is known now, for a judgement of the whole node."""
        processes: list[CudaProcess] = []
        modules: list[GpuModule] = []
        for key in self.calling():
            fact = self.fact(key)
            modules += self.modules(key)
            processes += () if fact is None else (fact,)
        return replace(memory, cuda=tuple(processes), modules=tuple(modules))

    def fact(self, key: NamedKey) -> CudaProcess | None:
        """What is known of a process now, with what its last judgement made of it."""
        judged, fact = self._judged.get(key), self.book.process(key)
        if fact is None or judged is None or judged.process is None:
            return fact
        return replace(fact, known_loads=judged.process.known_loads, fit=judged.process.fit)

    # ---------------------------------------------------------------- rounds

    def round(self, holders: Iterable[NamedKey]) -> None:
        """Once a second: who holds a device, and who has ended."""
        self.child.holders(tuple(sorted(set(holders))))
        holding = self._watch.book.holding()
        for start in self._library_less.look(self.state.without_library, holding):
            self._watch.enqueue(start)
        now = time.monotonic()
        if self.child.starts != self._starts:
            # What one tracer attached to ended with it.
            self._starts = self.child.starts
            self.book.libraries.clear()
        self._rounds += 1
        waiting = {key for _, key in self._ended}
        for key in self.book.known():
            used = self.book.used(key)
            if used is None or key in waiting:
                continue
            if self._rounds % LIFE_ROUNDS == 0 and not used.ended:
                # A tracer tells no end of those that ended before it began.
                used.ended = not self._identities.is_alive(key)
            if used.ended:
                self._ended.append((now, key))
        while self._ended and now - self._ended[0][0] >= FORGOTTEN_SECONDS:
            _, key = self._ended.popleft()
            used = self.book.used(key)
            if used is not None and used.identity is not None:
                self._names.pop((key[0], used.identity.start_time_ns), None)
            self.book.forget(key)
            self._judged.pop(key, None)
            self._fits.forget(key)

    def reload(self, policy: Policy) -> None:
        """Another policy: baselines and the ways of capture are those of the tracer's start."""
        self.policy = policy
        self._fits = Fits(policy)
        self.child.restart(policy)


def started(agent: Agent, stack: ExitStack) -> CudaSide:
    """The CUDA side of an agent, its tracer forked."""
    side = CudaSide(TracerOptions(root=agent.options.root), agent.policy)
    side.child.start()
    stack.callback(side.child.stop)
    return side


def key_of(message: Message) -> NamedKey:
    """The process that a message is about; (0, 0) for none."""
    if isinstance(message, LoadSeen):
        return message.load.pid, message.load.start_time_ticks
    if isinstance(message, ContextSeen):
        return message.call.process.pid, message.call.process.start_time_ticks
    if isinstance(message, LaunchesSeen):
        return message.window.pid, message.window.start_time_ticks
    if isinstance(message, ProcessMaps):
        return message.pid, message.start_time_ticks
    return 0, 0
