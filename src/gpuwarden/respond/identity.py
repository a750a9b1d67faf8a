"""Which process, and which exec of it, an action is held against; nothing acts on a bare pid.

A process is held by a pidfd that is opened first and compared afterwards, so that its number cannot
pass to another one between the comparison and the act. One thing the kernel lets nobody hold still:
an exec. It is looked for again in the microseconds before each signal.
"""

from __future__ import annotations

import errno
import os
import select
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from gpuwarden.errors import Denied, GpuwardenError, Unavailable
from gpuwarden.evidence.manifest import Subject as ArchiveSubject
from gpuwarden.finding import Subject
from gpuwarden.host import Host
from gpuwarden.model import Process
from gpuwarden.probes.exec_count import ExecCounts
from gpuwarden.respond.step import Identity
from gpuwarden.sensors.process import exec_mark, stat_lines

BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
NOT_COMPARABLE: Final = (
    "which exec of it was judged is not known: no exec count, and no mark of its addresses"
)


class Changed(Unavailable):
    """It is another process by now, or another program: to be judged again, not to be acted on."""


def of_subject(subject: Subject | ArchiveSubject) -> Identity | None:
    """The identity that a finding, or an archive, was made of; None if it is about no process."""
    if subject.pid is None or subject.start_time_ticks is None:
        return None
    return Identity(
        pid=subject.pid,
        start_time_ticks=subject.start_time_ticks,
        boot_id=subject.boot_id,
        exe_device=subject.exe_device,
        exe_inode=subject.exe_inode,
        exec_count=subject.exec_count,
        exec_mark=subject.exec_mark,
    )


def of_process(process: Process, boot_id: str | None) -> Identity:
    """The identity of a process as a snapshot has it; its exec count is in no snapshot."""
    exe = process.exe
    return Identity(
        pid=process.pid,
        start_time_ticks=process.start_time_ticks,
        boot_id=boot_id,
        exe_device=exe.device if exe else None,
        exe_inode=exe.inode if exe else None,
        exec_mark=process.exec_mark,
    )


def read_identity(host: Host, pid: int, counts: ExecCounts | None = None) -> Identity:
    """The process that has this number now, and its present exec.

    ``counts``: a probe that is loaded; without one it is loaded and unloaded here (50 ms). Where
    it cannot be loaded, the mark stands alone. Errors: Unavailable (no such process), Denied.
    """
    with ExitStack() as stack:
        if counts is None:
            counts = stack.enter_context(ExecCounts())
        line = stat_lines.read_line(host, pid)
        # Of one whose first thread has ended, another thread's folder shows the binary.
        thread = stat_lines.living_thread(host, line) or line
        exe = _binary(host, thread.pid)
        count = counts.of(pid)
        drawn = exec_mark.addresses_are_drawn(host)
        return Identity(
            pid=pid,
            start_time_ticks=line.start_time_ticks,
            boot_id=_boot_id(host),
            exe_device=exe[0] if exe else None,
            exe_inode=exe[1] if exe else None,
            exec_count=count.count
            if count is not None and count.start_time_ticks == line.start_time_ticks
            else None,
            exec_mark=exec_mark.read_mark(host, thread.pid, exe, drawn=drawn),
        )


def _boot_id(host: Host) -> str | None:
    try:
        return host.read_text(BOOT_ID, 64).strip() or None
    except GpuwardenError:
        return None


def _binary(host: Host, pid: int) -> tuple[str, int] | None:
    try:
        status = host.link_target_status(f"/proc/{pid}/exe")
    except GpuwardenError:
        return None
    return f"{status.device[0]}:{status.device[1]}", status.inode


def difference(identity: Identity, now: Identity, *, any_exec: bool = False) -> str:
    """What is another than it was, in one clause; empty when nothing is.

    ``any_exec``: the process is all that matters, whatever it executes. The kernel's exec count
    decides where both have it: a process can move its own mark, never its count. What cannot be
    compared counts as another.
    """
    if now.pid != identity.pid:
        return f"it is process {now.pid}"
    if identity.boot_id is None or now.boot_id != identity.boot_id:
        return "the machine was started anew since, or it is not known whether it was"
    if now.start_time_ticks != identity.start_time_ticks:
        return f"that process has ended, and another one has the number {identity.pid}"
    if any_exec:
        return ""
    before = (identity.exe_device, identity.exe_inode)
    after = (now.exe_device, now.exe_inode)
    if before != after:
        return f"its binary is another one: {_named(before)} then, {_named(after)} now"
    if identity.exec_count is not None and now.exec_count is not None:
        executed = now.exec_count - identity.exec_count
        return f"it has executed a program since ({executed} more)" if executed else ""
    if identity.exec_mark is not None and now.exec_mark is not None:
        if identity.exec_mark != now.exec_mark:
            return "it has executed a program since, or has moved its own addresses"
        return ""
    return NOT_COMPARABLE


