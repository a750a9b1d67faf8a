"""How the CUDA layer fares at one moment, as the Prometheus endpoint tells it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, get_args

import msgspec

Standing = Literal["known", "rebuilt", "driver", "jit", "unknown", "hash-like", "not-compared"]
STANDINGS: tuple[Standing, ...] = get_args(Standing)
Series = tuple[str, tuple[str, ...], float | None]


class CudaState(msgspec.Struct, frozen=True, kw_only=True):
    """Filled once a second from the agent's book of processes and the tracer's own state.

    Counts are since the agent's start, whatever became of the tracer since; others are of now.
    """

    watching: bool
    """The tracer lives, and nothing keeps it from attaching to a library that it finds."""
    problems: tuple[str, ...] = ()
    """What cannot be seen at all, and why."""
    libraries: int = 0
    entry_points: int = 0
    """Attached to, in all libraries."""
    dear_entry_points: int = 0
    """Those of them at +0, where each call costs a trap that single-steps."""
    processes: int = 0
    """Those that map a driver library now."""
    late_processes: int = 0
    """Those of them that had it before it was probed."""
    contexts: int = 0
    context_calls: int = 0
    loads: int = 0
    modules: Mapping[Standing, int] = {}
    """Each module of each process once; hash-like ones are not counted as unknown as well."""
    missed: Mapping[str, int] = {}
    """Loads of which bytes are missing, by the reason that the fact has."""
    captured_bytes: int = 0
    dropped: int = 0
    """Calls and messages of which not even the event found room."""
    stops: int = 0
    launches: int = 0
    graph_launches: int = 0
    compared_processes: int = 0
    """Those whose launches are compared with a launch profile now."""
    unfit_processes: int = 0
    """Those of them that do not fit it."""
    tracer_restarts: int = 0
    tracer_cpu_seconds: float | None = None
    """Of the tracer that lives now."""
    tracer_resident_bytes: int | None = None


def series(state: CudaState) -> Iterator[Series]:
    """Every series of the layer; a value of None is not known, and is to be left out."""
    yield "cuda_watching", (), state.watching
    for problem in state.problems:
        yield "cuda_unseen_info", (problem,), 1
    yield "cuda_libraries", (), state.libraries
    yield "cuda_entry_points", ("+10",), state.entry_points - state.dear_entry_points
    yield "cuda_entry_points", ("+0",), state.dear_entry_points
    yield "cuda_processes", ("whole",), state.processes - state.late_processes
    yield "cuda_processes", ("late",), state.late_processes
    yield "cuda_contexts", (), state.contexts
    yield "cuda_context_calls_total", (), state.context_calls
    yield "cuda_loads_total", (), state.loads
    for standing in STANDINGS:
        yield "cuda_modules_total", (standing,), state.modules.get(standing, 0)
    for reason, count in state.missed.items():
        yield "cuda_loads_missed_total", (reason,), count
    yield "cuda_captured_bytes_total", (), state.captured_bytes
    yield "cuda_calls_dropped_total", (), state.dropped
    yield "cuda_stops_total", (), state.stops
    yield "cuda_launches_total", ("kernel",), state.launches
    yield "cuda_launches_total", ("graph",), state.graph_launches
    yield "cuda_launch_profiles", ("fits",), state.compared_processes - state.unfit_processes
    yield "cuda_launch_profiles", ("does-not-fit",), state.unfit_processes
    yield "cuda_tracer_restarts_total", (), state.tracer_restarts
    yield "cuda_tracer_cpu_seconds", (), state.tracer_cpu_seconds
    yield "cuda_tracer_resident_memory_bytes", (), state.tracer_resident_bytes
