"""From a finding's id or a pid to what a plan is about: one process as it is now, and its verdict.

A finding is looked for in the daemon's memory first, then in a scan made now. The process is read
before the scan and after it, so that what was judged is what stays held.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from msgspec import Struct
from msgspec.structs import replace

from gpuwarden.errors import GpuwardenError, Unavailable, UsageError
from gpuwarden.finding import Finding, Report, Row
from gpuwarden.history import remembered
from gpuwarden.history.remembered import KnownFinding
from gpuwarden.host import Host
from gpuwarden.model import Container, Gpu, Process, Snapshot, Workload
from gpuwarden.node import Node
from gpuwarden.pattern import pattern
from gpuwarden.policy import Policy
from gpuwarden.probes.exec_count import ExecCounts
from gpuwarden.respond.identity import (
    NOT_COMPARABLE,
    difference,
    of_process,
    of_subject,
    read_identity,
)
from gpuwarden.respond.judged import gravest, verdict_of
from gpuwarden.respond.step import Identity, Target
from gpuwarden.sensors.cgroup import place
from gpuwarden.sensors.process import stat_lines

_FINDING = pattern(r"[0-9a-f]{16}")
_PID = pattern(r"[1-9][0-9]{0,9}")
_CGROUP_LIMIT_BYTES = 64 << 10


class Found(Struct, frozen=True, kw_only=True):
    """A target, and what a person must know of how it was found."""

    target: Target
    report: Report
    finding: Finding | None = None
    judged_again: str = ""
    """What has changed since the finding: nothing is done in this run."""
    notes: tuple[str, ...] = ()


class Finder:
    """Finds targets on one machine under one policy; ``look`` scans it, ``judge`` judges a scan."""

    def __init__(
        self,
        host: Host,
        policy: Policy,
        state_directory: str,
        *,
        look: Callable[[], Snapshot],
        judge: Callable[[Snapshot], Report],
    ) -> None:
        self._host = host
        self._policy = policy
        self._state_directory = state_directory
        self._look = look
        self._judge = judge
        self._seen: tuple[Snapshot, Report] | None = None

    def find(self, what: str) -> Found:
        """What ``what`` stands for: 16 hex digits are a finding, fewer decimal ones a pid.

        Errors: UsageError for neither, and for a finding that nobody knows or that is about no
        process and no GPU; Unavailable for a pid that is not there.
        """
        if _FINDING.fullmatch(what):
            return self._by_finding(what)
        if _PID.fullmatch(what):
            with ExecCounts() as counts:
                return self._by_pid(int(what), counts)
        raise UsageError(
            f"respond: '{what[:40]}' is neither a finding's id (16 hex digits) nor a pid",
            remedy="gpuwarden scan prints both",
        )

    def _judged(self) -> tuple[Snapshot, Report]:
        if self._seen is None:
            snapshot = self._look()
            self._seen = snapshot, self._judge(snapshot)
        return self._seen

    def _by_finding(self, what: str) -> Found:
        memory = remembered.finding(self._state_directory, what)
        notes = tuple(f"{one.what}: {one.reason}" for one in memory.troubles)
        known = memory.findings[0] if memory.findings else self._in_a_scan(what, notes)
        finding = known.finding
        if finding.subject.pid is None and finding.subject.gpu_ids:
            return self._of_gpu(known, notes)
        identity = of_subject(finding.subject)
        if identity is None:
            about = finding.subject.name or "no process"
            raise UsageError(
                f"respond: finding {what} ({finding.rule}) is about {about}: "
                "nothing can be done to it from here",
                remedy=finding.advice[0] if finding.advice else "",
            )
        with ExecCounts() as counts:
            try:
                now = read_identity(self._host, identity.pid, counts)
            except GpuwardenError:
                return self._ended(known, notes)
            changed = difference(identity, now)
            if not changed:
                return self._of_process(now, known, counts, notes)
            # The finding is of another exec, or of another process: a number is all that is left.
            # What was seen before that was read is not of this one.
            self._seen = None
            found = self._by_pid(identity.pid, counts)
        return replace(found, judged_again=changed, finding=finding, notes=notes + found.notes)

    def _in_a_scan(self, what: str, notes: tuple[str, ...]) -> KnownFinding:
        snapshot, report = self._judged()
        finding = next((one for one in report.findings if one.id == what), None)
        if finding is None:
            raise UsageError(
                f"respond: no finding {what}: not in {self._state_directory}, nor in a scan made "
                "now" + "".join(f"; {note}" for note in notes),
                remedy="gpuwarden scan lists what there is; --state names another memory",
            )
        at = snapshot.taken_at_ns
        return KnownFinding(finding=finding, is_open=True, first_seen_ns=at, last_seen_ns=at)

    def _by_pid(self, pid: int, counts: ExecCounts) -> Found:
        try:
            identity = read_identity(self._host, pid, counts)
        except Unavailable as error:
            found = self._listed_only(pid, None)
            if found is None:
                raise Unavailable(f"there is no process {pid}", remedy="gpuwarden scan") from error
            return found
        return self._of_process(identity, None, counts, ())

    def _listed_only(self, pid: int, known: KnownFinding | None) -> Found | None:
        """What is said of a pid that the driver lists and /proc does not have; None if it is not.

        Nothing can be held then, so nothing is done to it.
        """
        snapshot, report = self._judged()
        rows = tuple(row for row in report.rows if row.pid == pid and row.start_time_ticks is None)
        row = gravest(rows)
        if row is None:
            return None
        finding = known.finding if known is not None else None
        target = Target(
            verdict=row.verdict,
            identity=None,
            process=None,
            rows=rows,
            container=None,
            workload=None,
            gpus=_gpus(snapshot, {one.gpu_id for one in rows}),
            snapshot=snapshot,
            policy=self._policy,
            finding_id=finding.id if finding is not None else None,
            owner=row.owner,
            contact=row.contact,
        )
        note = f"the driver lists pid {pid}, and there is no such process to be seen"
        return Found(target=target, report=report, finding=finding, notes=(note,))

    def _of_process(
        self,
        identity: Identity,
        known: KnownFinding | None,
        counts: ExecCounts,
        notes: tuple[str, ...],
    ) -> Found:
        """``identity`` was read before the scan, or is the finding's; it must hold after it."""
        snapshot, report = self._judged()
        process = Node(snapshot).processes.get(identity.pid)
        changed = self._changed(identity, process, counts)
        if process is None:
            process = _bare_process(self._host, identity)
            if process is not None:
                snapshot = replace(snapshot, processes=(*snapshot.processes, process))
        return of_process_now(
            identity, known, snapshot, report, self._policy, changed=changed, notes=notes
        )

    def _changed(self, identity: Identity, process: Process | None, counts: ExecCounts) -> str:
        """What is another after the scan, or was in it."""
        try:
            changed = difference(identity, read_identity(self._host, identity.pid, counts))
        except GpuwardenError:
            return "it has ended while it was looked at"
        if changed == NOT_COMPARABLE:
            # Nothing says that it is another one; whoever acts on it is refused for that.
            changed = ""
        if changed or process is None:
            return changed
        seen = of_process(process, identity.boot_id)
        if seen.start_time_ticks != identity.start_time_ticks:
            return "its number passed to another process while it was looked at"
        binaries = {(None, None), (identity.exe_device, identity.exe_inode)}
        if (seen.exe_device, seen.exe_inode) not in binaries:
            return "it has executed another program while it was looked at"
        return ""

    def _ended(self, known: KnownFinding, notes: tuple[str, ...]) -> Found:
        """The process of a finding is gone: what is left is what it left behind."""
        finding = known.finding
        listed = self._listed_only(finding.subject.pid or 0, known)
        if listed is not None:
            return replace(listed, notes=notes + listed.notes)
        found = self._of_gpu(known, notes)
        said = f", of which the finding said {finding.verdict}" if finding.verdict else ""
        return replace(
            found,
            target=replace(found.target, verdict=None, rows=()),
            judged_again=f"process {finding.subject.pid}{said} has ended",
            notes=notes,
        )

    def _of_gpu(self, known: KnownFinding, notes: tuple[str, ...]) -> Found:
        snapshot, report = self._judged()
        finding = known.finding
        ids = set(finding.subject.gpu_ids)
        rows = tuple(row for row in report.rows if row.pid is None and row.gpu_id in ids)
        ruled = verdict_of(known, rows, time.time_ns())
        target = Target(
            verdict=ruled.verdict,
            identity=None,
            process=None,
            rows=rows,
            container=None,
            workload=None,
            gpus=_gpus(snapshot, ids),
            snapshot=snapshot,
            policy=self._policy,
            finding_id=finding.id,
            owner=finding.owner,
        )
        return Found(
            target=target,
            report=report,
            finding=finding,
            notes=(*notes, ruled.note) if ruled.note else notes,
        )


