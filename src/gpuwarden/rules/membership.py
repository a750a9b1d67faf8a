"""Membership: which workload of the expected set a process belongs to, proven or only claimed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from gpuwarden.finding import Proof
from gpuwarden.model import Process, Workload
from gpuwarden.node import ALL_GPUS, Node
from gpuwarden.pattern import pattern
from gpuwarden.policy import Policy, PolicyWorkload
from gpuwarden.rules.policy_match import fit

JOB_VARIABLES = ("SLURM_JOB_ID", "SLURM_JOBID")
ENGINES = frozenset({"docker", "podman"})
"""Runtimes that people start containers with; as a kubelet's they keep no CRI sandboxes."""
JOB_GROUP = pattern(r"job_[0-9]{1,20}|s[0-9A-HJKMNP-TV-Z]{13}")


class Claim(NamedTuple):
    """One tie between a process and something that is, was, or may be expected."""

    source: str
    name: str
    proof: Proof
    why: str
    workload: Workload | None = None
    entry: PolicyWorkload | None = None
    ended: bool = False
    unanswered: str = ""
    """Why the source could not confirm or refute it."""

    @property
    def owner(self) -> str | None:
        if self.entry is not None:
            return self.entry.owner
        if self.workload is not None:
            return self.workload.owner or self.workload.user
        return None

    @property
    def contact(self) -> str | None:
        return (self.entry or self.workload).contact if (self.entry or self.workload) else None  # type: ignore[union-attr]


def policy_references(entry: PolicyWorkload) -> tuple[str, ...]:
    """GPU references of a policy entry, as ``Node.resolve`` takes them."""
    return (ALL_GPUS,) if entry.gpus == ALL_GPUS else references_of(entry.gpus)


def references_of(items: Iterable[int | str]) -> tuple[str, ...]:
    """GPU references of what a policy names: numbers are indices, words UUIDs or PCI addresses."""
    references: list[str] = []
    for item in items:
        if isinstance(item, int) or re.fullmatch(r"[0-9]{1,4}", item):
            references.append(f"index:{item}")
        elif item.startswith(("uuid:", "index:", "minor:", "pci:", "mig:")):
            references.append(item)
        elif item.startswith(("GPU-", "MIG-")):
            references.append(f"uuid:{item}")
        else:
            references.append(f"pci:{item.lower()}")
    return tuple(references)


def gives(node: Node, claim: Claim, gpu_id: str | None) -> bool:
    """Whether the claim's workload was given this GPU; a GPU that is not known counts as given."""
    if gpu_id is None:
        return True
    if claim.entry is not None:
        entry_as_workload = Workload(
            source="policy", name=claim.entry.name, gpus=policy_references(claim.entry)
        )
        return node.gives(entry_as_workload, gpu_id)
    return claim.workload is not None and node.gives(claim.workload, gpu_id)


def is_resolvable(node: Node, claim: Claim) -> bool:
    """Whether any GPU that the claim's workload was given is one that this scan knows."""
    references = (
        policy_references(claim.entry)
        if claim.entry is not None
        else (claim.workload.gpus if claim.workload is not None else ())
    )
    return not references or node.resolve(references) != frozenset()


def _slurm_job_of(node: Node, process: Process) -> tuple[str | None, str]:
    """The job id and where it was read: ``cgroup``, ``listpids`` or ``environment``."""
    placement = process.cgroup
    if placement is not None and placement.slurm_job is not None:
        return placement.slurm_job, "cgroup"
    for workload in node.snapshot.workloads:
        if workload.source == "slurm" and process.pid in workload.pids:
            return workload.job_id, "listpids"
    for variable in JOB_VARIABLES:
        if process.environment.get(variable):
            return process.environment[variable], "environment"
    return None, ""


def _maker_of_job_group(process: Process) -> str | None:
    """The container, session or service in which a job's cgroup lies; None where Slurm makes it.

    Slurm makes it at the root (v1) or in a slice of the system (v2); below anything else, whoever
    runs there can make a group of that name.
    """
    makers: list[str] = []
    for path in process.cgroup.paths if process.cgroup is not None else ():
        parts = [part for part in path.split("/") if part]
        at = next((i for i, part in enumerate(parts) if JOB_GROUP.fullmatch(part)), None)
        if at is None:
            continue
        above = parts[: at - 1] if at and parts[at - 1].startswith("uid_") else parts[:at]
        foreign = [p for p in above[:-1] if not p.endswith(".slice") or p.startswith("user")]
        if not foreign:
            return None
        makers.append(foreign[0])
    return makers[0] if makers else None


