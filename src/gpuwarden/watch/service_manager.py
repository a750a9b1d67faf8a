"""What systemd is told of the daemon: that it sees, that it still turns, that it ends.

One datagram of ``NAME=value`` lines to the socket that ``NOTIFY_SOCKET`` names; the protocol is
simpler than any library for it. Source: sd_notify(3), sd_watchdog_enabled(3).
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping

STATUS_CHARACTERS = 200
BEATS = 3
"""Times in the watchdog's interval that the daemon says it turns: one may be late."""


class ServiceManager:
    """The notification socket of whoever started this process; silent where there is none."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """``environment`` defaults to this process's own, from which the words are taken out.

        A child must not speak for the daemon.
        """
        given = os.environ if environment is None else environment
        self._address = given.get("NOTIFY_SOCKET", "")
        self._beat_seconds = _beat_seconds(given)
        self._next_beat = 0.0
        if environment is None:
            for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
                os.environ.pop(name, None)

    @property
    def is_there(self) -> bool:
        return self._address[:1] in ("/", "@")

    def ready(self, status: str) -> None:
        """The daemon sees; ``status`` is a line for `systemctl status`."""
        self._tell(f"READY=1\nSTATUS={_line(status)}")

    def alive(self) -> None:
        """To be called each round: the watchdog restarts a daemon that does not say it in time."""
        now = time.monotonic()
        if self._beat_seconds is not None and now >= self._next_beat:
            self._next_beat = now + self._beat_seconds
            self._tell("WATCHDOG=1")

    def reloading(self) -> None:
        """A policy is read again; ``ready`` says that it was."""
        micros = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._tell(f"RELOADING=1\nMONOTONIC_USEC={micros}")

    def stopping(self) -> None:
        self._tell("STOPPING=1")

    def _tell(self, message: str) -> None:
        if not self.is_there:
            return
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        # Nobody to tell is no reason to end, and a full socket none to wait.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
            one.setblocking(False)
            one.sendto(message.encode("utf-8", "backslashreplace"), address)


def _beat_seconds(environment: Mapping[str, str]) -> float | None:
    """None without a watchdog, or with one that is for another process."""
    micros = environment.get("WATCHDOG_USEC", "")
    meant = environment.get("WATCHDOG_PID", "")
    if not micros.isdecimal() or int(micros) <= 0 or (meant and meant != str(os.getpid())):
        return None
    return int(micros) / 1e6 / BEATS


def _line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)[:STATUS_CHARACTERS]