def of_process_now(
    identity: Identity,
    known: KnownFinding | None,
    snapshot: Snapshot,
    report: Report,
    policy: Policy,
    *,
    changed: str = "",
    notes: tuple[str, ...] = (),
) -> Found:
    """The target that a snapshot and its report make of a process. Pure.

    ``known``: the finding that was asked about; ``changed``: why nothing is done in this run.
    """
    node = Node(snapshot)
    process = node.processes.get(identity.pid)
    rows = tuple(
        row
        for row in report.rows
        if row.pid == identity.pid and row.start_time_ticks in (None, identity.start_time_ticks)
    )
    ruled = verdict_of(known, rows, time.time_ns())
    row = gravest(rows)
    finding = known.finding if known is not None else _gravest_finding(report, identity)
    container = node.container_of(process) if process is not None else None
    target = Target(
        verdict=ruled.verdict,
        identity=identity,
        process=process,
        rows=rows,
        container=container,
        workload=_workload(snapshot, row, process, container),
        gpus=_gpus(snapshot, {row.gpu_id for row in rows}),
        snapshot=snapshot,
        policy=policy,
        finding_id=finding.id if finding is not None else None,
        owner=row.owner if row is not None else (finding.owner if finding else None),
        contact=row.contact if row is not None else None,
    )
    return Found(
        target=target,
        report=report,
        finding=finding,
        judged_again=changed,
        notes=(*notes, ruled.note) if ruled.note else notes,
    )


