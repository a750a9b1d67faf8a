"""Files that a server holds, read by a child: one that never answers costs seconds, no more.

The server of a FUSE mount can be the very process that is looked at. A child that hangs in the
kernel is ended and left behind; it ends once the server answers or is gone.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Generator
from contextlib import suppress
from typing import NoReturn

from gpuwarden.errors import TimedOut, Unavailable

STALL_SECONDS = 3.0
CHUNK_BYTES = 1 << 20
REAP_SECONDS = 0.5


def pieces(path: str, stall_seconds: float = STALL_SECONDS) -> Generator[bytes, None, None]:
    """What is in a regular file, up to its end, whatever size it is said to have.

    ``path`` leads to an open handle of ours. Errors: TimedOut after ``stall_seconds`` without a
    byte; Unavailable.
    """
    ours, theirs = os.pipe()
    try:
        child = os.fork()
    except OSError as error:
        os.close(ours)
        os.close(theirs)
        raise Unavailable(f"no process to read it in: {error.strerror}") from error
    if child == 0:
        _serve(path, theirs)
    os.close(theirs)
    try:
        while True:
            ready, _, _ = select.select([ours], [], [], stall_seconds)
            if not ready:
                raise TimedOut(f"its server did not answer within {stall_seconds:g} s")
            piece = os.read(ours, CHUNK_BYTES)
            if not piece:
                break
            yield piece
        if trouble := _ended(child, 2 * REAP_SECONDS):
            raise Unavailable(f"its server does not give it: {trouble}")
    finally:
        os.close(ours)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _ended(child, REAP_SECONDS)


def _serve(path: str, pipe: int) -> NoReturn:
    """The child: copies, and says in its status what went wrong. Never returns."""
    status = 1
    try:
        # Who reads may stop at any time.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY)
        while piece := memoryview(os.read(file, CHUNK_BYTES)):
            while piece:
                piece = piece[os.write(pipe, piece) :]
        status = 0
    except OSError as error:
        status = min(error.errno or 1, 255)
    finally:
        os._exit(status)


def _ended(child: int, seconds: float) -> str:
    """Takes the child's end, if it comes; what it says went wrong."""
    until = time.monotonic() + seconds
    while True:
        try:
            pid, status = os.waitpid(child, os.WNOHANG)
        except ChildProcessError:
            return ""
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return os.strerror(code) if code > 0 else ""
        if time.monotonic() > until:
            return ""
        time.sleep(0.005)
