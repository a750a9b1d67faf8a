"""Files below a folder, opened for a child to read: never through a link, never what is no file.

What is opened is what was looked at: a path is opened without opening the file (O_PATH), asked what
it is, and that file is opened then. A device, FIFO or socket is never opened.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Iterator

from msgspec import Struct

from gpuwarden.code.module import Place, Problem
from gpuwarden.codescan.jit_caches import cache_by_neighbours

DEPTH_LIMIT = 200
"""Folders in folders: each is open while what is in it is looked at."""
MOUNTS = "/proc/self/mountinfo"
MOUNTS_LIMIT_BYTES = 16 << 20
# Views of the kernel: their files are made when they are read, and some of them wait.
KERNEL_FILE_SYSTEMS = frozenset(
    "proc sysfs cgroup cgroup2 devpts debugfs tracefs bpf securityfs pstore configfs efivarfs "
    "fusectl mqueue binfmt_misc selinuxfs smackfs nsfs rpc_pipefs autofs".split()
)
_KINDS = {
    stat.S_IFCHR: "device nodes",
    stat.S_IFBLK: "device nodes",
    stat.S_IFIFO: "FIFOs",
    stat.S_IFSOCK: "sockets",
    stat.S_IFLNK: "symbolic links",
}


class OpenFile(Struct, frozen=True):
    """A regular file that is open for reading; whoever takes it closes it."""

    descriptor: int
    path: tuple[str, ...]
    """Names below the folder; none for a target that is a file itself."""
    size: int
    cache: str = ""
    """The JIT cache that the files beside it tell of."""


class _Folder:
    """An open folder that is being walked; its names are read once it is where it is closed."""

    def __init__(self, descriptor: int, path: tuple[str, ...]) -> None:
        self.descriptor = descriptor
        self.path = path
        self.names: frozenset[str] = frozenset()
        self.left: Iterator[str] = iter(())

    def read(self) -> None:
        """Errors: OSError."""
        self.names = frozenset(os.listdir(self.descriptor))
        self.left = iter(sorted(self.names))


class Walk:
    """Opens each file once in one scan, however many names and targets lead to it."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, int]] = set()
        self._kernel_devices = _kernel_devices()

    def file(self, path: str) -> OpenFile | int:
        """The target itself, links followed, since it was named; of a folder its descriptor.

        Errors: OSError, also for what is neither a file nor a folder.
        """
        looked_at = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            status = os.fstat(looked_at)
            if stat.S_ISDIR(status.st_mode):
                return _reopen(looked_at, os.O_DIRECTORY)
            if not stat.S_ISREG(status.st_mode):
                kind = _KINDS.get(stat.S_IFMT(status.st_mode), "other files")
                raise OSError(errno.EINVAL, f"{kind} are not opened")
            self._seen.add((status.st_dev, status.st_ino))
            return OpenFile(_reopen(looked_at, 0), (), status.st_size)
        finally:
            os.close(looked_at)

    def below(
        self, folder: int, target: str, skipped: Counter[str]
    ) -> Iterator[OpenFile | Problem]:
        """Every file below an open folder, in the order of names; ``folder`` is closed.

        What is left out by rule is counted in ``skipped``; what cannot be opened is a Problem.
        """
        stack = [_Folder(folder, ())]
        try:
            stack[0].read()
            while stack:
                directory, names, path = stack[-1].descriptor, stack[-1].left, stack[-1].path
                name = next(names, None)
                if name is None:
                    os.close(directory)
                    stack.pop()
                    continue
                here = (*path, shown(name))
                try:
                    found = self._open(directory, name, skipped, depth=len(stack))
                    if isinstance(found, int):
                        stack.append(_Folder(found, here))
                        stack[-1].read()
                    elif found is not None:
                        cache = cache_by_neighbours(name, stack[-1].names)
                        yield OpenFile(found.descriptor, here, found.size, cache)
                except OSError as error:
                    place = Place(target=target, members=("/".join(here),))
                    yield Problem(place=place, what="file", reason=_reason(error))
        finally:
            for one in stack:
                os.close(one.descriptor)

    def _open(
        self, directory: int, name: str, skipped: Counter[str], depth: int
    ) -> OpenFile | int | None:
        looked_at = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        try:
            status = os.fstat(looked_at)
            identity = (status.st_dev, status.st_ino)
            if status.st_dev in self._kernel_devices:
                skipped["files of the kernel's own file systems"] += 1
            elif stat.S_ISDIR(status.st_mode):
                if identity in self._seen:
                    skipped["folders met before"] += 1
                elif depth >= DEPTH_LIMIT:
                    raise OSError(errno.ELOOP, f"deeper than {DEPTH_LIMIT} folders")
                else:
                    self._seen.add(identity)
                    return _reopen(looked_at, os.O_DIRECTORY)
            elif not stat.S_ISREG(status.st_mode):
                skipped[_KINDS.get(stat.S_IFMT(status.st_mode), "other files")] += 1
            elif identity in self._seen:
                skipped["files met before"] += 1
            else:
                self._seen.add(identity)
                if status.st_size:
                    return OpenFile(_reopen(looked_at, 0), (), status.st_size)
            return None
        finally:
            os.close(looked_at)


def shown(name: str) -> str:
    """A name as text that can be told: bytes of it that are no UTF-8 are escaped."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _reopen(descriptor: int, flags: int) -> int:
    """Opens for reading the very file that a path descriptor stands for (open(2), O_PATH)."""
    flags |= os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    return os.open(f"/proc/self/fd/{descriptor}", flags)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _kernel_devices() -> frozenset[int]:
    """Device numbers of mounted file systems that are views of the kernel (proc(5), mountinfo)."""
    try:
        with open(MOUNTS, "rb") as mounts:
            lines = mounts.read(MOUNTS_LIMIT_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return frozenset()
    devices = set()
    for line in lines:
        fields, _, after = line.partition(" - ")
        kind = after.partition(" ")[0]
        numbers = fields.split(" ")[2:3]
        if kind in KERNEL_FILE_SYSTEMS and numbers:
            major, _, minor = numbers[0].partition(":")
            devices.add(os.makedev(int(major), int(minor)))
    return frozenset(devices)
