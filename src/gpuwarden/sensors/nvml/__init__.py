"""The NVIDIA driver's own account of GPUs and their processes, asked in a child with a deadline.

The library is found and checked first; a child without rights opens it and answers in lines, a
line for each GPU, so that one that hangs costs the GPUs after it and not those before.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator

from gpuwarden.errors import GpuwardenError, Malformed, Unavailable
from gpuwarden.host import Host
from gpuwarden.model import AccountedProcess, Gap, Gpu, GpuClient, LibraryCheck
from gpuwarden.sensors.nvml.answer import Answer, failure, gather, limits, without_library
from gpuwarden.sensors.nvml.child import Child, start_child
from gpuwarden.sensors.nvml.kernel import (
    driver_gpus,
    driver_is_loaded,
    has_mig_instances,
    is_this_machine,
)
from gpuwarden.sensors.nvml.library import Candidate, candidates
from gpuwarden.sensors.nvml.message import LINE_LIMIT_BYTES, Message, encode, parse_message
from gpuwarden.sensors.seen import Seen

NAME = "nvml"
Fact = LibraryCheck | Gpu | GpuClient | AccountedProcess | Gap

READ_BYTES = 1 << 18
ANSWER_LIMIT_BYTES = 64 << 20
LEAST_WAIT_SECONDS = 0.5
"""Given to a child even when the deadline went by while nobody was reading."""
REAP_SECONDS = 0.5


class NvmlQuery:
    """A question to the driver that is under way; ``read`` waits for the answer."""

    def __init__(self, host: Host, deadline_seconds: float) -> None:
        self.driver_version: str | None = None
        self.cuda_version: str | None = None
        self._host = host
        self._deadline_seconds = deadline_seconds
        self._found: list[Candidate] = []
        self._chosen: Candidate | None = None
        self._failure: GpuwardenError | None = None
        self._child: Child | None = None
        self._unprivileged = os.geteuid() == 0
        self._give_up_at = 0.0

    @property
    def child_pid(self) -> int | None:
        """The child while it lives: it holds the driver's device nodes and is not a holder."""
        return self._child.pid if self._child else None

    def read(self, seen: Seen) -> Iterator[Fact]:
        """What the driver said; ends by the deadline.

        Errors, all after the facts that could be had: Unavailable when there is no driver; Denied
        when the library was refused or the driver refuses; TimedOut when it hung; Malformed when
        it crashed or answered nonsense.
        """
        del seen
        try:
            yield from (found.check for found in self._found)
            if self._failure is not None:
                raise self._failure
            answer = self._collect()
            if self._unprivileged and not answer.timed_out and answer.privileges_would_help:
                self._start(unprivileged=False)
                second = self._collect()
                if answer.failed or not second.failed:
                    answer = second
            yield from self._facts(answer)
        finally:
            self.close()

    def close(self) -> None:
        """Ends the child if it still runs."""
        if self._child is not None:
            self._end(Answer())

    # ---------------------------------------------------------------- the child

    def _start(self, *, unprivileged: bool) -> None:
        assert self._chosen is not None and self._chosen.check.resolved is not None  # noqa: S101
        path = self._chosen.check.resolved
        self._unprivileged = unprivileged
        self._give_up_at = time.monotonic() + self._deadline_seconds
        self._child = start_child(
            lambda send: _ask(path, send),
            unprivileged=unprivileged,
            cpu_seconds=self._deadline_seconds,
        )

    def _collect(self) -> Answer:
        answer = Answer()
        if self._child is None:
            return answer
        give_up_at = max(self._give_up_at, time.monotonic() + LEAST_WAIT_SECONDS)
        poll = select.poll()
        poll.register(self._child.pipe, select.POLLIN)
        pending = b""
        total = 0
        try:
            while not answer.complete:
                left = give_up_at - time.monotonic()
                if left <= 0 or not poll.poll(max(1, int(left * 1000))):
                    answer.timed_out = time.monotonic() >= give_up_at
                    if answer.timed_out:
                        break
                    continue
                chunk = os.read(self._child.pipe, READ_BYTES)
                if not chunk:
                    break
                total += len(chunk)
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    answer.messages.append(parse_message(line))
                    answer.complete = answer.complete or answer.messages[-1].done
                if total > ANSWER_LIMIT_BYTES or len(pending) > LINE_LIMIT_BYTES:
                    raise Malformed("the NVML child's answer does not end")
        except Malformed as error:
            answer.damage = str(error)
        self._end(answer)
        if any(m.failed_code is not None or m.failed_load is not None for m in answer.messages):
            answer.complete = True
        return answer

    def _end(self, answer: Answer) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        os.close(child.pipe)
        stop_waiting_at = time.monotonic() + REAP_SECONDS
        # One that said it is done gets a moment to leave by itself; its status tells of a crash.
        kill_at = time.monotonic() + (0 if answer.timed_out or answer.damage else 0.1)
        pause = 0.0005
        while True:
            try:
                pid, status = os.waitpid(child.pid, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == child.pid:
                answer.wait_status = status
                return
            now = time.monotonic()
            if now >= kill_at:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
                kill_at = stop_waiting_at + 1
            if now >= stop_waiting_at:
                # It sleeps in the kernel and cannot be killed; we do not wait with it.
                answer.left_behind = True
                return
            time.sleep(pause)
            pause = min(pause * 2, 0.02)

    # ---------------------------------------------------------------- its answer

    def _facts(self, answer: Answer) -> Iterator[Fact]:
        told = gather(answer, driver_gpus(self._host))
        self.driver_version = told.driver_version
        self.cuda_version = told.cuda_version
        yield from told.gpus
        yield from told.clients
        yield from told.accounted
        yield from told.gaps
        yield from limits(told.gpus, self._chosen, unprivileged=self._unprivileged)
        error = failure(
            answer,
            told,
            deadline_seconds=self._deadline_seconds,
            is_loaded=lambda: driver_is_loaded(self._host),
        )
        if error is not None:
            raise error


def start(host: Host, *, library: str | None = None, deadline_seconds: float = 5.0) -> NvmlQuery:
    """Checks the library and asks the driver in a child; returns at once and never raises.

    ``library`` names the NVML library instead of the usual places. What went wrong is raised by
    ``NvmlQuery.read``, after the facts.
    """
    query = NvmlQuery(host, deadline_seconds)
    try:
        if not is_this_machine(host):
            raise Unavailable("this is a recorded machine, whose driver cannot be asked")
        query._found = list(candidates(host, library))
        query._chosen = next((c for c in query._found if c.check.accepted), None)
        if query._chosen is not None:
            query._start(unprivileged=os.geteuid() == 0 and not has_mig_instances(host))
        else:
            raise without_library(query._found, is_loaded=driver_is_loaded(host))
    except GpuwardenError as error:
        query._failure = error
    return query


def _ask(path: str, send: Callable[[bytes], None]) -> None:
    from gpuwarden.sensors.nvml.device import ask

    try:
        ask(path, lambda message: send(encode(message)))
    except Exception as error:  # noqa: BLE001 - whatever a strange library brings about
        text = f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace").decode()
        send(encode(Message(failed_load=text[:300])))
