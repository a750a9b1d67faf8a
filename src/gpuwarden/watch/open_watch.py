"""From the probe's events to findings: merged, put to a process and its container, judged, kept.

"Metadata not yet known" is a state of its own: a process whose container or job is not known yet is
held for up to two seconds while it is asked for, and then judged as what it is: unknown.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from gpuwarden.errors import GpuwardenError
from gpuwarden.finding import Finding
from gpuwarden.model import Container, DeviceOpen, Process, ToolRun
from gpuwarden.policy import Policy
from gpuwarden.probes.events import (
    Event,
    ExecEvent,
    ExitEvent,
    HeldDescriptor,
    OpenCount,
    OpenEvent,
    OpenReturn,
)
from gpuwarden.sensors.device_nodes import Majors
from gpuwarden.watch import examiner
from gpuwarden.watch.alarms import Alarms
from gpuwarden.watch.examiner import Examination, Examined
from gpuwarden.watch.identity import Identities, ticks
from gpuwarden.watch.judgement import Judged
from gpuwarden.watch.open_judge import (
    OPEN_RULE_IDS,
    Surroundings,
    container_of,
    container_state,
    device_names,
    findings_of,
    snapshot_of,
    sources_are_stale,
    unknown_containers,
)
from gpuwarden.watch.opens import Entry, OpenBook, fact
from gpuwarden.watch.opens import Key as EntryKey
from gpuwarden.watch.workers import Worker

HELD_SECONDS = 2.0
RETRY_SECONDS = 0.25
BATCH = 64
"""Processes asked about at once."""
QUEUE_LIMIT = 1 << 16
FORGOTTEN_NS = 5 * 10**9
"""How long the entries of a process that has ended are kept for events that come late."""

Key = tuple[int, int]
"""(pid, start time since boot in ns)."""
Observe = Callable[[list[Finding]], None]
Tell = Callable[[DeviceOpen, Process, Sequence[Process], int], None]


class _Waiting(Struct):
    """A process whose surroundings are being asked for."""

    since: float
    next_try: float
    asked: bool = False


class Counts(Struct):
    """What the open watch did, for metrics."""

    opens: int = 0
    returns: int = 0
    execs: int = 0
    exits: int = 0
    tools: int = 0
    judged: int = 0
    held: int = 0
    """Processes that had to wait for their container or job."""
    unknown: int = 0
    """Of them, those that were judged without: nobody told in time."""
    ask_failures: int = 0
    queue_full: int = 0
    by_kind: dict[tuple[str, str], int] = field(default_factory=dict)
    """Events by how and, at the time they came, state."""

    def event(self, kind: str, state: str) -> None:
        key = (kind, state)
        self.by_kind[key] = self.by_kind.get(key, 0) + 1


class OpenWatch:
    """Takes events, gives findings by ``observe`` and event lines by ``tell``; one thread."""

    def __init__(
        self,
        *,
        identities: Identities,
        surroundings: Surroundings,
        policy: Policy,
        policy_path: str | None,
        majors: Majors,
        worker: Worker,
        observe: Observe,
        tell: Tell | None = None,
        return_values: bool = False,
    ) -> None:
        self.book = OpenBook(return_values=return_values)
        self.alarms = Alarms()
        self.counts = Counts()
        self.majors = majors
        self.policy = policy
        self.policy_path = policy_path
        self.surroundings = surroundings
        self._identities = identities
        self._worker = worker
        self._observe = observe
        self._tell = tell
        self._queue: OrderedDict[Key, None] = OrderedDict()
        self._waiting: OrderedDict[Key, _Waiting] = OrderedDict()
        self._given_up: OrderedDict[Key, None] = OrderedDict()
        self._tool_runs: OrderedDict[Key, dict[str, ToolRun]] = OrderedDict()
        self._tool_identity: dict[Key, ExecEvent] = {}
        self._ended: deque[tuple[int, Key]] = deque()
        self._untold: deque[tuple[float, EntryKey, OpenEvent]] = deque()
        self._asked: list[Key] = []

    # ---------------------------------------------------------------- events

    def events(self, events: Iterable[Event]) -> None:
        """Takes what the probe told; nothing is judged yet."""
        for event in events:
            if isinstance(event, OpenEvent):
                self.counts.opens += 1
                self.counts.event(event.how, event.state)
                self._opened(event)
            elif isinstance(event, OpenReturn):
                self.counts.returns += 1
                self._news(self.book.returned(event))
            elif isinstance(event, ExecEvent):
                self.counts.execs += 1
                self._executed(event)
            elif isinstance(event, ExitEvent):
                self.counts.exits += 1
                key = (event.pid, event.start_time_ns)
                self.alarms.ended(_named(key), event.at_ns)
                self._ended.append((event.at_ns, key))

    def _opened(self, event: OpenEvent) -> None:
        merged = self.book.merged_twins
        self._news(self.book.opened(event))
        if self._tell is not None and self.book.merged_twins == merged:
            process = event.process
            key = (
                process.pid,
                process.start_time_ns,
                event.major,
                event.minor,
                event.how,
                event.denial,
            )
            self._untold.append((time.monotonic(), key, event))

    def _executed(self, event: ExecEvent) -> None:
        process = event.process
        key = (process.pid, process.start_time_ns)
        self._identities.forget((process.pid, process.start_time_ticks))
        if event.tool is not None:
            self.counts.tools += 1
            mine = self._tool_runs.setdefault(key, {})
            known = mine.get(event.tool)
            mine[event.tool] = ToolRun(
                pid=process.pid,
                start_time_ticks=process.start_time_ticks,
                tool=event.tool,
                at_ns=event.at_ns if known is None else known.at_ns,
                count=1 if known is None else known.count + 1,
            )
            self._tool_identity[key] = event
            if len(self._tool_runs) > QUEUE_LIMIT:
                old, _ = self._tool_runs.popitem(last=False)
                self._tool_identity.pop(old, None)
            self._enqueue(key)
        for entry_key in self.book.keys_of(*key):
            entry = self.book.entry(entry_key)
            if entry is not None:
                # What it opened is in the hands of another program now.
                entry.event = replace(entry.event, process=process)
                self._enqueue(key)

    def held(self, descriptors: Iterable[HeldDescriptor], at_ns: int) -> bool:
        """Every descriptor on a watched device at this moment; whether the holders changed."""
        news, changed = self.book.held(descriptors, at_ns)
        self._news(news)
        for key in news:
            entry = self.book.entry(key)
            if self._tell is not None and entry is not None and entry.event.how == "held":
                self._untold.append((time.monotonic(), key, entry.event))
        return changed

    def expired(self, since_boot_ns: int) -> None:
        """Gives up attempts whose end did not show."""
        self._news(self.book.expired(since_boot_ns))

    def counted(self, counts: Iterable[OpenCount]) -> None:
        """The kernel's own counts, which hold what the limiter did not tell of."""
        self.book.counted(counts)

    def _news(self, keys: Iterable[EntryKey]) -> None:
        for key in keys:
            entry = self.book.entry(key)
            if entry is None or entry.at_start:
                continue  # who held a device before is for the judgement of the whole node
            self._enqueue(key[:2])

    def _enqueue(self, key: Key) -> None:
        if key in self._queue:
            return
        if len(self._queue) >= QUEUE_LIMIT:
            self.counts.queue_full += 1
            return
        self._queue[key] = None

    # ---------------------------------------------------------------- judging

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be judged."""
        return not self._queue and not self._waiting

    def work(self, budget_seconds: float) -> None:
        """Judges what waits, until the budget is used up; findings are observed together."""
        until = time.monotonic() + budget_seconds
        found: list[Finding] = []
        while self._queue:
            key, _ = self._queue.popitem(last=False)
            found += self._judge(key)
            if time.monotonic() >= until:
                break
        if found:
            self._observe(found)
        self._ask()
        self._tell_settled()

    def _judge(self, key: Key) -> list[Finding]:
        entries = [self.book.entry(one) for one in sorted(self.book.keys_of(*key))]
        present = [entry for entry in entries if entry is not None and not entry.at_start]
        runs = tuple(self._tool_runs.get(key, {}).values())
        if present:
            identity = max((e.event for e in present), key=lambda event: event.at_ns).process
        elif key in self._tool_identity:
            identity = self._tool_identity[key].process
        else:
            return []
        process = self._identities.process(identity)
        lineage = self._identities.lineage(process)
        given_up = key in self._given_up
        if not given_up and unknown_containers(process, self.surroundings):
            self._hold(key)
            return []
        for entry in present:
            if entry.event.how == "held":
                entry.opened_by = self._forebear(
                    entry.event.major, entry.event.minor, process, lineage
                )
        names = device_names(self.surroundings.device_nodes)
        opens = [fact(entry, self.majors, names) for entry in present]
        at_ns = time.time_ns()
        snapshot = snapshot_of(
            self.surroundings, at_ns, process, lineage, opens=opens, tool_runs=runs
        )
        findings = findings_of(snapshot, self.policy, self.policy_path)
        if findings and not given_up and sources_are_stale(process, self.surroundings):
            # Confirm before you accuse: its job or pod may be newer than what we know.
            self._hold(key)
            return []
        self._waiting.pop(key, None)
        self.counts.judged += 1
        uses = 0
        for entry in present:
            uses += entry.count - entry.told
            entry.told = entry.count
        # What an exception of the policy covers is none, and so it ends one that is open.
        return self.alarms.put(_named(key), findings, max(uses, 1), at_ns)

    def _forebear(
        self, major: int, minor: int, process: Process, lineage: Sequence[Process]
    ) -> int | None:
        openers = self.book.openers(major, minor)
        for parent in lineage:
            if parent.pid in openers:
                return parent.pid
        # A parent that has ended leaves its number behind as its children's group or session.
        for pid in (process.ppid, process.process_group, process.session_id):
            if pid is not None and pid != process.pid and pid in openers:
                return pid
        return None

    # ---------------------------------------------------------------- asking

    def _hold(self, key: Key) -> None:
        now = time.monotonic()
        waiting = self._waiting.get(key)
        if waiting is None:
            self.counts.held += 1
            self._waiting[key] = _Waiting(now, now)
            return
        if now - waiting.since < HELD_SECONDS:
            if waiting.asked:
                waiting.next_try = now + RETRY_SECONDS
            return
        self._give_up(key)

    def _give_up(self, key: Key) -> None:
        self._waiting.pop(key, None)
        self._given_up[key] = None
        if len(self._given_up) > QUEUE_LIMIT:
            self._given_up.popitem(last=False)
        self.counts.unknown += 1
        self._enqueue(key)

    def _ask(self) -> None:
        if self._worker.busy or not self._waiting:
            return
        now = time.monotonic()
        due = [key for key, one in self._waiting.items() if one.next_try <= now][:BATCH]
        if not due:
            return
        processes: dict[int, Process] = {}
        for key in due:
            identity = self._identity_of(key)
            if identity is None:
                self._waiting.pop(key, None)
                continue
            processes[identity.pid] = identity
            for parent in self._identities.lineage(identity):
                processes.setdefault(parent.pid, parent)
        question = Examination(
            processes=tuple(processes.values()),
            gpus=self.surroundings.gpus,
            device_nodes=self.surroundings.device_nodes,
        )
        try:
            if self._worker.request(examiner.encode(question)):
                self._asked = due
        except GpuwardenError:
            self.counts.ask_failures += 1

    def _identity_of(self, key: Key) -> Process | None:
        for one in self.book.keys_of(*key):
            entry = self.book.entry(one)
            if entry is not None:
                return self._identities.process(entry.event.process)
        tool = self._tool_identity.get(key)
        return None if tool is None else self._identities.process(tool.process)

    def answered(self) -> None:
        """Takes the examiner's answer, if it is there, and judges what waited for it."""
        try:
            body = self._worker.take()
        except GpuwardenError:
            self.counts.ask_failures += 1
            self._requeue(asked=True)
            return
        if body is None:
            return
        answer = examiner.decode(body)
        self._keep(answer)
        self._requeue(asked=True)

    def _keep(self, answer: Examined) -> None:
        self.surroundings.keep(answer.containers)
        if answer.sources_at_ns:
            self.surroundings.sources = answer.sources
            self.surroundings.workloads = answer.workloads
            self.surroundings.sources_at_ns = answer.sources_at_ns

    def _requeue(self, *, asked: bool) -> None:
        for key in self._asked:
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.asked = asked
                self._enqueue(key)
        self._asked = []

    # ---------------------------------------------------------------- time

    def tick(self, now_ns: int) -> list[Key]:
        """Gives up what waited too long, counts repetitions, forgets the ended; call it often.

        Gives the processes that are forgotten, for the kernel's tables to forget them as well.
        """
        now = time.monotonic()
        for key, waiting in list(self._waiting.items()):
            if now - waiting.since >= HELD_SECONDS and key not in self._asked:
                self._give_up(key)
        for entry_key, entry in self.book.entries().items():
            if entry.told and entry.count > entry.told:
                self.alarms.used(_named(entry_key[:2]), entry.count - entry.told, entry.last_ns)
                entry.told = entry.count
        forgotten = []
        while self._ended and now_ns - self._ended[0][0] >= FORGOTTEN_NS:
            _, key = self._ended.popleft()
            if key in self._queue or key in self._waiting:
                self._ended.append((now_ns, key))
                break
            forgotten.append(key)
            self._given_up.pop(key, None)
            self._tool_runs.pop(key, None)
            self._tool_identity.pop(key, None)
            self._identities.forget(_named(key))
        return forgotten

    def resume(self, findings: Iterable[Finding], now_ns: int) -> None:
        """Takes up the open findings of an earlier run; processes that are gone have ended."""
        self.alarms.restore((one for one in findings if one.rule in OPEN_RULE_IDS), now_ns)
        for key in self.alarms.living():
            if not self._identities.is_alive(key):
                self.alarms.ended(key, now_ns)

    def current(self, now_ns: int) -> list[Finding]:
        """The findings of opens that hold now."""
        return self.alarms.current(now_ns, map(_named, self.book.holding()))

    def seconds_to_wait(self) -> float | None:
        """Until something that waits is due; None when nothing does."""
        if self._queue:
            return 0.0
        times = [one.next_try for one in self._waiting.values()]
        if self._untold:
            times.append(self._untold[0][0] + HELD_SECONDS)
        return None if not times else max(min(times) - time.monotonic(), 0.01)

    @property
    def pending(self) -> int:
        """Processes that wait for what their container or job is."""
        return len(self._waiting)

    def judged(self, judged: Judged) -> None:
        """What a judgement of the whole node saw: opens are judged with it from now on."""
        report, around = judged.report, self.surroundings
        around.node, around.sensors, around.gpus = report.node, report.sensors, report.gpus
        around.device_nodes = judged.device_nodes
        if judged.asked_at_ns >= around.sources_at_ns:
            around.sources, around.workloads = report.sources, judged.workloads
            around.sources_at_ns = judged.asked_at_ns
        around.keep(judged.containers)

    def forget(self, pid: int, start_time_ns: int) -> list[EntryKey]:
        """The keys of a process that has ended; they are not remembered any longer."""
        return self.book.forget(pid, start_time_ns)

    def container_of(self, process: Process) -> Container | None:
        """Its container as far as it is known."""
        return container_of(process, self.surroundings)

    # ---------------------------------------------------------------- telling

    def _tell_settled(self) -> None:
        """Event lines, in the order of the events; one that is not settled holds up to 2 s."""
        if self._tell is None:
            return
        now = time.monotonic()
        names = device_names(self.surroundings.device_nodes)
        while self._untold:
            since, key, event = self._untold[0]
            entry = self.book.entry(key)
            process_key = key[:2]
            settled = entry is None or not entry.waits
            known = process_key not in self._waiting and process_key not in self._queue
            if not (settled and known) and now - since < HELD_SECONDS:
                return
            self._untold.popleft()
            shown = event if entry is None else replace(event, state=entry.event.state)
            process = self._identities.process(event.process)
            alone = Entry(event=shown, first_ns=event.at_ns, last_ns=event.at_ns)
            told = replace(
                fact(alone, self.majors, names),
                container_state=container_state(process, self.surroundings),
            )
            self._tell(told, process, self._identities.lineage(process), event.at_ns)


def _named(key: Key) -> tuple[int, int]:
    """A process as findings name it: by its start in ticks."""
    return key[0], ticks(key[1])
