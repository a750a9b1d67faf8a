"""A running process opened for a look at its memory and its mapped files; it is never stopped.

Everything is opened here, with the rights that it needs: the kernel asks for them when
``/proc/PID/mem`` is opened and no more when it is read, so that a child without any can read it.
What is opened stays that process's, whatever its pid becomes; an exec ends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, Self

from msgspec import Struct

from gpuwarden.codescan.memory_map import (
    DELETED,
    MAPS_LIMIT_BYTES,
    FileKey,
    Region,
    by_file,
    parse_maps,
)
from gpuwarden.codescan.resident import Pages
from gpuwarden.codescan.tasks import Span
from gpuwarden.errors import Denied, GpuwardenError, Unavailable
from gpuwarden.host import Host
from gpuwarden.sensors.process.opened_folder import OpenedFolder, opened
from gpuwarden.sensors.process.stat_lines import is_kernel_thread

ZERO_DEVICE = (1, 5)
"""/dev/zero, whose private mappings are anonymous memory under another name."""
OBJECT_EXTENTS_LIMIT = 65_536
# statfs(2): linux/magic.h. Files there are memory.
_TMPFS, _HUGETLBFS, _RAMFS = 0x01021994, 0x958458F6, 0x858458F6
_MEMORY_FILE_SYSTEMS = frozenset({_TMPFS, _HUGETLBFS, _RAMFS})
# struct statfs: f_type is its first long.
_STATFS_BYTES = 256
_libc = ctypes.CDLL(None, use_errno=True)


class Inode(NamedTuple):
    """A file as stat(2) knows it, on every file system alike."""

    device: int
    number: int


class MappedFile(Struct, frozen=True):
    """A file that a process has mapped, still open; ``path`` as the process's maps tell it."""

    descriptor: int
    inode: Inode
    size: int
    path: str
    regions: tuple[Region, ...]
    in_memory: bool
    """It is memory that no name leads to: a memfd, shared memory, deleted on a memory file system.
    """
    owner_uid: int
    mode: int


_Kind = Literal["file", "zeros", "device", "unknown"]


