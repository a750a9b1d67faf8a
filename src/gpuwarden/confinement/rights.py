"""A forked child without rights: nobody, no capability, no descriptor but those it is given."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import struct
from collections.abc import Iterable, Mapping

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


def default_signals() -> None:
    """The parent's ways of ending on a signal are not the child's."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)


def unblock_signals() -> None:
    """A daemon may block signals and wake up for those it handles; its child does neither."""
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def keep_descriptors(wanted: Iterable[int]) -> list[int]:
    """Closes every descriptor but those, which get new numbers; the standard ones lead nowhere."""
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


def limit(limits: Mapping[int, int]) -> None:
    """Sets resource limits (``resource.RLIMIT_…`` → amount), never above those that hold."""
    for what, amount in limits.items():
        hard = resource.getrlimit(what)[1]
        lowest = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
        resource.setrlimit(what, (lowest, lowest))


def drop_rights(*, nobody: bool, capabilities: Iterable[int] = ()) -> None:
    """No new privileges, no capability but those that were held, and nobody if root.

    Errors: PermissionError when the capabilities stay.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    kept = sum(1 << capability for capability in capabilities)
    for number in range(CAP_LIMIT):
        if not kept >> number & 1:
            libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    if nobody and os.geteuid() == 0:
        # A container's root may lack these rights; its capabilities go all the same.
        with contextlib.suppress(PermissionError):
            os.setgroups([])
        with contextlib.suppress(PermissionError):
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
    header = ctypes.create_string_buffer(CAP_HEADER.pack(CAPABILITY_VERSION_3, 0))
    held = ctypes.create_string_buffer(CAP_DATA.size)
    libc.capget(header, held)
    low, permitted, _, high, permitted_high, _ = CAP_DATA.unpack(held.raw[: CAP_DATA.size])
    kept &= low | permitted | (high | permitted_high) << 32
    low, high = kept & 0xFFFFFFFF, kept >> 32
    data = ctypes.create_string_buffer(CAP_DATA.pack(low, low, 0, high, high, 0))
    if libc.capset(header, data) != 0:
        raise PermissionError("capset")


def end_with(parent: int) -> bool:
    """The child is killed when the thread that forked it ends; whether ``parent`` still is."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent
