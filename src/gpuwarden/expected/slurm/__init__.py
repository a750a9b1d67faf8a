"""What Slurm says should run on this node: its jobs, their GPUs, and which job ids are over.

Job ids come from this node first (steps, cgroups, environments); the controller then confirms
them. A controller that fails, answers late or prints something unexpected never means "no jobs":
then the source has failed, and nothing is called running or ended on its word.
"""

from __future__ import annotations

import time

import msgspec
from msgspec import Struct, field

from gpuwarden.errors import GpuwardenError, Malformed, Unavailable
from gpuwarden.expected.slurm import jobs
from gpuwarden.expected.slurm.controller import Controller, node_name
from gpuwarden.expected.slurm.gres import Gres, GresLayout, gpu_references
from gpuwarden.expected.slurm.site import (
    Site,
    find_site,
    gres_layout,
    step_sockets,
)
from gpuwarden.host import Host
from gpuwarden.model import SourceRun, Workload
from gpuwarden.sensors.seen import Seen

COMMAND_SECONDS = 2.0
TOTAL_SECONDS = 4.0
JOB_LIMIT = 128
"""Jobs asked about one by one; a node runs far fewer that hold GPUs."""
_NOTE_LIMIT = 4
_REMEDY_CONTROLLER = "run `scontrol ping` and `squeue` here; start slurmctld or mend the network"
_REMEDY_ROOT = (
    "run gpuwarden on the host itself, or give its container munge's socket, slurm.conf and "
    "Slurm's client programs"
)
_LOOSE_TRACKING = ("pgid", "linuxproc")


class _Answer(Struct):
    """What has been learned so far."""

    workloads: list[Workload] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def read(host: Host, seen: Seen) -> tuple[SourceRun, list[Workload]]:
    """Asks Slurm about this node; never raises for a Slurm that is absent or does not answer.

    ``ended`` holds only ids that somebody here still claims and that the controller, answering,
    does not know or says are over.
    """
    began = time.monotonic()
    try:
        run, workloads = _read(host, seen, began)
    except GpuwardenError as error:
        run = SourceRun(
            name="slurm",
            state="failed",
            reason=str(error),
            remedy=error.remedy or _REMEDY_CONTROLLER,
        )
        workloads = []
    seconds = time.monotonic() - began
    return msgspec.structs.replace(run, seconds=seconds, workloads=len(workloads)), workloads


def _absent(reason: str) -> tuple[SourceRun, list[Workload]]:
    return SourceRun(name="slurm", state="absent", reason=reason), []


def _read(host: Host, seen: Seen, began: float) -> tuple[SourceRun, list[Workload]]:
    site = find_site(host, seen)
    if site is None:
        return _absent("no slurmd runs here and there is no slurm.conf")
    if not host.is_local:
        raise Unavailable(
            "Slurm is on this host, and its commands cannot be run through a mounted root",
            remedy=_REMEDY_ROOT,
        )
    controller = Controller(host, site, began + TOTAL_SECONDS, COMMAND_SECONDS)
    sockets = step_sockets(host, site)
    node = node_name(controller, sockets)
    if node is None:
        return _absent("slurm.conf is here, but it has no node for this host and no slurmd runs")
    site.node = node
    if not jobs.controller_is_up(controller.ask("scontrol", "ping")):
        raise Unavailable("no controller of the Slurm cluster answers")
    listed = _listed(controller, node)
    node_gres = _node_gres(controller, node)
    pids = _step_pids(controller)
    answer = _Answer(notes=list(site.notes))
    if site.other_nodes:
        answer.notes.append(f"jobs of the nodes {', '.join(site.other_nodes)} were not asked for")
    if site.proctrack in _LOOSE_TRACKING:
        answer.notes.append(
            f"with proctrack/{site.proctrack} Slurm loses sight of processes that leave their "
            "parent, so a job's list of pids is incomplete"
        )
    layout = _layout(host, site, node, answer)
    asked = _Asked(controller, seen, node, node_gres, layout, pids, answer)
    asked.ask_running(listed)
    asked.ask_claimed(listed, _claimed_ids(seen, sockets, pids))
    asked.confirm_sluids()
    return _finish(answer, scheduled=any(item.is_gpu for item in node_gres)), answer.workloads


def _finish(answer: _Answer, *, scheduled: bool) -> SourceRun:
    reasons = [*answer.failures[:_NOTE_LIMIT], *answer.notes[:_NOTE_LIMIT]]
    return SourceRun(
        name="slurm",
        state="failed" if answer.failures else "ok",
        reason="; ".join(reasons),
        remedy=_REMEDY_CONTROLLER if answer.failures else "",
        running=tuple(sorted(answer.running)),
        ended=tuple(sorted(answer.ended)),
        scheduled=scheduled,
    )


def _listed(controller: Controller, node: str) -> dict[str, jobs.Job]:
    output = controller.ask("squeue", "-t", "all", "-w", node, "-o", jobs.SQUEUE_FORMAT)
    jobs.refuse_failure(output, "squeue")
    return {job.id: job for job in jobs.parse_squeue(output.stdout)}


def _node_gres(controller: Controller, node: str) -> tuple[Gres, ...]:
    output = controller.ask("scontrol", "show", "node", node)
    jobs.refuse_failure(output, "scontrol show node")
    return jobs.parse_node_gres(output.stdout)


def _step_pids(controller: Controller) -> dict[str, tuple[int, ...]]:
    """Job id → pids by slurmstepd's own word; empty when there are no steps or nobody says."""
    try:
        output = controller.ask("scontrol", "listpids")
        return jobs.parse_listpids(output.stdout)
    except (Unavailable, Malformed):
        return {}


