"""One descriptor for many: readable when any of them is, or when a time has come."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import struct
import time

# struct itimerspec: it_interval, it_value as seconds and nanoseconds. timerfd_create(2).
_TIMER = struct.Struct("=4q")
_MONOTONIC, _FLAGS = 1, os.O_NONBLOCK | os.O_CLOEXEC
_libc = ctypes.CDLL(None, use_errno=True)


class Readiness:
    """``fileno`` can be polled with others; one descriptor at a time can be paused."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._timer: int = _libc.timerfd_create(_MONOTONIC, _FLAGS)
        if self._timer < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self._poll.register(self._timer, select.EPOLLIN)
        self._watched: set[int] = set()
        self._paused: int | None = None
        self._paused_until = 0.0

    def close(self) -> None:
        self._poll.close()
        os.close(self._timer)

    def fileno(self) -> int:
        return self._poll.fileno()

    def watch(self, descriptors: set[int]) -> None:
        """Watches these and no others; one that was closed is out already."""
        for old in self._watched - descriptors:
            with contextlib.suppress(OSError):
                self._poll.unregister(old)
        for wanted in descriptors:
            events = 0 if wanted == self._paused else select.EPOLLIN
            # A number that was watched may be another descriptor's by now.
            try:
                self._poll.modify(wanted, events)
            except FileNotFoundError:
                self._poll.register(wanted, events)
        self._watched = set(descriptors)

    def pause(self, descriptor: int, seconds: float) -> None:
        """Is not readable for what that descriptor has until so many seconds from now."""
        self._poll.modify(descriptor, 0)
        self._paused, self._paused_until = descriptor, time.monotonic() + seconds
        self._set(seconds)

    def resume(self) -> None:
        """Ends a pause whose time is over."""
        if self._paused is not None and time.monotonic() >= self._paused_until:
            self._poll.modify(self._paused, select.EPOLLIN)
            self._paused = None
            self._set(0)
        elif self._paused is not None:
            self._set(max(self._paused_until - time.monotonic(), 0.001))

    def _set(self, seconds: float) -> None:
        # Setting it makes it unreadable; at zero it stays so.
        whole, part = divmod(int(seconds * 1e9), 1_000_000_000)
        _libc.timerfd_settime(self._timer, 0, _TIMER.pack(0, 0, whole, part), None)
