"""The daemon's one loop: events, rounds, judgements; everything that can hang is in a child.

The main thread alone judges and writes findings. Sinks have a thread each; the metrics endpoint
and Falco's listener have theirs and touch nothing but one frozen value and a queue.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from msgspec.structs import replace

from gpuwarden.errors import GpuwardenError
from gpuwarden.host import Host
from gpuwarden.model import DeviceOpen, Process
from gpuwarden.policy import Policy
from gpuwarden.probes.choose import Choice
from gpuwarden.scan import ScanOptions
from gpuwarden.sensors.machine import read_machine
from gpuwarden.watch import assembly, heap, judgement
from gpuwarden.watch.cuda_side import CudaSide
from gpuwarden.watch.cuda_sight import CUDA_SIGHT_RULES, CudaSight
from gpuwarden.watch.denial_findings import DENYING_RULES
from gpuwarden.watch.denying import Denying
from gpuwarden.watch.device_side import DeviceSide
from gpuwarden.watch.falco_unmatched import FALCO_RULES
from gpuwarden.watch.judging import Judging
from gpuwarden.watch.open_judge import OPEN_RULE_IDS, container_of
from gpuwarden.watch.open_watch import OpenWatch
from gpuwarden.watch.options import WatchOptions
from gpuwarden.watch.own_processes import OwnProcesses
from gpuwarden.watch.own_sight import SIGHT_RULES, OwnSight, Sight
from gpuwarden.watch.response_side import RESPONSE_RULES, ResponseSide
from gpuwarden.watch.sampling import Sampling
from gpuwarden.watch.service_manager import ServiceManager
from gpuwarden.watch.telling import Telling, sinks_of
from gpuwarden.watch.waiter import Waiter
from gpuwarden.watch.workers import Worker

BUDGET_SECONDS = 0.02
"""Judged at a stretch before the ring is emptied again."""
PRIORITY = -10
SWITCH_SECONDS = 0.0005
"""A thread that renders metrics must not keep an event waiting."""
USAGE_ROUNDS = 120
USAGE_FILE = "usage.msgpack"
FOR_EVER = float("inf")


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
        self.node = read_machine(self.host)
        self.own = OwnProcesses(self.host)
        self.started_at_ns = time.time_ns()
        self.own_sight = OwnSight()
        self.devices = DeviceSide(
            self.host,
            options,
            self.own,
            same_pids=self.node.host_pid_namespace is not False,
        )
        self.service = ServiceManager()
        self.judging: Judging
        self.sampling: Sampling
        self.watch: OpenWatch
        self.denying: Denying | None = None
        self.cuda: CudaSide | None = None
        self.cuda_sight = CudaSight()
        self.workers: dict[str, Worker] = {}
        self._reload = reload_policy
        self._begun = time.monotonic()
        self._rounds = 0
        self._follow_up = False
        self._usage_path: str | None = None

    @property
    def choice(self) -> Choice:
        """The way in which device opens are seen."""
        return self.devices.choice

    # ---------------------------------------------------------------- set-up

    def run(self, ready: Callable[[str], None] = lambda line: None) -> int:
        """Watches until a signal or the end of its time. Errors: UsageError for its options."""
        options = self.options
        sinks = sinks_of([*self.policy.sinks, *options.sinks], events=options.events)
        with ExitStack() as stack:
            self._waiter = Waiter(stack)
            heap.one_for_all_threads()
            # Children first: they are forked from a process without threads.
            assembly.start_children(self, stack)
            self.telling = Telling(
                options.state_directory,
                sinks,
                node=self.node.hostname,
                # Who scrapes metrics hears of it, and denials must not end with a terminal.
                ends_unheard=options.metrics is None and not options.enforce,
            )
            self._resume(stack)
            self.devices.start(stack)
            self.responses = ResponseSide(self, stack)
            assembly.make_watch(self)
            if options.enforce:
                assembly.enforce(self)
            self.telling.start(stack)
            self._listen(stack)
            # A crowd of processes must not keep it from the ring; children stay as they are.
            sys.setswitchinterval(SWITCH_SECONDS)
            # What is there now stays; the rest is looked through when a round is due, not amid one.
            gc.freeze()
            gc.disable()
            stack.callback(gc.enable)
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
            self._waiter.attend_signals(stack)
            ready(str(self.choice))
            self.service.ready(str(self.choice))
            stack.callback(self.service.stopping)
            self._loop()
        return 0

    def judge_job(self) -> judgement.Judgement:
        return judgement.Judgement(
            self.options.root,
            ScanOptions(nvml_library=self.options.nvml_library, deep=self.options.deep),
            self.policy,
            self.options.policy_path,
        )

    def _resume(self, stack: ExitStack) -> None:
        """Goes on from what the rounds of an earlier run added up to."""
        if not self.telling.is_kept:
            return
        self._usage_path = os.path.join(self.options.state_directory, USAGE_FILE)
        gap = self.sampling.resume(self._usage_path)
        if gap is not None:
            self.say(f"{gap.what}: {gap.reason}")
        stack.callback(self._keep_usage)

    def _keep_usage(self) -> None:
        if self._usage_path is not None:
            # A full disk is told of by the store, and costs minutes of memory at most.
            with contextlib.suppress(OSError):
                self.sampling.keep(self._usage_path)

    def process_ended(self, pid: int) -> None:
        self.sampling.ended(pid)
        self.judging.changed()

    @staticmethod
    def say(line: str) -> None:
        """A line for whoever reads the agent's standard error."""
        from gpuwarden.outputs.words import escape

        # Whoever read it may be gone, as after `2>&1 | head`: that is no reason to end.
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"gpuwarden: {escape(line)}\n")
            sys.stderr.flush()

    def _listen(self, stack: ExitStack) -> None:
        """The metrics endpoint and Falco's listener, where they are asked for."""
        from gpuwarden.watch import listeners

        self.falco = listeners.falco(self, stack)
        self.metrics = listeners.metrics(self, stack)

    def wake(self) -> None:
        """Makes the loop turn; from any thread."""
        self._waiter.wake()

    # ---------------------------------------------------------------- the loop

    def _loop(self) -> None:
        next_round = self._begun = time.monotonic()
        while not self._waiter.stopping:
            now = time.monotonic()
            if now - self._begun >= (self.options.for_seconds or FOR_EVER):
                return
            if now >= next_round:
                self._round()
                next_round = max(next_round + self.options.interval_seconds, now)
            if self.judging.is_due:
                memory = self.sampling.memory(time.time_ns())
                memory = replace(memory, opens=self.watch.recent())
                self.judging.ask(memory if self.cuda is None else self.cuda.remembered(memory))
            self._waiter.wait(self._descriptors(), self._patience(next_round))
            gather = self.devices.seconds_to_gather()
            if gather:
                time.sleep(gather)
            if self._waiter.reload_wanted:
                self._waiter.reload_wanted = False
                self.service.reloading()
                self._reload_policy()
                self.service.ready(str(self.choice))
            if self._follow_up:
                self._follow_up = False
                self.judging.follow_up()
            self._turn()

    def _patience(self, next_round: float) -> float:
        waits = [
            next_round - time.monotonic(),
            self.judging.seconds_to_wait(),
            self.watch.seconds_to_wait(),
            self.devices.seconds_to_wait(),
            None if self.denying is None else self.denying.seconds_to_wait(),
            None if self.cuda is None else self.cuda.seconds_to_wait(),
        ]
        return min(wait for wait in waits if wait is not None)

    def _descriptors(self) -> dict[str, int | None]:
        """What can wake the loop; children come and go."""
        found = {name: worker.fileno() for name, worker in self.workers.items()}
        found["sampler"] = self.sampling.sampler.fileno()
        found["probe"] = None if self.choice.probe is None else self.choice.probe.fileno()
        pids = {worker.pid for worker in self.workers.values() if worker.pid is not None}
        if self.cuda is not None:
            found["tracer"] = self.cuda.child.fileno()
            pids.add(self.cuda.child.pid or 0)
        pids |= self.responses.pids
        self.own.set_children(pids | set(self.sampling.sampler.child_pids))
        return found

    def _turn(self) -> None:
        """Takes whatever is there, without waiting."""
        groups = self.devices.take()
        self.responses.turn()
        if self.denying is not None:
            self.denying.turn(groups)
        if self.falco is not None:
            self.watch.events(self.falco.events(self.watch.surroundings.device_nodes))
        if self.cuda is not None:
            self.cuda.take(self.devices.opened_since())
        self.watch.answered()
        self.devices.look()
        self.watch.work(BUDGET_SECONDS)
        changed, samples = self.sampling.take()
        if samples:
            self.telling.record(samples)
        if changed:
            self.judging.changed()
        self._take_judgement()

    # ---------------------------------------------------------------- rounds

    def _round(self) -> None:
        """Once a second."""
        now_ns = time.time_ns()
        self.service.alive()
        self.sampling.sampler.request()
        self.devices.round()
        self.devices.forget(self.watch.tick(now_ns))
        if self.cuda is not None:
            self.cuda.round(self.watch.holding())
        own = self.own_sight.findings(self._sight(), now_ns)
        # Also of what is off: an earlier run may have left findings of it open.
        evaluated = OPEN_RULE_IDS | SIGHT_RULES | CUDA_SIGHT_RULES | FALCO_RULES
        evaluated |= DENYING_RULES | RESPONSE_RULES
        own += self.responses.findings(now_ns)
        if self.falco is not None:
            own += self.falco.findings(now_ns)
        if self.cuda is not None:
            own += self.cuda_sight.findings(self.cuda, now_ns)
        if self.denying is not None:
            own += self.denying.findings(now_ns)
        self.telling.round([*self.watch.current(now_ns), *own], evaluated)
        self._rounds += 1
        gc.collect(1)
        if self._rounds % USAGE_ROUNDS == 0:
            self._keep_usage()
            gc.collect()
            heap.give_back()
        if self.metrics is not None:
            self.metrics.fill(self)

    def _sight(self) -> Sight:
        return Sight(
            dropped=self.devices.lost(),
            way=f"watching by {self.choice.way}",
            polled=self.choice.poll is not None,
            refused=tuple(f"not by {one.way}: {one.reason}" for one in self.choice.refused),
            sampling_error=str(self.sampling.error or ""),
            sampling_failing_since_ns=self.sampling.failing_since_ns,
            judgement_error=self.judging.error,
        )

    def _take_judgement(self) -> None:
        judged = self.judging.take()
        if judged is None:
            return
        report = judged.report
        self.watch.judged(judged)
        if self.cuda is not None:
            self.cuda.judged(judged)
        self.sampling.judged({kin.pid: kin for kin in judged.kin})
        if self.denying is not None:
            self.denying.known(judged.containers)
        if self.metrics is not None:
            self.metrics.judged(judged)
        evaluated = frozenset(run.rule for run in report.rules if run.state == "ok")
        self.telling.report(report.findings, evaluated, self._missing)
        self.responses.came_up(report.findings)

    def _missing(self) -> None:
        """An open finding did not show; from the thread that writes."""
        self._follow_up = True
        self.wake()

    def tell_event(
        self, event: DeviceOpen, process: Process, lineage: Sequence[Process], at_ns: int
    ) -> None:
        from gpuwarden.outputs.event_lines import event_line

        line = event_line(
            event,
            process,
            lineage[0] if lineage else None,
            container_of(process, self.watch.surroundings),
            node=self.node.hostname,
            at_ns=at_ns,
        )
        self.telling.event_line(line)

    def _reload_policy(self) -> None:
        if self._reload is None:
            return
        try:
            policy = self._reload()
        except GpuwardenError as error:
            self.say(f"the policy stays as it was: {error}")
            return
        self.policy = self.watch.policy = policy
        # The judge has the old one: its next request starts another.
        self.workers["judge"].stop()
        self.workers["judge"].job = self.judge_job()
        if self.denying is not None:
            self.denying.reload(policy)
        if self.cuda is not None:
            self.cuda.reload(policy)
        self.judging.changed()
        self.say("the policy was read again")