def _named(exe: tuple[str | None, int | None]) -> str:
    return "not readable" if None in exe else f"inode {exe[1]} on {exe[0]}"


class HeldProcess:
    """A process that was compared while a pidfd of ours was open on it."""

    def __init__(
        self,
        host: Host,
        identity: Identity,
        pidfd: int,
        counts: ExecCounts,
        *,
        any_exec: bool = False,
    ) -> None:
        self._any_exec = any_exec
        self.host = host
        self.identity = identity
        self.pidfd = pidfd
        self.counts = counts

    @property
    def pid(self) -> int:
        return self.identity.pid

    @property
    def weaker(self) -> str:
        """Why an exec can only be told by the mark; empty where the kernel's count was compared."""
        if self.identity.exec_count is not None and not self.counts.unavailable:
            return ""
        why = self.counts.unavailable or "what was judged has no count"
        return f"execs are told by addresses alone, not by the kernel's count: {why}"

    def has_ended(self, within_seconds: float = 0.0) -> bool:
        """Whether all its threads have ended, waiting so long for it; a zombie has ended."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(int(within_seconds * 1000)))

    def check(self) -> None:
        """Compares it anew. Errors: Changed; Unavailable or Denied if it cannot be compared."""
        try:
            now = read_identity(self.host, self.pid, self.counts)
        except Denied:
            raise
        except GpuwardenError as error:
            raise Changed(f"process {self.pid} has ended") from error
        found = difference(self.identity, now, any_exec=self._any_exec)
        # What /proc has shown was this process's only if it has not ended by now.
        if not found and self.has_ended():
            found = "it has ended"
        if found:
            raise Changed(
                f"process {self.pid} is not the one that was judged: {found}",
                remedy="judge it again: gpuwarden respond PID",
            )

    def send(self, number: signal.Signals) -> None:
        """Compares it and signals it, with nothing in between. Errors: as ``check``."""
        self.check()
        self.send_again(number)

    def send_again(self, number: signal.Signals) -> None:
        """Signals the process without comparing: for the second signal of one act, since a handler
        of the first may have executed a program. Errors: Changed, Denied, Unavailable.
        """
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError as error:
            raise Changed(f"process {self.pid} has ended") from error
        except PermissionError as error:
            raise Denied(
                f"process {self.pid}: it may not be signalled", remedy="run as root"
            ) from error
        except OSError as error:
            raise Unavailable(f"process {self.pid}: {error.strerror}") from error


@contextmanager
def hold(
    host: Host,
    identity: Identity,
    counts: ExecCounts | None = None,
    *,
    any_exec: bool = False,
) -> Iterator[HeldProcess]:
    """Holds a process: the pidfd first, then everything is compared.

    ``any_exec``: for what may be done to it whatever it executes by now, such as letting it go on.
    Errors: Changed (to be judged again); Denied; Unavailable where this is not the machine itself
    or its kernel has no pidfds (before 5.3).
    """
    if not host.is_live:
        raise Unavailable(f"{host.root}: not this machine in the host's pid namespace")
    with ExitStack() as stack:
        if counts is None:
            counts = stack.enter_context(ExecCounts())
        try:
            pidfd = os.pidfd_open(identity.pid)
        except (ProcessLookupError, ValueError, OverflowError) as error:
            raise Changed(f"process {identity.pid} has ended") from error
        except OSError as error:
            # A thread of another process has that number.
            of_thread = error.errno in (errno.EINVAL, errno.ENOENT)
            kind = Changed if of_thread else Unavailable
            raise kind(f"process {identity.pid}: {error.strerror}") from error
        stack.callback(os.close, pidfd)
        held = HeldProcess(host, identity, pidfd, counts, any_exec=any_exec)
        held.check()
        yield held
