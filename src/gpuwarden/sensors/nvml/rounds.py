"""The lasting child's life: it opens the library once and answers a round for each request."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Mapping

from gpuwarden.sensors.nvml import errors
from gpuwarden.sensors.nvml.clients import Followed
from gpuwarden.sensors.nvml.cursor import SampleCursor
from gpuwarden.sensors.nvml.device import GPU_LIMIT, Reading, begin, greet
from gpuwarden.sensors.nvml.driver import Driver
from gpuwarden.sensors.nvml.message import Message, encode_frame

ROUND = b"r"
ENUMERATE = b"e"
"""A round in which the driver first looks for its GPUs anew."""
REFRESH_ROUNDS = 60
"""After so many everything is read again that is kept between rounds."""


class Channel:
    """Frames to the parent, which is woken once a round and not for each of them."""

    def __init__(self, connection: int, nudge: int) -> None:
        self._socket = socket.socket(fileno=connection)
        self._nudge = nudge

    def request(self) -> bytes:
        """The next request, empty when there will be no more."""
        return self._socket.recv(1)

    def send(self, message: Message) -> None:
        """Puts a message where the parent finds it when it looks."""
        view = memoryview(encode_frame(message))
        while view:
            try:
                view = view[self._socket.send(view, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                # No room until it is heard.
                self.wake()
                view = view[self._socket.send(view) :]

    def wake(self) -> None:
        """Has the parent look."""
        os.eventfd_write(self._nudge, 1)


def answer_rounds(path: str, channel: Channel, given_until_us: Mapping[str, int]) -> None:
    """Answers until the other end of ``channel`` closes, or the driver cannot be used any more.

    ``given_until_us`` tells per GPU which samples the child before this one gave. A round is a
    greeting, a message for each GPU, and the end; a failure is a greeting that says so.
    """
    # Nothing here refers to itself; looking for what does costs a seventh of a round.
    gc.disable()
    try:
        _answer(path, channel, given_until_us)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a strange library brings about
        text = f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace").decode()
        channel.send(Message(failed_load=text[:300]))
        channel.wake()


def _answer(path: str, channel: Channel, given_until_us: Mapping[str, int]) -> None:
    driver, greeting = begin(path)
    request = channel.request()
    if driver is None:
        channel.send(greeting)
        channel.wake()
        return
    session = _Session(driver, greeting, given_until_us)
    while request:
        if request == ENUMERATE:
            session.enumerate_next = True
        if not session.answer(channel):
            return
        request = channel.request()
    driver.call("nvmlShutdown")


class _Session:
    def __init__(
        self, driver: Driver, greeting: Message, given_until_us: Mapping[str, int]
    ) -> None:
        self.driver = driver
        self.greeting = greeting
        self.followed = Followed(
            cursors={gpu: SampleCursor(until) for gpu, until in given_until_us.items()}
        )
        self.enumerate_next = False
        self._round = 0
        self._troubled: frozenset[int] = frozenset()
        self._pause = 1
        """Rounds between two enumerations while a GPU stays in trouble."""
        self._due = 0

    def answer(self, channel: Channel) -> bool:
        """Sends one round; False when the driver cannot be used any more."""
        fresh = self._round % REFRESH_ROUNDS == 0
        self._round += 1
        count, _ = self.driver.number(("nvmlDeviceGetCount_v2", "nvmlDeviceGetCount"))
        if self.enumerate_next or count != self.greeting.gpu_count:
            self.enumerate_next = False
            fresh = True
            if not self._enumerate():
                channel.send(self.greeting)
                channel.wake()
                return False
        if fresh:
            gc.collect()
            self.followed.identities.clear()
        self.followed.with_accounting = fresh
        channel.send(self.greeting)
        troubled = set()
        for index in range(min(self.greeting.gpu_count or 0, GPU_LIMIT)):
            message = Reading(self.driver, index, self.followed).message()
            if any(gpu.error is not None for gpu in message.gpus):
                troubled.add(index)
            channel.send(message)
        channel.send(Message(done=True))
        channel.wake()
        self._plan(frozenset(troubled))
        return True

    def _plan(self, troubled: frozenset[int]) -> None:
        """A GPU in trouble has its driver look for it anew: at once, and ever more rarely."""
        if not troubled <= self._troubled:
            self._pause, self._due = 1, self._round
        self._troubled = troubled
        if troubled and self._round >= self._due:
            self.enumerate_next = True
            self._due = self._round + self._pause
            self._pause = min(2 * self._pause, REFRESH_ROUNDS)

    def _enumerate(self) -> bool:
        self.driver.call("nvmlShutdown")
        code = self.driver.first(("nvmlInit_v2", "nvmlInit"))
        if code != errors.SUCCESS:
            help_ = code in errors.MAYBE_PERMISSION_CODES
            self.greeting = Message(failed_code=code, privileges_would_help=help_)
        else:
            self.greeting = greet(self.driver)
        return self.greeting.failed_code is None
