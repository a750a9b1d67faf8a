"""A short job in a child of its own, with a deadline: what can hang, hangs there.

Reading a process's memory waits for whoever serves its pages (a file server, a page-fault handler
of its own); opening a file waits for its file system. Such a child is killed and left behind.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn

from gpuwarden.confinement.rights import (
    default_signals,
    end_with,
    keep_descriptors,
    unblock_signals,
)
from gpuwarden.errors import GpuwardenError, TimedOut, Unavailable

ANSWER_LIMIT_BYTES = 4096
HANGING_LIMIT = 8
"""Children that do not even die; beyond, no errand is begun."""
_DONE, _FAILED = b"+", b"-"

_killed: list[int] = []
Job = Callable[[Sequence[int]], bytes]


def run(job: Job, descriptors: Sequence[int], *, deadline_seconds: float) -> bytes:
    """What ``job`` answers, given those descriptors under new numbers; the child has no others.

    Errors: TimedOut; Unavailable when it failed (its own words) or no child can be had.
    """
    until = time.monotonic() + deadline_seconds
    _reap()
    if len(_killed) >= HANGING_LIMIT:
        raise Unavailable(f"{len(_killed)} earlier attempts hang in the kernel")
    answers, told = os.pipe2(os.O_CLOEXEC)
    try:
        with warnings.catch_warnings():
            # The child uses no lock and no thread of its parent's.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
    except OSError as error:
        os.close(answers)
        os.close(told)
        raise Unavailable(f"no process for it: {error.strerror}") from error
    if pid == 0:
        _serve(job, [told, *descriptors], os.getppid())
    os.close(told)
    try:
        answer = _received(answers, until)
    finally:
        os.close(answers)
        _end(pid)
    if answer is None:
        raise TimedOut(f"it did not end in {deadline_seconds:g} s")
    if answer[:1] == _DONE:
        return answer[1:]
    words = answer[1:].decode("utf-8", "backslashreplace")
    raise Unavailable(words or "the child that did it has ended")


def _received(answers: int, until: float) -> bytes | None:
    """All that is said until the other end is closed; None if that is too late."""
    poll = select.poll()
    poll.register(answers, select.POLLIN)
    said = b""
    while len(said) <= ANSWER_LIMIT_BYTES:
        left = until - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            return None
        chunk = os.read(answers, ANSWER_LIMIT_BYTES)
        if not chunk:
            break
        said += chunk
    return said


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _killed.append(pid)
    for _ in range(20):
        _reap()
        if pid not in _killed:
            return
        time.sleep(0.0005)


def _reap() -> None:
    for pid in list(_killed):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                continue
        _killed.remove(pid)


def _serve(job: Job, descriptors: Sequence[int], parent: int) -> NoReturn:
    # Nothing may leave but _exit: no handler, finaliser or buffer of the parent's.
    try:
        gc.disable()
        default_signals()
        unblock_signals()
        told, *kept = keep_descriptors(descriptors)
        if end_with(parent):
            os.write(told, _answered(job, kept)[:ANSWER_LIMIT_BYTES])
    except BaseException:  # noqa: BLE001, S110 - the parent hears of it by the pipe's end
        pass
    finally:
        os._exit(0)


def _answered(job: Job, kept: Sequence[int]) -> bytes:
    try:
        return _DONE + job(kept)
    except GpuwardenError as error:
        words = str(error)
    except OSError as error:
        words = error.strerror or str(error)
    except Exception as error:  # noqa: BLE001 - a defect is told like any other failure
        words = f"{type(error).__name__}: {error}"
    return _FAILED + words.encode("utf-8", "backslashreplace")
