"""CUDA contexts and who has them: more than are declared, a second process, no driver library."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from gpuwarden.finding import Evidence, Row, Severity
from gpuwarden.model import CudaContext, CudaProcess, NodeKind, Process
from gpuwarden.node import Node
from gpuwarden.outputs.words import moment
from gpuwarden.policy import Policy
from gpuwarden.rules import cuda_processes as watching
from gpuwarden.rules import device_opens as opened
from gpuwarden.rules import host_programs, system_programs
from gpuwarden.rules.cuda_processes import SOURCE, Watched
from gpuwarden.rules.hit import Hit
from gpuwarden.rules.placement import binary_name

SHOWN = 16
COMPUTES: frozenset[NodeKind] = frozenset({"nvidia-uvm"})
"""Without this node a program has no memory to compute in as CUDA has it; who only asks the driver
(NVML) or draws does not open it."""
DEVICES: frozenset[NodeKind] = frozenset({"nvidia-gpu", "nvidia-caps", *COMPUTES})
DRAWS: frozenset[NodeKind] = frozenset({"nvidia-modeset", "drm-render", "drm-card"})
FROM_PROC = ("driver_libraries", "environment", "exe")
"""Parts of a process that are unread where /proc could not be read of it."""


# ------------------------------------------------------------------ contexts


def contexts_beyond_declared(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[Hit]:
    """Processes with more live contexts on a device than their workload declares.

    A primary context is one however often it is retained. Green contexts are parts of one that is
    there already: told, not counted.
    """
    for one in watching.watched(node):
        if one.cuda is None or one.process is None:
            continue
        claim = watching.declared(node, policy, one.process)
        if claim is None or claim.entry is None:
            continue
        allowed = claim.entry.contexts
        live, green = _live(one.cuda)
        over = {on: some for on, some in _by_device(live).items() if len(some) > allowed}
        if not over:
            continue
        evidence = [
            Evidence(source=SOURCE, text=_counted(device, some, allowed))
            for device, some in sorted(over.items(), key=lambda item: item[0] or 0)
        ]
        told = [context for some in over.values() for context in some]
        evidence += [Evidence(source=SOURCE, text=_context(context)) for context in told[:SHOWN]]
        if len(told) > SHOWN:
            evidence.append(Evidence(source=SOURCE, text=f"and {len(told) - SHOWN} more"))
        if green:
            text = f"{_plural(len(green), 'green context')} beside them: parts of one, not counted"
            evidence.append(Evidence(source=SOURCE, text=text))
        yield Hit(
            watching.subject_of(node, one),
            (
                *evidence,
                *watching.workload_lines(claim),
                *watching.place_lines(node, one),
                *watching.limit_lines(one),
            ),
            owner=watching.owner_of(node, one, claim),
            # Since there is one too many, on whichever device that was first.
            since_ns=min(some[allowed].made_ns for some in over.values()),
        )


def _live(cuda: CudaProcess) -> tuple[list[CudaContext], list[CudaContext]]:
    """Contexts that are there now, the first made first: those that count, and green ones."""
    once = {(c.device, c.handle): c for c in cuda.contexts if c.ended_ns is None}
    live = sorted(once.values(), key=lambda context: context.made_ns)
    return [c for c in live if c.kind != "green"], [c for c in live if c.kind == "green"]


def _by_device(live: Sequence[CudaContext]) -> dict[int | None, list[CudaContext]]:
    """Contexts by CUDA ordinal; one whose call named no device is on the only one, if that is."""
    known = {context.device for context in live} - {None}
    only = next(iter(known)) if len(known) == 1 else None
    found: dict[int | None, list[CudaContext]] = defaultdict(list)
    for context in live:
        found[only if context.device is None else context.device].append(context)
    return found


def _counted(device: int | None, some: Sequence[CudaContext], allowed: int) -> str:
    where = "a device that the calls do not name" if device is None else f"CUDA device {device}"
    return f"{len(some)} contexts on {where}; the workload declares {allowed}"


def _context(context: CudaContext) -> str:
    how = {"created": "created", "primary": "the primary one, retained", "green": "green, made"}
    where = "" if context.device is None else f" on device {context.device}"
    return f"context {context.handle:#x}{where}: {how[context.kind]} {moment(context.made_ns)}"


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


# ------------------------------------------------------------------ a second process


def second_gpu_process_in_container(
    node: Node, policy: Policy, rows: Sequence[Row]
) -> Iterator[Hit]:
    """Processes that use the GPU in a single-process container after another one that does."""
    by_container: dict[str, list[tuple[Watched, CudaProcess, Process]]] = defaultdict(list)
    for one in watching.watched(node):
        if one.cuda is None or one.process is None or not _uses(one.cuda):
            continue
        identity = _container_id(node, one.process)
        if identity is not None:
            by_container[identity].append((one, one.cuda, one.process))
    for users in by_container.values():
        users.sort(key=lambda user: (_first_use(user[1]), user[0].start_time_ticks, user[0].pid))
        _, first, its = users[0]
        for one, cuda, process in users[1:]:
            claim = watching.declared(node, policy, process)
            if claim is None or claim.entry is None or not claim.entry.single_process:
                continue
            began = _first_use(cuda)
            since = began if began < _NEVER else process.started_at_ns
            evidence = (
                Evidence(
                    source=SOURCE, text=f"this one: {_use(cuda)}{_kinship(node, its, process)}"
                ),
                Evidence(source=SOURCE, text=f"the first one: {_named(its)}, {_use(first)}"),
            )
            yield Hit(
                watching.subject_of(node, one),
                (
                    *evidence,
                    *watching.workload_lines(claim),
                    *watching.place_lines(node, one),
                    *watching.limit_lines(one),
                ),
                owner=watching.owner_of(node, one, claim),
                since_ns=since,
            )


_NEVER = 1 << 63


def _uses(cuda: CudaProcess) -> bool:
    live, green = _live(cuda)
    return bool(live or green or cuda.loads or cuda.launches or cuda.graph_launches)


def _first_use(cuda: CudaProcess) -> int:
    """When its first context was made; before all others where that was not seen."""
    if cuda.before:
        return 0
    return min((context.made_ns for context in cuda.contexts), default=_NEVER)


def _container_id(node: Node, process: Process) -> str | None:
    container = node.container_of(process)
    if container is not None:
        return container.id
    return process.cgroup.container_id if process.cgroup is not None else None


def _use(cuda: CudaProcess) -> str:
    """What a process does with the GPU, in words."""
    live, green = _live(cuda)
    parts = [_plural(len(live) + len(green), "context")] if live or green else []
    if cuda.loads:
        parts.append(_plural(cuda.loads, "load"))
    launches = cuda.launches + cuda.graph_launches
    if launches:
        parts.append(f"{launches} launches" if launches > 1 else "1 launch")
    began = _first_use(cuda)
    since = f", since {moment(began)}" if 0 < began < _NEVER else ""
    return f"{', '.join(parts) or 'no use seen'}{since}"


def _named(process: Process) -> str:
    return f"pid {process.pid} ({process.comm}), {binary_name(process, None) or 'binary not read'}"


def _kinship(node: Node, first: Process, process: Process) -> str:
    """How two processes of a container are related, where the kernel keeps that."""
    parents = [process.ppid, *(parent.pid for parent in node.ancestors(process.pid))]
    if first.pid in parents:
        mine, its = process.exe, first.exe
        same = (
            mine is not None
            and its is not None
            and mine.inode is not None
            and (mine.device, mine.inode) == (its.device, its.inode)
        )
        how = "a fork of it, the same program" if same else "started by it, another program"
        return f"; it is a descendant of the first: {how}"
    if process.ppid == first.ppid and process.ppid > 0:
        return f"; both are children of pid {process.ppid}"
    return ""


# ------------------------------------------------------------------ no driver library


def gpu_process_without_driver_library(
    node: Node, policy: Policy, rows: Sequence[Row]
) -> Iterator[Hit]:
    """Holders of NVIDIA devices in which no CUDA driver library, however called, is mapped."""
    for one in watching.watched(node):
        cuda, process = one.cuda, one.process
        if cuda is None or not cuda.has_descriptors or cuda.libraries:
            continue
        kinds, inherited = _devices(node, one)
        if kinds and (inherited or not _may_compute(kinds, process)):
            continue
        severity: Severity = "error"
        why = []
        if process is None:
            severity = "warning"
        elif _belongs(node, process) or _has_library(process):
            continue
        else:
            unread = sorted(name for name in FROM_PROC if name in process.unread)
            if unread:
                severity = "warning"
                why.append(f"not sure: its {unread[0].replace('_', ' ')} could not be read")
        if not kinds or not kinds & COMPUTES:
            severity = "warning"
            why.append(
                "not sure: which of the devices it holds is not known"
                if not kinds
                else "not sure: it does not hold the node through which CUDA maps memory"
            )
        held = ", ".join(sorted(kinds)) or "accelerator descriptors"
        text = (
            f"holds {held}; no CUDA driver library is mapped, by name, SONAME or exported symbols"
        )
        claim = watching.declared(node, policy, process) if process is not None else None
        yield Hit(
            watching.subject_of(node, one),
            (
                Evidence(kind="hiding", strength="weak", source="/proc/<pid>/maps", text=text),
                *opened.notes(why),
                *watching.workload_lines(claim),
                *watching.place_lines(node, one),
                *watching.limit_lines(one),
            ),
            owner=watching.owner_of(node, one, claim),
            since_ns=process.started_at_ns if process is not None else None,
            severity=severity,
        )


def _devices(node: Node, one: Watched) -> tuple[set[NodeKind], bool]:
    """Kinds of the nodes that it holds, and whether all of them came from a forebear's open."""
    holders = node.holders_by_pid.get(one.pid, ())
    opens = [
        used
        for used in node.snapshot.opens
        if (used.pid, used.start_time_ticks) == (one.pid, one.start_time_ticks)
        and used.how in opened.USES
        and used.state == "opened"
    ]
    inherited = bool(opens) and not holders and all(used.opened_by is not None for used in opens)
    return {holder.kind for holder in holders} | {used.kind for used in opens}, inherited


def _may_compute(kinds: set[NodeKind], process: Process | None) -> bool:
    """Whether nodes of these kinds are what a program needs that computes on an NVIDIA GPU."""
    if kinds & COMPUTES:
        return True
    # NVML opens the GPU's node as well; who has its library asks, and who has a screen's draws.
    asks = process is not None and bool(process.driver_libraries)
    return bool(kinds & DEVICES) and not asks and not kinds & DRAWS


def _belongs(node: Node, process: Process) -> bool:
    """System programs, runtimes and management tools of the host's own, or a proven add-on."""
    match = system_programs.matches(node, process)
    if match is not None and match.proof == "proven":
        return True
    return (
        host_programs.is_runtime(node, process)
        or host_programs.is_host_program(node, process)
        or host_programs.is_hosts_own(node, process, host_programs.TOOLS)
    )


def _has_library(process: Process) -> bool:
    """Whether a driver library is mapped under its own name: the finder is yet to take it up."""
    names = (library.path.rsplit("/", 1)[-1] for library in process.driver_libraries)
    return any(name.startswith(("libcuda.so", "libhsa-runtime64.")) for name in names)
