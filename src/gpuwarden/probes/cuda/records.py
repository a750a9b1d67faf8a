"""What the probes of the CUDA driver library tell, decoded."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from gpuwarden.model.facts import Fact
from gpuwarden.probes.cuda.library import LibraryKey
from gpuwarden.probes.events import ProcessIdentity

ContextCallName = Literal["created", "retained", "green", "released", "reset", "destroyed"]


class ContextCall(Fact, frozen=True, kw_only=True):
    """A call about a context that returned; what failed (``result`` not 0) is told too."""

    at_ns: int
    process: ProcessIdentity
    thread_id: int
    function: str
    call: ContextCallName
    handle: int = 0
    device: int | None = None
    """CUDA ordinal; None where the call does not name one."""
    result: int = 0


class CapturedLoad(NamedTuple):
    """One load and its bytes, as far as they were copied. Who takes it closes ``descriptor``."""

    number: int
    at_ns: int
    process: ProcessIdentity
    thread_id: int
    function: str
    address: int
    """Of the image in the process; 0 for a load by name."""
    path: str | None
    """For a load by name, as the process gave it."""
    image_bytes: int | None
    captured_bytes: int
    missed: str
    """Why bytes are missing; empty if none is."""
    stopped: bool
    descriptor: int | None
    """A sealed memfd with the bytes; None when there are none."""


class LoadReturn(NamedTuple):
    """What a load came to."""

    number: int
    pid: int
    start_time_ns: int
    handle: int
    result: int


class HandleNamed(NamedTuple):
    """A handle that a kernel, a function or a module of a library was given."""

    pid: int
    start_time_ns: int
    function: str
    handle: int
    of: int
    """The module, library or kernel that it was asked of."""
    name: str
    """The kernel's; empty where the call names none."""


class CallSink(Protocol):
    """Who takes what ``CudaCalls.poll`` finds, in its order, in the thread that polls."""

    def context(self, call: ContextCall) -> None: ...
    def load(self, load: CapturedLoad) -> None: ...
    def returned(self, load: LoadReturn) -> None: ...
    def named(self, handle: HandleNamed) -> None: ...


class CallCounters(Fact, frozen=True, kw_only=True):
    """What went on since the probes were loaded."""

    loads: int = 0
    context_calls: int = 0
    names: int = 0
    copied_bytes: int = 0
    missed_loads: int = 0
    """Loads of which bytes are missing, for whatever reason."""
    dropped: int = 0
    """Calls of which not even the event found room."""
    stops: int = 0


OTHER_HANDLES = -1


class LaunchCount(NamedTuple):
    """How often a process launched a kernel, as counted in the kernel since it was probed."""

    pid: int
    start_time_ns: int
    handle: int
    """CUfunction or CUkernel; 0: a graph; ``OTHER_HANDLES``: all that found no room."""
    launches: int


class SampledLaunch(NamedTuple):
    """One launch of a sampled stretch."""

    at_ns: int
    """Boot clock."""
    pid: int
    start_time_ns: int
    thread_id: int
    handle: int
    stream: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]


class AttachedLibrary(NamedTuple):
    """What of a library is attached to."""

    key: LibraryKey
    probed: tuple[str, ...]
    at_start: tuple[str, ...]
    problems: tuple[str, ...]
