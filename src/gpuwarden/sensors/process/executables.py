"""The binary behind a process, by the kernel's link to it and not by any name."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable

import msgspec
from msgspec import Struct, field

from gpuwarden.errors import Denied, GpuwardenError, Malformed, Unavailable
from gpuwarden.host import FileStatus, Host
from gpuwarden.model import Executable
from gpuwarden.pattern import pattern
from gpuwarden.sensors.process.fan_out import in_child
from gpuwarden.sensors.process.mounts import MountTable, is_network, read_mounts
from gpuwarden.sensors.process.users import UserNames

DELETED = " (deleted)"
_MEMFD = "/memfd:"
_PYTHON = pattern(r"(?:ld-)?python\d{0,2}(?:\.\d{1,3})?[a-z]{0,2}(?:-[\w.-]{1,32})?", re.ASCII)
_LIBPYTHON = pattern(r"libpython\d.*")
_INTERPRETER_MARKS = (b"Py_BytesMain", b"Py_RunMain", b"Py_Main")
"""Exported by every CPython that carries its library in itself."""
_MARKS_LIMIT_BYTES = 8 << 20
_NETWORK_SECONDS = 1.0
_WRITERS_LIMIT = 32
EVERYBODY = -1


class _Contents(msgspec.Struct, frozen=True):
    """What reading a binary and looking at its path tells; may ask a file server."""

    elf: bool | None = None
    links_python: bool | None = None
    genuine: bool | None = None
    replaced: bool = False
    writers: tuple[int, ...] = ()
    unread: dict[str, str] = {}


class _Binary(Struct, frozen=True):
    """One process's binary as its link and statx through it tell."""

    pid: int
    path: str
    status: FileStatus
    deleted: bool
    memfd: bool
    mount_namespace: int | None


class Binaries(Struct):
    """What one scan remembers about binaries and mounts, so that 200 workers cost one look."""

    host: Host
    names: UserNames
    mounts: dict[int, MountTable] = field(default_factory=dict)
    elf: dict[tuple[tuple[int, int], int], tuple[bool | None, bool | None, str]] = field(
        default_factory=dict
    )
    contents: dict[tuple[object, ...], _Contents] = field(default_factory=dict)
    silent: set[tuple[int, int]] = field(default_factory=set)
    """File systems whose server did not answer once; it is not asked again."""
    init_mount_namespace: int | None = None
    init_root: str | None = None
    """What to put before a path to see it as the host's init does; None if that is not known."""


def new_binaries(host: Host, names: UserNames) -> Binaries:
    """An empty memory, with the place from which the host's own paths can be seen."""
    binaries = Binaries(host, names)
    binaries.init_mount_namespace = read_namespace(host, 1, "mnt")
    own = read_namespace(host, "self", "mnt")
    if binaries.init_mount_namespace is None and host.is_local:
        # Not even root may always look at pid 1; what we see at "/" is the next best host.
        binaries.init_mount_namespace = own
    if not host.is_local or (own is not None and own == binaries.init_mount_namespace):
        binaries.init_root = ""
    elif binaries.init_mount_namespace is not None:
        binaries.init_root = "/proc/1/root"
    return binaries


# proc_pid_ns(5): "kind:[inode]".
_NAMESPACE = pattern(r"[a-z_]{1,32}:\[(\d{1,20})\]")


def parse_namespace(link: str) -> int | None:
    """The inode in a namespace link such as ``mnt:[4026531841]``."""
    match = _NAMESPACE.fullmatch(link)
    return None if match is None else int(match.group(1))


def read_namespace(host: Host, pid: int | str, kind: str) -> int | None:
    """The inode of a process's namespace of a kind, None if it cannot be read."""
    try:
        return parse_namespace(host.read_link(f"/proc/{pid}/ns/{kind}"))
    except GpuwardenError:
        return None


