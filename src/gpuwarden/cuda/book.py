"""What is known of each process's use of CUDA: the tracer's messages, put together; no I/O."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

from msgspec import Struct, field
from msgspec.structs import replace

from gpuwarden.cuda.messages import (
    ContextSeen,
    LaunchesSeen,
    LibraryGone,
    LibrarySeen,
    LoadCame,
    LoadSeen,
    Message,
    ProcessEnded,
    ProcessMaps,
)
from gpuwarden.model import (
    CudaContext,
    CudaLibrary,
    CudaProcess,
    KernelUse,
    LaunchWindow,
    LoadedModule,
    ModuleLoad,
)
from gpuwarden.probes.cuda.functions import slot_name
from gpuwarden.probes.cuda.library import LibraryKey
from gpuwarden.probes.cuda.records import ContextCall
from gpuwarden.probes.events import ProcessIdentity, ticks

PROCESSES_LIMIT = 4096
CONTEXTS_LIMIT = 256
LOADS_LIMIT = 4096
"""Of one process that are kept whole; all are counted."""
MODULES_LIMIT = 8192
WINDOWS_LIMIT = 120
KERNELS_LIMIT = 2048
KERNELS_TOLD = 32
REASONS_LIMIT, REASON_LIMIT = 8, 160
OTHER = "for other reasons"

Key = tuple[int, int]
"""(pid, start time in ticks), as findings name a process."""

ENUMERATION = slot_name("CUDART_INTERFACE", 2)
"""Runtimes call it for each device while they count them: no proof of a context."""
GRAPHS = "kernels inside CUDA graphs: a graph is launched as one"
RAW = "calls that do not go through a driver library (ioctls on the device nodes)"
BEFORE = (
    "it had the driver library before that was probed: contexts and modules of that time are not "
    "known; a look at its memory finds modules that are still there"
)


class Used(Struct):
    """One process."""

    identity: ProcessIdentity | None = None
    libraries: tuple[LibraryKey, ...] = ()
    seen_since_ns: int | None = None
    before: bool = False
    contexts: OrderedDict[tuple[str, int], CudaContext] = field(default_factory=OrderedDict)
    retained: dict[int, int] = {}
    """Device → how often its primary context is retained."""
    loads: OrderedDict[int, ModuleLoad] = field(default_factory=OrderedDict)
    modules: OrderedDict[str, LoadedModule] = field(default_factory=OrderedDict)
    """By digest, each once."""
    load_count: int = 0
    missed: dict[str, int] = {}
    kernels: dict[tuple[str, str], int] = {}
    launches: int = 0
    graph_launches: int = 0
    windows: deque[LaunchWindow] = field(default_factory=lambda: deque(maxlen=WINDOWS_LIMIT))
    ended: bool = False


class CudaBook:
    """Bounded: the process that was heard of longest ago makes room, ended ones first."""

    def __init__(self) -> None:
        self._used: OrderedDict[Key, Used] = OrderedDict()
        self.libraries: dict[LibraryKey, CudaLibrary] = {}
        self.crowded_out = 0
        self.missed = 0
        """Loads that the driver may have taken and whose bytes, or some of them, are not known."""

    def take(self, message: Message) -> Key | None:
        """Takes what the tracer said; gives the process of which something new is known."""
        if isinstance(message, LoadSeen):
            return self._loaded(message)
        if isinstance(message, ContextSeen):
            return self._context(message.call)
        if isinstance(message, LaunchesSeen):
            return self._launched(message)
        if isinstance(message, LoadCame):
            return self._came(message)
        if isinstance(message, ProcessMaps):
            used = self._of((message.pid, message.start_time_ticks))
            used.libraries = message.libraries
            used.before |= message.before
            if used.seen_since_ns is None:
                used.seen_since_ns = message.at_ns
        elif isinstance(message, ProcessEnded):
            known = self._used.get((message.pid, message.start_time_ticks))
            if known is not None:
                known.ended = True
        elif isinstance(message, LibrarySeen):
            self.libraries[message.key] = message.library
        elif isinstance(message, LibraryGone):
            self.libraries.pop(message.key, None)
        return None

    def _of(self, key: Key) -> Used:
        used = self._used.get(key)
        if used is None:
            used = self._used[key] = Used(missed={}, kernels={}, retained={})
            if len(self._used) > PROCESSES_LIMIT:
                oldest = next((one for one, it in self._used.items() if it.ended), None)
                self._used.pop(next(iter(self._used)) if oldest is None else oldest)
                self.crowded_out += 1
        self._used.move_to_end(key)
        return used

    # ---------------------------------------------------------------- what was called

    def _loaded(self, message: LoadSeen) -> Key:
        load = message.load
        key = (load.pid, load.start_time_ticks)
        used = self._of(key)
        used.identity = message.process
        used.load_count += 1
        if _missed_of(load) and not load.result:
            self._missed(used, load, 1)
        for module in load.modules:
            if module.digest not in used.modules and len(used.modules) < MODULES_LIMIT:
                used.modules[module.digest] = module
        used.loads[load.number] = load
        if len(used.loads) > LOADS_LIMIT:
            used.loads.popitem(last=False)
        return key

    def _came(self, message: LoadCame) -> Key | None:
        key = (message.pid, ticks(message.start_time_ns))
        used = self._used.get(key)
        load = used.loads.get(message.number) if used is not None else None
        if used is not None and load is not None:
            if message.result and _missed_of(load) and not load.result:
                # The driver did not take it: what it was does not matter.
                self._missed(used, load, -1)
            used.loads[message.number] = replace(load, handle=message.handle, result=message.result)
        return None

    def _missed(self, used: Used, load: ModuleLoad, count: int) -> None:
        reason = _missed_of(load)[:REASON_LIMIT]
        if reason not in used.missed and len(used.missed) >= REASONS_LIMIT:
            reason = OTHER
        used.missed[reason] = used.missed.get(reason, 0) + count
        if used.missed[reason] <= 0:
            del used.missed[reason]
        self.missed += count

    def _context(self, call: ContextCall) -> Key | None:
        key = (call.process.pid, call.process.start_time_ticks)
        used = self._of(key)
        used.identity = call.process
        if call.result != 0 or call.function == ENUMERATION:
            return None
        device = call.device or 0
        if call.call == "retained":
            used.retained[device] = used.retained.get(device, 0) + 1
        if call.call in ("created", "green", "retained"):
            return key if self._made(used, call) else None
        if call.call == "destroyed":
            for kind in ("created", "green"):
                self._ended(used, (kind, call.handle), call.at_ns)
        elif call.call == "reset":
            self._ended(used, ("primary", device), call.at_ns)
        elif call.call == "released" and device in used.retained:
            used.retained[device] -= 1
            if used.retained[device] <= 0:
                del used.retained[device]
                self._ended(used, ("primary", device), call.at_ns)
        return None

    def _made(self, used: Used, call: ContextCall) -> bool:
        primary = call.call == "retained"
        kind = "primary" if primary else call.call
        # A primary context is one, however often it is retained and whatever its handle then is.
        name = (kind, (call.device or 0) if primary else call.handle)
        known = used.contexts.get(name)
        if known is not None and known.ended_ns is None:
            return False
        used.contexts[name] = CudaContext(
            pid=call.process.pid,
            start_time_ticks=call.process.start_time_ticks,
            kind="primary" if primary else ("green" if call.call == "green" else "created"),
            handle=call.handle,
            device=call.device,
            made_ns=call.at_ns,
        )
        used.contexts.move_to_end(name)
        while len(used.contexts) > CONTEXTS_LIMIT:
            gone = next((n for n, c in used.contexts.items() if c.ended_ns is not None), None)
            used.contexts.pop(next(iter(used.contexts)) if gone is None else gone)
        return True

    @staticmethod
    def _ended(used: Used, name: tuple[str, int], at_ns: int) -> None:
        known = used.contexts.get(name)
        if known is not None and known.ended_ns is None:
            used.contexts[name] = replace(known, ended_ns=at_ns)

    def _launched(self, message: LaunchesSeen) -> Key:
        window = message.window
        key = (window.pid, window.start_time_ticks)
        used = self._of(key)
        for kernel in window.kernels:
            used.launches += kernel.launches
            name = (kernel.name, kernel.digest)
            if name in used.kernels or len(used.kernels) < KERNELS_LIMIT:
                used.kernels[name] = used.kernels.get(name, 0) + kernel.launches
            else:
                used.kernels["", ""] = used.kernels.get(("", ""), 0) + kernel.launches
        used.graph_launches += window.graph_launches
        used.windows.append(window)
        return key

    # ---------------------------------------------------------------- what is known

    def used(self, key: Key) -> Used | None:
        """What is known of a process."""
        return self._used.get(key)

    def known(self) -> list[Key]:
        return list(self._used)

    def process(self, key: Key, *, has_descriptors: bool | None = None) -> CudaProcess | None:
        """The process as a fact, without what its profile says of it."""
        used = self._used.get(key)
        if used is None:
            return None
        return CudaProcess(
            pid=key[0],
            start_time_ticks=key[1],
            libraries=tuple(self.libraries[k] for k in used.libraries if k in self.libraries),
            seen_since_ns=used.seen_since_ns,
            before=used.before,
            contexts=tuple(used.contexts.values()),
            loads=used.load_count,
            missed_loads=sum(used.missed.values()),
            missed=tuple(used.missed),
            kernels=tuple(_most(used.kernels)),
            launches=used.launches,
            graph_launches=used.graph_launches,
            has_descriptors=has_descriptors,
            limits=tuple(self._limits(used)),
        )

    def _limits(self, used: Used) -> Iterable[str]:
        if used.before:
            yield BEFORE
        for key in used.libraries:
            library = self.libraries.get(key)
            if library is not None:
                yield from (f"{library.path}: {problem}" for problem in library.problems[:4])
        if used.graph_launches:
            yield GRAPHS
        yield RAW

    def forget(self, key: Key) -> None:
        self._used.pop(key, None)


def _missed_of(load: ModuleLoad) -> str:
    """Why it is not known what a load was: bytes are missing, or nothing was found in them."""
    return load.missed or ("" if load.modules else "; ".join(load.problems))


def _most(kernels: dict[tuple[str, str], int]) -> Iterable[KernelUse]:
    """The most launched ones; those launched before their module was examined are of it."""
    digests: dict[str, set[str]] = {}
    for name, digest in kernels:
        if digest:
            digests.setdefault(name, set()).add(digest)
    merged: dict[tuple[str, str], int] = {}
    for (name, digest), launches in kernels.items():
        known = digests.get(name, ())
        whose = next(iter(known)) if not digest and len(known) == 1 else digest
        merged[name, whose] = merged.get((name, whose), 0) + launches
    for (name, digest), launches in sorted(merged.items(), key=lambda one: -one[1])[:KERNELS_TOLD]:
        yield KernelUse(name=name, digest=digest, launches=launches)
