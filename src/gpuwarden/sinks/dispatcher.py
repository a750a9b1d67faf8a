"""Brings what the store holds to each sink: in order, at least once, each at its own pace."""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from gpuwarden.finding import Finding
from gpuwarden.life import encode
from gpuwarden.sinks.sink import Outcome, Sink
from gpuwarden.store import Ledger, News

IDLE_SECONDS = 1.0
STUCK_NS = 10 * 10**9
"""A delivery that takes longer counts as failing: a full pipe that nobody reads never ends it."""
REFUSALS = 3
"""How often a receiver may refuse one finding for what is in it before it is given up."""


class Backoff(msgspec.Struct, frozen=True):
    """Waits between attempts: doubled each time, with jitter, since many nodes fail together."""

    first_seconds: float = 0.5
    most_seconds: float = 60.0

    def seconds(self, failures: int) -> float:
        """The wait after so many failures in a row: between half and all of the doubled wait."""
        doubled = min(self.first_seconds * 2.0 ** min(max(failures - 1, 0), 30), self.most_seconds)
        return doubled * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, hides nothing


class SinkHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How one sink fares; counts are since the start, ``dropped`` since it was first named."""

    name: str
    delivered: int = 0
    repeated: int = 0
    dropped: int = 0
    waiting: int = 0
    """Transitions that it has yet to get."""
    failures: int = 0
    """In a row, up to now."""
    failing_since_ns: int | None = None
    error: str = ""
    """Of the last failure; empty once a delivery succeeds."""


class _Worker:
    """One sink and its thread."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.wake = threading.Event()
        self.thread: threading.Thread | None = None
        self.delivered = 0
        self.repeated = 0
        self.failures = 0
        self.failing_since_ns: int | None = None
        self.error = ""
        self.trying_since_ns: int | None = None
        self.refused_sequence = 0
        self.refusals = 0
        self.repeat_at = time.monotonic() + (sink.repeat_seconds or 0.0)

    def failing(self, now_ns: int) -> tuple[int | None, str]:
        """Since when, and how; a delivery that does not end is a failure, too."""
        if self.failing_since_ns is not None:
            return self.failing_since_ns, self.error
        trying = self.trying_since_ns
        if trying is not None and now_ns - trying >= STUCK_NS:
            return trying, "a delivery began and does not end: nobody reads it"
        return None, self.error

    def note(self, outcome: Outcome) -> None:
        if outcome.kind == "delivered":
            self.failures = 0
            self.failing_since_ns = None
            self.error = ""
        else:
            self.failures += 1
            self.error = outcome.reason
            if self.failing_since_ns is None:
                self.failing_since_ns = time.time_ns()


class Dispatcher:
    """A thread for each sink; one that hangs, or is down, delays no other and no observer.

    What a sink has is written after it was delivered: after a crash the last ones may come twice,
    with the same sequence, and none is left out.
    """

    def __init__(
        self,
        ledger: Ledger,
        sinks: Sequence[Sink],
        *,
        current: Callable[[], Sequence[Finding]] = tuple,
        backoff: Backoff | None = None,
    ) -> None:
        """``current`` gives the open findings, for sinks that want them repeated."""
        self._ledger = ledger
        self._current = current
        self._backoff = backoff or Backoff()
        self._stop = threading.Event()
        self._workers = [_Worker(sink) for sink in sinks]
        ledger.register([sink.key for sink in sinks])

    def start(self) -> None:
        for number, worker in enumerate(self._workers):
            worker.thread = threading.Thread(
                target=self._run, args=(worker,), name=f"sink-{number}", daemon=True
            )
            worker.thread.start()

    def wake(self) -> None:
        """Says that there is news; without it they are found within a second."""
        for worker in self._workers:
            worker.wake.set()

    def health(self) -> list[SinkHealth]:
        """How each sink fares, in the order they were given."""
        cursors = self._ledger.cursors()
        last = self._ledger.last_sequence
        now_ns = time.time_ns()
        found = []
        for worker in self._workers:
            cursor = cursors[worker.sink.key]
            since, error = worker.failing(now_ns)
            found.append(
                SinkHealth(
                    name=worker.sink.name,
                    delivered=worker.delivered,
                    repeated=worker.repeated,
                    dropped=cursor.dropped,
                    waiting=last - cursor.cursor,
                    failures=worker.failures,
                    failing_since_ns=since,
                    error=error,
                )
            )
        return found

    def drain(self, seconds: float) -> bool:
        """Waits until every sink has everything; False when some do not by then."""
        deadline = time.monotonic() + seconds
        self.wake()
        while any(health.waiting for health in self.health()):
            if time.monotonic() >= deadline:
                return False
            self._stop.wait(0.01)
        return True

    def stop(self, seconds: float = 2.0) -> bool:
        """Ends the threads; False when one hangs in its sink (it ends with the process).

        What was not delivered stays in the store for the next start.
        """
        self._stop.set()
        self.wake()
        deadline = time.monotonic() + seconds
        for worker in self._workers:
            if worker.thread is not None:
                worker.thread.join(max(deadline - time.monotonic(), 0.0))
        ended = True
        for worker in self._workers:
            if worker.thread is not None and worker.thread.is_alive():
                ended = False
            else:
                worker.sink.close()
        return ended

    def _run(self, worker: _Worker) -> None:
        while not self._stop.is_set():
            worker.wake.clear()
            try:
                items = self._ledger.undelivered(worker.sink.key)
                if not items:
                    self._repeat(worker)
                    worker.wake.wait(IDLE_SECONDS)
                    continue
                for item in items:
                    if self._stop.is_set() or not self._deliver(worker, item):
                        break
            except sqlite3.Error as error:
                worker.note(Outcome("retry", f"the store: {error}"))
            if worker.failures:
                # Then everything is asked for anew: the spool may have been shortened meanwhile.
                self._stop.wait(self._backoff.seconds(worker.failures))

    def _deliver(self, worker: _Worker, item: News) -> bool:
        outcome = self._attempt(worker, item.body)
        if self._stop.is_set() and outcome.kind != "delivered":
            return False
        if outcome.kind == "delivered":
            worker.delivered += 1
            self._ledger.delivered(worker.sink.key, item.sequence)
            return True
        if outcome.kind == "refused":
            if worker.refused_sequence != item.sequence:
                worker.refused_sequence, worker.refusals = item.sequence, 0
            worker.refusals += 1
            if worker.refusals >= REFUSALS:
                self._ledger.delivered(worker.sink.key, item.sequence, refused=True)
                # The receiver is there: it is this one finding that it does not take.
                worker.failures, worker.failing_since_ns = 0, None
        return False

    @staticmethod
    def _attempt(worker: _Worker, body: bytes) -> Outcome:
        worker.trying_since_ns = time.time_ns()
        try:
            outcome = worker.sink.deliver(body)
        except Exception as error:  # noqa: BLE001 - a defect of one sink must not end its thread
            outcome = Outcome("refused", f"{type(error).__name__}: {error}"[:200])
        worker.trying_since_ns = None
        worker.note(outcome)
        return outcome

    def _repeat(self, worker: _Worker) -> None:
        every = worker.sink.repeat_seconds
        if every is None or time.monotonic() < worker.repeat_at:
            return
        worker.repeat_at = time.monotonic() + every
        for finding in self._current():
            if self._stop.is_set() or self._attempt(worker, encode(finding)).kind != "delivered":
                return
            worker.repeated += 1
