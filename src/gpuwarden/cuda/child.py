"""The tracer as a child: started, listened to, started anew when it ends by itself."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import time
from typing import NoReturn

from gpuwarden.confinement.rights import (
    default_signals,
    end_with,
    keep_descriptors,
    unblock_signals,
)
from gpuwarden.cuda.channel import Channel
from gpuwarden.cuda.messages import Holders, Look, Message, Request, TracerFailed
from gpuwarden.cuda.options import TracerOptions
from gpuwarden.errors import Malformed
from gpuwarden.policy import Policy

RESTART_SECONDS = 1.0
RESTART_LIMIT_SECONDS = 60.0
LASTING_SECONDS = 60.0
"""One that ran so long is no longer one that keeps failing."""
END_SECONDS = 5.0
PRIORITY = -10


class TracerChild:
    """One tracer at a time; nothing here waits but ``stop``."""

    def __init__(self, options: TracerOptions, policy: Policy) -> None:
        self._options = options
        self.policy = policy
        """Of the next start."""
        self._channel: Channel[Message] | None = None
        self._holders: tuple[tuple[int, int], ...] = ()
        self._started_at = 0.0
        self._restart_at = 0.0
        self._pause = RESTART_SECONDS
        self.pid: int | None = None
        self.starts = 0
        self.error = ""
        """Why there is none now."""

    def start(self) -> None:
        """Forks it, if there is none; a fork that fails is tried again later."""
        if self._channel is not None:
            return
        ours, theirs = socket.socketpair()
        try:
            pid = os.fork()
        except OSError as error:
            ours.close()
            theirs.close()
            self._failed(f"no process for it: {error.strerror}")
            return
        if pid == 0:
            _serve(theirs, self._options, self.policy, os.getppid())
        theirs.close()
        self._channel = Channel(ours, Message)
        self.pid = pid
        self.starts += 1
        self.error = ""
        self._started_at = time.monotonic()
        if self._holders:
            self._channel.send(Holders(processes=self._holders))

    def fileno(self) -> int | None:
        """Readable when it has said something; None while there is none."""
        return None if self._channel is None else self._channel.fileno()

    def take(self) -> list[Message]:
        """What it has said; starts it anew when its time has come."""
        channel = self._channel
        if channel is None:
            if self.starts and time.monotonic() >= self._restart_at:
                self.start()
            return []
        try:
            found = channel.receive()
        except Malformed as error:
            self._end(f"what it says is not to be believed: {error}")
            return []
        channel.flush()
        said = [one.reason for one in found if isinstance(one, TracerFailed)]
        if channel.closed or said:
            self._end(said[-1] if said else "it has ended")
        return found

    def look(self, pids: tuple[int, ...]) -> None:
        """These have just opened an accelerator."""
        if self._channel is not None and pids:
            self._channel.send(Look(pids=pids))

    def holders(self, processes: tuple[tuple[int, int], ...]) -> None:
        """Who holds an accelerator's descriptors now: pid and start in ticks."""
        if processes != self._holders:
            self._holders = processes
            if self._channel is not None:
                self._channel.send(Holders(processes=processes))

    def restart(self, policy: Policy) -> None:
        """Another policy: what was attached is let go and attached to anew."""
        self.policy = policy
        self.stop()
        self.start()

    def stop(self) -> None:
        """Ends it: at the end of its control it detaches, which is waited for."""
        channel, pid = self._channel, self.pid
        self._channel = self.pid = None
        if channel is not None:
            channel.close()
        if pid is None:
            return
        until = time.monotonic() + END_SECONDS
        while not _reaped(pid):
            if time.monotonic() >= until:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                until = float("inf")
            time.sleep(0.01)

    def _end(self, why: str) -> None:
        channel, pid = self._channel, self.pid
        self._channel = self.pid = None
        if channel is not None:
            channel.close()
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self._failed(why)

    def _failed(self, why: str) -> None:
        now = time.monotonic()
        if now - self._started_at >= LASTING_SECONDS:
            self._pause = RESTART_SECONDS
        self.error = why
        self.starts = max(self.starts, 1)
        self._restart_at = now + self._pause
        self._pause = min(self._pause * 2, RESTART_LIMIT_SECONDS)


def _reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


def _serve(end: socket.socket, options: TracerOptions, policy: Policy, parent: int) -> NoReturn:
    # Nothing may leave but _exit: no handler, finaliser or buffer of the parent's.
    code = 1
    try:
        default_signals()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        unblock_signals()
        gc.freeze()
        gc.enable()
        with contextlib.suppress(OSError):
            # It empties a ring that others fill: on a busy machine its turn would come too late.
            os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
            # What is parsed in its children can wait.
            os.register_at_fork(after_in_child=_be_ordinary)
        [kept] = keep_descriptors([end.fileno()])
        if end_with(parent):
            channel: Channel[Request] = Channel(socket.socket(fileno=kept), Request)
            _trace(channel, options, policy)
            code = 0
    except BaseException:  # noqa: BLE001, S110 - the parent is gone, or hears of it by its end
        pass
    finally:
        os._exit(code)


def _be_ordinary() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def _trace(channel: Channel[Request], options: TracerOptions, policy: Policy) -> None:
    def receive() -> list[Request] | None:
        requests = channel.receive()
        channel.flush()
        return None if channel.closed else requests

    # Imported here: it loads much that the agent itself has no use for.
    from gpuwarden.cuda.tracer import Tracer

    try:
        Tracer(options, policy, channel.send).run(receive, channel.fileno())
    except Exception as error:
        import traceback

        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.name}, line {place.lineno}"
        channel.send(TracerFailed(reason=f"{type(error).__name__}: {error} ({where})"[:500]))
        raise
