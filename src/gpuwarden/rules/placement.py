"""How a process is named to a person: its binary, what it calls itself, the place it runs in."""

from __future__ import annotations

from gpuwarden.model import GpuClient, Process
from gpuwarden.node import Node
from gpuwarden.rules.masquerade import basename

ID_SHOWN = 12


def binary_name(process: Process | None, client: GpuClient | None) -> str | None:
    """The real binary's path; for a dump the printed name; None when unread."""
    if process is not None and process.exe is not None:
        return process.exe.path + (" (deleted)" if process.exe.deleted else "")
    if process is not None and process.kernel_thread:
        return f"[{process.comm}]"
    return client.reported_name if client is not None else None


def says(process: Process | None) -> str | None:
    """What a process calls itself when that differs from its binary."""
    if process is None or process.exe is None or not process.argv:
        return None
    said = " ".join(process.argv[0].split())
    return None if basename(said) == basename(process.exe.path) else said


def place_name(node: Node, process: Process | None) -> str | None:
    """``job 7``, ``ns/pod``, ``docker:name``, ``x.service``, ``session 3``; None when nowhere."""
    if process is None:
        return None
    container = node.container_of(process)
    if container is not None and container.pod_name:
        return f"{container.pod_namespace}/{container.pod_name}"
    place = process.cgroup
    if place is None or (container is not None and place.container_id is None):
        if container is None:
            return None
        return f"{container.runtime}:{container.name or container.id[:ID_SHOWN]}"
    if place.pod_uid is not None:
        return f"pod {place.pod_uid[:8]}"
    if place.container_id is not None:
        name = container.name if container is not None and container.name else None
        runtime = (
            (container.runtime if container is not None else None) or place.runtime or "container"
        )
        return f"{runtime}:{name or place.container_id[:ID_SHOWN]}"
    if place.slurm_job is not None:
        step = f".{place.slurm_step}" if place.slurm_step else ""
        return f"job {place.slurm_job}{step}"
    if place.batch_job is not None:
        return place.batch_job
    if place.ecs_task is not None:
        return f"ecs:{place.ecs_task[:ID_SHOWN]}"
    if place.machine is not None:
        return place.machine
    if place.session is not None:
        return f"session {place.session}"
    if place.unit is not None:
        return place.unit
    return None