def read_executable(
    binaries: Binaries, pid: int, mount_namespace: int | None
) -> Executable | str | None:
    """The binary of a process; the reason if it may not be seen; None if it has none (any more).

    Source: proc_pid_exe(5). Bounds: a file on a network file system is given one second.
    """
    host = binaries.host
    link = f"/proc/{pid}/exe"
    try:
        text = host.read_link(link)
    except Denied as error:
        return str(error)
    except (Unavailable, Malformed):
        return None
    try:
        status = host.link_target_status(link)
    except GpuwardenError as error:
        return Executable(
            path=text,
            unread=dict.fromkeys(("deleted", "device", "inode", "mode", "elf"), str(error)),
        )
    mounts = _mounts(binaries, pid, mount_namespace)
    memfd = _is_memfd(text, status, mounts)
    path, deleted = split_deleted(host, pid, text, status)
    filesystem: str | None = "tmpfs" if memfd else None
    if not memfd and isinstance(mounts, MountTable):
        filesystem = mounts.filesystem(status.device, path)
    binary = _Binary(pid, path, status, deleted, memfd, mount_namespace)
    contents = _contents(binaries, binary, filesystem)
    unread = dict(contents.unread)
    if filesystem is None:
        missing = "its mount is not in the process's mount table"
        unread["filesystem"] = mounts if isinstance(mounts, str) else missing
    return Executable(
        path=path,
        deleted=deleted,
        replaced=contents.replaced,
        memfd=memfd,
        device=f"{status.device[0]}:{status.device[1]}",
        inode=status.inode,
        link_count=status.link_count,
        owner_uid=status.uid,
        mode=stat.S_IMODE(status.mode),
        size_bytes=status.size_bytes,
        filesystem=filesystem,
        path_is_genuine=contents.genuine,
        directory_writable_by=contents.writers,
        elf=contents.elf,
        links_python=contents.links_python,
        unread=unread,
    )


def _mounts(binaries: Binaries, pid: int, namespace: int | None) -> MountTable | str:
    """The mount table that a process sees, or the reason why it cannot be read."""
    if namespace in binaries.mounts:
        return binaries.mounts[namespace]
    try:
        table = read_mounts(binaries.host, pid)
    except GpuwardenError as error:
        return str(error)
    if namespace is not None:
        binaries.mounts[namespace] = table
    return table


def _is_memfd(text: str, status: FileStatus, mounts: MountTable | str) -> bool:
    """The kernel's own shmem file: on a file system that nobody has mounted, with no link left."""
    if not text.startswith(_MEMFD) or status.link_count:
        return False
    return isinstance(mounts, str) or status.device not in mounts.types


def split_deleted(host: Host, pid: int, text: str, status: FileStatus) -> tuple[str, bool]:
    """The path in a link's text, and whether the file is gone from it.

    " (deleted)" is the kernel's mark only if nothing is at the whole text, since a file can really
    be called so; a file with another hard link keeps a link count when its path is removed.
    """
    if not text.endswith(DELETED):
        return text, status.link_count == 0
    stripped = text.removesuffix(DELETED)
    if status.link_count == 0:
        return stripped, True
    try:
        at_text = host.status(f"/proc/{pid}/root{text}")
    except GpuwardenError:
        return stripped, True
    is_name = (at_text.device, at_text.inode) == (status.device, status.inode)
    return (text, False) if is_name else (stripped, True)


def _contents(binaries: Binaries, binary: _Binary, filesystem: str | None) -> _Contents:
    status, namespace = binary.status, binary.mount_namespace
    key = (status, binary.path, binary.deleted, namespace)
    if namespace is not None and key in binaries.contents:
        return binaries.contents[key]

    def look() -> _Contents:
        return _look(binaries, binary)

    if binaries.host.is_live and (is_network(filesystem) or _asks_a_server(binaries, binary)):
        contents = _look_with_deadline(binaries, status.device, look)
    else:
        contents = look()
    if not contents.unread:
        # A reason may be this process's alone: it may have vanished meanwhile.
        binaries.contents[key] = contents
    return contents


def _asks_a_server(binaries: Binaries, binary: _Binary) -> bool:
    """Whether the process, or the host's init, reaches the path over a server's mount.

    A local file can lie below one, or have one laid over its directory after it was started.
    """
    seen_by = ((binary.pid, binary.mount_namespace), (1, binaries.init_mount_namespace))
    tables = [_mounts(binaries, pid, namespace) for pid, namespace in seen_by]
    return any(isinstance(t, MountTable) and t.asks_a_server(binary.path) for t in tables)


