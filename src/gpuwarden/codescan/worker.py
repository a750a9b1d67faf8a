"""The parent's end of one confined child: tasks out, answers in, and its end noticed."""

from __future__ import annotations

import array
import contextlib
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from gpuwarden.code.module import Place
from gpuwarden.codescan.board import Board
from gpuwarden.codescan.inside import serve
from gpuwarden.codescan.tasks import (
    FRAME_LIMIT_BYTES,
    LENGTH,
    Answer,
    Assess,
    Done,
    Ready,
    Settings,
    Task,
)
from gpuwarden.errors import Malformed, Unavailable

RECEIVE_BYTES = 1 << 18
STALL_CPU_SECONDS = 120.0
"""CPU time that a child may use without moving on or saying anything."""
STALL_SECONDS = 900.0
"""Time that may pass so: an export or a file server that does not go on either."""
CPU_CLOCK_OF_PROCESS = 2  # clock_getcpuclockid(3): CPUCLOCK_SCHED of all its threads.


class Job(msgspec.Struct):
    """A task with its descriptor, which is ours until the task is done."""

    task: Task
    descriptor: int
    close: Callable[[], str]
    """Called once when the task is done or given up; says what went wrong at the other end of a
    stream, or nothing."""
    cache: str = ""
    """The JIT cache that the file is in, where more than its path tells."""


class Worker:
    """A child that is given jobs; ``fileno`` is readable when it has answered, or has ended."""

    def __init__(self, settings: Settings, assess: Assess | None) -> None:
        """Forks it. Errors: Unavailable when no process can be made."""
        self.jobs: deque[Job] = deque()
        """Those given to it and not done, the first is the one that it is on."""
        self.unconfined: tuple[str, ...] | None = None
        self.board = Board()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Answer)  # type: msgspec.msgpack.Decoder[Answer]
        self._received = bytearray()
        self._moved_at = self._moved_at_cpu = 0.0
        self._moves = -1
        self._begun_at = self._begun_at_cpu = 0.0
        parent = os.getpid()
        try:
            self._channel, theirs = socket.socketpair()
            pid = os.fork()
        except OSError as error:
            raise Unavailable(f"no process to read in: {error.strerror}") from error
        if pid == 0:
            serve(theirs, self.board, settings, assess, parent)
        self.pid = pid
        theirs.close()
        self._channel.setblocking(False)

    def fileno(self) -> int:
        return self._channel.fileno()

    def give(self, job: Job) -> None:
        """Sends a job. Errors: Unavailable when the child is gone; then the job was not given."""
        raw = self._encoder.encode(job.task)
        rights = array.array("i", [job.descriptor])
        try:
            self._channel.setblocking(True)
            # The descriptor goes with the first bytes and is only taken with them.
            sent = self._channel.sendmsg(
                [LENGTH.pack(len(raw))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
            )
            self._channel.sendall(LENGTH.pack(len(raw))[sent:] + raw)
        except OSError as error:
            raise Unavailable(f"the child is gone: {error.strerror}") from error
        finally:
            self._channel.setblocking(False)
        if not self.jobs:
            self._begin()
        self.jobs.append(job)

    def answers(self) -> list[tuple[Job, Answer]] | None:
        """What it has said by now, each with its job; None when it has ended.

        Errors: Malformed when it says what is no answer, which an honest child never does.
        """
        try:
            data = self._channel.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self._received += data
        self._note_movement()
        said: list[tuple[Job, Answer]] = []
        for frame in self._frames():
            try:
                answer = self._decoder.decode(frame)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise Malformed(f"an answer that is none: {error}") from error
            if isinstance(answer, Ready):
                self.unconfined = answer.unconfined
                continue
            if not self.jobs:
                raise Malformed("an answer to nothing that was asked")
            said.append((self.jobs[0], answer))
            if isinstance(answer, Done):
                if answer.number != self.jobs[0].task.number:
                    raise Malformed("an answer to another task than was asked")
                self.jobs.popleft()
                self._begin()
        return said

    def _frames(self) -> Iterator[bytes]:
        """Whole frames, in order, each taken before what comes after it is looked at."""
        while len(self._received) >= LENGTH.size:
            size = LENGTH.unpack_from(self._received)[0]
            if size > FRAME_LIMIT_BYTES:
                raise Malformed(f"an answer of {size} bytes")
            end = LENGTH.size + size
            if end > len(self._received):
                break
            frame = bytes(self._received[LENGTH.size : end])
            # From the front of a bytearray this costs nothing.
            del self._received[:end]
            yield frame

    def _cpu_seconds(self) -> float:
        try:
            return time.clock_gettime(~self.pid << 3 | CPU_CLOCK_OF_PROCESS)
        except OSError:
            return 0.0

    def _note_movement(self) -> None:
        self._moved_at, self._moved_at_cpu = time.monotonic(), self._cpu_seconds()

    def _begin(self) -> None:
        self._note_movement()
        self._begun_at, self._begun_at_cpu = self._moved_at, self._moved_at_cpu

    def spent(self) -> tuple[float, float]:
        """Seconds since it began what it is on, and those of its CPU time."""
        return time.monotonic() - self._begun_at, self._cpu_seconds() - self._begun_at_cpu

    def is_stalled(self) -> bool:
        """Whether it computes or waits on and on without moving in what it reads."""
        moves = self.board.look()[2]
        if moves != self._moves:
            self._moves = moves
            self._note_movement()
            return False
        waited = time.monotonic() - self._moved_at
        return waited > STALL_SECONDS or (
            self._cpu_seconds() - self._moved_at_cpu > STALL_CPU_SECONDS
        )

    def where(self) -> Place | None:
        """What it was reading last."""
        place = self.board.place()
        asked = self.jobs[0].task.place if self.jobs else None
        return place if place and asked and place.target == asked.target else asked

    def end(self) -> str:
        """Ends it, if it has not ended; how it did, in words."""
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.board.close()
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            return f"it ended by {signal.Signals(number).name}" if number != 9 else "it was killed"
        return f"it ended with status {os.waitstatus_to_exitcode(status)}"

    def close(self) -> None:
        """Lets it end by itself, since nothing more is asked."""
        self._channel.close()
        os.waitpid(self.pid, 0)
        self.board.close()
