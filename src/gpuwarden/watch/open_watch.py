"""From the probe's events to findings: merged, put to a process and its container, judged, kept.

"Metadata not yet known" is a state of its own: a process whose container or job is not known yet is
held for up to two seconds while it is asked for, and then judged as what it is: unknown.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from gpuwarden.finding import Finding, severity_rank
from gpuwarden.model import DeviceOpen, Process, Snapshot, ToolRun
from gpuwarden.policy import Policy
from gpuwarden.probes.events import (
    HOWS,
    Event,
    ExecEvent,
    ExitEvent,
    HeldDescriptor,
    OpenCount,
    OpenEvent,
    OpenReturn,
    ticks,
)
from gpuwarden.probes.skim import FIELDS
from gpuwarden.sensors.device_nodes import Majors
from gpuwarden.watch.alarms import Alarms
from gpuwarden.watch.asking import Asking
from gpuwarden.watch.counts import Counts
from gpuwarden.watch.cuda_facts import CudaFacts
from gpuwarden.watch.event_telling import EventTelling, Tell
from gpuwarden.watch.forebears import Forebears
from gpuwarden.watch.identity import Identities, program_and_place
from gpuwarden.watch.judgement import Judged
from gpuwarden.watch.open_judge import (
    OPEN_RULE_IDS,
    Surroundings,
    device_names,
    findings_of,
    snapshot_of,
    sources_are_stale,
    unknown_containers,
)
from gpuwarden.watch.opens import Entry, OpenBook, fact, key_of
from gpuwarden.watch.opens import Key as EntryKey
from gpuwarden.watch.past_opens import PastOpens
from gpuwarden.watch.tool_runs import OF_THE_MOMENT, ToolRuns, by_program
from gpuwarden.watch.waiting import Key
from gpuwarden.watch.workers import Worker

HOW, DENIAL = (
    next(at for at, (name, _, _) in enumerate(FIELDS) if name == wanted)
    for wanted in ("how", "denial")
)
"""Where these stand among the fields of a record that is only looked at."""
QUEUE_LIMIT = 1 << 16
FORGOTTEN_NS = 5 * 10**9
"""How long the entries of a process that has ended are kept for events that come late."""

Observe = Callable[[list[Finding]], None]


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
        cuda: CudaFacts | None = None,
    ) -> None:
        self.book = OpenBook(return_values=return_values)
        self.alarms = Alarms()
        self.counts = Counts()
        self.majors = majors
        self.policy = policy
        self.policy_path = policy_path
        self.surroundings = surroundings
        self.forebears = Forebears(self.book)
        self._identities = identities
        self._observe = observe
        self._asking = Asking(worker, surroundings, identities, self.counts)
        self._waiting = self._asking.waiting
        self._events: EventTelling | None = None
        if tell is not None:
            self._events = EventTelling(tell, self.book, identities, surroundings)
        self._queue: OrderedDict[Key, None] = OrderedDict()
        self._tools = ToolRuns()
        self._ended: deque[tuple[int, Key]] = deque()
        self._past = PastOpens(self.book, surroundings)
        self.cuda = cuda

    # ---------------------------------------------------------------- events

    def events(self, events: Iterable[Event]) -> None:
        """Takes what the probe told; nothing is judged yet."""
        for event in events:
            if isinstance(event, OpenEvent):
                self.counts.opens += 1
                self.counts.event(event.how, event.state)
                self.counts.would_deny += event.denial == "would deny"
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

    def skim(self, fields: tuple[int, ...], path: bytes) -> bool:
        """Counts an open that is one more of a known kind, before it is decoded; else False."""
        if self._events is not None or not self.book.skim(fields, path):
            return False
        self.counts.opens += 1
        self.counts.event(HOWS[fields[HOW]], "denied" if fields[DENIAL] == 1 else "attempted")
        self.counts.would_deny += fields[DENIAL] == 2
        return True

    def _opened(self, event: OpenEvent) -> None:
        merged = self.book.merged_twins
        self._news(self.book.opened(event))
        if self._events is not None and self.book.merged_twins == merged:
            self._events.add(time.monotonic(), key_of(event), event)

    def _executed(self, event: ExecEvent) -> None:
        process = event.process
        key = (process.pid, process.start_time_ns)
        self._identities.forget((process.pid, process.start_time_ticks))
        if event.tool is not None:
            self.counts.tools += 1
            self._tools.ran(key, event, event.tool)
            self.enqueue(key)
        for entry_key in self.book.keys_of(*key):
            entry = self.book.entry(entry_key)
            if entry is not None and entry.event.how not in OF_THE_MOMENT:
                # What it opened is in the hands of another program now.
                entry.event = replace(entry.event, process=process)
                self.enqueue(key)

    def held(
        self, descriptors: Iterable[HeldDescriptor], at_ns: int, *, after_loss: bool = False
    ) -> bool:
        """Every descriptor on a watched device at this moment; whether the holders changed.

        ``after_loss``: events were lost since the last time, perhaps a new holder's open.
        """
        news, changed = self.book.held(descriptors, at_ns, after_loss=after_loss)
        self._news(news)
        for key in news:
            entry = self.book.entry(key)
            if entry is None or entry.event.how != "held":
                continue
            self.counts.event("held", "opened")
            if self._events is not None:
                self._events.add(time.monotonic(), key, entry.event)
        return changed

    def expired(self, since_boot_ns: int) -> None:
        """Gives up attempts whose end did not show."""
        self._news(self.book.expired(since_boot_ns))

    def counted(self, counts: Iterable[OpenCount]) -> None:
        """The kernel's own counts, which hold what the limiter did not tell of."""
        self.book.counted(counts)
        self._repeated()

    def _repeated(self) -> None:
        for key, entry in self.book.entries().items():
            if entry.told and entry.count > entry.told:
                self.alarms.used(_named(key[:2]), entry.count - entry.told, entry.last_ns)
                entry.told = entry.count

    def _news(self, keys: Iterable[EntryKey]) -> None:
        for key in keys:
            entry = self.book.entry(key)
            if entry is None or entry.at_start:
                continue  # who held a device before is for the judgement of the whole node
            self.enqueue(key[:2])

    def enqueue(self, key: Key) -> None:
        """Something else is known of a process: it is judged, soon."""
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
        self._give_up_overdue()
        self._asking.ask(time.monotonic(), self._identity_of)
        if self._events is not None:
            self._events.tell_settled(time.monotonic(), self.majors, self.is_open)

    def is_open(self, key: Key) -> bool:
        """Whether it is yet to be judged."""
        return self._waiting.holds(key) or key in self._queue

    def _judge(self, key: Key) -> list[Finding]:
        entries = [self.book.entry(one) for one in sorted(self.book.keys_of(*key))]
        present = [entry for entry in entries if entry is not None and not entry.at_start]
        runs = self._tools.of(key)
        programs = by_program(present)
        tool = self._tools.last(key)
        opened = any(one.event.how not in OF_THE_MOMENT for one in present)
        known = {who.exe_inode for who, _ in programs}
        caller = None if self.cuda is None else self.cuda.identity(key)
        if caller is not None and caller.exe_inode not in known:
            programs.append((caller, []))
            known.add(caller.exe_inode)
        if tool is not None and not opened and tool.exe_inode not in known:
            # It has opened nothing as the tool; what it did before was another program's.
            programs.append((tool, []))
        if not programs:
            return []
        now, at_ns = time.monotonic(), time.time_ns()
        findings: dict[str, Finding] = {}
        unsure = False
        for identity, of_program in programs:
            process = self._identities.process(identity)
            lineage = self._identities.lineage(process)
            unknown = unknown_containers(process, self.surroundings)
            if not unknown or self._waiting.gave_up(key):
                # A tool is what the program is that runs last.
                tools = runs if identity is programs[-1][0] else ()
                snapshot = self._snapshot(
                    process, lineage, of_program, tools, at_ns, vain=self._waiting.gave_up(key)
                )
                cuda = self.cuda
                if cuda is not None and identity is programs[-1][0]:
                    snapshot = cuda.added(snapshot, process)
                found = findings_of(snapshot, self.policy, self.policy_path)
                found = [one for one in found if cuda is None or cuda.wants(one, process)]
                for one in found:
                    last = findings.setdefault(one.id, one)
                    if severity_rank(one.severity) > severity_rank(last.severity):
                        findings[one.id] = one
                # Confirm before you accuse: its job or pod may be newer than what we know.
                unknown |= bool(found) and sources_are_stale(process, self.surroundings)
            unsure |= unknown
        if unsure and not self._waiting.gave_up(key):
            self.counts.held += self._waiting.hold(key, now)
            return []
        if unsure:
            self._waiting.later(key, now)
        else:
            self._waiting.forget(key)
        self.counts.judged += 1
        uses = 0
        for entry in present:
            uses += entry.count - entry.told
            entry.told = entry.count
        if not present:
            uses = self._tools.untold(key)
        if self.cuda is not None:
            uses += self.cuda.untold(key)
        # What an exception of the policy covers is none, and so it ends one that is open.
        place = program_and_place(process)
        return self.alarms.put(_named(key), list(findings.values()), uses, at_ns, place)

    def _snapshot(
        self,
        process: Process,
        lineage: Sequence[Process],
        entries: Iterable[Entry],
        tools: Sequence[ToolRun],
        at_ns: int,
        *,
        vain: bool,
    ) -> Snapshot:
        names = device_names(self.surroundings.device_nodes)
        opens = []
        for entry in entries:
            event = entry.event
            if event.how == "held":
                entry.opened_by = self.forebears.of(
                    event.major, event.minor, process, event.process.start_time_ns, lineage
                )
            opens.append(fact(entry, self.majors, names))
        return snapshot_of(
            self.surroundings,
            at_ns,
            process,
            lineage,
            opens=opens,
            tool_runs=tools,
            asked_in_vain=vain,
        )

    # ---------------------------------------------------------------- asking

    def _give_up_overdue(self) -> None:
        for key in self._waiting.overdue(time.monotonic()):
            self.counts.unknown += 1
            self.enqueue(key)

    def _identity_of(self, key: Key) -> Process | None:
        for one in self.book.keys_of(*key):
            entry = self.book.entry(one)
            if entry is not None:
                return self._identities.process(entry.event.process)
        who = self._tools.last(key) or (None if self.cuda is None else self.cuda.identity(key))
        return None if who is None else self._identities.process(who)

    def answered(self) -> None:
        """Takes the examiner's answer, if it is there, and judges what waited for it."""
        for key in self._asking.answered():
            self.enqueue(key)

    # ---------------------------------------------------------------- time

    def tick(self, now_ns: int) -> list[Key]:
        """Gives up what waited too long, counts repetitions, forgets the ended; call it often.

        Gives the processes that are forgotten, for the kernel's tables to forget them as well.
        """
        self._repeated()
        forgotten = []
        while self._ended and now_ns - self._ended[0][0] >= FORGOTTEN_NS:
            _, key = self._ended.popleft()
            if key in self._queue or self._waiting.holds(key):
                self._ended.append((now_ns, key))
                break
            forgotten.append(key)
            self._waiting.forget(key)
            self._tools.forget(key)
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
        calling = () if self.cuda is None else self.cuda.calling()
        return self.alarms.current(now_ns, (*self.holding(), *calling))

    def holding(self) -> list[tuple[int, int]]:
        """Processes that hold a device, as findings name them."""
        return [_named(key) for key in self.book.holding()]

    def seconds_to_wait(self) -> float | None:
        """Until something that waits is due; None when nothing does."""
        if self._queue:
            return 0.0
        due = [self._asking.next_time()]
        if self._events is not None:
            due.append(self._events.next_time())
        times = [one for one in due if one is not None]
        return None if not times else max(min(times) - time.monotonic(), 0.01)

    @property
    def pending(self) -> int:
        """Processes that wait for what their container or job is."""
        return len(self._waiting)

    def judged(self, judged: Judged) -> None:
        """What a judgement of the whole node saw: opens are judged with it from now on."""
        report, around = judged.report, self.surroundings
        self._identities.know_users(judged.users)
        around.node, around.sensors, around.gpus = report.node, report.sensors, report.gpus
        around.device_nodes = judged.device_nodes
        if judged.asked_at_ns >= around.sources_at_ns:
            around.sources, around.workloads = report.sources, judged.workloads
            around.sources_at_ns = judged.asked_at_ns
        around.keep(judged.containers, judged.asked_at_ns)
        for key in self._waiting.unanswered():
            self.enqueue(key)

    def forget(self, pid: int, start_time_ns: int) -> list[EntryKey]:
        """The keys of a process that has ended; they are not remembered any longer."""
        self._past.keep(self.book.keys_of(pid, start_time_ns), self.majors)
        return self.book.forget(pid, start_time_ns)

    def recent(self) -> tuple[DeviceOpen, ...]:
        """Devices that were opened, by processes that are there and by the last that ended."""
        return self._past.recent(self.majors)


def _named(key: Key) -> tuple[int, int]:
    """A process as findings name it: by its start in ticks."""
    return key[0], ticks(key[1])
