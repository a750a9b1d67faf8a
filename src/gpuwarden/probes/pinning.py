"""Denials that outlive this process: what is pinned in a BPF file system, and its removal.

Pinned are the programs that deny (``link_…``) and the maps they ask (``map_…``). Once pinned they
stay until ``unpin`` or a restart of the machine, whatever becomes of the process that pinned them.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable

from msgspec import Struct

from gpuwarden.errors import Denied, Unavailable, UsageError
from gpuwarden.probes import layouts
from gpuwarden.probes.cgroup2 import GroupKey
from gpuwarden.probes.libbpf import Libbpf, library
from gpuwarden.probes.loading import LoadedObject

DIRECTORY = "/sys/fs/bpf/gpuwarden"
FILE_SYSTEM = "/sys/fs/bpf"
MAPS = ("denied_cgroups", "settings", "watched_devices")
DENIALS_LIMIT = 4096
"""As many as the map has room for."""

_MAGIC = 0xCAFE4A11  # BPF_FS_MAGIC of linux/magic.h
_STATFS_BYTES = 256
_LINK, _MAP, _NEW = "link_", "map_", "new_"  # the file system takes no name with a dot
_KEY = layouts.packed("cgroup_key")
_VALUE_BYTES = 4
_WOULD_DENY = 2


class PinnedDenial(Struct, frozen=True):
    """A control group that a pinned program denies the watched devices to."""

    group: GroupKey
    dry_run: bool = False


class Pinned(Struct, frozen=True):
    """What is pinned in a directory."""

    directory: str
    names: tuple[str, ...]
    denials: tuple[PinnedDenial, ...] = ()
    unread: str = ""
    """Why the denials could not be read; then there may be some."""


def pin(
    bpf: Libbpf, loaded: LoadedObject, programs: Iterable[str], directory: str
) -> tuple[str, ...]:
    """Pins these programs and the maps they ask; what was pinned there before goes afterwards.

    Each new link is in force before the old one goes: no open passes meanwhile. Gives the names.
    Errors: UsageError (not a BPF file system), Denied, Unavailable.
    """
    prepare(directory)
    descriptors = {_MAP + name: loaded.map(name) for name in MAPS}
    for program in programs:
        if program in loaded.links:
            link = bpf.checked("bpf_link__fd", loaded.links[program])
            descriptors[_LINK + program] = link
    try:
        for name, descriptor in descriptors.items():
            fresh = os.path.join(directory, _NEW + name)
            if os.path.lexists(fresh):
                os.unlink(fresh)
            bpf.checked("bpf_obj_pin", descriptor, fresh.encode())
        for name in descriptors:
            os.rename(os.path.join(directory, _NEW + name), os.path.join(directory, name))
        for name in set(_ours(directory)) - set(descriptors):
            os.unlink(os.path.join(directory, name))
    except OSError as error:
        raise _explained(f"{directory}: the denials were not pinned", error) from error
    return tuple(sorted(descriptors))


def unpin(directory: str = DIRECTORY) -> tuple[str, ...]:
    """Ends every denial that is pinned there; the names of what was removed, none if none was.

    Needs no loaded probe and no libbpf. The kernel lets go of them a moment later.
    Errors: Denied, Unavailable.
    """
    removed = []
    try:
        for name in sorted(_ours(directory), key=lambda one: _LINK not in one):
            os.unlink(os.path.join(directory, name))
            removed.append(name)
        if removed and not os.listdir(directory):
            os.rmdir(directory)
    except OSError as error:
        raise _explained(f"{directory}: denials stay pinned", error) from error
    return tuple(removed)


def pinned(directory: str = DIRECTORY) -> Pinned | None:
    """What is pinned there and which groups it denies; None if nothing is.

    Errors: Denied, Unavailable, when the directory cannot be read.
    """
    try:
        names = tuple(sorted(_ours(directory)))
    except OSError as error:
        raise _explained(f"{directory}: cannot be read", error) from error
    if not names:
        return None
    try:
        with library() as bpf:
            return Pinned(directory, names, _denials(bpf, directory))
    except (OSError, Unavailable) as error:
        return Pinned(directory, names, unread=str(error))


def _ours(directory: str) -> list[str]:
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [name for name in names if name.removeprefix(_NEW).startswith((_LINK, _MAP))]


def _denials(bpf: Libbpf, directory: str) -> tuple[PinnedDenial, ...]:
    path = os.path.join(directory, f"{_MAP}denied_cgroups")
    descriptor = bpf.checked("bpf_obj_get", path.encode())
    found = []
    try:
        key: bytes | None = None
        following = ctypes.create_string_buffer(_KEY.size)
        value = ctypes.create_string_buffer(_VALUE_BYTES)
        for _ in range(DENIALS_LIMIT):
            if bpf.call("bpf_map_get_next_key", descriptor, key, following) != 0:
                break
            key = following.raw
            if bpf.call("bpf_map_lookup_elem", descriptor, key, value) == 0:
                identity, hierarchy, _ = _KEY.unpack(key)
                dry_run = int.from_bytes(value.raw, "little") == _WOULD_DENY
                found.append(PinnedDenial(GroupKey(hierarchy, identity), dry_run))
    finally:
        os.close(descriptor)
    return tuple(found)


# -------------------------------------------------------------------- the file system


def prepare(directory: str, *, mount: bool = True) -> None:
    """Makes the directory in a BPF file system, which is mounted if it is not yet.

    A mount made here is in this process's mount namespace: systemd's own, elsewhere the host's.
    Errors: UsageError (not in one, and with ``mount`` none can be there), Denied, Unavailable.
    """
    if os.path.normpath(directory) != directory or not directory.startswith("/"):
        raise UsageError(f"{directory}: not an absolute, plain path")
    there = directory
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if not _is_bpf(there):
        within = directory.startswith(FILE_SYSTEM + "/") and os.path.isdir(FILE_SYSTEM)
        if not mount or not within:
            raise UsageError(
                f"{directory}: not in a BPF file system", remedy=f"a directory below {FILE_SYSTEM}"
            )
        _mount()
    try:
        os.makedirs(directory, 0o700, exist_ok=True)
        status = os.lstat(directory)
    except OSError as error:
        raise _explained(f"{directory}: cannot be made", error) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise Denied(f"{directory}: not a directory of ours")
    if status.st_mode & 0o022:
        raise Denied(f"{directory}: others may write there", remedy=f"chmod 700 {directory}")


def check_it_is_the_hosts(directory: str = DIRECTORY) -> None:
    """A BPF file system that only our own mount namespace has ends with us, and the pins in it.

    Errors: Unavailable. Where process 1 may not be looked at, that cannot be told.
    """
    try:
        ours = os.stat(directory)
    except OSError:
        return
    try:
        theirs = os.stat(f"/proc/1/root{directory}")
    except FileNotFoundError:
        pass
    except OSError:
        return
    else:
        if (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino):
            return
    raise Unavailable(
        f"{FILE_SYSTEM} here is not the host's: what is pinned would end with gpuwarden",
        remedy=f"mount -t bpf bpf {FILE_SYSTEM} on the host, before gpuwarden starts",
    )


def _is_bpf(path: str) -> bool:
    library_of_c = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if library_of_c.statfs(os.fsencode(path), buffer) != 0:
        return False
    # struct statfs begins with its type, a long, on x86-64 and arm64.
    return int.from_bytes(buffer.raw[:8], "little") == _MAGIC


def _mount() -> None:
    library_of_c = ctypes.CDLL(None, use_errno=True)
    flags = ctypes.c_ulong(2 | 4 | 8)  # MS_NOSUID, MS_NODEV, MS_NOEXEC
    done = library_of_c.mount(b"bpf", FILE_SYSTEM.encode(), b"bpf", flags, b"mode=700")
    if done != 0:
        code = ctypes.get_errno()
        error = OSError(code, os.strerror(code))
        raise _explained(f"{FILE_SYSTEM}: no BPF file system, and none can be mounted", error)


def _explained(message: str, error: OSError) -> Denied | Unavailable:
    message = f"{message}: {error.strerror or error}"
    if isinstance(error, PermissionError):
        return Denied(message, remedy="run as root on the host")
    return Unavailable(message, remedy=f"mount -t bpf bpf {FILE_SYSTEM}, as root on the host")
