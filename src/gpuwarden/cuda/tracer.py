"""The tracer: one process that finds driver libraries, probes them and tells what was called.

It is a child of the agent, so that a flood of modules does not keep device opens waiting. Before
the first driver library is found nothing is loaded into the kernel and no other child is made. The
machine's own library counts as found when it is installed, or its kernel driver is there.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import ExitStack

from msgspec import Struct
from msgspec.structs import replace

from gpuwarden.cuda.guardian import Guardian, sweep
from gpuwarden.cuda.installed import InstalledLibraries, has_kernel_driver
from gpuwarden.cuda.libraries import Libraries
from gpuwarden.cuda.loads import Loads
from gpuwarden.cuda.messages import (
    ContextSeen,
    Holders,
    LaunchesSeen,
    LibraryGone,
    LibrarySeen,
    LoadCame,
    LoadSeen,
    Look,
    ProcessEnded,
    ProcessMaps,
    Request,
    TracerState,
)
from gpuwarden.cuda.options import TracerOptions
from gpuwarden.cuda.traced import Key, Processes
from gpuwarden.cuda.windows import WINDOW_SECONDS, LaunchWindows
from gpuwarden.errors import GpuwardenError
from gpuwarden.host import Host
from gpuwarden.model import CudaLibrary
from gpuwarden.policy import Policy
from gpuwarden.probes import pinning
from gpuwarden.probes.cuda.calls import CallSettings, CudaCalls
from gpuwarden.probes.cuda.launches import LaunchProbe
from gpuwarden.probes.cuda.library import FoundLibrary, LibraryKey
from gpuwarden.probes.cuda.records import (
    AttachedLibrary,
    CallCounters,
    CapturedLoad,
    ContextCall,
    HandleNamed,
    LoadReturn,
)
from gpuwarden.probes.events import ticks
from gpuwarden.sensors.process import stat_lines

GUARDED_SECONDS = 0.1
INSTALLED_WINDOWS = 30
UNREAD_TOLD = 16
RESULTS_LIMIT = 4096
"""Of loads that are still being examined."""
RETRY_SECONDS = 30.0
"""Until probes that could not be loaded are tried again."""

Tell = Callable[[Struct], None]


class Tracer:
    """``run`` returns when the other end of its control is gone. Takes what the probes tell."""

    def __init__(self, options: TracerOptions, policy: Policy, tell: Tell) -> None:
        self._options = options
        self._policy = policy
        self._tell = tell
        self._host = Host(options.root)
        self._stack = ExitStack()
        self._poll = select.epoll()
        self._libraries = Libraries(self._host)
        self._installed = InstalledLibraries(self._host)
        self._calls: CudaCalls | None = None
        self._launches: LaunchProbe | None = None
        self._loads: Loads | None = None
        self._guardian: Guardian | None = None
        self._processes = Processes()
        self._attached: dict[LibraryKey, FoundLibrary] = {}
        self._mapping: dict[tuple[int, int], tuple[LibraryKey, ...]] = {}
        self._holders: tuple[tuple[int, int], ...] = ()
        self._problems: dict[str, str] = {}
        self._unread: tuple[str, ...] = ()
        self._results: OrderedDict[int, LoadReturn] = OrderedDict()
        self._retry_at = 0.0
        self._launch_windows: LaunchWindows | None = None
        self._dying: set[Key] = set()
        self._windows = 0

    # ---------------------------------------------------------------- the loop

    def run(self, receive: Callable[[], list[Request] | None], control: int) -> None:
        """``receive`` gives requests, None at the end; ``control`` is readable when there are."""
        with self._stack:
            _continue_the_stopped()
            self._stack.callback(self._libraries.close)
            self._stack.callback(self._installed.close)
            if has_kernel_driver(self._host):
                # Whoever maps the first library is not to call it before this is done.
                self._load()
            self._look_at_installed()
            self._stack.callback(self._poll.close)
            self._watch(control)
            self._watch(self._libraries.fileno())
            self._look(None)
            due = time.monotonic()
            while True:
                patience = max(min(due - time.monotonic(), self._patience), 0.0)
                ready = {descriptor for descriptor, _ in self._poll.poll(patience)}
                if control in ready:
                    requests = receive()
                    if requests is None:
                        return
                    for request in requests:
                        self._asked(request)
                self._take(ready)
                if time.monotonic() >= due:
                    self._second()
                    due = max(due + WINDOW_SECONDS, time.monotonic())

    def _watch(self, descriptor: int | None) -> None:
        if descriptor is not None:
            self._poll.register(descriptor, select.EPOLLIN)

    def _asked(self, request: Request) -> None:
        if isinstance(request, Look):
            self._look(request.pids)
        elif isinstance(request, Holders):
            self._holders = request.processes

    def _take(self, ready: Iterable[int]) -> None:
        if self._libraries.fileno() in ready:
            self._look(None)
        if self._calls is not None:
            self._calls.poll()
        if self._loads is not None:
            self._examined(self._loads)
        if self._guardian is not None:
            self._guardian.look()

    @property
    def _patience(self) -> float:
        """A guardian lets nobody be stopped while we do not show ourselves."""
        return WINDOW_SECONDS if self._guardian is None else GUARDED_SECONDS

    def _second(self) -> None:
        self._look(None)
        self._windows += 1
        if self._windows % INSTALLED_WINDOWS == 0:
            self._look_at_installed()
        self._window()
        self._bury()
        if self._loads is not None:
            self._note("modules", "; ".join(self._loads.problems))
        self._tell(self._state())

    # ---------------------------------------------------------------- libraries

    def _look(self, pids: Iterable[int] | None) -> None:
        news = self._libraries.look(pids)
        found = set()
        for one in news.found:
            if one.key not in self._attached:
                found.add(one.key)
            self._attach(one)
        for key in news.gone:
            if key not in self._installed.found:
                self._detach(key)
        self._unread = tuple(news.problems[:UNREAD_TOLD])
        for process, keys in news.mapped.items():
            if self._mapping.get(process) == keys:
                continue
            before = not found.isdisjoint(keys)
            self._mapping[process] = keys
            self._tell(
                ProcessMaps(
                    pid=process[0],
                    start_time_ticks=process[1],
                    libraries=keys,
                    before=before,
                    at_ns=time.time_ns(),
                )
            )

    def _look_at_installed(self) -> None:
        """Attaches to this machine's own libraries; an upgrade makes them other ones."""
        new, gone = self._installed.look()
        for one in new:
            self._attach(one)
        mapped = {key for keys in self._mapping.values() for key in keys}
        for key in gone:
            if key not in mapped:
                self._detach(key)

    def _attach(self, library: FoundLibrary) -> None:
        self._attached[library.key] = library
        problems = list(library.problems)
        probed: list[str] = []
        at_start: list[str] = []
        if self._load():
            for probe in (self._calls, self._launches):
                if probe is None:
                    continue
                done = _attached(probe, library)
                probed += done.probed
                at_start += done.at_start
                problems += done.problems
        problems += self._problems.values()
        major, minor, inode = library.key
        self._tell(
            LibrarySeen(
                key=library.key,
                library=CudaLibrary(
                    device=f"{major}:{minor}",
                    inode=inode,
                    path=library.path,
                    build_id=library.build_id,
                    soname=library.soname,
                    probed=tuple(probed),
                    at_start=tuple(at_start),
                    problems=tuple(problems),
                ),
            )
        )

    def _detach(self, key: LibraryKey) -> None:
        if self._attached.pop(key, None) is None:
            return
        for probe in (self._calls, self._launches):
            if probe is not None:
                probe.detach(key)
        self._tell(LibraryGone(key=key))

    def _load(self) -> bool:
        """Loads the probes, if they are not; False when that is not possible now."""
        if self._calls is not None:
            return True
        if time.monotonic() < self._retry_at:
            return False
        # The children that parse are forked first: they are to have no descriptor of a probe.
        loads = Loads(self._host, self._policy)
        try:
            with ExitStack() as stack:
                stack.callback(loads.close)
                calls = stack.enter_context(CudaCalls(_settings(self._policy), self))
                launches = None
                if self._options.launches:
                    launches = stack.enter_context(LaunchProbe())
                guardian = self._guarded(calls, stack)
                self._stack.push(stack.pop_all())
        except GpuwardenError as error:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            self._note("probes", f"calls of the driver library are not seen: {error}")
            return False
        self._note("probes", "")
        self._calls, self._launches, self._loads = calls, launches, loads
        self._guardian = guardian
        if launches is not None:
            self._launch_windows = LaunchWindows(launches, self._processes, self._options)
        self._watch(calls.fileno())
        self._watch(loads.fileno())
        return True

    def _guarded(self, calls: CudaCalls, stack: ExitStack) -> Guardian | None:
        """Who continues the stopped whatever becomes of us; without, nobody is stopped."""
        if not self._policy.capture.may_stop:
            return None
        try:
            return stack.enter_context(Guardian(calls.stopped_map, calls.stops_until))
        except GpuwardenError as error:
            self._note("guardian", str(error))
            return None

    def _note(self, what: str, problem: str) -> None:
        if problem:
            self._problems[what] = problem
        else:
            self._problems.pop(what, None)

    # ---------------------------------------------------------------- what the probes tell

    def context(self, call: ContextCall) -> None:
        self._tell(ContextSeen(call=call))

    def load(self, load: CapturedLoad) -> None:
        if self._loads is None:
            if load.descriptor is not None:
                os.close(load.descriptor)
            return
        self._loads.submit(load)

    def returned(self, load: LoadReturn) -> None:
        self._processes.handles((load.pid, load.start_time_ns)).came(load.number, load.handle)
        self._results[load.number] = load
        if len(self._results) > RESULTS_LIMIT:
            self._results.popitem(last=False)
        self._tell(
            LoadCame(
                pid=load.pid,
                start_time_ns=load.start_time_ns,
                number=load.number,
                handle=load.handle,
                result=load.result,
            )
        )

    def named(self, handle: HandleNamed) -> None:
        self._processes.handles((handle.pid, handle.start_time_ns)).named(handle)

    def _examined(self, loads: Loads) -> None:
        for process, seen in loads.take():
            load = seen
            key = (process.pid, process.start_time_ns)
            self._processes.handles(key).examined(load.number, load.modules)
            came = self._results.pop(load.number, None)
            if came is not None:
                load = replace(load, handle=came.handle, result=came.result)
            self._tell(LoadSeen(process=process, load=load))

    # ---------------------------------------------------------------- once a second

    def _window(self) -> None:
        if self._guardian is not None:
            self._note("guardian", self._guardian.problem)
        if self._launch_windows is not None:
            for key, window in self._launch_windows.turn():
                self._tell(LaunchesSeen(start_time_ns=key[1], window=window))
            self._note("launches", self._launch_windows.problem)

    def _bury(self) -> None:
        """Notes processes that have ended; their last window is told before they are forgotten."""
        ended = {
            key for key in self._processes.known() if not self._is_there(key[0], ticks(key[1]))
        }
        for key in ended & self._dying:
            self._processes.forget(key)
            self._forget(key)
        self._dying = ended - self._dying
        for process in list(self._mapping):
            if not self._is_there(*process):
                del self._mapping[process]
                self._libraries.ended(process[0])
                self._tell(ProcessEnded(pid=process[0], start_time_ticks=process[1]))

    def _forget(self, key: Key) -> None:
        for probe in (self._calls, self._launches):
            if probe is not None:
                probe.forget(*key)

    def _is_there(self, pid: int, start_time_ticks: int) -> bool:
        line = stat_lines.read_one(self._host, pid)
        return line is not None and line.start_time_ticks == start_time_ticks

    def _state(self) -> TracerState:
        usage = os.times()
        without: tuple[tuple[int, int, tuple[str, ...]], ...] = ()
        with contextlib.suppress(GpuwardenError):
            without = tuple(self._libraries.without_library(self._holders))
        return TracerState(
            attached=self._calls is not None,
            counters=CallCounters() if self._calls is None else self._calls.counters(),
            crowded_out=self._processes.crowded_out,
            problems=tuple(self._problems.values()),
            unread=self._unread,
            without_library=without,
            cpu_seconds=usage.user + usage.system,
            resident_bytes=_resident_bytes(),
        )


def _attached(probe: CudaCalls | LaunchProbe, library: FoundLibrary) -> AttachedLibrary:
    try:
        return probe.attach(library)
    except GpuwardenError as error:
        return AttachedLibrary(library.key, (), (), (f"not attached: {error}",))
    except OSError as error:
        return AttachedLibrary(library.key, (), (), (f"not attached: {error.strerror}",))


def _continue_the_stopped() -> None:
    """Continues whom an earlier tracer left stopped, if both it and its guardian were killed."""
    if os.path.isdir(pinning.DIRECTORY):
        with contextlib.suppress(GpuwardenError, OSError):
            sweep()


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _settings(policy: Policy) -> CallSettings:
    capture = policy.capture
    return CallSettings(
        ring_bytes=1 << (capture.ring_mib * (1 << 20) - 1).bit_length(),
        module_limit_bytes=capture.module_mib << 20,
        may_stop=capture.may_stop,
        wait_ms=capture.wait_ms,
    )
