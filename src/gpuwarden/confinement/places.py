"""No network and no path: namespaces and an empty root where we are root, Landlock for everybody.

Sources: unshare(2), mount_namespaces(7), landlock(7), linux/landlock.h.
"""

from __future__ import annotations

import ctypes
import os
import struct

from gpuwarden.confinement.rights import PR_SET_NO_NEW_PRIVS

CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 0x4000, 1 << 18
EMPTY_ROOT_AT = b"/proc"
"""Where an empty file system is mounted, in a namespace that nobody else sees."""

# The same numbers on every machine since they are younger than the common table.
LANDLOCK_CREATE_RULESET, LANDLOCK_RESTRICT_SELF = 444, 446
LANDLOCK_CREATE_RULESET_VERSION = 1
# struct landlock_ruleset_attr: handled_access_fs; from ABI 4 handled_access_net, from 6 scoped.
_RULESET = struct.Struct("=3Q")
# ABI → its rights on files: all from EXECUTE to MAKE_SYM, then REFER, TRUNCATE, IOCTL_DEV.
_FILE_RIGHTS = ((1, 0x1FFF), (2, 0x3FFF), (3, 0x7FFF), (5, 0xFFFF))
_NETWORK_RIGHTS, _SCOPES = 0x3, 0x3
_ABI_BYTES = ((1, 8), (4, 16), (6, 24))


def leave_network() -> str:
    """A network of its own with nothing in it, for root; why not, empty when it is done."""
    return _unshare(CLONE_NEWNET)


def leave_root() -> str:
    """An empty, read-only root directory, for root; why not, empty when it is done."""
    if refused := _unshare(CLONE_NEWNS):
        return refused
    libc = ctypes.CDLL(None, use_errno=True)
    flags = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
    none = ctypes.c_char_p(None)
    for mount in (
        (none, b"/", none, MS_REC | MS_PRIVATE, none),
        (b"none", EMPTY_ROOT_AT, b"tmpfs", flags, b"size=4k"),
    ):
        if libc.mount(*mount[:3], ctypes.c_ulong(mount[3]), mount[4]) != 0:
            return f"mount: {os.strerror(ctypes.get_errno())}"
    try:
        os.chroot(EMPTY_ROOT_AT)
        os.chdir("/")
    except OSError as error:
        return f"chroot: {error.strerror}"
    return ""


def leave_paths() -> str:
    """No path can be opened, made or removed any more (Landlock); why not, empty when done."""
    libc = ctypes.CDLL(None, use_errno=True)
    call = libc.syscall
    none = ctypes.c_void_p(None)
    abi = call(LANDLOCK_CREATE_RULESET, none, ctypes.c_size_t(0), LANDLOCK_CREATE_RULESET_VERSION)
    if abi < 1:
        return f"Landlock: {os.strerror(ctypes.get_errno())}"
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    rights = max(bits for first, bits in _FILE_RIGHTS if first <= abi)
    size = max(size for first, size in _ABI_BYTES if first <= abi)
    attributes = _RULESET.pack(rights, _NETWORK_RIGHTS, _SCOPES)[:size]
    rules = call(LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0)
    if rules < 0:
        return f"Landlock: {os.strerror(ctypes.get_errno())}"
    done = call(LANDLOCK_RESTRICT_SELF, rules, 0)
    code = ctypes.get_errno()
    os.close(rules)
    return f"Landlock: {os.strerror(code)}" if done != 0 else ""


def _unshare(what: int) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(what) != 0:
        return f"unshare: {os.strerror(ctypes.get_errno())}"
    return ""
