"""The binary of a process, and the files that only it still has: memory files and deleted ones.

A file is named by a handle that opens nothing (``O_PATH``), looked at, and read only if it is a
regular file of a file system that answers by itself. Where a server, perhaps the process itself,
has to answer (FUSE, NFS), a child reads it; where reading waits or acts (/proc, tracing), nobody.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from msgspec import Struct

from gpuwarden.codescan.memory_map import DELETED, MAPS_LIMIT_BYTES, Region, by_file, parse_maps
from gpuwarden.errors import GpuwardenError, Malformed, Unavailable
from gpuwarden.evidence import served_files
from gpuwarden.evidence.descriptors import Descriptor
from gpuwarden.evidence.opened_process import OpenedProcess, is_regular
from gpuwarden.evidence.shelf import Shelf
from gpuwarden.host_calls import FileStatus
from gpuwarden.outputs.words import escape
from gpuwarden.sensors.process.mounts import MountTable, is_network, parse_mountinfo

BINARY_LIMIT_BYTES = 1 << 30
FILE_LIMIT_BYTES = 256 << 20
TOTAL_LIMIT_BYTES = 1 << 30
"""Of all files but the binary: memory that processes share can be any size."""
FILES_LIMIT = 256
ROOM_SHARE = 3, 4
"""Of what is left in the archive, what one file may have."""
CHUNK_BYTES = 1 << 20
MOUNTS_LIMIT_BYTES = 4 << 20
ANSWERING = frozenset(
    "ext2 ext3 ext4 xfs btrfs tmpfs devtmpfs ramfs hugetlbfs overlay f2fs zfs squashfs bcachefs "
    "erofs iso9660 udf vfat exfat ntfs3 jfs reiserfs nilfs2 rootfs".split()
)
MEMFD = "/memfd:"
SHARED_MEMORY = "/dev/zero (deleted)"
MAPPINGS_LIMIT = 4096

Inode = tuple[tuple[int, int], int]


class _Copying(Struct):
    """What copying needs to know of one process, and how much is left for it."""

    process: OpenedProcess
    shelf: Shelf
    mounts: MountTable
    left_bytes: int = TOTAL_LIMIT_BYTES


class Nameless(Struct, frozen=True):
    """A file of which this process has a descriptor or a mapping, and nobody a name."""

    link: str
    """Below /proc/PID: ``fd/5``, ``map_files/7f00…-7f01…``."""
    name: str
    """In the archive."""
    target: str
    status: FileStatus
    is_executable: bool
    """Code of it is mapped."""


def collect(process: OpenedProcess, shelf: Shelf, found: Sequence[Descriptor]) -> None:
    """The binary as ``exe``, the files as ``files/…``; what is not taken is noted."""
    copying = _Copying(process, shelf, _mounts(process))
    copied = {_binary(copying)}
    files = _nameless(process, shelf, found)
    # Code first, then the small ones: of many, the most.
    files.sort(key=lambda one: (not one.is_executable, one.status.size_bytes))
    for count, one in enumerate(files):
        inode = one.status.device, one.status.inode
        if inode in copied:
            continue
        copied.add(inode)
        what = f"{one.link} → {escape(one.target)}"
        if count >= FILES_LIMIT:
            more = files[count:]
            size = sum(each.status.size_bytes for each in more)
            shelf.left_out(f"{len(more)} files like {what}", f"more than {FILES_LIMIT}", size)
            break
        limit = min(FILE_LIMIT_BYTES, copying.left_bytes)
        with shelf.trying(what), _handle(process, one.link) as handle:
            if _copy(copying, handle, (f"files/{one.name}", what, one.target), limit):
                copying.left_bytes -= min(limit, one.status.size_bytes)


def _binary(copying: _Copying) -> Inode | None:
    process = copying.process
    inode: Inode | None = None
    with copying.shelf.trying("binary"), _handle(process, "exe") as handle:
        status = process.handle_status(handle)
        target = process.link("exe")
        named = "exe", f"binary {escape(target)}", target
        if _copy(copying, handle, named, BINARY_LIMIT_BYTES):
            inode = status.device, status.inode
    return inode


def _copy(copying: _Copying, handle: int, named: tuple[str, str, str], limit: int) -> bool:
    """One file through its handle; ``named``: in the archive, for a person, by its link.

    Errors: Unavailable, Denied, Malformed when it may not be read.
    """
    name, what, target = named
    shelf = copying.shelf
    status = copying.process.handle_status(handle)
    if not is_regular(status):
        raise Malformed("no regular file")
    size = status.size_bytes
    filesystem = _filesystem(status, target, copying.mounts)
    if filesystem not in ANSWERING and not is_network(filesystem):
        where = filesystem or "an unknown file system"
        shelf.left_out(what, f"it is on {where}, which may not answer or may act on it", size)
        return False
    if limit <= 0:
        shelf.left_out(what, f"more than {TOTAL_LIMIT_BYTES >> 20} MiB of such files", size)
        return False
    if filesystem not in ANSWERING:
        # Its size is the server's word.
        content = served_files.pieces(f"/proc/self/fd/{handle}")
        what = f"{what}, as the server of {filesystem} gave it"
        limit = min(limit, shelf.writer.room_bytes * ROOM_SHARE[0] // ROOM_SHARE[1])
        with closing(content):
            return shelf.put(name, content, what, limit_bytes=limit, cut=True)
    descriptor = _reopened(handle)
    try:
        is_sparse = _is_sparse(descriptor)
        if not is_sparse:
            # One large file does not take the room of all that is still to come.
            limit = min(limit, shelf.writer.room_bytes * ROOM_SHARE[0] // ROOM_SHARE[1])
        return shelf.put(
            name,
            _pieces(descriptor, size),
            what,
            size_bytes=size,
            limit_bytes=limit,
            compress=is_sparse,
            cut=True,
        )
    finally:
        os.close(descriptor)


def _pieces(descriptor: int, size: int) -> Iterator[bytes]:
    """Up to the size that it had: one that grows while it is read has no end."""
    at = 0
    while at < size:
        piece = os.pread(descriptor, min(CHUNK_BYTES, size - at), at)
        if not piece:
            raise Unavailable(f"it was cut to {at} bytes while it was read")
        at += len(piece)
        yield piece


def _is_sparse(descriptor: int) -> bool:
    status = os.fstat(descriptor)
    return status.st_blocks * 512 < status.st_size // 2


def _filesystem(status: FileStatus, target: str, mounts: MountTable) -> str | None:
    """What holds it. Memory files lie on a mount of the kernel's own, which no table has."""
    if status.device == memory_device():
        return "tmpfs"
    return mounts.filesystem(status.device, target.removesuffix(DELETED))


