"""What of the CUDA layer the agent could not see: findings about its own sight."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.finding import Advisory, Evidence, Finding, about_source
from gpuwarden.watch.cuda_side import CudaSide
from gpuwarden.watch.own_sight import GREW_STAYS_NS

SOURCE = "CUDA calls"
PROBLEMS_SHOWN = 8

CUDA_CALLS_UNSEEN = Advisory(
    id="cuda_calls_unseen",
    title="Calls of a CUDA driver library are not seen",
    severity="warning",
    explanation="A process uses the driver's library, and its contexts, module loads and launches "
    "are not seen, or not all of them. Device opens and looks at memory still are.",
    steps=(
        "Follow what the evidence says of each library.",
        "Run as root on a kernel of 6.0 or later, with BTF and libbpf.so.1.",
        "gpuwarden code scan --pid PID looks at the code that a process has in memory now.",
    ),
)
MODULE_BYTES_MISSED = Advisory(
    id="module_bytes_missed",
    title="GPU modules were loaded whose code could not be copied",
    severity="warning",
    explanation="Processes loaded modules faster than they could be copied, or memory that could "
    "not be read, so what code they are is not known. It can be done on purpose, to hide one "
    "module behind others.",
    steps=(
        "gpuwarden code scan --pid PID finds what is still in the process's memory.",
        "Give more room in the policy: capture.ring_mib.",
        "capture.may_stop stops a process for the moment that the copy takes; it stalls its job.",
    ),
)
CUDA_SIGHT_ADVISORIES = (CUDA_CALLS_UNSEEN, MODULE_BYTES_MISSED)
CUDA_SIGHT_RULES = frozenset(one.id for one in CUDA_SIGHT_ADVISORIES)


class CudaSight:
    """Keeps what one look does not show: when a count grew last."""

    def __init__(self) -> None:
        self._missed = 0
        self._grew_at_ns: int | None = None

    def findings(self, side: CudaSide, at_ns: int) -> Iterator[Finding]:
        """What holds now; missed modules are told for an hour after the last one."""
        unseen = list(_unseen(side))
        if unseen:
            evidence = (Evidence(source="tracer", text=text) for text in unseen[:PROBLEMS_SHOWN])
            yield about_source(CUDA_CALLS_UNSEEN, SOURCE, evidence)
        missed = sum(count for count, _ in _counts(side))
        if missed > self._missed:
            self._grew_at_ns = at_ns
        # A tracer that was started anew counts from zero.
        self._missed = missed
        if self._grew_at_ns is not None and at_ns - self._grew_at_ns < GREW_STAYS_NS:
            yield about_source(MODULE_BYTES_MISSED, SOURCE, _missed(side))


def _unseen(side: CudaSide) -> Iterator[str]:
    if side.child.error:
        yield f"the tracer is not running: {side.child.error}"
    if side.book.libraries:
        # Without a library there are no calls to be seen.
        yield from side.state.problems
    for library in side.book.libraries.values():
        if not library.probed:
            why = "; ".join(library.problems) or "nothing of it was attached to"
            yield f"{library.path}: {why}"
    yield from side.launch_problems


def _counts(side: CudaSide) -> tuple[tuple[int, str], ...]:
    crowded_out = side.book.crowded_out + side.state.crowded_out
    return (
        (side.book.missed, "modules of which bytes are missing"),
        (side.state.counters.dropped, "calls that found no room in the ring"),
        (side.state.dropped_messages, "events that the agent did not take in time"),
        (side.untold_dropped, "events that were not told, since too many waited"),
        (crowded_out, "times a process was forgotten, since too many others came"),
    )


def _missed(side: CudaSide) -> Iterator[Evidence]:
    for count, what in _counts(side):
        if count:
            yield Evidence(source="tracer", text=f"{count} {what}")
    for key in side.book.known():
        process = side.book.process(key)
        if process is not None and process.missed_loads:
            text = f"pid {process.pid}: {process.missed_loads} ({'; '.join(process.missed[:3])})"
            yield Evidence(source="tracer", text=text)
