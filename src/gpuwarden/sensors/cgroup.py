"""Where a process belongs, as the lines of its /proc/<pid>/cgroup name it.

A path is walked from the outside in and every owner on the way is kept in ``chain``, so docker in
a pod, kind, or Slurm in a pod stay visible as such. Names under /sys/fs/cgroup are made by
whoever has the right to make directories there: everything here is a claim until the runtime or
the scheduler confirms it (cgroups(7), systemd.unit(5), Kubernetes "cgroup drivers", Slurm
"cgroup v2 plugin").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

from gpuwarden.model import CgroupPlacement
from gpuwarden.sensors.cgroup_path import CHAIN_LIMIT, PATH_LIMIT, Walk, walk_path

LINE_LIMIT: Final = 64
"""A kernel has about fifteen hierarchies."""
_CACHED_CHARACTERS: Final = 4096


def place(lines: Sequence[str]) -> CgroupPlacement:
    """The placement that the lines of a /proc/<pid>/cgroup file name; any text gives one.

    Containers, pods, jobs and machines outrank units and sessions; among units the
    ``name=systemd`` line wins, then the ``0::`` line. ``unit`` is a unit of the machine itself
    (of a user's own manager if ``user_slice_uid`` is set): a unit inside a container or a machine
    stands in ``chain`` only, except that the service which holds a podman payload is kept.
    """
    kept = tuple(line[: PATH_LIMIT + 256] for line in lines[:LINE_LIMIT])
    if sum(map(len, kept)) <= _CACHED_CHARACTERS:
        return _place_cached(kept)
    return _place(kept)


def containers_in(placement: CgroupPlacement) -> Iterator[tuple[str | None, str]]:
    """Each (runtime, container id) of the chain, from the outside in; runtime None if unnamed."""
    for link in placement.chain:
        kind, _, name = link.partition(":")
        if kind == "container":
            yield None, name
        elif kind in {"docker", "containerd", "crio", "podman", "singularity", "ecs"}:
            yield kind, name
        elif kind == "helper":
            yield placement.runtime, name


@lru_cache(maxsize=1024)
def _place_cached(lines: tuple[str, ...]) -> CgroupPlacement:
    return _place(lines)


def _place(lines: tuple[str, ...]) -> CgroupPlacement:
    preferences: dict[str, int] = {}
    met = False
    for line in lines:
        parts = line.rstrip("\n").split(":", 2)
        if len(parts) != 3 or not parts[2].startswith("/"):
            continue
        met = True
        controllers, path = parts[1], parts[2][:PATH_LIMIT]
        preference = 2 if controllers == "name=systemd" else 1 if not controllers else 0
        if any(part not in {"", ".", ".."} for part in path.split("/")):
            preferences[path] = max(preference, preferences.get(path, 0))
    if not preferences:
        return CgroupPlacement(private_namespace=met)
    walks = sorted(
        (walk_path(path, preference) for path, preference in preferences.items()),
        key=lambda walk: walk.rank if walk.has_owner else (walk.rank[0], walk.preference, 0),
        reverse=True,
    )
    return _merge(walks)


def _merge(walks: list[Walk]) -> CgroupPlacement:
    """The best walk's answer; jobs and pods that only other hierarchies carry are put in front."""
    best = walks[0]
    chain = list(best.chain)
    for other in walks[1:]:
        if not other.has_owner:
            continue
        missing = [link for link in other.chain if link not in chain]
        chain = [*missing, *chain][-CHAIN_LIMIT:]
        if best.slurm_job is None and other.slurm_job is not None:
            best.slurm_job, best.slurm_step = other.slurm_job, other.slurm_step
            best.slurm_uid, best.slurm_node = other.slurm_uid, other.slurm_node
        if best.container_id is None:
            best.runtime, best.container_id = other.runtime, other.container_id
            best.helper = other.helper
        best.pod_uid = best.pod_uid or other.pod_uid
        best.batch_job = best.batch_job or other.batch_job
        best.ecs_task = best.ecs_task or other.ecs_task
        best.machine = best.machine or other.machine
    if best.slurm_uid is None:
        best.slurm_uid = next(
            (w.slurm_uid for w in walks if w.slurm_uid is not None and w.slurm_job), None
        )
    return CgroupPlacement(
        paths=tuple(walk.path for walk in walks),
        unit=best.unit,
        unit_transient=best.unit_transient,
        session=best.session,
        user_slice_uid=best.user_uid,
        runtime=best.runtime,
        container_id=best.container_id,
        container_helper=best.helper,
        pod_uid=best.pod_uid,
        slurm_job=best.slurm_job,
        slurm_step=best.slurm_step,
        slurm_uid=best.slurm_uid,
        slurm_node=best.slurm_node,
        batch_job=best.batch_job,
        ecs_task=best.ecs_task,
        machine=best.machine,
        chain=tuple(chain[-CHAIN_LIMIT:]),
    )