def _gravest_finding(report: Report, identity: Identity) -> Finding | None:
    """The finding of a verdict about this process, which the report has in order of gravity."""
    mine = (
        one
        for one in report.findings
        if one.subject.pid == identity.pid and one.verdict is not None and not one.silenced_by
    )
    return next(mine, None)


def _gpus(snapshot: Snapshot, ids: Collection[str | None]) -> tuple[Gpu, ...]:
    return tuple(gpu for gpu in snapshot.gpus if gpu.id in ids)


def _workload(
    snapshot: Snapshot,
    row: Row | None,
    process: Process | None,
    container: Container | None,
) -> Workload | None:
    """The one that the verdict named, else the job or pod that it is in."""
    placement = process.cgroup if process is not None else None
    job = placement.slurm_job if placement is not None else None
    pod = container.pod_uid if container is not None else None
    tests: tuple[Callable[[Workload], bool], ...] = (
        lambda one: row is not None and row.workload is not None and one.name == row.workload,
        lambda one: job is not None and one.source == "slurm" and one.job_id == job,
        lambda one: pod is not None and one.pod_uid == pod,
    )
    for test in tests:
        found = next((one for one in snapshot.workloads if test(one)), None)
        if found is not None:
            return found
    return None


def _bare_process(host: Host, identity: Identity) -> Process | None:
    """A process that the scan did not look at, since it uses no accelerator now."""
    try:
        line = stat_lines.read_line(host, identity.pid)
        raw = host.read_bytes(f"/proc/{identity.pid}/cgroup", _CGROUP_LIMIT_BYTES)
    except GpuwardenError:
        return None
    if line.start_time_ticks != identity.start_time_ticks:
        return None
    lines = tuple(raw.decode("utf-8", "backslashreplace").splitlines()[:64])
    return Process(
        pid=line.pid,
        start_time_ticks=line.start_time_ticks,
        ppid=line.ppid,
        process_group=line.process_group,
        session_id=line.session_id,
        comm=line.comm,
        state=line.state,
        kernel_thread=stat_lines.is_kernel_thread(line),
        cgroup_lines=lines,
        cgroup=place(lines),
    )
