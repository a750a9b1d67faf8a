"""The daemon's root-only socket: requests come in on a thread, the agent's own thread answers them.

One connection at a time, one request and one answer each, bounded in size and in time. The thread
touches nothing of the agent: it puts a request into a queue, wakes the loop and waits.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from gpuwarden import control
from gpuwarden.control import Answer, Request
from gpuwarden.errors import GpuwardenError, Unavailable
from gpuwarden.finding import Finding
from gpuwarden.probes.cgroup2 import GroupKey
from gpuwarden.watch import denial_findings
from gpuwarden.watch.asked_denials import AskedDenials

if TYPE_CHECKING:
    from gpuwarden.probes.loader import DeviceOpenProbe
    from gpuwarden.watch.agent import Agent

READ_SECONDS = 2.0
"""For a whole request: whoever is slower is not answered."""
WAITING_LIMIT = 8
GROUPS_LIMIT = 64
PER_TURN = 4
FORGET_SECONDS = 30.0
_PEER = struct.Struct("=iII")  # struct ucred of linux/socket.h
_GIVEN_UP, _TAKEN = "given up", "taken"


class _Asked:
    """A request on its way to the agent's thread and back."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._lock = threading.Lock()
        self._state = ""
        self._there = threading.Event()
        self._answer = Answer(done=False, error="no answer")

    def take(self) -> bool:
        """Whether it is still wanted; then nobody gives it up any more."""
        with self._lock:
            if self._state:
                return False
            self._state = _TAKEN
            return True

    def answer(self, answer: Answer) -> None:
        self._answer = answer
        self._there.set()

    def wait(self, seconds: float) -> Answer:
        if not self._there.wait(seconds):
            with self._lock:
                if not self._state:
                    self._state = _GIVEN_UP
                    return Answer(done=False, error=f"the daemon did not answer in {seconds:g} s")
            # It is being done at this moment.
            self._there.wait()
        return self._answer


