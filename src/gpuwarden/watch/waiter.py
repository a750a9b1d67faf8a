"""Waits for whatever comes first: descriptors that come and go, other threads, signals, time."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
from collections.abc import Mapping
from contextlib import ExitStack


class Waiter:
    """One selector, a socket that other threads write to, and the signals of a daemon."""

    def __init__(self, stack: ExitStack) -> None:
        self.stopping = False
        """SIGTERM or SIGINT came."""
        self.reload_wanted = False
        """SIGHUP came; whoever acts on it takes it back."""
        self._ours, self._theirs = socket.socketpair()
        for one in (self._ours, self._theirs):
            one.setblocking(False)
            stack.callback(one.close)
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._selector.register(self._ours, selectors.EVENT_READ)
        self._registered: dict[str, int] = {}

    def attend_signals(self, stack: ExitStack) -> None:
        """From now until the stack ends; before, they do what they did."""
        before = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        stack.callback(signal.set_wakeup_fd, before)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            stack.callback(signal.signal, number, signal.signal(number, self._came))

    def _came(self, number: int, frame: object) -> None:
        if number == signal.SIGHUP:
            self.reload_wanted = True
        else:
            self.stopping = True

    def wake(self) -> None:
        """Ends the wait; from any thread."""
        with contextlib.suppress(OSError):
            self._theirs.send(b"w")

    def wait(self, descriptors: Mapping[str, int | None], seconds: float) -> None:
        """Until one of the descriptors is readable, or it is woken, or the time is over."""
        self._register(descriptors)
        self._selector.select(max(seconds, 0.0))
        with contextlib.suppress(BlockingIOError):
            self._ours.recv(4096)

    def _register(self, descriptors: Mapping[str, int | None]) -> None:
        for name, descriptor in descriptors.items():
            known = self._registered.get(name)
            if known == descriptor:
                continue
            if known is not None:
                self._unregister(known)
                del self._registered[name]
            if descriptor is not None:
                # The number may have been another child's a moment ago.
                self._unregister(descriptor)
                self._selector.register(descriptor, selectors.EVENT_READ)
                self._registered[name] = descriptor

    def _unregister(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.unregister(descriptor)
