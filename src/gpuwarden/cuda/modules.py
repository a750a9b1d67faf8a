"""What becomes of captured module bytes: confined children describe, look up and judge them.

Two children: one takes whatever comes, the other only what is soon done, so that a small module
does not wait behind large ones. The same bytes are examined once.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Self

from msgspec import Struct

from gpuwarden.code.bounds import Bounds
from gpuwarden.code.module import Place
from gpuwarden.codescan.judging_data import load_judging
from gpuwarden.codescan.known_code import Trust
from gpuwarden.codescan.tasks import (
    Answer,
    Assess,
    Digest,
    DigestTask,
    Done,
    LoadTask,
    Settings,
)
from gpuwarden.codescan.worker import Job, Worker
from gpuwarden.cuda.load_queue import (
    SMALL_BYTES,
    Answers,
    LoadQueue,
    QueueLimits,
    Waiting,
    digest_of,
)
from gpuwarden.cuda.loaded_modules import Examined, LoadAnswers
from gpuwarden.cuda.open_profiles import Opener, OpenProfile
from gpuwarden.errors import Malformed, Unavailable
from gpuwarden.model import LoadedModule
from gpuwarden.policy import Policy
from gpuwarden.probes.cuda.records import CapturedLoad

BOUNDS = Bounds(image_bytes=512 << 20, total_bytes=4 << 30, modules=100_000, false_starts=100_000)
CPU_SECONDS = 5.0
"""CPU time that a child may spend on a load, and more for each MiB of it; waiting ten times as
long is as bad."""
CPU_SECONDS_OF_MIB = 1.0
WAITING_FACTOR = 10.0
LOOK_SECONDS = 0.5
"""Between looks at whether children get on."""
BASELINES_SECONDS = 3.0
"""Between looks at whether baselines were replaced."""
FORK_AGAIN_SECONDS = 1.0
IDLE_FORK_SECONDS = 0.2
FORK_FAILURES = 3
"""In a row, after which what waits is told of and not kept."""
_DIGEST_DIGITS = 64
_TARGET = "load"


class ExaminedLoad(NamedTuple):
    """The answer to one load."""

    number: int
    modules: tuple[LoadedModule, ...]
    problems: tuple[str, ...]


class _Hand(Struct):
    """One child and what it is at."""

    quick: bool
    worker: Worker | None = None
    generation: int = 0
    waiting: Waiting | None = None
    answers: LoadAnswers | None = None
    """Of the load; None while only its digest is asked."""
    digest: str = ""


class ModuleExaminer:
    """A context manager; ``fileno`` is readable when ``take`` has something to do.

    ``take`` is to be called every second also when it is not: children that do not get on, and
    baselines that were replaced, are noticed there.
    """

    def __init__(
        self,
        policy: Policy,
        trusted: Trust | None = None,
        *,
        limits: QueueLimits | None = None,
        bounds: Bounds = BOUNDS,
        assess: Callable[[tuple[OpenProfile, ...]], Assess] | None = None,
    ) -> None:
        """Opens the policy's baselines and forks; the process must have one thread.

        ``trusted`` is whose signatures on baselines hold, by default those of the keys installed.
        ``assess`` makes what children call for each module; by default the standings in all
        profiles.
        """
        self.problems: tuple[str, ...] = ()
        """Which profiles cannot be asked, and which children cannot be had."""
        self.unconfined: tuple[str, ...] = ()
        """What of the confinement of the children could not be had."""
        self.replaced = 0
        """Children that ended before their work did."""
        self.answers = Answers()
        self._make_assess = assess or _standings
        self._settings = Settings(bounds=bounds)
        self._queue = LoadQueue(limits or QueueLimits())
        self._ready: deque[ExaminedLoad] = deque()
        self._poll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._bell, select.EPOLLIN)
        self._hands = [_Hand(quick=True), _Hand(quick=False)]
        self._numbers = 0
        self._generation = 0
        self._fork_failures = 0
        self._fork_trouble = ""
        self._fork_at = self._look_at = self._baselines_at = 0.0
        load_judging()
        self.use(policy, trusted)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the children; what waits is not answered any more."""
        for hand in self._hands:
            if hand.worker is not None:
                self._poll.unregister(hand.worker)
                hand.worker.end()
                hand.worker = None
            if hand.waiting is not None:
                self._queue.done(hand.waiting)
                hand.waiting = None
        for waiting in self._queue.all_waiting():
            self._queue.done(waiting)
        if not self._poll.closed:
            self._poll.close()
            os.close(self._bell)

    def fileno(self) -> int:
        return self._poll.fileno()

    def use(self, policy: Policy, trusted: Trust | None = None) -> None:
        """Compares with the profiles of another policy from now on."""
        self._opener = Opener(policy, trusted)
        self._open()

    # ------------------------------------------------------------------------------ loads

    def submit(self, load: CapturedLoad) -> None:
        """Takes a load and its descriptor, which is closed here; each is answered once."""
        if load.descriptor is None:
            self._answer([load.number], Examined())
            return
        try:
            size = os.fstat(load.descriptor).st_size
            waiting = Waiting([load.number], load.descriptor, size, bool(load.missed))
            self._take_in(waiting)
        except OSError as error:
            self._give_up(
                Waiting([load.number], load.descriptor, 0, False), f"not read: {error.strerror}"
            )
        self._hand_out()

    def _take_in(self, waiting: Waiting) -> None:
        refusal = self._queue.refusal(waiting.size)
        if not waiting.size:
            self._give_up(waiting, "no bytes")
            return
        # What is very likely the same as something else is worth a moment of ours.
        is_like_another = refusal and (
            self._queue.has_size(waiting.size) or self.answers.has_size(waiting.size)
        )
        if waiting.size <= SMALL_BYTES or is_like_another:
            waiting.digest = digest_of(waiting.descriptor, waiting.size)
            if self._is_old(waiting):
                os.close(waiting.descriptor)
                return
        if refusal:
            self._give_up(waiting, refusal)
        else:
            self._queue.add(waiting)

    def _is_old(self, waiting: Waiting) -> bool:
        """Whether the same bytes are answered, or wait already."""
        found = self.answers.find(waiting.content)
        if found is not None:
            self._answer(waiting.numbers, found)
            return True
        return self._queue.join(waiting)

    def _give_up(self, waiting: Waiting, problem: str) -> None:
        """Answers what never was in the queue."""
        os.close(waiting.descriptor)
        self._answer(waiting.numbers, Examined(problems=(problem,)))

    def _answer(self, numbers: list[int], examined: Examined) -> None:
        self._ready.extend(ExaminedLoad(number, *examined) for number in numbers)
        os.eventfd_write(self._bell, 1)

    def _finish(self, waiting: Waiting, examined: Examined) -> None:
        self._queue.done(waiting)
        self._answer(waiting.numbers, examined)

    def take(self) -> list[ExaminedLoad]:
        """What is answered by now."""
        now = time.monotonic()
        for hand in self._hands:
            if hand.worker is not None:
                self._hear(hand, hand.worker)
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self._look_after()
        if now >= self._baselines_at:
            self._baselines_at = now + BASELINES_SECONDS
            if self._opener.stamp() != self._stamp:
                self._open()
        self._hand_out()
        if self._ready:
            try:
                os.eventfd_read(self._bell)
            except BlockingIOError:
                pass
        taken = list(self._ready)
        self._ready.clear()
        return taken

    # ------------------------------------------------------------------------------ children

    def _open(self) -> None:
        """Opens the baselines and lets children that have the old ones go when they are done."""
        # Before they are opened: what is replaced meanwhile is seen as another.
        self._stamp = self._opener.stamp()
        profiles = self._opener.open()
        self._profiles = tuple(profile.name for profile in profiles)
        self._profile_problems = tuple(
            dict.fromkeys(profile.failed for profile in profiles if profile.failed)
        )
        self._assess = self._make_assess(profiles)
        self._generation += 1
        self.answers.clear()
        self._note_problems()
        for hand in self._hands:
            if hand.worker is not None and hand.waiting is None:
                self._dismiss(hand, hand.worker)
            self._fork(hand)

    def _note_problems(self) -> None:
        trouble = (self._fork_trouble,) if self._fork_trouble else ()
        self.problems = (*self._profile_problems, *trouble)

    def _fork(self, hand: _Hand) -> None:
        if hand.worker is not None or time.monotonic() < self._fork_at:
            return
        try:
            hand.worker = Worker(self._settings, self._assess)
        except Unavailable as error:
            self._could_not_fork(str(error))
            return
        hand.generation = self._generation
        self._poll.register(hand.worker, select.EPOLLIN)

    def _could_not_fork(self, why: str) -> None:
        self._fork_failures += 1
        self._fork_at = time.monotonic() + FORK_AGAIN_SECONDS
        self._fork_trouble = f"a child to examine modules in did not come up: {why}"
        self._note_problems()
        has_one = any(hand.worker is not None for hand in self._hands)
        if self._fork_failures >= FORK_FAILURES and not has_one:
            for waiting in self._queue.all_waiting():
                self._finish(waiting, Examined(problems=(f"not examined: {why}",)))

    def _dismiss(self, hand: _Hand, worker: Worker) -> str:
        self._poll.unregister(worker)
        hand.worker = None
        return worker.end()

    def _hand_out(self) -> None:
        for hand in self._hands:
            if hand.worker is None:
                self._fork(hand)
            while hand.worker is not None and hand.waiting is None:
                waiting = self._queue.next_for(quick=hand.quick)
                if waiting is None:
                    break
                if not self._give(hand, hand.worker, waiting):
                    self._queue.put_back(waiting)
                    break

    def _give(self, hand: _Hand, worker: Worker, waiting: Waiting) -> bool:
        """Whether the child took it; one that ended is noticed where it is listened to."""
        self._numbers += 1
        place = Place(target=_TARGET)
        task: DigestTask | LoadTask
        if waiting.digest:
            task = LoadTask(number=self._numbers, place=place, size=waiting.size)
        else:
            task = DigestTask(number=self._numbers, place=place, size=waiting.size)
        try:
            worker.give(Job(task, waiting.descriptor, _nothing_to_close))
        except Unavailable:
            return False
        hand.waiting, hand.digest = waiting, ""
        hand.answers = None
        if waiting.digest:
            hand.answers = LoadAnswers(waiting.size, self._profiles, is_cut=waiting.is_cut)
        return True

    def _hear(self, hand: _Hand, worker: Worker) -> None:
        try:
            said = worker.answers()
        except Malformed as error:
            self._ended(hand, worker, f"what the child says is not to be believed: {error}")
            return
        if said is None:
            self._ended(hand, worker, "")
            return
        if worker.unconfined is not None:
            self.unconfined = tuple(dict.fromkeys((*self.unconfined, *worker.unconfined)))
            if self._fork_failures:
                self._fork_failures, self._fork_trouble = 0, ""
                self._note_problems()
        for _, answer in said:
            self._take_answer(hand, answer)

    def _take_answer(self, hand: _Hand, answer: Answer) -> None:
        if isinstance(answer, Digest):
            hand.digest = answer.digest
        elif not isinstance(answer, Done):
            if hand.answers is not None:
                hand.answers.take(answer)
        elif hand.waiting is not None:
            waiting, answers = hand.waiting, hand.answers
            hand.waiting = hand.answers = None
            if answers is not None:
                examined = answers.answer()
                if hand.generation == self._generation:
                    self.answers.keep(waiting.content, waiting.size, examined)
                self._finish(waiting, examined)
            else:
                self._digested(waiting, hand.digest)
            if hand.worker is not None and hand.generation != self._generation:
                self._dismiss(hand, hand.worker)

    def _digested(self, waiting: Waiting, digest: str) -> None:
        if len(digest) != _DIGEST_DIGITS:
            self._finish(waiting, Examined(problems=("not examined: it could not be hashed",)))
            return
        waiting.digest = digest
        found = self.answers.find(waiting.content)
        if found is not None:
            self._finish(waiting, found)
        elif self._queue.has(waiting.content):
            self._queue.done(waiting)
            self._queue.join(waiting)
        else:
            self._queue.digested(waiting)

    def _ended(self, hand: _Hand, worker: Worker, why: str) -> None:
        """What it was at is answered with what it had said of it by then."""
        how = self._dismiss(hand, worker)
        waiting, answers = hand.waiting, hand.answers
        hand.waiting = hand.answers = None
        self.replaced += 1
        if worker.unconfined is None:
            if waiting is not None:
                self._queue.put_back(waiting)
            self._could_not_fork(how)
        elif waiting is None:
            self._fork_at = time.monotonic() + IDLE_FORK_SECONDS
        else:
            answers = answers or LoadAnswers(waiting.size, self._profiles, is_cut=True)
            answers.trouble(why or f"the child that examined it ended before it was done: {how}")
            self._finish(waiting, answers.answer())

    def _look_after(self) -> None:
        """Ends children that spend more on a load than any honest one needs."""
        for hand in self._hands:
            if hand.worker is None or hand.waiting is None:
                continue
            seconds, cpu_seconds = hand.worker.spent()
            allowed = CPU_SECONDS + CPU_SECONDS_OF_MIB * (hand.waiting.size / (1 << 20))
            if cpu_seconds > allowed or seconds > WAITING_FACTOR * allowed:
                self._ended(hand, hand.worker, "not examined to its end: it took too long")


def _standings(profiles: tuple[OpenProfile, ...]) -> Assess:
    # Imported here: who only names this module needs no numpy.
    from gpuwarden.cuda.standings import StandingsAssessor

    return StandingsAssessor(profiles)


def _nothing_to_close() -> str:
    return ""