class ControlSide:
    """Takes requests on a socket; ``turn`` answers them, in the thread that owns the denials."""

    def __init__(
        self,
        path: str,
        denials: AskedDenials,
        wake: Callable[[], None],
        *,
        answer_seconds: float = control.ANSWER_SECONDS / 2,
    ) -> None:
        self.path = path
        self.denials = denials
        self.trouble = ""
        """Why no request can come in."""
        self._wake = wake
        self._answer_seconds = answer_seconds
        self._waiting: queue.Queue[_Asked] = queue.Queue(WAITING_LIMIT)
        self._listening: socket.socket | None = None
        self._directory = -1
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._forget_at = time.monotonic() + FORGET_SECONDS

    # ---------------------------------------------------------------- life

    def start(self, probe: DeviceOpenProbe | None) -> None:
        """Puts remembered denials into force and listens. No errors; see ``trouble``."""
        self.denials.begin(probe)
        try:
            self._listen()
        except (OSError, GpuwardenError) as error:
            self.close()
            self.trouble = f"{self.path}: no requests are taken: {error}"
            return
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        directory, name = os.path.split(self.path)
        os.makedirs(directory, 0o700, exist_ok=True)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
        self._directory = os.open(directory, flags)
        status = os.fstat(self._directory)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise Unavailable("others may write in its directory")
        # A path of any length, in the directory that was just looked at.
        here = f"/proc/self/fd/{self._directory}/{name}"
        self._remove_stale(here)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listening = listening
        before = os.umask(0o177)
        try:
            listening.bind(here)
        finally:
            os.umask(before)
        os.chmod(here, 0o600)
        listening.listen(WAITING_LIMIT)
        listening.settimeout(1.0)

    def _remove_stale(self, here: str) -> None:
        try:
            kind = os.lstat(here).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(kind):
            raise Unavailable("something else is there")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
            other.settimeout(READ_SECONDS)
            try:
                other.connect(here)
            except ConnectionRefusedError:
                os.unlink(here)
                return
        raise Unavailable("another daemon listens there")

    def close(self) -> None:
        """Takes no more requests; denials end with the probe. Twice does nothing."""
        self._closing.set()
        bound, self._listening = self._listening, None
        if bound is not None:
            with contextlib.suppress(OSError):
                if bound.getsockname():
                    os.unlink(os.path.basename(self.path), dir_fd=self._directory)
            with contextlib.suppress(OSError):
                bound.shutdown(socket.SHUT_RDWR)
            bound.close()
        if self._thread is not None:
            self._thread.join(READ_SECONDS + 1.0)
            self._thread = None
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1

    # ---------------------------------------------------------------- the thread that listens

    def _serve(self) -> None:
        listening = self._listening
        while listening is not None and not self._closing.is_set():
            try:
                connection, _ = listening.accept()
            except TimeoutError:
                continue
            except OSError:
                # Out of descriptors, or closed: the first passes.
                if self._closing.wait(0.2):
                    return
                continue
            with connection, contextlib.suppress(OSError):
                answer = self._answered(connection)
                # What was not read would turn the answer into a reset.
                connection.settimeout(0)
                with contextlib.suppress(BlockingIOError):
                    connection.recv(control.MESSAGE_LIMIT_BYTES)
                connection.settimeout(READ_SECONDS)
                connection.sendall(msgspec.json.encode(answer))

    def _answered(self, connection: socket.socket) -> Answer:
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        _, uid, _ = _PEER.unpack(peer)
        try:
            data = _read(connection)
            if uid != 0:
                return Answer(done=False, error="only root may ask")
            request = msgspec.json.decode(data, type=Request)
        except (GpuwardenError, msgspec.MsgspecError, ValueError, RecursionError) as error:
            return Answer(done=False, error=f"no request: {error}")
        if len(request.groups) > GROUPS_LIMIT:
            return Answer(done=False, error=f"more than {GROUPS_LIMIT} control groups")
        asked = _Asked(request)
        try:
            self._waiting.put_nowait(asked)
        except queue.Full:
            return Answer(done=False, error="too many requests wait already")
        self._wake()
        return asked.wait(self._answer_seconds)

    # ---------------------------------------------------------------- the agent's thread

    def turn(self) -> None:
        """Answers what waits, a few at a time; never waits itself."""
        for _ in range(PER_TURN):
            try:
                asked = self._waiting.get_nowait()
            except queue.Empty:
                break
            if asked.take():
                asked.answer(self._do(asked.request))
        if not self._waiting.empty():
            self._wake()

    def _do(self, request: Request) -> Answer:
        try:
            if request.action == "deny":
                self.denials.deny(
                    request.groups,
                    name=request.name,
                    reason=request.reason,
                    since_ns=time.time_ns(),
                )
            elif request.action == "allow":
                kept = self.denials.allow(request.groups)
                if kept:
                    return Answer(done=False, error="; ".join(kept), denied=self.denials.denied())
        except (GpuwardenError, OSError) as error:
            return Answer(done=False, error=str(error))
        except Exception as error:  # noqa: BLE001
            # A request must not end the daemon.
            return Answer(done=False, error=f"{type(error).__name__}: {error}")
        return Answer(done=True, denied=self.denials.denied())

    def findings(self) -> list[Finding]:
        """What is denied on request, and what of it is not as asked; once a round."""
        now = time.monotonic()
        if now >= self._forget_at:
            self._forget_at = now + FORGET_SECONDS
            self.denials.forget_ended()
        found = list(denial_findings.of_requests(self.denials.denied()))
        if self.denials.trouble:
            found.append(denial_findings.trouble("denials on request", [self.denials.trouble]))
        return found


def _read(connection: socket.socket) -> bytes:
    """A request to the end of what the other side writes. Errors: Unavailable, OSError."""
    until = time.monotonic() + READ_SECONDS
    data = b""
    while True:
        left = until - time.monotonic()
        if left <= 0:
            raise Unavailable(f"it was not complete within {READ_SECONDS:g} s")
        connection.settimeout(left)
        try:
            chunk = connection.recv(16 << 10)
        except TimeoutError as error:
            raise Unavailable(f"it was not complete within {READ_SECONDS:g} s") from error
        if not chunk:
            return data
        data += chunk
        if len(data) > control.MESSAGE_LIMIT_BYTES:
            raise Unavailable(f"longer than {control.MESSAGE_LIMIT_BYTES} bytes")


def started(agent: Agent, stack: ExitStack) -> ControlSide:
    """The control side of an agent whose probe is loaded; ends with the stack."""
    options = agent.options

    def by_policy() -> list[GroupKey]:
        decisions = () if agent.denying is None else agent.denying.decisions()
        return [group for one in decisions if one.state != "would deny" for group in one.groups]

    denials = AskedDenials(options.state_directory, agent.node.boot_id, also=by_policy)
    side = ControlSide(control.socket_of(options.state_directory), denials, agent.wake)
    side.start(agent.choice.probe if agent.choice.can_deny else None)
    stack.callback(side.close)
    if side.trouble:
        agent.say(side.trouble)
    return side
