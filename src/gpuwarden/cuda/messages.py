"""What the tracer and the agent tell one another: all that passes between them."""

from __future__ import annotations

from gpuwarden.model import CudaLibrary, LaunchWindow, ModuleLoad
from gpuwarden.model.facts import Fact
from gpuwarden.probes.cuda.library import LibraryKey
from gpuwarden.probes.cuda.records import CallCounters, ContextCall
from gpuwarden.probes.events import ProcessIdentity

# ------------------------------------------------------------------ tracer → agent


class LibrarySeen(Fact, frozen=True, kw_only=True, tag="library"):
    """A driver library was found and attached to, as far as that went."""

    key: LibraryKey
    library: CudaLibrary


class LibraryGone(Fact, frozen=True, kw_only=True, tag="library gone"):
    """Nobody maps it any longer: nothing is attached to it."""

    key: LibraryKey


class ProcessMaps(Fact, frozen=True, kw_only=True, tag="process"):
    """Which driver libraries a process maps; ``before``: it did so when that library was found."""

    pid: int
    start_time_ticks: int
    libraries: tuple[LibraryKey, ...]
    before: bool
    at_ns: int


class ContextSeen(Fact, frozen=True, kw_only=True, tag="context"):
    call: ContextCall


class LoadSeen(Fact, frozen=True, kw_only=True, tag="load"):
    """A load whose bytes were examined, or are missing."""

    process: ProcessIdentity
    load: ModuleLoad


class LoadCame(Fact, frozen=True, kw_only=True, tag="load result"):
    """What a load that was told of came to."""

    pid: int
    start_time_ns: int
    number: int
    handle: int
    result: int


class LaunchesSeen(Fact, frozen=True, kw_only=True, tag="launches"):
    start_time_ns: int
    window: LaunchWindow


class ProcessEnded(Fact, frozen=True, kw_only=True, tag="ended"):
    """A process that was told of is there no longer."""

    pid: int
    start_time_ticks: int


class TracerState(Fact, frozen=True, kw_only=True, tag="state"):
    """How the tracer fares; told once a second while it has anything to do."""

    attached: bool = False
    """The probes are loaded, which waits for the first driver library."""
    counters: CallCounters = CallCounters()
    dropped_messages: int = 0
    crowded_out: int = 0
    """Processes whose handles and launches were forgotten, since too many others came."""
    problems: tuple[str, ...] = ()
    """Why calls are not seen, or not all of them."""
    unread: tuple[str, ...] = ()
    """Processes and files of which it is not known whether they are of interest, and why."""
    without_library: tuple[tuple[int, int, tuple[str, ...]], ...] = ()
    """Holders that map no CUDA driver library: pid, start in ticks, GPU libraries they have."""
    cpu_seconds: float = 0.0
    resident_bytes: int = 0


class TracerFailed(Fact, frozen=True, kw_only=True, tag="failed"):
    """Its last word: a defect of ours."""

    reason: str


Message = (
    LibrarySeen
    | LibraryGone
    | ProcessMaps
    | ContextSeen
    | LoadSeen
    | LoadCame
    | LaunchesSeen
    | ProcessEnded
    | TracerState
    | TracerFailed
)

# ------------------------------------------------------------------ agent → tracer


class Holders(Fact, frozen=True, kw_only=True, tag="holders"):
    """Processes that hold an accelerator's descriptors: pid and start in ticks."""

    processes: tuple[tuple[int, int], ...]


class Look(Fact, frozen=True, kw_only=True, tag="look"):
    """Processes that have just opened an accelerator: what they map is looked at now."""

    pids: tuple[int, ...]


Request = Holders | Look
