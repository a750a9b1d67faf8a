"""Children that answer requests: work that can hang, or takes long, is done apart from the agent.

A worker is forked and serves one request at a time over a socket: a length, then that many bytes,
both ways. One that misses its deadline or dies is ended and forked anew at the next request.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import struct
import time
import warnings
from collections.abc import Callable
from typing import NoReturn

from gpuwarden.errors import GpuwardenError, TimedOut, Unavailable

HEAD = struct.Struct("=IB")
"""Length of the body, and whether it is an answer (0) or the text of an error (1)."""
MESSAGE_LIMIT_BYTES = 64 << 20
CHUNK_BYTES = 1 << 18
PR_SET_PDEATHSIG = 1
FAILURES_BEFORE_WAITING = 3
WAIT_SECONDS = 10.0


class Worker:
    """One child with one job; ``request`` and ``take`` never wait."""

    def __init__(
        self, name: str, job: Callable[[bytes], bytes], *, deadline_seconds: float
    ) -> None:
        """``job`` runs in the child; what it raises becomes the error of that request.

        Another ``job`` is served from the next start on.
        """
        self.name = name
        self.job = job
        self._deadline_seconds = deadline_seconds
        self._socket: socket.socket | None = None
        self._pending = bytearray()
        self._unsent = memoryview(b"")
        self._asked_at: float | None = None
        self._failures = 0
        self._wait_until = 0.0
        self._killed: list[int] = []
        self.pid: int | None = None
        self.starts = 0

    @property
    def busy(self) -> bool:
        """Whether a request is under way."""
        return self._asked_at is not None

    def fileno(self) -> int | None:
        """A descriptor that is readable when there is an answer; None while there is no child."""
        return None if self._socket is None else self._socket.fileno()

    def start(self) -> None:
        """Forks the child if there is none. Errors: Unavailable."""
        if self._socket is not None:
            return
        self._reap()
        ours, theirs = socket.socketpair()
        try:
            with warnings.catch_warnings():
                # The child uses no lock and no thread of ours; it serves and exits.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError as error:
            ours.close()
            theirs.close()
            raise Unavailable(f"no process for the {self.name}: {error.strerror}") from error
        if pid == 0:
            _serve(theirs.fileno(), self.job, os.getppid())
        theirs.close()
        ours.setblocking(False)
        self._socket, self.pid = ours, pid
        self.starts += 1

    def request(self, body: bytes) -> bool:
        """Sends a request; False while one is under way or the child keeps failing.

        Errors: Unavailable when no child can be started.
        """
        if self.busy or time.monotonic() < self._wait_until:
            return False
        self.start()
        self._asked_at = time.monotonic()
        self._unsent = memoryview(HEAD.pack(len(body), 0) + body)
        self._send()
        return True

    def _send(self) -> None:
        while self._unsent and self._socket is not None:
            try:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
            except BlockingIOError:
                return
            except OSError:
                return  # the answer's end tells what happened

    def take(self) -> bytes | None:
        """The answer, once it is whole; None before. The request is over in every other case.

        Errors: TimedOut; Unavailable when the child died or the job failed.
        """
        if self._asked_at is None or self._socket is None:
            return None
        self._send()
        ended = False
        while len(self._pending) <= HEAD.size + MESSAGE_LIMIT_BYTES:
            try:
                chunk = self._socket.recv(CHUNK_BYTES)
            except BlockingIOError:
                break
            except OSError:
                ended = True
                break
            if not chunk:
                ended = True
                break
            self._pending += chunk
        if self._is_too_long():
            self._give_up()
            raise Unavailable(f"the {self.name} answered with more than may be taken")
        whole = self._whole()
        if whole is not None:
            self._asked_at = None
            self._failures = 0
            failed, body = whole
            if failed:
                raise Unavailable(body.decode("utf-8", "backslashreplace"))
            return body
        if ended:
            self._give_up()
            raise Unavailable(f"the {self.name} ended before it answered")
        if time.monotonic() - self._asked_at > self._deadline_seconds:
            self._give_up()
            raise TimedOut(f"the {self.name} did not answer in {self._deadline_seconds:g} s")
        return None

    def _is_too_long(self) -> bool:
        if len(self._pending) < HEAD.size:
            return False
        length: int = HEAD.unpack_from(self._pending)[0]
        # What follows an answer belongs to none: such a child is out of step.
        return length > MESSAGE_LIMIT_BYTES or len(self._pending) > HEAD.size + length

    def _whole(self) -> tuple[bool, bytes] | None:
        if len(self._pending) < HEAD.size:
            return None
        length, failed = HEAD.unpack_from(self._pending)
        if len(self._pending) < HEAD.size + length:
            return None
        body = bytes(self._pending[HEAD.size : HEAD.size + length])
        del self._pending[: HEAD.size + length]
        return bool(failed), body

    def _give_up(self) -> None:
        self.stop()
        self._failures += 1
        if self._failures >= FAILURES_BEFORE_WAITING:
            self._wait_until = time.monotonic() + WAIT_SECONDS

    def seconds_left(self) -> float | None:
        """Until the deadline of the request under way."""
        if self._asked_at is None:
            return None
        return max(self._asked_at + self._deadline_seconds - time.monotonic(), 0.0)

    def stop(self) -> None:
        """Ends the child; the next request starts another."""
        self._asked_at = None
        self._pending.clear()
        self._unsent = memoryview(b"")
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._killed.append(self.pid)
            self.pid = None
        for _ in range(50):
            self._reap()
            if not self._killed:
                return
            time.sleep(0.001)

    def _reap(self) -> None:
        """Waits for no child; one that hangs in the kernel stays until a later call."""
        for pid in list(self._killed):
            try:
                ended = os.waitpid(pid, os.WNOHANG)[0] != 0
            except ChildProcessError:
                ended = True
            if ended:
                self._killed.remove(pid)


def _serve(descriptor: int, job: Callable[[bytes], bytes], parent: int) -> NoReturn:
    # Nothing may leave this function but _exit: no handler, finaliser or buffer of the parent.
    try:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        gc.enable()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        own = os.dup2(descriptor, 3) if descriptor != 3 else 3
        os.closerange(4, 1 << 16)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        if null > 3:
            os.close(null)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == parent or parent == 0:
            with socket.socket(fileno=own) as connection:
                while True:
                    head = _received(connection, HEAD.size)
                    body = _received(connection, HEAD.unpack(head)[0])
                    connection.sendall(_answered(job, body))
    except BaseException:  # noqa: BLE001, S110 - the parent is gone, or the child is broken
        pass
    finally:
        os._exit(0)


def _answered(job: Callable[[bytes], bytes], body: bytes) -> bytes:
    try:
        answer = job(body)
        return HEAD.pack(len(answer), 0) + answer
    except GpuwardenError as error:
        text = str(error)
    except Exception as error:  # noqa: BLE001 - a defect must not end the worker
        text = f"{type(error).__name__}: {error}"
    told = text.encode("utf-8", "backslashreplace")[:4096]
    return HEAD.pack(len(told), 1) + told


def _received(connection: socket.socket, length: int) -> bytes:
    chunks = bytearray()
    while len(chunks) < length:
        chunk = connection.recv(min(length - len(chunks), CHUNK_BYTES))
        if not chunk:
            raise EOFError
        chunks += chunk
    return bytes(chunks)
