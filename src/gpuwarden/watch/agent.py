"""The daemon's one loop: events, rounds, judgements; everything that can hang is in a child.

The main thread alone judges and writes findings. Sinks have a thread each; the metrics endpoint
and Falco's listener have theirs and touch nothing but one frozen value and a queue.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from gpuwarden.errors import GpuwardenError
from gpuwarden.finding import Finding
from gpuwarden.host import Host
from gpuwarden.life import FindingLife
from gpuwarden.model import DeviceOpen, Process
from gpuwarden.policy import Policy
from gpuwarden.probes.choose import Choice, chosen, watched_numbers
from gpuwarden.probes.events import ExitEvent, OpenEvent
from gpuwarden.probes.settings import Settings
from gpuwarden.scan import ScanOptions
from gpuwarden.sensors.device_nodes import Majors, assigned_majors, read_majors
from gpuwarden.sensors.machine import read_machine
from gpuwarden.sensors.nvml.sampler import Sampler
from gpuwarden.sensors.process import stat_lines
from gpuwarden.sensors.process.executables import read_namespace
from gpuwarden.sinks.dispatcher import Dispatcher
from gpuwarden.sinks.own_trouble import OWN_RULES, OwnTrouble
from gpuwarden.sinks.sink import Sink
from gpuwarden.store import Store
from gpuwarden.watch import examiner, judgement
from gpuwarden.watch.identity import Identities
from gpuwarden.watch.judging import Judging
from gpuwarden.watch.open_judge import OPEN_RULE_IDS, Surroundings
from gpuwarden.watch.open_watch import OpenWatch
from gpuwarden.watch.options import WatchOptions
from gpuwarden.watch.own_processes import OwnProcesses
from gpuwarden.watch.own_sight import SIGHT_RULES, OwnSight, Sight
from gpuwarden.watch.sampling import Sampling
from gpuwarden.watch.workers import Worker

BUDGET_SECONDS = 0.02
"""Judged at a stretch before the ring is emptied again."""
MAJORS_SECONDS = 5.0
COUNTS_SECONDS = 10.0
SOON_SECONDS = (0.02, 0.1, 0.3)
"""After an attempt: when to look whether the device is held."""
ALWAYS_EVALUATED = OPEN_RULE_IDS | OWN_RULES | SIGHT_RULES
EVENTS_DESCRIPTOR = 1


class Agent:
    """Everything that one `gpuwarden watch` holds; ``run`` returns when it is told to stop."""

    def __init__(
        self,
        options: WatchOptions,
        policy: Policy,
        *,
        reload_policy: Callable[[], Policy] | None = None,
    ) -> None:
        self.options = options
        self.policy = policy
        self.host = Host(options.root)
        self.own = OwnProcesses(self.host)
        self.started_at_ns = time.time_ns()
        self.own_sight = OwnSight()
        self.own_trouble = OwnTrouble()
        self.stopping = False
        self.rounds = 0
        self._reload = reload_policy
        self._reload_wanted = False
        self._majors_at = 0.0
        self._counts_at = 0.0
        self._look_at: list[float] = []
        self._open_rounds: set[str] = set()

    # ---------------------------------------------------------------- set-up

    def run(self, ready: Callable[[str], None] = lambda line: None) -> int:
        """Watches until a signal or the end of its time. Errors: UsageError for its options."""
        sinks = self._sinks()
        with ExitStack() as stack:
            # Children first: they are forked from a process without threads.
            self._start_children(stack)
            self._open_store(stack)
            self.majors = self._read_majors()
            self.life = FindingLife(self.store, node=self.node.hostname)
            self.dispatcher = Dispatcher(self.store.findings, sinks, current=self.life.current)
            self.choice = self._choose(stack)
            self._make_watch()
            self.dispatcher.start()
            stack.callback(self._end_sinks)
            self._start_listeners(stack)
            self._signals(stack)
            ready(str(self.choice))
            self._loop(stack)
        return 0

    def _sinks(self) -> list[Sink]:
        from gpuwarden.sinks.specs import parse_sinks
        from gpuwarden.watch.text_sink import TextSink

        named = parse_sinks(dict.fromkeys([*self.policy.sinks, *self.options.sinks]))
        if named:
            return named
        # Lines of JSON and lines for a person do not mix.
        return parse_sinks(["stdout"]) if self.options.events else [TextSink()]

    def _start_children(self, stack: ExitStack) -> None:
        options = self.options
        self.node = read_machine(self.host)
        judge = judgement.Judgement(
            options.root,
            ScanOptions(nvml_library=options.nvml_library),
            self.policy,
            options.policy_path,
        )
        self.judge_worker = Worker("judge", judge, deadline_seconds=judgement.DEADLINE_SECONDS)
        self.examiner_worker = Worker(
            "examiner", examiner.Examiner(options.root), deadline_seconds=examiner.DEADLINE_SECONDS
        )
        for worker in (self.judge_worker, self.examiner_worker):
            worker.start()
            stack.callback(worker.stop)
        self.judging = Judging(self.judge_worker, interval_seconds=options.scan_interval_seconds)
        self.sampling = Sampling(
            self.host, Sampler(self.host, library=options.nvml_library), self.node.boot_id
        )
        stack.callback(self.sampling.sampler.close)

    def _open_store(self, stack: ExitStack) -> None:
        try:
            self.store = Store(self.options.state_directory)
        except GpuwardenError as error:
            self.store = Store.volatile(self.options.state_directory, error)
        stack.callback(self.store.close)

    def _read_majors(self) -> Majors:
        try:
            listed = read_majors(self.host)
        except GpuwardenError:
            return assigned_majors()
        # A node can be made and tried before its driver is loaded.
        return Majors({**assigned_majors().names, **listed.names}, listed.misc)

    def _choose(self, stack: ExitStack) -> Choice:
        options = self.options
        settings = Settings(limit_events=options.limit_events, return_values=options.return_values)
        return stack.enter_context(
            chosen(watched_numbers(self.majors), settings, host=self.host, ways=options.ways)
        )

    def _make_watch(self) -> None:
        same_pids = self.node.host_pid_namespace is not False
        identities = Identities(self.host, boot_time_ns=self.node.boot_time_ns, same_pids=same_pids)
        mounts = _host_mounts(self.host)
        self.watch = OpenWatch(
            identities=identities,
            surroundings=Surroundings(
                node=self.node, host_mount_namespace=mounts, init=identities.init()
            ),
            policy=self.policy,
            policy_path=self.options.policy_path,
            majors=self.majors,
            worker=self.examiner_worker,
            observe=self._observe_opens,
            tell=self._tell if self.options.events else None,
            return_values=self.options.return_values,
        )

    def _start_listeners(self, stack: ExitStack) -> None:
        """The metrics endpoint and Falco's listener, where they are asked for."""

    def _signals(self, stack: ExitStack) -> None:
        ours, theirs = socket.socketpair()
        for one in (ours, theirs):
            one.setblocking(False)
            stack.callback(one.close)
        self._wakeup = ours
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        stack.callback(signal.set_wakeup_fd, before)
        for number in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, number, signal.signal(number, self._stop))
        stack.callback(signal.signal, signal.SIGHUP, signal.signal(signal.SIGHUP, self._hang_up))

    def _stop(self, number: int, frame: object) -> None:
        self.stopping = True

    def _hang_up(self, number: int, frame: object) -> None:
        self._reload_wanted = True

    def _end_sinks(self) -> None:
        self.dispatcher.drain(2.0)
        self.dispatcher.stop()

    # ---------------------------------------------------------------- the loop

    def _loop(self, stack: ExitStack) -> None:
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._registered: dict[str, int] = {}
        begun = time.monotonic()
        next_round = begun
        while not self.stopping:
            now = time.monotonic()
            if now >= next_round:
                self._round()
                next_round = max(next_round + self.options.interval_seconds, now)
            self.judging.ask(self.sampling.memory(time.time_ns())) if self._may_judge() else None
            if self.options.for_seconds is not None and now - begun >= self.options.for_seconds:
                return
            self._register()
            self._selector.select(self._patience(next_round))
            with contextlib.suppress(BlockingIOError):
                self._wakeup.recv(4096)
            if self._reload_wanted:
                self._reload_policy()
            self._turn()

    def _may_judge(self) -> bool:
        return not self.judge_worker.busy and self.judging.seconds_to_wait() <= 0

    def _patience(self, next_round: float) -> float:
        waits = [next_round - time.monotonic(), self.judging.seconds_to_wait()]
        waiting = self.watch.seconds_to_wait()
        if waiting is not None:
            waits.append(waiting)
        if self._look_at:
            waits.append(self._look_at[0] - time.monotonic())
        return max(min(waits), 0.0)

    def _register(self) -> None:
        """Keeps the selector at the descriptors there are: children come and go."""
        wanted = {
            "judge": self.judge_worker.fileno(),
            "examiner": self.examiner_worker.fileno(),
            "sampler": self.sampling.sampler.fileno(),
            "probe": self.choice.probe.fileno() if self.choice.probe is not None else None,
        }
        for name, descriptor in wanted.items():
            known = self._registered.get(name)
            if known == descriptor:
                continue
            if known is not None:
                with contextlib.suppress(KeyError, ValueError, OSError):
                    self._selector.unregister(known)
                del self._registered[name]
            if descriptor is not None:
                with contextlib.suppress(KeyError):
                    # The number may have been another child's a moment ago.
                    self._selector.unregister(descriptor)
                self._selector.register(descriptor, selectors.EVENT_READ)
                self._registered[name] = descriptor
        self.own.set_children(
            {
                pid
                for pid in (
                    self.judge_worker.pid,
                    self.examiner_worker.pid,
                    self.sampling.sampler.child_pid,
                )
                if pid is not None
            }
        )

    def _turn(self) -> None:
        """Takes whatever is there, without waiting."""
        self._take_events()
        self.watch.answered()
        self._look_for_holders()
        self.watch.work(BUDGET_SECONDS)
        changed, samples = self.sampling.take()
        if samples:
            self.store.samples.record(samples)
        if changed:
            self.judging.changed()
        self._take_judgement()

    def _take_events(self) -> None:
        probe = self.choice.probe
        if probe is None:
            return
        events = probe.poll(0)
        if not events:
            return
        mine = []
        for event in events:
            if isinstance(event, OpenEvent):
                if self.own.has(event.process):
                    continue
            elif isinstance(event, ExitEvent):
                self.sampling.ended(event.pid)
                self.judging.changed()
            mine.append(event)
        before = self.watch.book.attempts_waiting
        self.watch.events(mine)
        if self.watch.book.attempts_waiting > before and not self._look_at:
            now = time.monotonic()
            self._look_at = [now + seconds for seconds in SOON_SECONDS]

    def _look_for_holders(self, *, now: bool = False) -> None:
        probe = self.choice.probe
        if probe is None or not (now or (self._look_at and time.monotonic() >= self._look_at[0])):
            return
        if self._look_at:
            del self._look_at[0]
        own = self.own.pids
        try:
            held = [one for one in probe.holders() if one.pid not in own]
        except GpuwardenError:
            return
        if self.watch.held(held, time.time_ns()):
            self.judging.changed()

    # ---------------------------------------------------------------- rounds

    def _round(self) -> None:
        """Once a second."""
        self.rounds += 1
        now, now_ns = time.monotonic(), time.time_ns()
        self.sampling.sampler.request()
        self._poll()
        self._look_for_holders(now=True)
        if self.choice.probe is not None:
            self.watch.expired(time.clock_gettime_ns(time.CLOCK_BOOTTIME))
        if now - self._majors_at >= MAJORS_SECONDS:
            self._majors_at = now
            self._follow_majors()
        self._forget(self.watch.tick(now_ns), now)
        own = self.own_trouble.findings(self.dispatcher.health(), self.store.troubles, now_ns)
        own += self.own_sight.findings(self._sight(), now_ns)
        self._observe([*self.watch.current(now_ns), *own], ALWAYS_EVALUATED)
        self.store.trim(now_ns)

    def _poll(self) -> None:
        poll = self.choice.poll
        if poll is None:
            return
        try:
            found = poll.look()
        except GpuwardenError:
            return
        self.watch.events([event for event in found if not self.own.has(event.process)])
        if found:
            self.judging.changed()

    def _follow_majors(self) -> None:
        majors = self._read_majors()
        if majors == self.majors:
            return
        self.majors = self.watch.majors = majors
        if self.choice.probe is not None:
            self.choice.probe.watch(watched_numbers(majors))
        self.judging.changed()

    def _forget(self, ended: Sequence[tuple[int, int]], now: float) -> None:
        probe = self.choice.probe
        if probe is None:
            return
        if ended or now - self._counts_at >= COUNTS_SECONDS:
            self._counts_at = now
            self.watch.counted(probe.counts())
        for pid, start_ns in ended:
            keys = self.watch.book.forget(pid, start_ns)
            probe.forget(pid, start_ns, {key[2:5] for key in keys})

    def _sight(self) -> Sight:
        counts = self.watch.counts
        dropped = {
            "the agent's own queue was full": counts.queue_full,
            "too many processes at once": self.watch.book.crowded_out,
        }
        if self.choice.probe is not None:
            probe = self.choice.probe.counters()
            dropped |= {
                "opens, no room in the ring": probe.dropped_opens,
                "returns, no room in the ring": probe.dropped_returns,
                "execs, no room in the ring": probe.dropped_execs,
                "exits, no room in the ring": probe.dropped_exits,
                "records that could not be decoded": probe.malformed,
            }
        sampling = self.sampling
        return Sight(
            dropped=dropped,
            way=f"watching by {self.choice.way}",
            polled=self.choice.poll is not None,
            refused=tuple(f"not by {one.way}: {one.reason}" for one in self.choice.refused),
            sampling_error=str(sampling.error or ""),
            sampling_failing_since_ns=sampling.failing_since_ns,
            judgement_error=self.judging.error,
        )

    # ---------------------------------------------------------------- findings

    def _take_judgement(self) -> None:
        judged = self.judging.take()
        if judged is None:
            return
        report = judged.report
        around = self.watch.surroundings
        around.node, around.sensors, around.gpus = report.node, report.sensors, report.gpus
        around.device_nodes = judged.device_nodes
        if judged.asked_at_ns >= around.sources_at_ns:
            around.sources, around.workloads = report.sources, judged.workloads
            around.sources_at_ns = judged.asked_at_ns
        around.keep(judged.containers)
        self.sampling.judged({kin.pid: kin for kin in judged.kin})
        evaluated = frozenset(run.rule for run in report.rules if run.state == "ok")
        self._observe(report.findings, evaluated)
        now = {finding.id for finding in report.findings}
        if any(f.rule in evaluated and f.id not in now for f in self.life.open.values()):
            self.judging.follow_up()

    def _observe_opens(self, findings: list[Finding]) -> None:
        self._observe(findings, frozenset())

    def _observe(self, findings: Sequence[Finding], evaluated: frozenset[str]) -> None:
        if self.life.observe(findings, time.time_ns(), evaluated):
            self.dispatcher.wake()

    def _tell(
        self, event: DeviceOpen, process: Process, lineage: Sequence[Process], at_ns: int
    ) -> None:
        from gpuwarden.outputs.event_lines import event_line

        line = event_line(
            event,
            process,
            lineage[0] if lineage else None,
            self.watch.container_of(process),
            node=self.node.hostname,
            at_ns=at_ns,
        )
        with contextlib.suppress(BrokenPipeError):
            os.write(EVENTS_DESCRIPTOR, line + b"\n")

    def _reload_policy(self) -> None:
        self._reload_wanted = False
        if self._reload is None:
            return
        try:
            policy = self._reload()
        except GpuwardenError as error:
            print(f"gpuwarden: the policy stays as it was: {error}", file=sys.stderr)  # noqa: T201
            return
        self.policy = self.watch.policy = policy
        # The judge has the old one: the next request starts another.
        self.judge_worker.stop()
        self.judge_worker.job = judgement.Judgement(
            self.options.root,
            ScanOptions(nvml_library=self.options.nvml_library),
            policy,
            self.options.policy_path,
        )
        self.judging.changed()


def _host_mounts(host: Host) -> int | None:
    """The mount namespace of the host's init: its own, or kthreadd's, or as a last resort ours."""
    found = read_namespace(host, 1, "mnt")
    if found is None:
        line = stat_lines.read_one(host, 2)
        if line is not None and stat_lines.is_kernel_thread(line):
            found = read_namespace(host, 2, "mnt")
    return found if found is not None else read_namespace(host, "self", "mnt")
