"""Confined children at work side by side: each is given the next job, and replaced if it ends."""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Iterator

from gpuwarden.code.module import Problem
from gpuwarden.codescan.tasks import Answer, Assess, Done, FileTask, Settings, Trouble
from gpuwarden.codescan.worker import Job, Worker
from gpuwarden.errors import Malformed, Unavailable

WORKERS = 2
QUEUE = 8
"""Small files that a child is given ahead, so that it need not wait for us between them."""
QUEUED_BYTES = 1 << 20
TICK_SECONDS = 0.25
IDLE_ENDS_LIMIT = 1000

Told = Iterator[tuple[Job, Answer]]


class Crew:
    """A context manager; nothing is forked before there is something to do."""

    def __init__(
        self,
        settings: Settings,
        assess: Assess | None = None,
        *,
        workers: int = WORKERS,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """``tick`` is called now and then while it works."""
        self._settings = settings
        self._assess = assess
        self._count = workers
        self._tick = tick
        self._workers: list[Worker] = []
        self._given_back: deque[Job] = deque()
        self.unconfined: tuple[str, ...] = ()
        self.replaced = 0
        """Children that ended before their work did."""

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            for job in worker.jobs:
                job.close()
            worker.end() if worker.jobs else worker.close()
        for job in self._given_back:
            job.close()
        self._workers.clear()

    def read_bytes(self) -> int:
        """Of the jobs that are being worked on, about: a file that is shared out counts once."""
        return sum(
            worker.board.look()[0] // _shares(worker.jobs[0])
            for worker in self._workers
            if worker.jobs
        )

    def answers(self, jobs: Iterator[Job]) -> Told:
        """Does all the jobs; each answer with its job, those of one job in order and ``Done`` last.

        A job is taken from ``jobs`` when somebody has time for it. Errors: Unavailable when no
        child can be made.
        """
        tick_at = time.monotonic() + TICK_SECONDS
        while True:
            has_more = self._hand_out(jobs)
            if not has_more and not any(worker.jobs for worker in self._workers):
                return
            yield from self._heard()
            if time.monotonic() >= tick_at:
                self._tick()
                tick_at = time.monotonic() + TICK_SECONDS

    def _hand_out(self, jobs: Iterator[Job]) -> bool:
        """Gives jobs to all who have time; whether there are more."""
        while True:
            job = self._given_back.popleft() if self._given_back else next(jobs, None)
            if job is None:
                return False
            worker = self._free_for(job)
            try:
                if worker is not None:
                    worker.give(job)
                    continue
            except Unavailable:
                pass  # It has ended, which is noticed where it is listened to.
            self._given_back.appendleft(job)
            return True

    def _free_for(self, job: Job) -> Worker | None:
        """Somebody who has nothing to do, else for a small file one who is at small files."""
        if len(self._workers) < self._count and all(worker.jobs for worker in self._workers):
            self._workers.append(Worker(self._settings, self._assess))
        least = min(self._workers, key=lambda worker: len(worker.jobs))
        if not least.jobs:
            return least
        # A long message, or one behind a long task, must not wait for a child that waits for us.
        is_light = len(least.jobs) < QUEUE and all(map(_is_small, (job, *least.jobs)))
        return least if is_light else None

    def _heard(self) -> Told:
        poll = select.poll()
        for worker in self._workers:
            poll.register(worker, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(TICK_SECONDS * 1000)}
        for worker in list(self._workers):
            if worker.fileno() in ready:
                try:
                    said = worker.answers()
                except Malformed as error:
                    yield from self._ended(worker, f"what it says is not to be believed: {error}")
                    continue
                if said is None:
                    yield from self._ended(worker, "")
                    continue
                self._learn(worker)
                for job, answer in said:
                    yield from _closed(job, answer) if isinstance(answer, Done) else [(job, answer)]
            elif worker.jobs and worker.is_stalled():
                yield from self._ended(worker, "it did not come to an end and was stopped")

    def _learn(self, worker: Worker) -> None:
        for one in worker.unconfined or ():
            if one not in self.unconfined:
                self.unconfined = (*self.unconfined, one)

    def _ended(self, worker: Worker, why: str) -> Told:
        """One problem names what it was reading; it is forked anew when there is more to do."""
        place = worker.where()
        self._workers.remove(worker)
        how = worker.end()
        self.replaced += 1
        if worker.unconfined is None:
            for job in worker.jobs:
                job.close()
            raise Unavailable(f"a child to read in did not come up: {how}")
        if not worker.jobs:
            if self.replaced > IDLE_ENDS_LIMIT:
                raise Unavailable(f"children to read in do not stay: {how}")
            return
        job, *others = worker.jobs
        self._given_back.extendleft(reversed(others))
        problem = Problem(
            place=place or job.task.place,
            what="the child that read it",
            reason=why or f"{how}, and nothing after it in this file was read",
        )
        yield job, Trouble(problem=problem)
        done = Done(number=job.task.number, what="", read_bytes=_bytes_of(job), files=0)
        yield from _closed(job, done)


def _bytes_of(job: Job) -> int:
    """What a job is taken to have read that did not come to its end."""
    task = job.task
    return (task.size or 0) if isinstance(task, FileTask) else 0


def _shares(job: Job) -> int:
    task = job.task
    return task.shares if isinstance(task, FileTask) else 1


def _is_small(job: Job) -> bool:
    task = job.task
    return isinstance(task, FileTask) and task.size is not None and task.size <= QUEUED_BYTES


def _closed(job: Job, done: Done) -> Told:
    if complaint := job.close():
        problem = Problem(place=job.task.place, what="where it comes from", reason=complaint)
        yield job, Trouble(problem=problem)
    yield job, done