def _look_with_deadline(
    binaries: Binaries, device: tuple[int, int], look: Callable[[], _Contents]
) -> _Contents:
    reason = "its network file system did not answer"
    if device not in binaries.silent:
        try:
            answer = in_child(lambda: msgspec.msgpack.encode(look()), _NETWORK_SECONDS)
            return msgspec.msgpack.decode(answer, type=_Contents)
        except (Unavailable, msgspec.MsgspecError) as error:
            binaries.silent.add(device)
            reason = f"{reason}: {error}"
    fields = ("elf", "links_python", "path_is_genuine", "directory_writable_by")
    return _Contents(unread=dict.fromkeys(fields, reason))


def _look(binaries: Binaries, binary: _Binary) -> _Contents:
    pid, path, status = binary.pid, binary.path, binary.status
    unread: dict[str, str] = {}
    elf, links_python, reason = _elf(binaries, pid, path, status)
    if reason:
        unread["elf"] = reason
    genuine: bool | None = None
    replaced = False
    writers: tuple[int, ...] = ()
    if not binary.memfd:
        at_path = _status(binaries.host, f"/proc/{pid}/root{path}")
        replaced = binary.deleted and at_path is not None
        genuine, why = _genuine(binaries, path, status, binary.mount_namespace)
        if why:
            unread["path_is_genuine"] = why
        folder = _status(binaries.host, f"/proc/{pid}/root{os.path.dirname(path) or '/'}")
        if folder is None:
            unread["directory_writable_by"] = "its directory cannot be looked at"
        else:
            writers = writers_of(folder, binaries.names)
    return _Contents(elf, links_python, genuine, replaced, writers, unread)


def _status(host: Host, path: str) -> FileStatus | None:
    try:
        return host.status(path)
    except GpuwardenError:
        return None


def _genuine(
    binaries: Binaries, path: str, status: FileStatus, namespace: int | None
) -> tuple[bool | None, str]:
    init = binaries.init_mount_namespace
    if init is None or binaries.init_root is None or namespace is None:
        return None, "the mount namespaces of the process and of the host's init are not known"
    # With mounts of its own, another file at that path is no lie; the same file is still the same.
    other = False if namespace == init else None
    try:
        there = binaries.host.status(binaries.init_root + path)
    except Denied as error:
        return None, str(error)
    except GpuwardenError:
        return other, ""
    is_same = (there.device, there.inode) == (status.device, status.inode)
    return (True if is_same else other), ""


def writers_of(folder: FileStatus, names: UserNames) -> tuple[int, ...]:
    """uids other than root that can write a directory, by its mode; EVERYBODY if all can."""
    if folder.mode & stat.S_IWOTH:
        return (EVERYBODY,)
    found: set[int] = set()
    if folder.mode & stat.S_IWUSR:
        found.add(folder.uid)
    if folder.mode & stat.S_IWGRP:
        found |= names.members.get(folder.gid, set())
    return tuple(sorted(found - {0}))[:_WRITERS_LIMIT]


def _elf(
    binaries: Binaries, pid: int, path: str, status: FileStatus
) -> tuple[bool | None, bool | None, str]:
    from gpuwarden.sensors.elf import read_identity

    key = (status.device, status.inode)
    wants_python = _PYTHON.fullmatch(os.path.basename(path)) is not None
    kept = binaries.elf.get(key)
    if kept is not None and (kept[1] is not None or not wants_python):
        return kept[0], kept[1] if wants_python else None, kept[2]
    link = f"/proc/{pid}/exe"
    try:
        identity = read_identity(binaries.host, link)
        python: bool | None = None
        if wants_python:
            python = any(_LIBPYTHON.fullmatch(name) for name in identity.needed) or (
                identity.is_elf and _carries_python(binaries.host, link)
            )
    except GpuwardenError as error:
        return None, None, str(error)
    binaries.elf[key] = (identity.is_elf, python, "")
    return identity.is_elf, python, ""


def _carries_python(host: Host, link: str) -> bool:
    head = host.read_bytes(link, _MARKS_LIMIT_BYTES)
    return any(mark in head for mark in _INTERPRETER_MARKS)