def slurm_claim(node: Node, process: Process) -> Claim | None:
    """The process's Slurm job, as its cgroup, Slurm's own pid list or its environment say."""
    job, where = _slurm_job_of(node, process)
    if job is None:
        return None
    if where == "environment" and process.cgroup is not None and process.cgroup.container_id:
        # Whoever starts a container writes its environment: it must not soften what the container
        # is by naming a job that has ended or that nobody can be asked about.
        return Claim("slurm", f"job {job}", "claimed", "only its environment names it")
    source = node.source("slurm")
    name = f"job {job}"
    if source is None or source.state in ("failed", "skipped", "absent"):
        reason = source.reason if source and source.reason else "Slurm was not asked"
        return Claim("slurm", name, "claimed", f"its {where} names it", unanswered=reason)
    workload = next(
        (w for w in node.snapshot.workloads if w.source == "slurm" and w.job_id == job), None
    )
    if workload is None:
        if job in source.ended:
            return Claim("slurm", name, "claimed", f"its {where} names it", ended=True)
        return Claim(
            "slurm",
            name,
            "claimed",
            f"its {where} names it",
            unanswered=f"the controller did not answer for job {job}",
        )
    if where == "environment":
        return Claim("slurm", name, "claimed", "only its environment names it", workload=workload)
    maker = _maker_of_job_group(process) if where == "cgroup" else None
    if maker is not None and process.pid not in workload.pids:
        return Claim(
            "slurm",
            name,
            "claimed",
            f"its cgroup names it inside {maker}, where others than Slurm make groups",
            workload=workload,
        )
    if workload.uid is not None and process.uid not in (None, 0, workload.uid):
        return Claim(
            "slurm",
            name,
            "claimed",
            f"its {where} names it, but it runs as uid {process.uid}, not {workload.uid}",
            workload=workload,
        )
    how = "Slurm lists this pid" if where == "listpids" else "its cgroup, and the controller agrees"
    return Claim("slurm", name, "proven", how, workload=workload)


def kubernetes_claim(node: Node, process: Process) -> Claim | None:
    """The process's pod and whether pod-resources gave it an accelerator."""
    placement = process.cgroup
    container = node.container_of(process)
    uid = placement.pod_uid if placement else None
    if uid is None and container is not None:
        uid = container.pod_uid
    if uid is None:
        return None
    label = uid
    if container is not None and container.pod_name:
        label = f"{container.pod_namespace}/{container.pod_name}"
    name = f"pod {label}"
    source = node.source("kubernetes")
    if source is None or source.state != "ok":
        reason = source.reason if source and source.reason else "the kubelet was not asked"
        return Claim("kubernetes", name, "claimed", "its cgroup names it", unanswered=reason)

    def is_it(workload: Workload) -> bool:
        if workload.source != "kubernetes":
            return False
        if workload.pod_uid is not None:
            return workload.pod_uid == uid
        return (
            container is not None
            and container.pod_name is not None
            and (workload.pod_namespace, workload.pod_name)
            == (container.pod_namespace, container.pod_name)
        )

    workload = next((w for w in node.snapshot.workloads if is_it(w)), None)
    if workload is None:
        return Claim("kubernetes", name, "claimed", "the kubelet gave this pod no accelerator")
    if container is None or not container.confirmed:
        return Claim(
            "kubernetes",
            name,
            "claimed",
            "only its cgroup name ties it to the pod",
            workload=workload,
        )
    if node.is_outside(process, container):
        return Claim(
            "kubernetes",
            name,
            "claimed",
            "in the pod's cgroup, but in the host's namespaces",
            workload=workload,
        )
    # A container made past the kubelet can carry any pod's uid and, by its labels, any name; only a
    # pod that the runtime keeps has a name there, and one runtime keeps a pod.
    if container.runtime in ENGINES and uid in source.running:
        return Claim(
            "kubernetes",
            name,
            "claimed",
            f"the pod is another runtime's, its container is {container.runtime}'s",
            workload=workload,
        )
    if container.pod_uid not in (None, uid):
        return Claim(
            "kubernetes",
            name,
            "claimed",
            f"its cgroup names the pod, its container is pod {container.pod_uid}'s",
            workload=workload,
        )
    if container.pod_name is None and uid not in source.running:
        return Claim(
            "kubernetes", name, "claimed", "its container only carries the uid", workload=workload
        )
    return Claim(
        "kubernetes",
        name,
        "proven",
        "the runtime confirms the container of its cgroup",
        workload=workload,
    )


def systemd_claim(node: Node, process: Process) -> Claim | None:
    """The process's unit, when it is in no container and no job."""
    placement = process.cgroup
    if placement is None or placement.unit is None or placement.container_id is not None:
        return None
    source = node.source("systemd")
    unit = placement.unit
    if source is None or source.state != "ok":
        return Claim("systemd", f"unit {unit}", "claimed", "its cgroup names it")
    for workload in node.snapshot.workloads:
        if workload.source != "systemd" or workload.unit != unit:
            continue
        # The name alone could be a group of the same name elsewhere in the tree.
        group = workload.cgroup_path
        if group is not None and not any(
            path == group or path.startswith(group + "/") for path in placement.paths
        ):
            return Claim(
                "systemd",
                f"unit {unit}",
                "claimed",
                f"its cgroup is not {group}",
                workload=workload,
            )
        return Claim(
            "systemd", f"unit {unit}", "proven", "systemd confirms the unit", workload=workload
        )
    proof: Proof = "proven" if unit in source.running else "claimed"
    return Claim("systemd", f"unit {unit}", proof, "its cgroup names it")


def policy_claims(
    node: Node, policy: Policy, process: Process, job: Workload | None
) -> Iterator[Claim]:
    """Policy entries that fit the process."""
    for entry in policy.workloads:
        result = fit(node, entry.match, process, job)
        if result.fits:
            yield Claim("policy", entry.name, result.proof, f"matches by {result.why}", entry=entry)


def claims(node: Node, policy: Policy, process: Process) -> Sequence[Claim]:
    """Every tie of a process to the expected set: scheduler, orchestrator, systemd, policy."""
    slurm = slurm_claim(node, process)
    job = slurm.workload if slurm is not None and slurm.proof == "proven" else None
    found = [slurm, kubernetes_claim(node, process), systemd_claim(node, process)]
    return [c for c in found if c is not None] + list(policy_claims(node, policy, process, job))
