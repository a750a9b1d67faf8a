"""A snapshot joined: processes, GPUs, containers, sources and workloads by what links them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property

from gpuwarden.model import (
    AccountedProcess,
    CodeScan,
    Connection,
    Container,
    Gpu,
    GpuClient,
    GpuModule,
    Holder,
    PersistenceEntry,
    Process,
    SensorRun,
    Snapshot,
    SourceRun,
    Usage,
    Workload,
)
from gpuwarden.pattern import pattern

ALL_GPUS = "all"
ANCESTRY_LIMIT = 64
GPU_NODE_KINDS = frozenset({"nvidia-gpu", "drm-render", "drm-card", "accel", "habana"})

_MIG_REFERENCE = pattern(r"mig:(?P<parent>[^/]+)/(?P<gi>[0-9]{1,9})(?:/(?P<ci>[0-9]{1,9}))?")


class Node:
    """Look-ups over one snapshot. Pure: nothing here reads the machine or judges."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.processes: dict[int, Process] = {p.pid: p for p in snapshot.processes}
        self.gpus: dict[str, Gpu] = {g.id: g for g in snapshot.gpus}
        self.containers: dict[str, Container] = {c.id: c for c in snapshot.containers}
        self.hidden_pids = {h.pid: h for h in snapshot.hidden}

    # ---------------------------------------------------------------- look-ups

    @cached_property
    def clients_by_pid(self) -> dict[int, list[GpuClient]]:
        found: dict[int, list[GpuClient]] = defaultdict(list)
        for client in self.snapshot.clients:
            found[client.pid].append(client)
        return dict(found)

    @cached_property
    def clients_by_gpu(self) -> dict[str, list[GpuClient]]:
        found: dict[str, list[GpuClient]] = defaultdict(list)
        for client in self.snapshot.clients:
            found[client.gpu_id].append(client)
        return dict(found)

    @cached_property
    def holders_by_pid(self) -> dict[int, list[Holder]]:
        found: dict[int, list[Holder]] = defaultdict(list)
        for holder in self.snapshot.holders:
            found[holder.pid].append(holder)
        return dict(found)

    @cached_property
    def connections_by_pid(self) -> dict[int, list[Connection]]:
        found: dict[int, list[Connection]] = defaultdict(list)
        for connection in self.snapshot.connections:
            found[connection.pid].append(connection)
        return dict(found)

    @cached_property
    def accounted_by_pid(self) -> dict[int, list[AccountedProcess]]:
        found: dict[int, list[AccountedProcess]] = defaultdict(list)
        for entry in self.snapshot.accounted:
            found[entry.pid].append(entry)
        return dict(found)

    @cached_property
    def usage_by_client(self) -> dict[tuple[str, int | None, int | None], list[Usage]]:
        """By GPU, pid and start time in ticks; a GPU as a whole has neither."""
        found: dict[tuple[str, int | None, int | None], list[Usage]] = defaultdict(list)
        for usage in self.snapshot.usage:
            found[(usage.gpu_id, usage.pid, usage.start_time_ticks)].append(usage)
        return dict(found)

    @cached_property
    def _modules_by_process(self) -> dict[tuple[int, int], list[GpuModule]]:
        found: dict[tuple[int, int], list[GpuModule]] = defaultdict(list)
        for module in self.snapshot.modules:
            found[(module.pid, module.start_time_ticks)].append(module)
        return dict(found)

    def modules_of(self, process: Process) -> list[GpuModule]:
        """GPU code of a process that is not simply known; of none other that had its pid."""
        return list(self._modules_by_process.get((process.pid, process.start_time_ticks), ()))

    def code_scan_of(self, process: Process) -> CodeScan | None:
        """How much of a process's GPU code was seen; None when nobody looked."""
        for scan in self.snapshot.code_scans:
            if scan.pid == process.pid and scan.start_time_ticks in (
                None,
                process.start_time_ticks,
            ):
                return scan
        return None

    @cached_property
    def children(self) -> dict[int, list[Process]]:
        found: dict[int, list[Process]] = defaultdict(list)
        for process in self.snapshot.processes:
            found[process.ppid].append(process)
        return dict(found)

    @cached_property
    def migs_by_parent(self) -> dict[str, list[Gpu]]:
        found: dict[str, list[Gpu]] = defaultdict(list)
        for gpu in self.snapshot.gpus:
            if gpu.parent_id is not None:
                found[gpu.parent_id].append(gpu)
        return dict(found)

    @property
    def persistence(self) -> tuple[PersistenceEntry, ...]:
        return self.snapshot.persistence

    def sensor(self, name: str) -> SensorRun | None:
        return next((s for s in self.snapshot.sensors if s.name == name), None)

    def source(self, name: str) -> SourceRun | None:
        return next((s for s in self.snapshot.sources if s.name == name), None)

    def sees(self, sensor: str) -> bool:
        """Whether a sensor looked and saw (at least partly)."""
        run = self.sensor(sensor)
        return run is not None and run.state in ("ok", "partial")

    # ---------------------------------------------------------------- GPUs

    def gpu_label(self, gpu_id: str | None) -> str:
        """``0``, ``0:1`` for a MIG device (parent:instance), a short PCI address, or ``-``."""
        gpu = self.gpus.get(gpu_id or "")
        if gpu is None:
            return "-" if gpu_id is None else gpu_id
        if gpu.parent_id is not None:
            parent = self.gpus.get(gpu.parent_id)
            # A part of a part does not exist; a damaged recording may say so, even in a circle.
            number = self.gpu_label(parent.id) if parent and parent.parent_id is None else "?"
            instance = gpu.gpu_instance_id if gpu.gpu_instance_id is not None else gpu.index
            return f"{number}:{instance if instance is not None else '?'}"
        if gpu.index is not None:
            return str(gpu.index)
        if gpu.minor is not None:
            return str(gpu.minor)
        # Short enough for a column: the bus and device of the PCI address.
        return gpu.pci_address[9:] if gpu.pci_address else gpu.id

    def gpus_of_holder(self, holder: Holder) -> Iterator[Gpu]:
        """The whole GPUs that a device node stands for; none for control nodes."""
        for gpu in self.snapshot.gpus:
            if gpu.parent_id is not None:
                continue
            if (
                (
                    holder.kind == "nvidia-gpu"
                    and gpu.vendor == "nvidia"
                    and gpu.minor == holder.minor
                )
                or (holder.kind == "drm-render" and gpu.render_minor == holder.minor)
                or (holder.kind == "drm-card" and gpu.card_minor == holder.minor)
                or (
                    holder.kind in ("accel", "habana")
                    and gpu.vendor not in ("nvidia", "amd")
                    and gpu.minor == holder.minor
                )
            ):
                yield gpu

    @cached_property
    def _references(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = defaultdict(set)
        for gpu in self.snapshot.gpus:
            keys: list[str] = [f"uuid:{gpu.id}"]
            if gpu.uuid is not None:
                keys.append(f"uuid:{gpu.uuid}")
            if gpu.parent_id is None:
                if gpu.index is not None:
                    keys.append(f"index:{gpu.index}")
                if gpu.minor is not None:
                    keys.append(f"minor:{gpu.minor}")
                if gpu.pci_address is not None:
                    keys.append(f"pci:{gpu.pci_address}")
            for key in keys:
                found[key].add(gpu.id)
        return dict(found)

    def resolve(self, references: tuple[str, ...]) -> frozenset[str] | None:
        """GPU ids that references stand for, a whole GPU with its MIG devices; None means all."""
        ids: set[str] = set()
        for reference in references:
            if reference == ALL_GPUS:
                return None
            mig = _MIG_REFERENCE.fullmatch(reference)
            if mig is not None:
                ids |= self._mig_ids(mig["parent"], int(mig["gi"]), mig["ci"])
                continue
            for gpu_id in self._references.get(reference, ()):
                ids.add(gpu_id)
                ids.update(g.id for g in self.migs_by_parent.get(gpu_id, ()))
        return frozenset(ids)

    def _mig_ids(self, parent: str, gi: int, ci: str | None) -> set[str]:
        parents = self._references.get(f"uuid:{parent}", set())
        if parent.isdigit():
            parents = parents | self._references.get(f"index:{parent}", set())
        return {
            gpu.id
            for owner in parents
            for gpu in self.migs_by_parent.get(owner, ())
            if gpu.gpu_instance_id == gi and (ci is None or gpu.compute_instance_id == int(ci))
        }

    def gives(self, workload: Workload, gpu_id: str) -> bool:
        """Whether a workload was given this GPU, or the MIG device's whole GPU, or a part of it."""
        ids = self.resolve(workload.gpus)
        if ids is None or gpu_id in ids:
            return True
        # A process of a MIG job holds the whole GPU's device node: its parent counts as given.
        return any(g.parent_id == gpu_id for g in (self.gpus[i] for i in ids))

    # ---------------------------------------------------------------- ancestry

    def ancestors(self, pid: int) -> Iterator[Process]:
        """Parents from the nearest up, as far as the snapshot knows them; loop-safe."""
        seen = {pid}
        process = self.processes.get(pid)
        while process is not None and len(seen) < ANCESTRY_LIMIT:
            parent = self.processes.get(process.ppid)
            if parent is None or parent.pid in seen:
                return
            seen.add(parent.pid)
            yield parent
            process = parent

    def container_of(self, process: Process) -> Container | None:
        """Its container by the id in its cgroup, else the one whose mounts it shares."""
        placement = process.cgroup
        if placement is not None and placement.container_id is not None:
            return self.containers.get(placement.container_id)
        # Bare runc and ctr leave no id in the path: their mount namespace tells.
        mounts = process.namespaces.get("mnt")
        kind = "mnt" if self.init is not None and "mnt" in self.init.namespaces else "pid"
        if mounts is None or self.shares_host_namespace(process, kind) is not False:
            return None
        return self._containers_by_mounts.get(mounts)

    @cached_property
    def _containers_by_mounts(self) -> dict[int, Container]:
        return {
            c.mount_namespace: c
            for c in self.snapshot.containers
            if c.mount_namespace is not None and c.confirmed
        }

    @cached_property
    def init(self) -> Process | None:
        return self.processes.get(1)

    def is_outside(self, process: Process, container: Container) -> bool:
        """Whether a process of a container's cgroup lives in the host's namespaces, not in its.

        Sandboxes inside a container make namespaces too, so differing alone says nothing.
        """
        mounts, pids = process.namespaces.get("mnt"), process.namespaces.get("pid")
        if mounts in (None, container.mount_namespace):
            return False
        in_host_mounts = self.shares_host_namespace(process, "mnt") is True
        if container.mount_namespace is None:
            # Every container has mounts of its own; but inside one, init is the container's.
            return in_host_mounts and self.snapshot.node.host_pid_namespace is True
        if in_host_mounts:
            return True
        of_host = self.shares_host_namespace(process, "pid")
        return bool(of_host) and container.pid_namespace not in (None, pids)

    def shares_host_namespace(self, process: Process, kind: str) -> bool | None:
        """Whether a process is in init's namespace of that kind; None when either is unread."""
        mine = process.namespaces.get(kind)
        theirs = self.init.namespaces.get(kind) if self.init else None
        if kind == "pid" and theirs is None:
            # The initial pid namespace's inode is fixed (PROC_PID_INIT_INO, 0xEFFFFFFC).
            theirs = 0xEFFFFFFC
        if kind == "mnt" and theirs is None:
            return None
        return None if mine is None or theirs is None else mine == theirs