def _layout(host: Host, site: Site, node: str, answer: _Answer) -> GresLayout:
    try:
        return gres_layout(host, site, node)
    except GpuwardenError as error:
        answer.notes.append(f"gres.conf cannot be read, GPU numbers are taken as they are: {error}")
        return GresLayout()


def _claimed_ids(
    seen: Seen, sockets: list[tuple[str, str]], pids: dict[str, tuple[int, ...]]
) -> list[str]:
    """Job ids that something on this node names, the most trustworthy first."""
    found = [job for _, job in sockets] + list(pids)
    for process in seen.processes.values():
        if process.cgroup is not None and process.cgroup.slurm_job is not None:
            found.append(process.cgroup.slurm_job)
    for process in seen.processes.values():
        found.append(process.environment.get("SLURM_JOB_ID", ""))
        found.append(process.environment.get("SLURM_JOBID", ""))
    plain = (str(int(job)) for job in found if jobs.is_job_id(job))
    return list(dict.fromkeys(plain))


class _Asked(Struct):
    """The controller's word on single jobs, gathered into one answer."""

    controller: Controller
    seen: Seen
    node: str
    node_gres: tuple[Gres, ...]
    layout: GresLayout
    pids: dict[str, tuple[int, ...]]
    answer: _Answer

    def ask_running(self, listed: dict[str, jobs.Job]) -> None:
        """Each job that the controller has on this node now becomes a workload with its GPUs."""
        running = [job for job in listed.values() if job.is_running]
        self.answer.running.update(job.id for job in running)
        for job in running[:JOB_LIMIT]:
            try:
                told = self._tell(job.id)
            except GpuwardenError as error:
                self.answer.failures.append(f"the GPUs of job {job.id} are not known: {error}")
                continue
            if told is None:
                # It ended, and was forgotten, between two questions.
                self.answer.running.discard(job.id)
                continue
            self.answer.workloads.append(self._workload(job, told.gres))
        if len(running) > JOB_LIMIT:
            self.answer.failures.append(f"only {JOB_LIMIT} of {len(running)} jobs were asked about")

    def ask_claimed(self, listed: dict[str, jobs.Job], claimed: list[str]) -> None:
        """Ids that are named here and do not run here: over, elsewhere, or not answered for."""
        unasked = 0
        for place, job_id in enumerate(job for job in claimed if job not in self.answer.running):
            known = listed.get(job_id)
            if known is None and place < JOB_LIMIT:
                try:
                    known = self._tell(job_id)
                except GpuwardenError as error:
                    self.answer.notes.append(f"job {job_id} was not answered for: {error}")
                    continue
                if known is None:
                    self.answer.ended.add(job_id)
                    continue
            if known is None:
                unasked += 1
            elif known.is_ended:
                self.answer.ended.add(job_id)
            else:
                self.answer.notes.append(
                    f"job {job_id} is {known.states[0] if known.states else 'known'}, "
                    "but not on this node"
                )
        if unasked:
            self.answer.notes.append(f"{unasked} claimed job ids were not asked about")

    def confirm_sluids(self) -> None:
        """A cgroup that carries a SLUID instead of a job id is tied to its job by slurmstepd.

        Slurm ≥ 26.05 names cgroups so unless CgroupJobIdPaths=yes.
        """
        job_of = {pid: job for job, pids in self.pids.items() for pid in pids}
        lost = 0
        for pid, process in self.seen.processes.items():
            name = process.cgroup.slurm_job if process.cgroup is not None else None
            if name is None or jobs.is_job_id(name):
                continue
            job = job_of.get(pid)
            if job in self.answer.running:
                self.answer.running.add(name)
            elif job in self.answer.ended:
                self.answer.ended.add(name)
            else:
                lost += 1
        if lost:
            self.answer.notes.append(
                f"{lost} processes are in a cgroup named by a SLUID that no step here answers for "
                "(CgroupJobIdPaths=yes in cgroup.conf names them by job id)"
            )
        self.answer.ended -= self.answer.running

    def _tell(self, job_id: str) -> jobs.Job | None:
        """One job, or None when the controller answers that it knows no such job.

        Errors: Unavailable, TimedOut, Malformed.
        """
        output = self.controller.ask("scontrol", "show", "job", "-d", job_id)
        if jobs.is_unknown_job(output):
            return None
        jobs.refuse_failure(output, "scontrol show job")
        try:
            return jobs.parse_scontrol_job(output.stdout, job_id, self.node)
        except Malformed:
            # An array's several records, or text that the job's owner made to look like ours.
            answer = self.controller.ask("squeue", "--json", "-t", "all", "-j", job_id)
            if jobs.is_unknown_job(answer):
                return None
            jobs.refuse_failure(answer, "squeue --json")
            return jobs.parse_squeue_json(answer.stdout, self.node).get(job_id)

    def _workload(self, job: jobs.Job, gres: tuple[Gres, ...] | None) -> Workload:
        references: tuple[str, ...] = ("all",)
        shared, unsure = False, "Slurm does not say which GPUs"
        if gres is not None:
            references, shared, unsure = gpu_references(
                gres, self.layout, self.node_gres, self.seen.gpus
            )
        if unsure:
            self.answer.notes.append(f"job {job.id}: {unsure}, so any GPU counts as its own")
        return Workload(
            source="slurm",
            name=f"job {job.id}",
            owner=job.user,
            gpus=references,
            shared=shared,
            user=job.user,
            uid=job.uid,
            job_id=job.id,
            account=job.account,
            partition=job.partition,
            pids=self.pids.get(job.id, ()),
            state=job.states[0] if job.states else None,
            started_at_ns=job.started_at_ns,
        )
