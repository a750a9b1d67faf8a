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

from gpuwarden.code.bounds import Bounds
from gpuwarden.codescan.judging_data import load_judging
from gpuwarden.codescan.known_code import Trust
from gpuwarden.codescan.tasks import Assess, Settings
from gpuwarden.cuda.examining_child import Ended, ExaminingChild, Outcome
from gpuwarden.cuda.load_queue import (
    SMALL_BYTES,
    Answers,
    LoadQueue,
    QueueLimits,
    Waiting,
    digest_of,
)
from gpuwarden.cuda.loaded_modules import Examined
from gpuwarden.cuda.open_profiles import Opener, OpenProfile
from gpuwarden.errors import Unavailable
from gpuwarden.model import LoadedModule
from gpuwarden.policy import Policy
from gpuwarden.probes.cuda.records import CapturedLoad

BOUNDS = Bounds(image_bytes=512 << 20, total_bytes=4 << 30, modules=100_000, false_starts=100_000)
LOOK_SECONDS = 0.5
"""Between looks at whether children get on."""
BASELINES_SECONDS = 3.0
"""Between looks at whether baselines were replaced."""
FORK_AGAIN_SECONDS = 1.0
IDLE_FORK_SECONDS = 0.2
FORK_FAILURES = 3
"""In a row, after which what waits is told of and not kept."""
_DIGEST_DIGITS = 64
QUICK, ANY = True, False
"""What a child is for: only what is soon done, or whatever comes."""


class ExaminedLoad(NamedTuple):
    """The answer to one load."""

    number: int
    modules: tuple[LoadedModule, ...]
    problems: tuple[str, ...]


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
        self._children: dict[bool, ExaminingChild] = {}
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
        for quick in list(self._children):
            waiting = self._dismiss(quick).waiting
            if waiting is not None:
                self._queue.done(waiting)
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
        for quick in list(self._children):
            self._hear(quick)
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
        """Opens the baselines; children that have the old ones go when they are done."""
        # Before they are opened: what is replaced meanwhile is seen as another.
        self._stamp = self._opener.stamp()
        profiles = self._opener.open()
        self._profiles = tuple(profile.name for profile in profiles)
        failed = dict.fromkeys(profile.failed for profile in profiles if profile.failed)
        self._profile_problems = tuple(failed)
        self._assess = self._make_assess(profiles)
        self._generation += 1
        self.answers.clear()
        self._note_problems()
        self._renew()

    def _renew(self) -> None:
        """Forks what is not there, and anew who has old baselines and is at nothing."""
        for quick in (QUICK, ANY):
            child = self._children.get(quick)
            if child is not None and child.waiting is None:
                if child.generation == self._generation:
                    continue
                self._dismiss(quick)
            if quick not in self._children and time.monotonic() >= self._fork_at:
                self._fork(quick)

    def _fork(self, quick: bool) -> None:
        try:
            child = ExaminingChild(self._settings, self._assess, self._profiles, self._generation)
        except Unavailable as error:
            self._could_not_fork(str(error))
            return
        self._children[quick] = child
        self._poll.register(child, select.EPOLLIN)

    def _could_not_fork(self, why: str) -> None:
        self._fork_failures += 1
        self._fork_at = time.monotonic() + FORK_AGAIN_SECONDS
        self._fork_trouble = f"a child to examine modules in did not come up: {why}"
        self._note_problems()
        if self._fork_failures >= FORK_FAILURES and not self._children:
            for waiting in self._queue.all_waiting():
                self._finish(waiting, Examined(problems=(f"not examined: {why}",)))

    def _note_problems(self) -> None:
        trouble = (self._fork_trouble,) if self._fork_trouble else ()
        self.problems = (*self._profile_problems, *trouble)

    def _dismiss(self, quick: bool, why: str = "") -> Ended:
        child = self._children.pop(quick)
        self._poll.unregister(child)
        return child.end(why)

    def _hand_out(self) -> None:
        self._renew()
        for quick, child in self._children.items():
            if child.waiting is not None:
                continue
            waiting = self._queue.next_for(quick=quick)
            if waiting is not None:
                self._numbers += 1
                if not child.give(self._numbers, waiting):
                    self._queue.put_back(waiting)

    def _hear(self, quick: bool) -> None:
        child = self._children[quick]
        outcome = child.hear()
        if isinstance(outcome, Ended):
            # It is closed already, which took it off the poll.
            del self._children[quick]
            self._ended(outcome)
            return
        if child.unconfined is not None:
            self.unconfined = tuple(dict.fromkeys((*self.unconfined, *child.unconfined)))
            if self._fork_trouble:
                self._fork_failures, self._fork_trouble = 0, ""
                self._note_problems()
        if outcome is not None:
            self._came(outcome, is_current=child.generation == self._generation)

    def _came(self, outcome: Outcome, *, is_current: bool) -> None:
        waiting, digest, examined = outcome
        if examined is not None:
            if is_current:
                self.answers.keep(waiting.content, waiting.size, examined)
            self._finish(waiting, examined)
        elif len(digest) != _DIGEST_DIGITS:
            self._finish(waiting, Examined(problems=("not examined: it could not be hashed",)))
        else:
            waiting.digest = digest
            found = self.answers.find(waiting.content)
            if found is not None:
                self._finish(waiting, found)
            elif self._queue.has(waiting.content):
                self._queue.done(waiting)
                self._queue.join(waiting)
            else:
                self._queue.digested(waiting)

    def _ended(self, ended: Ended) -> None:
        self.replaced += 1
        waiting = ended.waiting
        if not ended.came_up:
            if waiting is not None:
                self._queue.put_back(waiting)
            self._could_not_fork(ended.how)
        elif waiting is not None:
            self._finish(waiting, ended.examined)
        else:
            self._fork_at = time.monotonic() + IDLE_FORK_SECONDS

    def _look_after(self) -> None:
        for quick, child in list(self._children.items()):
            if child.is_overdue():
                self._ended(self._dismiss(quick, "not examined to its end: it took too long"))


def _standings(profiles: tuple[OpenProfile, ...]) -> Assess:
    # Imported here: who only names this module needs no numpy.
    from gpuwarden.cuda.standings import StandingsAssessor

    return StandingsAssessor(profiles)
