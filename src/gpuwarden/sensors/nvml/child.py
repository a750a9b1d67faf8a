"""The child that opens the driver library: without rights, without output, with an end.

It is forked and not executed, so it starts at once; it is forked before a scan has read anything.
It leaves its rights before the library is opened, since opening it already runs its code.

A scan's child answers once and leaves; a lasting one is asked again and again over a socket. Each
ends with the thread that started it, so a lasting one must be started by one that stays.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from collections.abc import Callable
from typing import NoReturn

from msgspec import Struct

from gpuwarden.confinement.rights import (
    CAP_SYS_ADMIN,
    default_signals,
    drop_rights,
    end_with,
    keep_descriptors,
    limit,
    unblock_signals,
)
from gpuwarden.errors import Unavailable

OPEN_FILES_LIMIT = 1024
PROCESSES_LIMIT = 512
CPU_MARGIN_SECONDS = 2


class Child(Struct, frozen=True):
    """A running child: its pid, and the end of the pipe or socket that its answer comes from."""

    pid: int
    pipe: int
    nudge: int = -1
    """A lasting child's eventfd: it has said all, or can say no more until it is heard."""


def start_child(
    job: Callable[[Callable[[bytes], None]], None],
    *,
    unprivileged: bool,
    cpu_seconds: float,
) -> Child:
    """Forks a child that gives up its rights and runs ``job`` with a function that sends bytes.

    With ``unprivileged`` a root child becomes nobody; otherwise it keeps its uid and, of the
    capabilities, CAP_SYS_ADMIN alone (NVML asks for it to list other users' MIG processes).
    Errors: Unavailable when no process can be made.
    """
    try:
        reader, writer = os.pipe2(os.O_CLOEXEC)
    except OSError as error:
        raise Unavailable(f"no pipe for the NVML child: {error.strerror}") from error

    def answer(kept: list[int]) -> None:
        job(lambda data: send_all(kept[0], data))

    try:
        pid = _fork(answer, [writer], unprivileged=unprivileged, cpu_seconds=cpu_seconds)
    except Unavailable:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    return Child(pid, reader)


def start_lasting_child(job: Callable[[int, int], None], *, unprivileged: bool) -> Child:
    """Forks a child like ``start_child``'s that runs ``job`` with a stream socket and an eventfd.

    Its CPU time has no limit: whoever asks it must end it when it does not answer. Our end of the
    socket does not block. Errors: Unavailable when no process can be made.
    """
    # Imported here: a scan starts often and needs none.
    import socket

    with contextlib.ExitStack() as opened:
        try:
            ours, theirs = socket.socketpair()
            opened.enter_context(theirs)
            opened.enter_context(ours)
            nudge = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError as error:
            raise Unavailable(f"no socket for the NVML child: {error.strerror}") from error
        ours.setblocking(False)
        try:
            pid = _fork(
                lambda kept: job(*kept),
                [theirs.fileno(), nudge],
                unprivileged=unprivileged,
                cpu_seconds=None,
            )
        except Unavailable:
            os.close(nudge)
            raise
        return Child(pid, ours.detach(), nudge)


def _fork(
    job: Callable[[list[int]], None],
    kept: list[int],
    *,
    unprivileged: bool,
    cpu_seconds: float | None,
) -> int:
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        raise Unavailable(f"no process for the NVML child: {error.strerror}") from error
    if pid == 0:
        _run(job, kept, parent, unprivileged=unprivileged, cpu_seconds=cpu_seconds)
    return pid


def _run(
    job: Callable[[list[int]], None],
    kept: list[int],
    parent: int,
    *,
    unprivileged: bool,
    cpu_seconds: float | None,
) -> NoReturn:
    # Nothing may leave this function but _exit: no handler, finaliser or buffer of the parent.
    code = 1
    try:
        default_signals()
        # Read now, with our rights: their files may be out of nobody's reach later.
        from gpuwarden.sensors.nvml import device  # noqa: F401

        if cpu_seconds is None:
            import gpuwarden.sensors.nvml.rounds  # noqa: F401

            # A finaliser of the parent's would close a descriptor that is the library's here.
            gc.freeze()
            unblock_signals()
        kept = keep_descriptors(kept)
        _limit(cpu_seconds)
        drop_rights(nobody=unprivileged, capabilities=() if unprivileged else (CAP_SYS_ADMIN,))
        if end_with(parent):
            job(kept)
            code = 0
    except BaseException:  # noqa: BLE001, S110
        pass
    finally:
        os._exit(code)


def _limit(cpu_seconds: float | None) -> None:
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: PROCESSES_LIMIT,
        resource.RLIMIT_NOFILE: OPEN_FILES_LIMIT,
    }
    if cpu_seconds is not None:
        limits[resource.RLIMIT_CPU] = max(1, int(cpu_seconds)) + CPU_MARGIN_SECONDS
    limit(limits)


def send_all(writer: int, data: bytes) -> None:
    """Writes all of it, however long that takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(writer, view) :]