class ProcessMemory:
    """One process, opened; a context manager. Errors: Unavailable or Denied if it cannot be."""

    def __init__(self, host: Host, pid: int) -> None:
        self.pid = pid
        self._opened = contextlib.ExitStack()
        self._kinds: dict[FileKey, _Kind] = {}
        try:
            self._folder = self._opened.enter_context(OpenedFolder(host, pid))
            line = self._folder.line
            self.start_time_ticks = line.start_time_ticks
            self.comm = line.comm
            if is_kernel_thread(line) or (line.state == "Z" and self._folder.thread is None):
                raise Unavailable("it has no memory: a kernel thread, or it has ended")
            self.memory = self._open("mem")
            self.regions = parse_maps(self.read("maps", MAPS_LIMIT_BYTES))
            if not self.regions:
                raise Unavailable("it has no memory: it has just ended")
            self.pages = Pages(self._open("pagemap"), self._open("smaps"))
        except BaseException:
            self._opened.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def _open(self, name: str) -> int:
        descriptor = self._folder.open(name, os.O_RDONLY)
        self._opened.callback(os.close, descriptor)
        return descriptor

    def read(self, name: str, limit: int) -> bytes:
        """Up to ``limit`` bytes of a file in its /proc/PID. Errors: Unavailable, Denied."""
        return self._folder.read(name, limit)

    def link(self, name: str) -> str:
        """What a link in its /proc/PID says. Errors: Unavailable, Denied."""
        return self._folder.link(name)

    @property
    def owner_uid(self) -> int:
        """The owner of its /proc/PID: its effective uid, or root if it may not be dumped."""
        return os.fstat(self._folder.descriptor).st_uid

    def files(self, *, executable: bool) -> Iterator[MappedFile | tuple[Region, str]]:
        """Each regular file that it has mapped, open until the next is asked for.

        Programs and libraries, of which a mapping is executable, or all others. Or a region with
        the reason why its file could not be opened. Devices are left out.
        """
        for regions in by_file(self.regions).values():
            if any("x" in region.permissions for region in regions) != executable:
                continue
            try:
                handle = self._handle(regions)
            except GpuwardenError as error:
                yield regions[0], f"{error}; {error.remedy}" if error.remedy else str(error)
                continue
            try:
                status = os.fstat(handle)
                if not stat.S_ISREG(status.st_mode):
                    continue
                # The handle names the inode and is no way to read it yet.
                descriptor = opened(f"/proc/self/fd/{handle}", os.O_RDONLY)
            except (OSError, GpuwardenError) as error:
                yield regions[0], getattr(error, "strerror", None) or str(error)
                continue
            finally:
                os.close(handle)
            try:
                yield MappedFile(
                    descriptor,
                    Inode(status.st_dev, status.st_ino),
                    status.st_size,
                    regions[0].path,
                    tuple(regions),
                    status.st_nlink == 0 and _file_system(descriptor) in _MEMORY_FILE_SYSTEMS,
                    status.st_uid,
                    status.st_mode,
                )
            finally:
                os.close(descriptor)

    def _handle(self, regions: Sequence[Region]) -> int:
        """An O_PATH descriptor of the file that is mapped: nothing of it is opened by that.

        Errors: Unavailable, Denied.
        """
        denied: GpuwardenError | None = None
        for region in regions[:8]:
            name = f"map_files/{region.start:x}-{region.end:x}"
            try:
                return self._folder.open(name, os.O_PATH)
            except Denied:
                denied = Denied(
                    "its link in map_files may not be followed",
                    remedy="run with CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE",
                )
                break
            except Unavailable:
                continue
        region = regions[0]
        # Without the right to follow those links: by its path, if that still is the same file.
        path = b"root" + os.fsencode(region.path.removesuffix(DELETED))
        try:
            handle = self._folder.open(path, os.O_PATH)
        except (GpuwardenError, ValueError):
            raise denied or Unavailable("it is mapped no more, or its file is gone") from None
        status = os.fstat(handle)
        if status.st_ino == region.inode and stat.S_ISREG(status.st_mode):
            return handle
        os.close(handle)
        raise denied or Unavailable("its path leads to another file than the one mapped")

    def memory_regions(self) -> list[Region]:
        """Regions whose own pages are memory of this process; shared files are read as files.

        Left out are mappings of devices, and of what cannot be told from one.
        """
        return [
            region
            for region in self.regions
            if not region.is_kernels
            and (not region.is_file or (not region.is_shared and self._is_memory(region)))
        ]

    def _is_memory(self, region: Region) -> bool:
        return self._kind(region) in ("file", "zeros")

    @property
    def device_mappings(self) -> int:
        """Mappings that are never read: reading one could reach the device."""
        return sum(
            self._kind(region) == "device" or (self._kind(region) == "zeros" and region.is_shared)
            for region in self.regions
            if region.is_file
        )

    def _kind(self, region: Region) -> _Kind:
        """What kind of file a region is a mapping of, asked once a file."""
        if region.key not in self._kinds:
            self._kinds[region.key] = self._kind_of_file(region)
        return self._kinds[region.key]

    def _kind_of_file(self, region: Region) -> _Kind:
        try:
            handle = self._handle([region])
        except GpuwardenError:
            return "unknown"
        try:
            status = os.fstat(handle)
        except OSError:
            return "unknown"
        finally:
            os.close(handle)
        if stat.S_ISREG(status.st_mode):
            return "file"
        number = (os.major(status.st_rdev), os.minor(status.st_rdev))
        return "zeros" if stat.S_ISCHR(status.st_mode) and number == ZERO_DEVICE else "device"


def _file_system(descriptor: int) -> int:
    """The type of the file system a file is on; 0 if it cannot be told."""
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(ctypes.c_int(descriptor), buffer) != 0:
        return 0
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF


def extents(file: MappedFile) -> list[Span]:
    """Where a memory file has pages, as offsets: its holes are passed over, never made."""
    found: list[Span] = []
    at = 0
    while at < file.size and len(found) < OBJECT_EXTENTS_LIMIT:
        try:
            start = os.lseek(file.descriptor, at, os.SEEK_DATA)
            end = os.lseek(file.descriptor, start, os.SEEK_HOLE)
        except OSError:
            break
        if end <= start:
            break
        found.append(Span(start=start, size=end - start, mapping=file.path))
        at = end
    return found
