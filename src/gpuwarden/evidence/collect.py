"""Everything about a subject into an archive, the most fleeting first.

It reads only, stops nobody and opens no device, socket or pipe of whom it looks at. Each process is
held by its directory in /proc from beginning to end, so that nothing of another one that has its
pid by then can come under its name. What could not be had is noted with the reason.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from gpuwarden.errors import GpuwardenError, Unavailable
from gpuwarden.evidence import (
    autostarts,
    container_files,
    descriptors,
    gpu_modules,
    kernel_lines,
    nameless_files,
    node_files,
    past,
    process_files,
    sockets,
    surroundings,
)
from gpuwarden.evidence.archive import ArchiveWriter
from gpuwarden.evidence.manifest import Account, Machine, Subject
from gpuwarden.evidence.masks import mask_text
from gpuwarden.evidence.opened_process import OpenedProcess
from gpuwarden.evidence.shelf import Shelf
from gpuwarden.evidence.subjects import Subjects, Whom, boot_id, subjects
from gpuwarden.evidence.wanted import Wanted
from gpuwarden.finding import Report
from gpuwarden.host import Host
from gpuwarden.model import Snapshot
from gpuwarden.node import Node
from gpuwarden.outputs.words import escape
from gpuwarden.policy import Policy
from gpuwarden.scan import ScanOptions, take_snapshot
from gpuwarden.sensors.process import stat_lines
from gpuwarden.sensors.seen import StatLine

FINDINGS_TOLD = 256
TEXT_LIMIT = 400


def collect(
    wanted: Wanted,
    writer: ArchiveWriter,
    *,
    policy: Policy,
    policy_path: str | None,
    tell: Callable[[str], None],
) -> Account:
    """All that is to be had into ``writer``; what it came to, without why it was asked for.

    Errors: Unavailable when the subject is not there (any more), UsageError.
    """
    host = Host(wanted.root)
    if wanted.boot_id is not None and wanted.boot_id != boot_id(host):
        raise Unavailable("the machine was started anew since: none of its processes is left")
    with ExitStack() as stack:
        # Held first: a scan takes time, and what it is about may end in it.
        held: OpenedProcess | None = None
        if wanted.pid is not None:
            held = stack.enter_context(OpenedProcess(host, wanted.pid, wanted.start_time_ticks))
        collection = _Collection(wanted, writer, host, policy, tell)
        return collection.run(stack, held, policy_path)


class _Collection:
    """One archive's subjects, one after the other."""

    def __init__(
        self,
        wanted: Wanted,
        writer: ArchiveWriter,
        host: Host,
        policy: Policy,
        tell: Callable[[str], None],
    ) -> None:
        self._wanted = wanted
        self._writer = writer
        self._host = host
        self._policy = policy
        self._tell = tell
        self._boot_id = boot_id(host)
        self._identities: dict[int, dict[str, Any]] = {}
        self._changed: set[int] = set()
        self._lines: dict[int, StatLine] | None = None
        self._ended: list[str] = []
        self._seconds: dict[str, float] = {}
        self._began = time.monotonic()

    def run(self, stack: ExitStack, held: OpenedProcess | None, policy_path: str | None) -> Account:
        wanted, host = self._wanted, self._host
        if held is not None:
            self._of_process(held)
        options = ScanOptions(nvml_library=wanted.nvml_library, deep=wanted.deep)
        snapshot = node_files.mask_snapshot(take_snapshot(host, options))
        self._note("snapshot")
        node = Node(snapshot)
        chosen = self._chosen(held, node)
        opened = [held] if held is not None else self._opened(stack, chosen)
        for process in opened if held is None else ():
            self._of_process(process)
        top = Shelf(self._writer, "node", "node")
        report = node_files.collect(top, host, snapshot, self._policy, policy_path)
        whom = [(one.pid, one.start_time_ticks) for one in opened]
        groups = [self._identities[one.pid]["cgroup"] for one in opened]
        container_files.collect(top.below("containers", "container"), host, node, groups)
        autostarts.collect(top.below("autostarts", "autostart"), host, node, chosen.processes)
        kernel_lines.collect(top, host, {one.pid: one.line.comm for one in opened})
        self._note("node")
        digests = self._modules(opened, node) if wanted.memory else []
        past.collect(Shelf(self._writer, "past", "memory of watch"), wanted, whom, digests)
        self._note("past")
        for process in opened:
            self._between(process, "the archive was closed")
        top.put_json("seconds.json", self._seconds, "where the time went")
        return Account(
            subject=chosen.subject,
            machine=_machine(snapshot, host),
            why="",
            finding=wanted.finding,
            findings=_findings(report, chosen),
            ended=tuple(self._ended),
        )

    def _of_process(self, process: OpenedProcess) -> None:
        """All that is to be had of one process but its memory; who it is must hold throughout."""
        shelf = self._shelf(process)
        self._tell(f"pid {process.pid}: its files")
        before = process_files.collect(process, shelf, self._boot_id)
        self._identities[process.pid] = before
        self._between(process, "its files were read")
        found = descriptors.collect(process, shelf)
        sockets.collect(process, shelf)
        self._between(process, "its descriptors were read")
        nameless_files.collect(process, shelf, found)
        self._between(process, "its binary was read")
        surroundings.collect(process, shelf, self._table())
        self._note("processes")

    def _shelf(self, process: OpenedProcess) -> Shelf:
        return Shelf(self._writer, f"processes/{process.pid}", f"pid {process.pid}")

    def _table(self) -> dict[int, StatLine]:
        if self._lines is None:
            self._lines = stat_lines.read(self._host)
        return self._lines

    def _between(self, process: OpenedProcess, when: str) -> None:
        """Says once when a process has ended, or is another program."""
        if process.pid in self._changed:
            return
        why = process.why_gone()
        if not why:
            before = self._identities[process.pid]
            now = process_files.identify(process, self._boot_id)
            names = ("exe_device", "exe_inode", "exec_mark")
            if any(before[name] != now[name] for name in names) and not process.why_gone():
                why = "it has executed another program"
        if why:
            self._changed.add(process.pid)
            self._ended.append(f"pid {process.pid}: {why}, while or before {when}")

    def _chosen(self, held: OpenedProcess | None, node: Node) -> Subjects:
        if held is None:
            return subjects(self._wanted, self._host, node)
        who = self._identities[held.pid]
        seen = node.processes.get(held.pid)
        is_it = seen is not None and seen.start_time_ticks == held.start_time_ticks
        container = seen.cgroup.container_id if is_it and seen and seen.cgroup else None
        subject = Subject(
            kind="process",
            text=f"pid {held.pid} ({escape(held.line.comm)})",
            pid=held.pid,
            start_time_ticks=held.start_time_ticks,
            boot_id=self._boot_id,
            exe=who["exe"],
            exe_device=who["exe_device"],
            exe_inode=who["exe_inode"],
            exec_mark=who["exec_mark"],
            container_id=container,
            pids=(held.pid,),
        )
        return Subjects(subject, (Whom(held.pid, held.start_time_ticks),))

    def _opened(self, stack: ExitStack, chosen: Subjects) -> list[OpenedProcess]:
        opened: list[OpenedProcess] = []
        for whom in chosen.processes:
            try:
                process = OpenedProcess(self._host, whom.pid, whom.start_time_ticks)
            except GpuwardenError as error:
                self._writer.unread(f"pid {whom.pid}", str(error))
                self._ended.append(f"pid {whom.pid}: {error}, before it was looked at")
                continue
            opened.append(stack.enter_context(process))
        if chosen.more:
            self._writer.left_out(f"{chosen.more} processes", "more than one archive is about")
        if not opened:
            raise Unavailable(f"{chosen.subject.text}: all of its processes have ended")
        return opened

    def _modules(self, opened: list[OpenedProcess], node: Node) -> list[str]:
        self._tell("GPU modules in memory and in mapped files")
        alive = [(one.pid, one.start_time_ticks) for one in opened if not one.why_gone()]
        shelf = Shelf(self._writer, "modules", "")
        digests = gpu_modules.collect(shelf, self._host, alive, self._policy, node)
        for process in opened:
            self._between(process, "its memory was read")
        self._note("modules")
        return digests

    def _note(self, what: str) -> None:
        now = time.monotonic()
        self._seconds[what] = round(self._seconds.get(what, 0.0) + now - self._began, 3)
        self._began = now


def _machine(snapshot: Snapshot, host: Host) -> Machine:
    node = snapshot.node
    told = os.uname()
    return Machine(
        hostname=escape(node.hostname),
        kernel=node.kernel or told.release,
        architecture=told.machine,
        system=node_files.system_name(host),
        driver_version=node.driver_version,
        cuda_version=node.cuda_version,
        unread=node.unread,
    )


def _findings(report: Report, chosen: Subjects) -> tuple[str, ...]:
    """One line for each finding about the subject."""
    whom = {(one.pid, one.start_time_ticks) for one in chosen.processes}
    lines: list[str] = []
    for finding in report.findings:
        subject = finding.subject
        of_process = (subject.pid, subject.start_time_ticks) in whom
        if of_process or (chosen.subject.gpu is not None and chosen.subject.gpu in subject.gpu_ids):
            verdict = f", {finding.verdict}" if finding.verdict else ""
            line = f"{finding.id} {finding.severity}{verdict}: {finding.title}: {subject.name}"
            lines.append(escape(mask_text(line))[:TEXT_LIMIT])
    return tuple(lines[:FINDINGS_TOLD])
