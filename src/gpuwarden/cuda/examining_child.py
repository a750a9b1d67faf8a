"""One confined child that examines loads, one at a time, and how each of them ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpuwarden.code.module import Place
from gpuwarden.codescan.tasks import (
    Assess,
    Digest,
    DigestTask,
    Done,
    LoadTask,
    Settings,
)
from gpuwarden.codescan.worker import Job, Worker
from gpuwarden.cuda.load_queue import Waiting
from gpuwarden.cuda.loaded_modules import Examined, LoadAnswers
from gpuwarden.errors import Malformed, Unavailable

CPU_SECONDS = 5.0
"""CPU time that a child may spend on a load, and more for each MiB of it; waiting ten times as
long is as bad."""
CPU_SECONDS_OF_MIB = 1.0
WAITING_FACTOR = 10.0
_MIB = 1 << 20


class Outcome(NamedTuple):
    """What came of a load: its digest was asked, or what is in it."""

    waiting: Waiting
    digest: str
    examined: Examined | None


class Ended(NamedTuple):
    """The child is gone."""

    how: str
    came_up: bool
    waiting: Waiting | None
    """The load that it was at, if it was at one."""
    examined: Examined
    """What it had said of that load by then, and how it ended."""


class ExaminingChild:
    """``fileno`` is readable when it has answered, or has ended."""

    def __init__(
        self, settings: Settings, assess: Assess, profiles: Sequence[str], generation: int
    ) -> None:
        """Forks it; ``generation`` tells which baselines it has. Errors: Unavailable."""
        self.generation = generation
        self.waiting: Waiting | None = None
        """What it is at."""
        self._worker = Worker(settings, assess)
        self._profiles = profiles
        self._answers: LoadAnswers | None = None
        self._digest = ""

    def fileno(self) -> int:
        return self._worker.fileno()

    @property
    def pid(self) -> int:
        return self._worker.pid

    @property
    def unconfined(self) -> tuple[str, ...] | None:
        """What of its confinement could not be had; None before it is up."""
        return self._worker.unconfined

    def give(self, number: int, waiting: Waiting) -> bool:
        """Whether it took the load; that it has ended is noticed where it is listened to."""
        place = Place(target="load")
        kind = LoadTask if waiting.digest else DigestTask
        task = kind(number=number, place=place, size=waiting.size)
        try:
            self._worker.give(Job(task, waiting.descriptor, _nothing_to_close))
        except Unavailable:
            return False
        self.waiting, self._digest = waiting, ""
        self._answers = self._new_answers(waiting) if waiting.digest else None
        return True

    def _new_answers(self, waiting: Waiting) -> LoadAnswers:
        return LoadAnswers(waiting.size, self._profiles, is_cut=waiting.is_cut)

    def hear(self) -> Outcome | Ended | None:
        """What it has said by now came to."""
        try:
            said = self._worker.answers()
        except Malformed as error:
            return self.end(f"what the child says is not to be believed: {error}")
        if said is None:
            return self.end()
        for _, answer in said:
            if isinstance(answer, Digest):
                self._digest = answer.digest
            elif isinstance(answer, Done):
                return self._outcome()
            elif self._answers is not None:
                self._answers.take(answer)
        return None

    def _outcome(self) -> Outcome | None:
        waiting, answers = self.waiting, self._answers
        self.waiting = self._answers = None
        if waiting is None:
            return None
        return Outcome(waiting, self._digest, answers.answer() if answers is not None else None)

    def is_overdue(self) -> bool:
        """Whether it spends more on a load than any honest one needs."""
        if self.waiting is None:
            return False
        seconds, cpu_seconds = self._worker.spent()
        allowed = CPU_SECONDS + CPU_SECONDS_OF_MIB * (self.waiting.size / _MIB)
        return cpu_seconds > allowed or seconds > WAITING_FACTOR * allowed

    def end(self, why: str = "") -> Ended:
        """Ends it, if it has not ended."""
        how = self._worker.end()
        waiting, answers = self.waiting, self._answers
        self.waiting = self._answers = None
        examined = Examined()
        if waiting is not None:
            answers = answers or self._new_answers(waiting)
            answers.trouble(why or f"the child that examined it ended before it was done: {how}")
            examined = answers.answer()
        return Ended(how, self.unconfined is not None, waiting, examined)


def _nothing_to_close() -> str:
    return ""
