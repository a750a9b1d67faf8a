"""The child that opens the driver library: without rights, without output, with an end.

It is forked and not executed, so it starts at once; it is forked before a scan has read anything.
It leaves its rights before the library is opened, since opening it already runs its code.

A scan's child answers once and leaves; a lasting one is asked again and again over a socket. Each
ends with the thread that started it, so a lasting one must be started by one that stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import resource
import signal
import struct
from collections.abc import Callable
from typing import NoReturn

from msgspec import Struct

from gpuwarden.errors import Unavailable

NOBODY = 65534

# linux/prctl.h, linux/capability.h
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
CAP_SYS_ADMIN = 21
CAP_LIMIT = 64
CAPABILITY_VERSION_3 = 0x20080522
# struct __user_cap_header_struct: version, pid; two __user_cap_data_struct: effective, permitted,
# inheritable, for capabilities 0 to 31 and 32 to 63.
CAP_HEADER = struct.Struct("=Ii")
CAP_DATA = struct.Struct("=6I")

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
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        # Read now, with our rights: their files may be out of nobody's reach later.
        from gpuwarden.sensors.nvml import device  # noqa: F401

        if cpu_seconds is None:
            import gpuwarden.sensors.nvml.rounds  # noqa: F401

            # A finaliser of the parent's would close a descriptor that is the library's here.
            gc.freeze()
            _unblock_signals()
        kept = _only_descriptors(kept)
        _limit(cpu_seconds)
        _drop(unprivileged=unprivileged)
        _libc().prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == parent:
            job(kept)
            code = 0
    except BaseException:  # noqa: BLE001, S110
        pass
    finally:
        os._exit(code)


def _unblock_signals() -> None:
    """A daemon may block signals and wake up for those it handles; its child does neither."""
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _only_descriptors(wanted: list[int]) -> list[int]:
    kept = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3) for descriptor in wanted]
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            # The listing's own descriptor is among them and already closed.
            with contextlib.suppress(OSError):
                os.close(int(name))
    return kept


def _limit(cpu_seconds: float | None) -> None:
    limits = [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, PROCESSES_LIMIT),
        (resource.RLIMIT_NOFILE, OPEN_FILES_LIMIT),
    ]
    if cpu_seconds is not None:
        limits.append((resource.RLIMIT_CPU, max(1, int(cpu_seconds)) + CPU_MARGIN_SECONDS))
    for what, amount in limits:
        hard = resource.getrlimit(what)[1]
        amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)  # noqa: PLW2901
        resource.setrlimit(what, (amount, amount))


def _drop(*, unprivileged: bool) -> None:
    libc = _libc()
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    kept = 0 if unprivileged else 1 << CAP_SYS_ADMIN
    for capability in range(CAP_LIMIT):
        if not kept >> capability & 1:
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    if unprivileged and os.geteuid() == 0:
        # A container's root may lack these rights; its capabilities go all the same.
        with contextlib.suppress(PermissionError):
            os.setgroups([])
        with contextlib.suppress(PermissionError):
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
    header = ctypes.create_string_buffer(CAP_HEADER.pack(CAPABILITY_VERSION_3, 0))
    held = ctypes.create_string_buffer(CAP_DATA.size)
    libc.capget(header, held)
    effective, permitted = CAP_DATA.unpack(held.raw[: CAP_DATA.size])[:2]
    kept &= permitted | effective
    data = ctypes.create_string_buffer(CAP_DATA.pack(kept, kept, 0, 0, 0, 0))
    if libc.capset(header, data) != 0:
        raise PermissionError("capset")


def send_all(writer: int, data: bytes) -> None:
    """Writes all of it, however long that takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(writer, view) :]


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