_memory_devices: list[tuple[int, int]] = []


def memory_device() -> tuple[int, int] | None:
    """The device number of all memory files of this kernel, as one of our own tells it."""
    if not _memory_devices:
        try:
            own = os.memfd_create("gpuwarden", os.MFD_CLOEXEC)
        except OSError:
            return None
        try:
            device = os.fstat(own).st_dev
            _memory_devices.append((os.major(device), os.minor(device)))
        finally:
            os.close(own)
    return _memory_devices[0]


def _reopened(handle: int) -> int:
    try:
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Unavailable(f"it cannot be read: {error.strerror}") from error


@contextmanager
def _handle(process: OpenedProcess, link: str) -> Iterator[int]:
    handle = process.open(link, os.O_PATH)
    try:
        yield handle
    finally:
        os.close(handle)


def _mounts(process: OpenedProcess) -> MountTable:
    try:
        return parse_mountinfo(process.read("mountinfo", MOUNTS_LIMIT_BYTES))
    except GpuwardenError:
        return MountTable()


def _nameless(process: OpenedProcess, shelf: Shelf, found: Sequence[Descriptor]) -> list[Nameless]:
    """Each once; of one that is mapped and open as well, the mapping."""
    files: dict[Inode, Nameless] = {}
    regions: list[Region] = []
    with shelf.trying("mapped files"):
        regions = parse_maps(process.read("maps", MAPS_LIMIT_BYTES))
    mappings = sorted(by_file(regions).values(), key=lambda mapped: not _is_code(mapped))
    asked = [mapped for mapped in mappings if _may_be_nameless(mapped)]
    if len(asked) > MAPPINGS_LIMIT:
        more = len(asked) - MAPPINGS_LIMIT
        shelf.left_out(f"{more} mapped files without a name", f"more than {MAPPINGS_LIMIT}")
    for mapped in asked[:MAPPINGS_LIMIT]:
        region = mapped[0]
        link = f"map_files/{region.start:x}-{region.end:x}"
        with shelf.trying(f"{link} → {escape(region.path)}"):
            status = process.status(link)
            if status.is_regular:
                files[status.device, status.inode] = Nameless(
                    link,
                    f"map-{region.start:x}",
                    region.path,
                    status,
                    _is_code(mapped),
                )
    for one in found:
        inode = one.status.device, one.status.inode
        if not one.is_nameless or inode in files:
            continue
        try:
            target = process.link(f"fd/{one.number}")
        except GpuwardenError:
            target = ""
        files[inode] = Nameless(
            f"fd/{one.number}", f"fd-{one.number}", target, one.status, is_executable=False
        )
    return list(files.values())


def _is_code(mapped: Sequence[Region]) -> bool:
    return any("x" in one.permissions for one in mapped)


def _may_be_nameless(mapped: Sequence[Region]) -> bool:
    """By its path, which can be made up; memory that is shared with children alone is no file."""
    path = mapped[0].path
    if path == SHARED_MEMORY and not _is_code(mapped):
        return False
    return path.endswith(DELETED) or path.startswith(MEMFD)
