"""Whether a policy's match fits a process, and whether what it fits by can be forged."""

from __future__ import annotations

from typing import NamedTuple

from gpuwarden.finding import Proof
from gpuwarden.model import Container, Process, Workload
from gpuwarden.node import Node
from gpuwarden.policy import Match, set_conditions, words


class MatchResult(NamedTuple):
    """``fits``, how far it is proven, and which conditions decided."""

    fits: bool
    proof: Proof
    why: str


NO_MATCH = MatchResult(False, "none", "")


def _word_fits(wanted: str, value: str | None, *, globs: bool = False) -> bool:
    if value is None:
        return False
    if globs and wanted.endswith("*"):
        return value.startswith(wanted[:-1])
    return wanted == value


def image_fits(wanted: str, image: str | None) -> bool:
    """Exact image name; without a tag any tag fits. Never by a part of the name."""
    if image is None:
        return False
    name = image.split("@", 1)[0]
    if wanted in (image, name):
        return True
    repository, _, tag = name.rpartition(":")
    return bool(repository) and "/" not in tag and wanted == repository


def _container_condition(name: str, value: object, container: Container | None) -> bool:
    if container is None:
        return False
    if name == "pod_labels":
        labels = {**container.labels, **container.pod_labels}
        return isinstance(value, dict) and all(labels.get(k) == v for k, v in value.items())
    wanted = words(value if isinstance(value, str | list) else None)
    if name == "pod_namespace":
        return any(_word_fits(w, container.pod_namespace) for w in wanted)
    if name == "pod_name":
        return any(_word_fits(w, container.pod_name, globs=True) for w in wanted)
    if name == "image":
        return any(image_fits(w, container.image) for w in wanted)
    digest = container.image_digest or ""
    return any(w in (digest, digest.rpartition("@")[2]) for w in wanted)


def fit(node: Node, match: Match, process: Process, job: Workload | None) -> MatchResult:
    """Tries every condition that ``match`` sets; all must hold. ``job`` is its proven Slurm job."""
    if match.is_empty:
        return NO_MATCH
    container = node.container_of(process)
    proof: Proof = "proven"
    why: list[str] = []
    for name, value in set_conditions(match):
        wanted = words(value) if isinstance(value, str | list) else ()
        if name in ("pod_namespace", "pod_name", "pod_labels", "image", "image_digest"):
            if not _container_condition(name, value, container):
                return NO_MATCH
            if container is None or not container.confirmed:
                proof = "claimed"
        elif name.startswith("slurm_"):
            field = {"slurm_account": "account", "slurm_partition": "partition"}.get(name, "user")
            if job is None or not any(_word_fits(w, getattr(job, field)) for w in wanted):
                return NO_MATCH
        elif name == "unit":
            placement = process.cgroup
            unit = placement.unit if placement else None
            if container is not None or not any(_word_fits(w, unit, globs=True) for w in wanted):
                return NO_MATCH
            source = node.source("systemd")
            if source is None or source.state != "ok" or unit not in source.running:
                proof = "claimed"
        elif name == "user":
            if not any(w in (process.user, str(process.uid)) for w in wanted):
                return NO_MATCH
            # Inside another user namespace or container, uids are whatever its root says.
            if container is not None:
                proof = "claimed"
        elif name == "binary":
            exe = process.exe
            if exe is None or not any(_word_fits(w, exe.path, globs=True) for w in wanted):
                return NO_MATCH
            # A file of the process's own user is whatever that user writes into it: it narrows a
            # match by that user, and proves nothing without one.
            trusted = {0, None, process.uid} if match.user is not None else {0, None}
            writable = (
                exe.owner_uid not in trusted
                or not trusted.issuperset(exe.directory_writable_by)
                or bool((exe.mode or 0) & 0o022)
            )
            foreign = container is not None or exe.path_is_genuine is False
            # With mounts of its own any file can be laid over the path.
            own_mounts = node.shares_host_namespace(process, "mnt") is False
            foreign = foreign or (own_mounts and exe.path_is_genuine is not True)
            if writable or foreign or exe.memfd or (exe.deleted and not exe.replaced):
                proof = "claimed"
        why.append(name)
    return MatchResult(True, proof, ", ".join(why))
