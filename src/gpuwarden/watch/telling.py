"""Findings into the store, and from there to the sinks; what is wrong with either is one, too.

Writing waits for the disk, so a thread does it: the agent's own must go on to empty the ring. That
thread alone observes and writes; what comes meanwhile is written together.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress

from msgspec import Struct

from gpuwarden.errors import GpuwardenError, UsageError
from gpuwarden.finding import Finding
from gpuwarden.life import MAX_OPEN, FindingLife
from gpuwarden.model import Gap, ModuleLoad
from gpuwarden.outputs.words import escape
from gpuwarden.sinks.dispatcher import Backoff, Dispatcher, SinkHealth
from gpuwarden.sinks.event_output import EventOutput
from gpuwarden.sinks.lines import StdoutSink
from gpuwarden.sinks.own_trouble import OWN_RULES, SILENT_NS, OwnTrouble
from gpuwarden.sinks.sink import Sink
from gpuwarden.sinks.specs import parse_sinks
from gpuwarden.store import Sample, Sighting, Store
from gpuwarden.store_modules import Whose, sightings
from gpuwarden.watch.text_sink import TextSink

DRAIN_SECONDS = 2.0
WRITE_SECONDS = 10.0
"""How long the end of the agent waits for what is not written yet."""
QUEUE_LIMIT = 20_000
"""Findings that wait to be written; then the agent waits as well, since nothing may be lost."""
TRIM_ROUNDS = 10


def sinks_of(specs: Iterable[str], *, events: bool) -> list[Sink]:
    """The sinks that are named; without any, text for a person. Errors: UsageError."""
    named = parse_sinks(dict.fromkeys(specs))
    if named:
        return named
    # Lines of JSON and lines for a person do not mix.
    return parse_sinks(["stdout"]) if events else [TextSink()]


class TellingView(Struct, frozen=True, kw_only=True):
    """How telling fares, as of the last round; for other threads."""

    findings: tuple[Finding, ...] = ()
    """The open ones."""
    sinks: tuple[SinkHealth, ...] = ()
    troubles: tuple[Gap, ...] = ()
    set_aside: tuple[Gap, ...] = ()
    lost_samples: int = 0
    findings_bytes: int = 0
    samples_bytes: int = 0


class _Job(Struct):
    findings: Sequence[Finding]
    evaluated: frozenset[str]
    is_round: bool = False
    missing: Callable[[], None] | None = None
    samples: Sequence[Sample] = ()
    modules: Sequence[Sighting] = ()

    @property
    def only_opens(self) -> bool:
        """Whether it says nothing of findings that are not in it."""
        return not (self.is_round or self.missing or self.samples or self.modules)


class Telling:
    """The store, the life of findings and the sinks."""

    def __init__(
        self,
        directory: str,
        sinks: Sequence[Sink],
        *,
        node: str,
        ends_unheard: bool = True,
        silent_ns: int = SILENT_NS,
        backoff: Backoff | None = None,
    ) -> None:
        """``ends_unheard``: a standard output that nobody reads any longer, and no other sink, ends
        the agent. ``silent_ns``: how long a sink may fail before that is told."""
        self.is_kept = True
        """Whether the directory is ours to write, so that a restart goes on from it."""
        try:
            self._store = Store(directory)
        except GpuwardenError as error:
            self._store = Store.volatile(directory, error)
            self.is_kept = False
        self._life = FindingLife(self._store, node=node)
        self._dispatcher = Dispatcher(
            self._store.findings, sinks, current=self._life.current, backoff=backoff
        )
        self._events = EventOutput()
        self._trouble = OwnTrouble(silent_ns=silent_ns)
        self._standard = next((sink for sink in sinks if isinstance(sink, StdoutSink)), None)
        self._ends_unheard = ends_unheard and len(sinks) == 1
        self._jobs: deque[_Job] = deque()
        self._waiting = 0
        self._lock = threading.Condition()
        self._ending = False
        self._thread = threading.Thread(target=self._write, name="telling", daemon=True)
        self._rounds = 0
        self.view = TellingView(findings=tuple(self._life.open.values()))
        self.fill: Callable[[Sequence[Finding]], list[Finding]] = list
        """Adds what takes a look at a process; called in the thread that tells."""

    def start(self, stack: ExitStack) -> None:
        """Starts the threads; at the end they get a moment for what is left."""
        self._dispatcher.start()
        self._thread.start()
        stack.callback(self._end)

    def _end(self) -> None:
        with self._lock:
            self._ending = True
            self._lock.notify_all()
        self._thread.join(WRITE_SECONDS)
        until = time.monotonic() + DRAIN_SECONDS
        self._events.close(DRAIN_SECONDS)
        self._dispatcher.drain(max(until - time.monotonic(), 0.0))
        self._dispatcher.stop()
        if not self._thread.is_alive():
            self._store.close()

    # ---------------------------------------------------------------- from the agent's thread

    def opens(self, findings: Sequence[Finding]) -> None:
        """Findings that have just come up; nothing is said of others."""
        self._put(_Job(findings, frozenset()))

    def round(self, findings: Sequence[Finding], evaluated: frozenset[str]) -> None:
        """What holds in this round, of the rules that were evaluated; own troubles are added.

        Errors: UsageError when nobody is left who hears of it, see ``ends_unheard``.
        """
        self._mind_the_reader()
        self._put(_Job(findings, evaluated | OWN_RULES, is_round=True))

    def _mind_the_reader(self) -> None:
        """Of `gpuwarden watch | head`: what it writes then reaches nobody, now or later."""
        if self._standard is None or not self._standard.reader_is_gone:
            return
        if self._ends_unheard:
            raise UsageError(
                "nobody reads standard output any longer, and there is no other sink: it ends",
                remedy="what was not told is told at the next start; name a sink: --sink file:PATH",
            )
        self._standard = None
        _complain("nobody reads standard output any longer; watching goes on")

    def report(
        self, findings: Sequence[Finding], evaluated: frozenset[str], missing: Callable[[], None]
    ) -> None:
        """What a judgement found; ``missing`` is called, from the thread that writes, when an open
        finding of an evaluated rule is not among them."""
        self._put(_Job(findings, evaluated, missing=missing))

    def event_line(self, line: bytes) -> None:
        """A device event as a line of JSON for standard output; waits for no reader."""
        self._events.put(line)

    def record(self, samples: Sequence[Sample]) -> None:
        """Samples to be remembered."""
        self._put(_Job((), frozenset(), samples=samples))

    def sighted(self, load: ModuleLoad, whose: Whose) -> None:
        """GPU modules that a process has loaded, to be remembered."""
        self._put(_Job((), frozenset(), modules=list(sightings(load, whose))))

    def _put(self, job: _Job) -> None:
        with self._lock:
            while self._waiting > QUEUE_LIMIT and self._thread.is_alive():
                self._lock.wait(1.0)
            self._jobs.append(job)
            self._waiting += len(job.findings)
            self._lock.notify_all()
        # The interpreter's lock goes to the thread that writes: a finding is what is waited for.
        time.sleep(0)

    # ---------------------------------------------------------------- the thread that writes

    def _write(self) -> None:
        while True:
            with self._lock:
                while not self._jobs and not self._ending:
                    self._lock.wait()
                if not self._jobs:
                    return
                jobs = self._taken()
            for job in jobs:
                try:
                    self._do(job)
                except Exception as error:  # noqa: BLE001 - a defect must not end all telling
                    text = f"{type(error).__name__}: {error}"[:500]
                    _complain(f"a finding could not be told: {text}")

    def _taken(self) -> list[_Job]:
        """All that waits, findings that just came up put together as far as the order allows."""
        jobs: list[_Job] = []
        for job in self._jobs:
            if jobs and job.only_opens and jobs[-1].only_opens:
                jobs[-1] = _Job([*jobs[-1].findings, *job.findings], frozenset())
            else:
                jobs.append(job)
        self._jobs.clear()
        self._waiting = 0
        self._lock.notify_all()
        return jobs

    def _do(self, job: _Job) -> None:
        now_ns = time.time_ns()
        if job.samples:
            self._store.samples.record(job.samples)
            return
        if job.modules:
            self._store.modules.record(job.modules)
            return
        findings = self.fill(job.findings)
        if job.is_round:
            health, troubles = self._dispatcher.health(), self._store.troubles
            findings += self._trouble.findings(
                health,
                troubles,
                now_ns,
                not_opened=self._life.overflowed,
                most_open=MAX_OPEN,
                unread_lines=self._events.dropped,
            )
        if self._life.observe(findings, now_ns, job.evaluated):
            self._dispatcher.wake()
        if job.missing is not None:
            now = {finding.id for finding in findings}
            open_now = self._life.open.values()
            if any(one.rule in job.evaluated and one.id not in now for one in open_now):
                job.missing()
        if job.is_round:
            self._rounds += 1
            if self._rounds % TRIM_ROUNDS == 0:
                self._store.trim(now_ns)
            self._look()

    def _look(self) -> None:
        store = self._store
        parts = (store.findings, store.samples, store.modules)
        self.view = TellingView(
            findings=tuple(self._life.open.values()),
            sinks=tuple(self._dispatcher.health()),
            troubles=tuple(one.trouble for one in parts if one.trouble is not None),
            set_aside=tuple(one.set_aside for one in parts if one.set_aside is not None),
            lost_samples=store.samples.lost,
            findings_bytes=store.findings.bytes_used(),
            samples_bytes=store.samples.bytes_used(),
        )


def _complain(text: str) -> None:
    # Whoever read standard error may be gone as well, or it was closed: that ends nothing.
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"gpuwarden: {escape(text)}\n")
        sys.stderr.flush()
