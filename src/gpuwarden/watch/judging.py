"""When the whole node is judged: at the start, on changes, and now and then; in a child."""

from __future__ import annotations

import time

from msgspec.structs import replace

from gpuwarden.errors import GpuwardenError
from gpuwarden.watch import judgement
from gpuwarden.watch.judgement import Judged, Memory
from gpuwarden.watch.workers import Worker

LEAST_SECONDS = 2.0
SHARE = 10.0
"""A judgement is followed by at least so many times its own length without one."""
FOLLOW_UP_SECONDS = 10.0
FAILURES_TOLD = 2
REST_SECONDS = 30.0


class Judging:
    """Asks for judgements and takes them; changes come together in one, none is lost."""

    def __init__(self, worker: Worker, *, interval_seconds: float) -> None:
        self.worker = worker
        self.interval_seconds = interval_seconds
        self.last: Judged | None = None
        self.ended_at = time.monotonic()
        self.count = 0
        self.failures = 0
        self._failed_in_a_row = 0
        self.error = ""
        self._due = 0.0
        self._not_before = 0.0

    def changed(self) -> None:
        """Something is different: judge as soon as that is affordable."""
        self._due = min(self._due, self._not_before)

    def follow_up(self) -> None:
        """A finding did not show this time: look again soon whether it is over."""
        self._due = min(self._due, max(time.monotonic() + FOLLOW_UP_SECONDS, self._not_before))

    @property
    def is_due(self) -> bool:
        return not self.worker.busy and time.monotonic() >= self._due

    def seconds_to_wait(self) -> float:
        if self.worker.busy:
            left = self.worker.seconds_left()
            return self.interval_seconds if left is None else left + 0.01
        return max(self._due - time.monotonic(), 0.0)

    def ask(self, memory: Memory) -> None:
        """Asks, if it is time and none is under way."""
        now = time.monotonic()
        if self.worker.busy or now < self._due:
            return
        if self.last is not None:
            memory = replace(memory, code=self.last.code)
        try:
            asked = self.worker.request(judgement.encode(memory))
        except GpuwardenError as error:
            self._failed(error)
            asked = False
        if not asked:
            self._due = now + LEAST_SECONDS
            return
        # A change that comes from now on asks for another one.
        self._due = now + self.interval_seconds
        self._not_before = now + LEAST_SECONDS

    def take(self) -> Judged | None:
        """The judgement, once it is there."""
        try:
            body = self.worker.take()
        except GpuwardenError as error:
            self._failed(error)
            return None
        if body is None:
            return None
        now = time.monotonic()
        self.last = judgement.decode(body)
        self.ended_at = now
        self.count += 1
        self.error, self._failed_in_a_row = "", 0
        self._not_before = now + max(LEAST_SECONDS, SHARE * self.last.seconds)
        self._due = max(self._due, self._not_before)
        if self.seconds_to_wait() >= REST_SECONDS:
            # Nothing is to be judged for a while: what it loaded need not stay in memory.
            self.worker.stop()
        return self.last

    def _failed(self, error: GpuwardenError) -> None:
        self.failures += 1
        self._failed_in_a_row += 1
        self._due = self._not_before = time.monotonic() + FOLLOW_UP_SECONDS
        if self._failed_in_a_row >= FAILURES_TOLD:
            self.error = str(error)
