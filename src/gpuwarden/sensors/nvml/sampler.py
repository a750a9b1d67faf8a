"""The driver asked again and again: one child for the whole life, and a new one when it fails.

Nothing here waits. The owner registers ``fileno`` with its loop, asks for a round when it is time,
and takes it when it is there. The thread that asks must stay: the child ends with it.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable

from gpuwarden.errors import GpuwardenError, Malformed, Unavailable
from gpuwarden.host import Host
from gpuwarden.model import AccountedProcess, LibraryCheck, UtilisationSample
from gpuwarden.sensors.nvml import kernel
from gpuwarden.sensors.nvml.answer import (
    Answer,
    Told,
    failure,
    gather,
    limits,
    without_library,
)
from gpuwarden.sensors.nvml.kernel import (
    DriverGpu,
    driver_gpus,
    driver_is_loaded,
    has_mig_instances,
    is_this_machine,
)
from gpuwarden.sensors.nvml.lasting import LastingChild
from gpuwarden.sensors.nvml.library import Candidate, candidates
from gpuwarden.sensors.nvml.round import Round, RoundQuery

__all__ = ["Round", "RoundQuery", "Sampler"]

ROUND, ENUMERATE = b"r", b"e"
"""As in ``rounds``, which only the child imports."""
LONGEST_PAUSE_SECONDS = 60.0
STEADY_SECONDS = 60.0
"""A child that lived so long starts the pauses anew."""
CHECK_SECONDS = 60.0
"""How often it is looked whether the library is the one that is open, and what GPUs there are."""
REAP_SECONDS = 0.5
LEFT_BEHIND_LIMIT = 3
GPUS_REMEMBERED = 1024
WITHOUT_PRIVILEGES_SECONDS = 600.0
"""After the child with rights failed where the one without did not."""


class Sampler:
    """Asks the driver for rounds in a child that stays; one round at a time."""

    def __init__(
        self,
        host: Host,
        library: str | None = None,
        deadline_seconds: float = 5.0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``library`` names the NVML library instead of the usual places. Starts nothing yet."""
        self.libraries: tuple[LibraryCheck, ...] = ()
        self.ignored = 0
        """Requests while a round was under way."""
        self.starts = 0
        """Children started so far."""
        self._host = host
        self._library = library
        self._deadline_seconds = deadline_seconds
        self._clock = clock
        self._epoll = select.epoll()
        self._ready_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._ready_event, select.EPOLLIN)
        self._ready: Round | None = None
        self._child: LastingChild | None = None
        self._leaving: list[LastingChild] = []
        """Killed, and still there when last looked."""
        self._found: list[Candidate] = []
        self._chosen: Candidate | None = None
        self._checked_at = 0.0
        # The round under way, when it was asked for, and what the child without rights said to it.
        self._answer: Answer | None = None
        self._asked_at = 0.0
        self._asked_at_ns = 0
        self._due_at = 0.0
        self._first_answer: Answer | None = None
        self._failure: GpuwardenError = Unavailable("the driver was not asked yet")
        self._failures = 0
        self._retry_at = 0.0
        self._unprivileged_until = 0.0
        self._known: list[DriverGpu] = []
        self._known_names: list[str] | None = None
        self._known_at = 0.0
        self._accounted: dict[str, tuple[AccountedProcess, ...]] = {}
        self._newest: dict[tuple[str, int], UtilisationSample] = {}
        self._given_until_us: dict[str, int] = {}

    # ---------------------------------------------------------------- for the owner

    def fileno(self) -> int:
        """Readable when ``take`` should be called; the same for the whole life."""
        return self._epoll.fileno()

    @property
    def child_pids(self) -> tuple[int, ...]:
        """Our children that may hold device nodes: none of them is a holder to report."""
        children = [*self._leaving, *([self._child] if self._child else [])]
        return tuple(child.pid for child in children)

    @property
    def messages_so_far(self) -> int:
        """How much of the round under way has been heard: the greeting and a message for each GPU.

        While one hangs, this tells which GPU it is at.
        """
        return len(self._answer.messages) if self._answer is not None else 0

    def overdue(self, now: float) -> bool:
        """Whether the round under way is past its deadline at ``now`` (monotonic seconds)."""
        return self._answer is not None and now >= self._due_at

    def request(self) -> None:
        """Asks for a round and returns at once; counted in ``ignored`` while one is under way.

        Call it every second or so: it also ends a child that is overdue and starts a new one.
        """
        self._advance()
        if self._answer is not None or self._ready is not None:
            self.ignored += 1
            return
        now = self._clock()
        self._asked_at, self._asked_at_ns = now, time.time_ns()
        self._recheck(now)
        if self._child is None and now >= self._retry_at:
            unprivileged = os.geteuid() == 0 and not has_mig_instances(self._host)
            self._try_start(now, unprivileged=unprivileged)
        if self._child is None:
            self._give(
                Round(at_ns=self._asked_at_ns, error=self._failure, libraries=self.libraries)
            )
            return
        changed = self._look_for_gpus(now)
        self._ask(ENUMERATE if changed and self._child.was_asked else ROUND)

    def take(self) -> Round | None:
        """The round that was asked for, once it is there; never waits."""
        self._advance()
        ready, self._ready = self._ready, None
        if ready is not None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._ready_event)
        return ready

    def close(self) -> None:
        """Ends the child, waiting half a second for it at most."""
        now = self._clock()
        self._dismiss(now)
        stop_waiting_at = time.monotonic() + REAP_SECONDS
        while not all(child.is_gone() for child in self._leaving):
            if time.monotonic() >= stop_waiting_at:
                break
            time.sleep(0.005)
        for child in self._leaving:
            child.forget()
        self._leaving.clear()
        self._answer = self._ready = None
        if not self._epoll.closed:
            self._epoll.close()
            os.close(self._ready_event)

    # ---------------------------------------------------------------- the child

    def _try_start(self, now: float, *, unprivileged: bool) -> None:
        try:
            self._start(now, unprivileged=unprivileged)
        except GpuwardenError as error:
            self._failed(error, now)

    def _start(self, now: float, *, unprivileged: bool) -> None:
        if not is_this_machine(self._host):
            raise Unavailable("this is a recorded machine, whose driver cannot be asked")
        self._leaving = [child for child in self._leaving if not child.is_gone()]
        if len(self._leaving) >= LEFT_BEHIND_LIMIT:
            raise Unavailable(
                f"{len(self._leaving)} processes that asked the NVIDIA driver hang in it and "
                "cannot be killed, so it is not asked again until one of them ends",
                remedy="drain the node and reset the GPU or reboot",
            )
        self._choose(now)
        if self._chosen is None:
            raise without_library(self._found, is_loaded=driver_is_loaded(self._host))
        resolved = self._chosen.check.resolved
        assert resolved is not None  # noqa: S101 - an accepted library has one
        self._child = LastingChild(
            resolved,
            self._epoll,
            unprivileged=unprivileged,
            given_until_us=dict(self._given_until_us),
            started_at=now,
        )
        self.starts += 1

    def _choose(self, now: float) -> None:
        self._checked_at = now
        self._found = list(candidates(self._host, self._library))
        self.libraries = tuple(candidate.check for candidate in self._found)
        self._chosen = next((c for c in self._found if c.check.accepted), None)

    def _recheck(self, now: float) -> None:
        """Lets the child go when the library is another file by now, or no longer acceptable."""
        if self._child is None or now - self._checked_at < CHECK_SECONDS:
            return
        before = self._chosen
        self._choose(now)
        if before is None or self._chosen is None or before.check != self._chosen.check:
            self._dismiss(now)

    def _dismiss(self, now: float) -> None:
        if self._child is not None:
            self._child.end(now)
            self._leaving.append(self._child)
            self._child = None

    def _ask(self, request: bytes) -> None:
        assert self._child is not None  # noqa: S101
        self._answer = Answer()
        self._due_at = self._clock() + self._deadline_seconds
        self._child.ask(request)

    def _advance(self) -> None:
        """Whatever can be done without waiting."""
        now = self._clock()
        self._leaving = [child for child in self._leaving if not child.is_gone()]
        child = self._child
        if child is None:
            return
        if child.ending_since is None:
            self._hear(child, now)
        if child.ending_since is not None:
            gone = child.is_gone()
            if gone or now - child.ending_since >= REAP_SECONDS:
                self._lost(child, now, left_behind=not gone)
        elif self._answer is not None and self._answer.complete:
            self._complete(child, self._answer, now)

    def _hear(self, child: LastingChild, now: float) -> None:
        try:
            if not child.receive(self._answer):
                child.end(now)
        except Malformed as error:
            child.damage = str(error)
            child.end(now)
        if self._answer is not None and not self._answer.complete and now >= self._due_at:
            # Said of one that ended at this very moment as well: it did not answer in time.
            child.timed_out = child.ending_since is None
            child.end(now)

    # ---------------------------------------------------------------- how a round ends

    def _complete(self, child: LastingChild, answer: Answer, now: float) -> None:
        """The child has answered, and lives."""
        if answer.refused:
            child.end(now)
        elif not self._asked_with_rights(child, answer, now):
            self._finish(answer, now, unprivileged=child.unprivileged)

    def _lost(self, child: LastingChild, now: float, *, left_behind: bool) -> None:
        """The child has ended, or will not end."""
        self._child = None
        if left_behind:
            self._leaving.append(child)
        answer = self._answer
        last = Answer() if answer is None or _is_whole(answer) else answer
        last.damage, last.timed_out = child.damage, child.timed_out
        last.left_behind, last.wait_status = left_behind, child.wait_status
        if answer is not None and self._asked_with_rights(child, answer, now):
            return
        if now - child.started_at >= STEADY_SECONDS:
            self._failures = 0
        error = self._error(last, gather(last, []))
        assert error is not None  # noqa: S101 - it is not complete, or was refused
        self._failed(error, now)
        if answer is not None:
            self._finish(answer, now, unprivileged=child.unprivileged)

    def _asked_with_rights(self, child: LastingChild, answer: Answer, now: float) -> bool:
        """Asks a second child, with rights, when the driver withholds something from nobody."""
        if (
            not child.unprivileged
            or os.geteuid() != 0
            or child.timed_out
            or not answer.privileges_would_help
            or now < self._unprivileged_until
        ):
            return False
        self._dismiss(now)
        self._try_start(now, unprivileged=False)
        if self._child is None:
            return False
        self._first_answer = answer
        self._ask(ROUND)
        return True

    def _finish(self, answer: Answer, now: float, *, unprivileged: bool) -> None:
        first, self._first_answer = self._first_answer, None
        if first is not None and answer.failed and not first.failed:
            # Rights made it worse: go on without them.
            self._unprivileged_until = now + WITHOUT_PRIVILEGES_SECONDS
            self._retry_at = now
            answer, unprivileged = first, True
        told = gather(answer, self._known)
        self._remember(answer, told)
        self._give(
            Round(
                at_ns=self._asked_at_ns,
                seconds=now - self._asked_at,
                gpus=tuple(told.gpus),
                clients=tuple(told.clients),
                unlisted=tuple(told.unlisted),
                accounted=tuple(one for kept in self._accounted.values() for one in kept),
                gaps=(*told.gaps, *limits(told.gpus, self._chosen, unprivileged=unprivileged)),
                driver_version=told.driver_version,
                cuda_version=told.cuda_version,
                error=self._error(answer, told),
                libraries=self.libraries,
                child_pid=self._child.pid if self._child else None,
                newest=self._newest,
            )
        )

    def _error(self, answer: Answer, told: Told) -> GpuwardenError | None:
        return failure(
            answer,
            told,
            deadline_seconds=self._deadline_seconds,
            is_loaded=lambda: driver_is_loaded(self._host),
        )

    def _failed(self, error: GpuwardenError, now: float) -> None:
        self._failure = error
        # Without a driver there is nothing to be in a hurry for.
        pause = LONGEST_PAUSE_SECONDS if type(error) is Unavailable else 2.0**self._failures
        self._failures = min(self._failures + 1, 16)
        self._retry_at = now + min(pause, LONGEST_PAUSE_SECONDS)

    def _give(self, told: Round) -> None:
        self._answer = None
        self._ready = told
        os.eventfd_write(self._ready_event, 1)

    # ---------------------------------------------------------------- what rounds leave behind

    def _remember(self, answer: Answer, told: Told) -> None:
        for message in answer.messages:
            if message.gpus and message.accounted is not None:
                self._accounted[message.gpus[0].id] = message.accounted
        if not answer.failed:
            self._accounted = {
                gpu.id: self._accounted[gpu.id] for gpu in told.gpus if gpu.id in self._accounted
            }
        newest = {}
        until_us: dict[str, int] = {}
        for client in (*told.clients, *told.unlisted):
            key = (client.gpu_id, client.pid)
            if client.samples:
                newest[key] = client.samples[-1]
                at_us = newest[key].at_ns // 1000
                until_us[client.gpu_id] = max(at_us, until_us.get(client.gpu_id, 0))
            elif key in self._newest:
                newest[key] = self._newest[key]
        self._newest = newest
        self._given_until_us.update(until_us)
        if len(self._given_until_us) > GPUS_REMEMBERED:
            self._given_until_us = until_us

    def _look_for_gpus(self, now: float) -> bool:
        """Reads what the kernel module lists; True when that is not what it was."""
        names: list[str] | None = None
        with contextlib.suppress(GpuwardenError):
            names = sorted(self._host.names(f"{kernel.DRIVER_DIRECTORY}/gpus"))
        changed = names != self._known_names
        if changed or now - self._known_at >= CHECK_SECONDS:
            self._known_names, self._known_at = names, now
            self._known = driver_gpus(self._host)
        return changed


def _is_whole(answer: Answer) -> bool:
    return not answer.failed
