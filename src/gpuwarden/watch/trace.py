"""`gpuwarden trace`: what chosen processes do by CUDA, as it happens, and a summary at the end."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from gpuwarden.cuda.messages import LaunchesSeen, LibraryGone, LibrarySeen, Message, ProcessMaps
from gpuwarden.cuda.options import TracerOptions
from gpuwarden.errors import Denied, UsageError
from gpuwarden.finding import Finding, severity_rank
from gpuwarden.host import Host
from gpuwarden.life import Transition
from gpuwarden.model import Container, Process
from gpuwarden.outputs.cuda_text import Traced, closing_table
from gpuwarden.outputs.words import escape
from gpuwarden.policy import Policy
from gpuwarden.sensors.machine import read_machine
from gpuwarden.sensors.process import stat_lines
from gpuwarden.watch import examiner
from gpuwarden.watch.cuda_facts import NamedKey
from gpuwarden.watch.cuda_side import CudaSide, key_of
from gpuwarden.watch.cuda_telling import CudaTelling, container_name
from gpuwarden.watch.device_side import listed_majors
from gpuwarden.watch.identity import Identities, host_mounts
from gpuwarden.watch.open_judge import Surroundings, container_of
from gpuwarden.watch.open_watch import OpenWatch
from gpuwarden.watch.waiter import Waiter
from gpuwarden.watch.workers import Worker

if TYPE_CHECKING:
    from gpuwarden.watch.trace_learning import RunOfProcess

BUDGET_SECONDS = 0.02
LINGER_SECONDS = 3.5
"""How long what a process did last is waited for, after its end."""
EXIT_CLEAR, EXIT_FINDING, EXIT_BLIND = 0, 1, 2

Write = Callable[[str], None]


class Trace:
    """One run of the command; ``run`` returns at its time's end, a signal, or the process's end."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        policy: Policy,
        policy_path: str | None,
        *,
        width: int,
        colour: bool,
        write: Write,
    ) -> None:
        self._arguments = arguments
        self._colour = colour
        self._policy = policy
        self._width = width
        self._write = write
        self._host = Host(arguments.root)
        self._findings: dict[str, Finding] = {}
        self._runs: dict[NamedKey, RunOfProcess] = {}
        self._chosen: dict[NamedKey, tuple[Process, Container | None]] = {}
        node = read_machine(self._host)
        self._node = node.hostname
        same_pids = node.host_pid_namespace is not False
        self._identities = Identities(
            self._host, boot_time_ns=node.boot_time_ns, same_pids=same_pids
        )
        self._examiner = Worker(
            "examiner",
            examiner.Examiner(arguments.root),
            deadline_seconds=examiner.DEADLINE_SECONDS,
        )
        self._surroundings = Surroundings(
            node=node,
            host_mount_namespace=host_mounts(self._host),
            init=self._identities.init(),
        )
        self._watch = OpenWatch(
            identities=self._identities,
            surroundings=self._surroundings,
            policy=policy,
            policy_path=policy_path,
            majors=listed_majors(self._host),
            worker=self._examiner,
            observe=self._found,
        )
        options = TracerOptions(
            root=arguments.root, sample_every=1 if arguments.learn is not None else 5
        )
        self._side = CudaSide(options, policy)
        self._side.attend(self._watch, self._identities)
        self._side.tell = self._tell
        self._lines = CudaTelling(
            self._side.book, self._identities, self._surroundings, node=node.hostname
        )

    # ---------------------------------------------------------------- the loop

    def run(self) -> int:
        """Traces; the exit code. Errors: UsageError, Denied."""
        if os.geteuid() != 0:
            raise Denied("uprobes need root", remedy="sudo gpuwarden trace ...")
        subject = self._subject()
        with ExitStack() as stack:
            waiter = Waiter(stack)
            self._examiner.start()
            stack.callback(self._examiner.stop)
            self._side.child.start()
            stack.callback(self._side.child.stop)
            waiter.attend_signals(stack)
            self._loop(waiter, subject)
        return self._close()

    def _subject(self) -> NamedKey | None:
        """The process that was named. Errors: UsageError when it is not there."""
        pid = self._arguments.pid
        if pid is None:
            return None
        line = stat_lines.read_one(self._host, pid)
        if line is None:
            raise UsageError(f"trace: there is no process {pid}")
        return pid, line.start_time_ticks

    def _loop(self, waiter: Waiter, subject: NamedKey | None) -> None:
        begun = time.monotonic()
        until = begun + (self._arguments.for_seconds or float("inf"))
        next_round = begun
        while not waiter.stopping and time.monotonic() < until:
            if time.monotonic() >= next_round:
                next_round += 1.0
                self._watch.tick(time.time_ns())
                self._side.round(())
                if subject is not None and not self._identities.is_alive(subject):
                    until = min(until, time.monotonic() + LINGER_SECONDS)
                    subject = None
            waits = (
                next_round - time.monotonic(),
                until - time.monotonic(),
                self._watch.seconds_to_wait(),
                self._side.seconds_to_wait(),
            )
            descriptors = {
                "tracer": self._side.child.fileno(),
                "examiner": self._examiner.fileno(),
            }
            waiter.wait(descriptors, min(one for one in waits if one is not None))
            self._turn()

    def _turn(self) -> None:
        self._side.take(())
        self._watch.answered()
        self._watch.work(BUDGET_SECONDS)

    # ---------------------------------------------------------------- what is told

    def _found(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            key = (finding.subject.pid or 0, finding.subject.start_time_ticks or 0)
            if self._choose(key) is None:
                continue
            before = self._findings.get(finding.id)
            self._findings[finding.id] = finding
            if before is None or before.severity != finding.severity:
                self._write(self._text(finding))

    def _text(self, finding: Finding) -> str:
        if self._arguments.events:
            return ""
        from gpuwarden.watch.text_sink import render

        now_ns = time.time_ns()
        values = {name: getattr(finding, name) for name in finding.__struct_fields__}
        told = Transition(
            **values, at_ns=now_ns, first_seen_ns=now_ns, last_seen_ns=now_ns, node=self._node
        )
        return render(told, width=self._width, colour=self._colour)

    def _tell(self, message: Message, profile: str) -> None:
        if isinstance(message, LaunchesSeen):
            self._keep(message)
            if not self._arguments.launches:
                return
        if isinstance(message, LibrarySeen | LibraryGone):
            if not self._arguments.all:
                return  # told in the summary, of the processes that were asked for
        elif self._choose(key_of(message)) is None:
            return
        elif isinstance(message, ProcessMaps):
            # From now on its calls are seen.
            for key in message.libraries:
                library = self._side.book.libraries.get(key)
                if library is not None and not self._arguments.all:
                    self._write_event(LibrarySeen(key=key, library=library), profile)
            return
        self._write_event(message, profile)

    def _write_event(self, message: Message, profile: str) -> None:
        if self._arguments.events:
            line = self._lines.line(message, profile)
            text = "" if line is None else line.decode() + "\n"
        else:
            text = self._lines.text(message, profile, width=self._width, colour=self._colour)
        self._write(text)

    def _keep(self, message: LaunchesSeen) -> None:
        """Keeps a window of a run that is to be learned from."""
        key = key_of(message)
        if self._arguments.learn is None or self._choose(key) is None:
            return
        from gpuwarden.watch.trace_learning import RunOfProcess

        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = RunOfProcess(pid=key[0], windows=[])
        run.add(message.window)

    def _choose(self, key: NamedKey) -> tuple[Process, Container | None] | None:
        """The process, if it is one of those that were asked for, with its container."""
        known = self._chosen.get(key)
        if known is not None:
            return known
        used = self._side.book.used(key)
        if used is None:
            return None
        identity = used.identity
        process = (
            self._identities.named(key) if identity is None else self._identities.process(identity)
        )
        if process is None:
            return None
        container = container_of(process, self._surroundings)
        if not self._is_wanted(process, container):
            return None
        found = process, container
        if container is not None or process.cgroup is None or not process.cgroup.container_id:
            self._chosen[key] = found
        return found

    def _is_wanted(self, process: Process, container: Container | None) -> bool:
        wanted = self._arguments
        if wanted.all:
            return True
        if wanted.pid is not None:
            return wanted.pid == process.pid or any(
                one.pid == wanted.pid for one in self._identities.lineage(process)
            )
        placement = process.cgroup
        identity = None if placement is None else placement.container_id
        if identity is not None and identity.startswith(wanted.container):
            return True
        return container is not None and wanted.container in (container.name, container.id)

    # ---------------------------------------------------------------- the end

    def _close(self) -> int:
        traced = []
        for key in self._side.book.known():
            known, fact = self._choose(key), self._side.fact(key)
            if known is not None and fact is not None:
                place = container_name(*known)
                profile = self._side.whose(key).profile
                modules = self._side.modules(key)
                traced.append(Traced(fact, known[0], place, profile, modules))
        blind = self._blind(traced)
        if not self._arguments.events:
            self._write(closing_table(traced, width=self._width, colour=self._colour))
            unread = self._side.state.unread if self._arguments.all else ()
            self._write("".join(f"not seen: {escape(one)}\n" for one in (*blind, *unread)))
        if self._arguments.learn is not None:
            self._learn()
        if any(
            severity_rank(one.severity) >= severity_rank("error") for one in self._findings.values()
        ):
            return EXIT_FINDING
        return EXIT_BLIND if blind else EXIT_CLEAR

    def _blind(self, traced: Sequence[Traced]) -> tuple[str, ...]:
        """Why less was seen than was asked for."""
        problems = list(self._side.state.problems)
        if self._side.child.error:
            problems.append(f"the tracer: {self._side.child.error}")
        if not traced and not self._arguments.all:
            problems.append(
                "no call of a CUDA driver library was seen from it"
                if self._side.book.libraries
                else "nobody maps a CUDA driver library"
            )
        return tuple(problems)

    def _learn(self) -> None:
        from gpuwarden.watch.trace_learning import learned

        for key, part in self._runs.items():
            part.digests = self._side.digests_of(key)
            whose = self._side.whose(key)
            part.workload, part.profile = whose.workload, whose.profile
            part.findings = [
                one
                for one in self._findings.values()
                if (one.subject.pid, one.subject.start_time_ticks) == key
            ]
        path = self._arguments.learn
        found = learned(self._runs.values(), path, node=self._node, merged=self._arguments.merge)
        if not self._arguments.events:
            self._write(
                escape(
                    f"{path}: learned {found.launches:,} launches of {len(found.kernels)} kernels "
                    f"in {found.seconds:.0f} s, {found.runs} run{'s' * (found.runs != 1)}"
                )
                + "\n"
            )


def run(
    arguments: argparse.Namespace,
    policy: Policy,
    policy_path: str | None,
    *,
    width: int,
    colour: bool,
    write: Write,
) -> int:
    """Runs the command; its exit code. Errors: GpuwardenError."""
    return Trace(arguments, policy, policy_path, width=width, colour=colour, write=write).run()
