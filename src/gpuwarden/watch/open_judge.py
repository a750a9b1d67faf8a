"""Judges device opens: one small snapshot a process, with what is known of the node."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from gpuwarden.finding import Finding
from gpuwarden.judge import judge
from gpuwarden.model import (
    Container,
    DeviceNode,
    DeviceOpen,
    Gpu,
    NodeFacts,
    Process,
    SensorRun,
    Snapshot,
    SourceRun,
    ToolRun,
    Workload,
)
from gpuwarden.policy import Policy
from gpuwarden.probes.events import NANOSECONDS, TICKS_PER_SECOND
from gpuwarden.rules.registry import CUDA_RULES, OPEN_RULES
from gpuwarden.sensors.cgroup import containers_in
from gpuwarden.sensors.machine import INITIAL_PID_NAMESPACE

CONTAINERS_LIMIT = 4096
UNHEARD = "it did not answer since this process began"
OPEN_RULE_IDS = frozenset(rule.advisory.id for rule in (*OPEN_RULES, *CUDA_RULES))


class Surroundings(Struct):
    """What is known of the node between two judgements; opens are judged with it."""

    node: NodeFacts
    sensors: tuple[SensorRun, ...] = ()
    sources: tuple[SourceRun, ...] = ()
    workloads: tuple[Workload, ...] = ()
    sources_at_ns: int = 0
    gpus: tuple[Gpu, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()
    containers: dict[str, Container] = field(default_factory=dict)
    containers_at_ns: dict[str, int] = field(default_factory=dict)
    """When each of them was last seen to be there, at the earliest."""
    host_mount_namespace: int | None = None
    init: Process | None = None

    def keep(self, containers: Iterable[Container], at_ns: int) -> None:
        """Remembers containers; what a runtime confirmed is not replaced by what it did not.

        ``at_ns``: when it began to be looked for them.
        """
        for one in containers:
            known = self.containers.get(one.id)
            if known is None or one.confirmed or not known.confirmed:
                self.containers.pop(one.id, None)
                self.containers[one.id] = one
                self.containers_at_ns[one.id] = at_ns
        while len(self.containers) > CONTAINERS_LIMIT:
            oldest = next(iter(self.containers))
            del self.containers[oldest]
            self.containers_at_ns.pop(oldest, None)

    @property
    def has_sources(self) -> bool:
        """Whether anything here says who may use the GPUs, or should have."""
        return any(source.state in ("ok", "failed") for source in self.sources)


def is_loose(process: Process, surroundings: Surroundings) -> bool:
    """Whether it may be in a container that its control group does not name (bare runc, ctr)."""
    placement = process.cgroup
    mounts = process.namespaces.get("mnt")
    if mounts is None or surroundings.host_mount_namespace in (None, mounts):
        return False
    of_host = process.namespaces.get("pid") == INITIAL_PID_NAMESPACE
    if placement is not None and placement.unit is not None and of_host:
        return False  # a service with mounts of its own (PrivateTmp) is no container
    return placement is None or (
        placement.container_id is None
        and placement.slurm_job is None
        and placement.machine is None
        and placement.session is None
    )


def unknown_containers(process: Process, surroundings: Surroundings) -> bool:
    """Whether it is in a container that no runtime has told of."""
    placement = process.cgroup
    if placement is not None:
        for _, identity in containers_in(placement):
            known = surroundings.containers.get(identity)
            if known is None or not known.confirmed:
                return True
        if placement.pod_uid is not None and placement.container_id is None:
            return True
    return is_loose(process, surroundings) and _by_mounts(process, surroundings) is None


def _by_mounts(process: Process, surroundings: Surroundings) -> Container | None:
    """The container whose mounts a process has, seen since that process began.

    The number of a namespace is given anew once nobody is left in it: a container that was seen
    before may have ended, and its number may be another one's now.
    """
    mounts, began_ns = process.namespaces.get("mnt"), began_before_ns(process)
    for container in surroundings.containers.values():
        seen_ns = surroundings.containers_at_ns.get(container.id, 0)
        if mounts is not None and container.mount_namespace == mounts and seen_ns >= began_ns:
            return container
    return None


def sources_are_stale(process: Process, surroundings: Surroundings) -> bool:
    """Whether the sources were asked before this process began: its job may be newer."""
    if not surroundings.has_sources:
        return surroundings.sources_at_ns == 0
    return surroundings.sources_at_ns <= began_before_ns(process)


def began_before_ns(process: Process) -> int:
    """A moment (Unix time) by which it had begun, to the tick of the kernel's clock.

    /proc/stat tells the boot to the second only: what it gives may be up to a second too early,
    and a job that is newer than the last answer would be taken for one that was asked about.
    """
    booted_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return booted_ns + (process.start_time_ticks + 1) * (NANOSECONDS // TICKS_PER_SECOND)


def container_state(
    process: Process, surroundings: Surroundings
) -> Literal["none", "known", "unknown"]:
    """``none``, ``known`` or ``unknown``, as a DeviceOpen has it."""
    placement = process.cgroup
    named = placement is not None and (
        placement.container_id is not None or placement.pod_uid is not None
    )
    if not named and not is_loose(process, surroundings):
        return "none"
    return "unknown" if unknown_containers(process, surroundings) else "known"


def container_of(process: Process, surroundings: Surroundings) -> Container | None:
    """The container of a process as far as it is known, by its control group or its mounts."""
    placement = process.cgroup
    if placement is not None and placement.container_id is not None:
        return surroundings.containers.get(placement.container_id)
    return _by_mounts(process, surroundings) if is_loose(process, surroundings) else None


def snapshot_of(
    surroundings: Surroundings,
    at_ns: int,
    process: Process,
    lineage: Sequence[Process],
    *,
    opens: Sequence[DeviceOpen],
    tool_runs: Sequence[ToolRun] = (),
    asked_in_vain: bool = False,
) -> Snapshot:
    """The small snapshot that a process's opens are judged on; it replays like any other.

    ``asked_in_vain``: sources that were last heard before it began count as silent.
    """
    sources = surroundings.sources
    if asked_in_vain and sources_are_stale(process, surroundings):
        sources = tuple(
            replace(one, state="failed", reason=UNHEARD) if one.state == "ok" else one
            for one in sources
        )
    known = [process, *lineage]
    pids = {one.pid for one in known}
    if surroundings.init is not None and 1 not in pids:
        known.append(surroundings.init)
    state = container_state(process, surroundings)
    return Snapshot(
        taken_at_ns=at_ns,
        node=surroundings.node,
        sensors=surroundings.sensors,
        sources=sources,
        gpus=surroundings.gpus,
        processes=tuple(known),
        device_nodes=surroundings.device_nodes,
        containers=tuple(_containers(surroundings, known, process)),
        workloads=surroundings.workloads,
        opens=tuple(replace(one, container_state=state) for one in opens),
        tool_runs=tuple(tool_runs),
    )


def _containers(
    surroundings: Surroundings, known: Iterable[Process], process: Process
) -> Iterator[Container]:
    wanted: dict[str, str | None] = {}
    for one in known:
        if one.cgroup is not None:
            for runtime, identity in containers_in(one.cgroup):
                wanted.setdefault(identity, runtime)
    for identity, runtime in wanted.items():
        yield surroundings.containers.get(identity) or Container(
            id=identity, runtime=runtime or "unknown"
        )
    if is_loose(process, surroundings):
        container = _by_mounts(process, surroundings)
        if container is not None and container.id not in wanted:
            yield container


def findings_of(snapshot: Snapshot, policy: Policy, policy_path: str | None) -> list[Finding]:
    """What the rules over opens find in a small snapshot."""
    rules = (*OPEN_RULES, *CUDA_RULES) if snapshot.cuda else OPEN_RULES
    return list(judge(snapshot, policy, policy_path, rules).findings)


def device_names(nodes: Iterable[DeviceNode]) -> Mapping[tuple[int, int], set[str]]:
    """(major, minor) → the paths that it has under /dev."""
    names: dict[tuple[int, int], set[str]] = {}
    for node in nodes:
        names.setdefault((node.major, node.minor), set()).add(node.path)
    return names
