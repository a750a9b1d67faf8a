"""The system calls that a parser needs, by number; the kernel refuses all others (seccomp(2)).

What is left: read, write and map descriptors that are open already, memory that is never
executable, threads, time, and an end. Nothing opens a path, makes a socket or a process, or
signals one. A refused call gives EPERM, so that a library that tries one more way goes on.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from gpuwarden.confinement.rights import PR_SET_NO_NEW_PRIVS

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
# linux/audit.h: AUDIT_ARCH_X86_64, AUDIT_ARCH_AARCH64.
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
MACHINES = tuple(AUDIT)

# Name → number on x86_64 (asm/unistd_64.h) and on aarch64 (asm-generic/unistd.h).
ALLOWED = {
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "preadv": (295, 69),
    "preadv2": (327, 286),
    "lseek": (8, 62),
    "close": (3, 57),
    "fstat": (5, 80),
    "dup": (32, 23),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "brk": (12, 214),
    "recvmsg": (47, 212),
    "sendmsg": (46, 211),
    "recvfrom": (45, 207),
    "sendto": (44, 206),
    "poll": (7, None),
    "ppoll": (271, 73),
    "futex": (202, 98),
    "set_robust_list": (273, 99),
    "rseq": (334, 293),
    "membarrier": (324, 283),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101),
    "gettimeofday": (96, 169),
    "getrusage": (98, 165),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getppid": (110, 173),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getrandom": (318, 278),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    "exit": (60, 93),
    "exit_group": (231, 94),
}
MAPPING = {"mmap": (9, 222), "mprotect": (10, 226)}
CLONE, CLONE3, FCNTL = (56, 220), (435, 435), (72, 25)

PROT_EXEC, PROTECTION_ARGUMENT = 4, 2
CLONE_THREAD = 0x10000
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL: the others lock files and choose who is signalled.
FCNTL_LAST, F_DUPFD_CLOEXEC = 4, 1030

# struct sock_filter (linux/filter.h): code, jump if true, jump if false, constant.
_INSTRUCTION = struct.Struct("=HBBI")
_LOAD, _RETURN = 0x20, 0x06  # BPF_LD | BPF_W | BPF_ABS, BPF_RET | BPF_K
_EQUAL, _ABOVE, _ANY_BIT = 0x15, 0x25, 0x45  # BPF_JMP | BPF_JEQ, BPF_JGT, BPF_JSET | BPF_K
# struct seccomp_data (linux/seccomp.h): nr @0, arch @4, args @16, eight bytes each.
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000


class _Program(ctypes.Structure):
    """struct sock_fprog (linux/filter.h)."""

    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def refuse_calls() -> str:
    """Leaves this process the calls of a parser; why not, empty when it is done."""
    machine = os.uname().machine
    if machine not in AUDIT:
        return f"no list of calls for {machine}"
    code = program(machine)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    held = _Program(len(code) // _INSTRUCTION.size, code)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(held), 0, 0) != 0:
        return f"seccomp: {os.strerror(ctypes.get_errno())}"
    return ""


def program(machine: str) -> bytes:
    """The filter for ``machine``: classic BPF, struct sock_filter one after the other."""
    which = MACHINES.index(machine)
    refuse = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    allow = (_RETURN, 0, 0, _ALLOW)
    lines: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_EQUAL, 1, 0, AUDIT[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    # Each of these is skipped as a whole when the number is another.
    lines += [(_EQUAL, 0, 1, CLONE3[which]), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    lines += [
        (_EQUAL, 0, 4, CLONE[which]),
        (_LOAD, 0, 0, _ARGUMENTS_AT),
        (_ANY_BIT, 0, 1, CLONE_THREAD),
        allow,
        refuse,
    ]
    for numbers in MAPPING.values():
        lines += [
            (_EQUAL, 0, 4, numbers[which]),
            (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * PROTECTION_ARGUMENT),
            (_ANY_BIT, 0, 1, PROT_EXEC),
            refuse,
            allow,
        ]
    lines += [
        (_EQUAL, 0, 5, FCNTL[which]),
        (_LOAD, 0, 0, _ARGUMENTS_AT + 8),
        (_EQUAL, 1, 0, F_DUPFD_CLOEXEC),
        (_ABOVE, 1, 0, FCNTL_LAST),
        allow,
        refuse,
    ]
    for pair in ALLOWED.values():
        number = pair[which]
        if number is not None:
            lines += [(_EQUAL, 0, 1, number), allow]
    return b"".join(_INSTRUCTION.pack(*line) for line in [*lines, refuse])
