"""Work done in forked children: over several cores, and with a deadline that a hang cannot break.

A read of /proc costs processor time in the kernel, which threads of one interpreter would queue
for; a name service or a dead file server may never answer. Both go into children that hand back
bytes and exit.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from gpuwarden.errors import TimedOut, Unavailable

Item = TypeVar("Item")

WORKERS_LIMIT = 4
ANSWER_LIMIT_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20


class _Child:
    """One forked child and the pipe that its answer comes through."""

    def __init__(self, work: Callable[[], bytes]) -> None:
        self.reader, writer = os.pipe()
        try:
            self.pid = os.fork()
        except OSError as error:
            os.close(self.reader)
            os.close(writer)
            raise Unavailable(f"no child process could be started: {error.strerror}") from error
        if self.pid == 0:
            _work_and_exit(work, writer)
        os.close(writer)

    def answer(self, deadline: float) -> bytes:
        """All that the child wrote; TimedOut at ``deadline`` (monotonic), Unavailable on failure.

        The child is gone afterwards in every case.
        """
        chunks: list[bytes] = []
        size = 0
        try:
            while True:
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([self.reader], [], [], left)[0]:
                    raise TimedOut("no answer before the deadline")
                chunk = os.read(self.reader, _CHUNK_BYTES)
                if not chunk:
                    break
                chunks.append(chunk)
                size += len(chunk)
                if size > ANSWER_LIMIT_BYTES:
                    raise Unavailable("the child's answer is too long")
        except BaseException:
            self._end()
            raise
        os.close(self.reader)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if code != 0:
            raise Unavailable(f"the child ended with {code}")
        return b"".join(chunks)

    def _end(self) -> None:
        os.close(self.reader)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        # One that hangs in the kernel cannot be waited for; init will reap it when we are gone.
        for _ in range(20):
            if os.waitpid(self.pid, os.WNOHANG)[0]:
                return
            time.sleep(0.001)


def _work_and_exit(work: Callable[[], bytes], writer: int) -> None:
    code = 1
    try:
        view = memoryview(work())
        while view:
            view = view[os.write(writer, view) :]
        code = 0
    except BaseException:  # noqa: BLE001  a child must end here, whatever happens
        code = 1
    finally:
        os._exit(code)


def in_child(work: Callable[[], bytes], deadline_seconds: float) -> bytes:
    """What ``work`` returns, done in a forked child. Errors: TimedOut; Unavailable if it failed."""
    return _Child(work).answer(time.monotonic() + deadline_seconds)


def workers_for(count: int, *, least_each: int) -> int:
    """How many processes are worth using for ``count`` items: 1 means no child at all."""
    if threading.active_count() > 1:
        return 1
    cores = len(os.sched_getaffinity(0))
    return max(1, min(WORKERS_LIMIT, cores, count // least_each))


def fan_out(
    items: Sequence[Item],
    work: Callable[[Sequence[Item]], bytes],
    *,
    workers: int,
    deadline_seconds: float,
) -> list[tuple[Sequence[Item], bytes | Exception]]:
    """``work`` over ``items`` split in ``workers`` shares, the last of them done right here.

    One (share, answer) a share. A child that fails or hangs gives its error as the answer.
    """
    shares = [items[at::workers] for at in range(workers)]
    deadline = time.monotonic() + deadline_seconds
    done: list[tuple[Sequence[Item], bytes | Exception]] = []
    children: list[tuple[Sequence[Item], _Child]] = []
    here = [shares[-1]]
    for share in shares[:-1]:
        try:
            children.append((share, _Child(lambda share=share: work(share))))  # type: ignore[misc]
        except Unavailable:
            here.append(share)
    try:
        done.extend((share, work(share)) for share in here)
    finally:
        for share, child in children:
            try:
                done.append((share, child.answer(deadline)))
            except Unavailable as error:
                done.append((share, error))
    return done
