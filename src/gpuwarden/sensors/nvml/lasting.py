"""Our end of a lasting child: asked and read without ever waiting for it, and ended for certain."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Mapping

from gpuwarden.errors import Malformed
from gpuwarden.sensors.nvml.answer import Answer
from gpuwarden.sensors.nvml.child import start_lasting_child
from gpuwarden.sensors.nvml.message import take_frame

READ_BYTES = 1 << 18
READS_AT_ONCE = 16
"""A child that never stops talking must not keep us from everything else."""
ROUND_LIMIT_BYTES = 64 << 20
NUDGES_LIMIT = 64


class LastingChild:
    """A child that has the library open; ``epoll`` tells when it has said something or ended."""

    def __init__(
        self,
        path: str,
        epoll: select.epoll,
        *,
        unprivileged: bool,
        given_until_us: Mapping[str, int],
        started_at: float,
    ) -> None:
        """Starts it. Errors: Unavailable when no process can be made."""

        def job(connection: int, nudge: int) -> None:
            from gpuwarden.sensors.nvml.rounds import Channel, answer_rounds

            answer_rounds(path, Channel(connection, nudge), given_until_us)

        child = start_lasting_child(job, unprivileged=unprivileged)
        self.pid = child.pid
        self.unprivileged = unprivileged
        self.started_at = started_at
        self.was_asked = False
        self.ending_since: float | None = None
        self.timed_out = False
        self.damage = ""
        """Why what it said was not believed."""
        self._epoll = epoll
        self._socket: int | None = child.pipe
        self._end_descriptor: int | None = None
        self._pending = bytearray()
        self._received = 0
        self._nudges = 0
        """Since it last said something."""
        self._reaped = False
        self.wait_status: int | None = None
        self._nudge = child.nudge
        # The socket itself tells of its end only: a round is many writes and one nudge.
        epoll.register(child.pipe, 0)
        epoll.register(child.nudge, select.EPOLLIN)

    def ask(self, request: bytes) -> None:
        """Asks for a round; one that has ended is noticed by ``receive``."""
        self.was_asked = True
        self._received = 0
        if self._socket is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError, BlockingIOError):
                os.write(self._socket, request)

    def receive(self, answer: Answer | None) -> bool:
        """Adds what it has said to ``answer`` (None: nothing was asked); False when it is gone.

        Errors: Malformed.
        """
        if self._socket is not None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._nudge)
                self._nudges += 1
            if self._nudges > NUDGES_LIMIT:
                raise Malformed("the NVML child wakes us for nothing")
        for _ in range(READS_AT_ONCE):
            if self._socket is None:
                return False
            try:
                chunk = os.read(self._socket, READ_BYTES)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                return False
            if not chunk:
                return False
            self._received += len(chunk)
            self._nudges = 0
            self._pending += chunk
            while (message := take_frame(self._pending)) is not None:
                if answer is None or answer.complete:
                    raise Malformed("the NVML child answers what nobody asked")
                answer.messages.append(message)
                answer.complete = message.done or answer.refused
            if self._received > ROUND_LIMIT_BYTES:
                raise Malformed("the NVML child's answer does not end")
        # There is more, and it was not we who emptied the socket: look again at once.
        os.eventfd_write(self._nudge, 1)
        return True

    def end(self, now: float) -> None:
        """Kills it, if it has not ended; ``is_gone`` and ``epoll`` tell when that is done."""
        if self.ending_since is not None:
            return
        self.ending_since = now
        self._hang_up()
        if not self._reap():
            with contextlib.suppress(OSError):
                self._end_descriptor = os.pidfd_open(self.pid)
                self._epoll.register(self._end_descriptor, select.EPOLLIN)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def is_gone(self) -> bool:
        """Whether it has ended; ``wait_status`` then says how, unless somebody else was told."""
        if not self._reap():
            return False
        self.forget()
        return True

    def forget(self) -> None:
        """Lets go of its descriptors, whether it has ended or not."""
        self._hang_up()
        if self._end_descriptor is not None:
            self._epoll.unregister(self._end_descriptor)
            os.close(self._end_descriptor)
            self._end_descriptor = None

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._epoll.unregister(self._socket)
            os.close(self._socket)
            self._epoll.unregister(self._nudge)
            os.close(self._nudge)
            self._socket = None
            self._pending.clear()

    def _reap(self) -> bool:
        if not self._reaped:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self._reaped = True
            else:
                if pid == self.pid:
                    self._reaped, self.wait_status = True, status
        return self._reaped
