"""An image in the memory of a process that runs: how long it is, and its bytes, read from outside.

For kernels that copy nothing while the caller waits. It is a race: what the process does meanwhile
is read, and when it has ended nothing is. cuda_image.h measures images in the same way.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from gpuwarden.code import elf, fatbin, tile_ir
from gpuwarden.errors import Malformed, TimedOut, Unavailable
from gpuwarden.probes import errands
from gpuwarden.probes.cuda import copies
from gpuwarden.probes.cuda.stopped import holds

PARTS_LIMIT = 64
SECTIONS_LIMIT = 65536
DEADLINE_SECONDS = 0.5
_WRAPPER_MAGIC = struct.pack("<I", fatbin.WRAPPER_MAGIC)
_POINTER = struct.Struct("<Q")
_ALIGNMENT = 8
_PIECE_BYTES = 1 << 18

Read = Callable[[int, int], bytes]
"""(address, size) → the bytes there, fewer where memory ends."""


class Extent(NamedTuple):
    """A run of bytes of an image."""

    address: int
    size_bytes: int
    """With ``until_nul``, 0."""
    until_nul: bool = False


class ReadImage(NamedTuple):
    """What could be read. Who takes it closes ``descriptor``."""

    descriptor: int | None
    captured_bytes: int
    missed: str


def extents(read: Read, address: int) -> Iterator[Extent]:
    """Where the bytes of the image at an address are: one run, or one for each linked fatbin.

    Errors: Malformed when nothing says where it ends.
    """
    head = read(address, fatbin.WRAPPER.size)
    if head.startswith(_WRAPPER_MAGIC):
        wrapper = fatbin.wrapper_at(head)
        if wrapper is None:
            raise Malformed("a fatbin's wrapper of an unknown version")
        yield _extent(read, wrapper.fatbin)
        if wrapper.version == 2 and wrapper.others:
            for index in range(PARTS_LIMIT):
                pointer = _exactly(read, wrapper.others + index * _POINTER.size, _POINTER.size)
                (other,) = _POINTER.unpack(pointer)
                if not other:
                    return
                yield _extent(read, other)
            raise Malformed(f"more than {PARTS_LIMIT} fatbins behind one wrapper")
        return
    yield _extent(read, address)


def _extent(read: Read, address: int) -> Extent:
    head = read(address, fatbin.HEADER.size)
    if not head:
        raise Malformed("the process's memory could not be read")
    if head.startswith(fatbin.MAGIC) and len(head) == fatbin.HEADER.size:
        _, _, header_bytes, behind = fatbin.HEADER.unpack(head)
        return Extent(address, header_bytes + behind)
    if head.startswith(elf.MAGIC):
        return Extent(address, _elf_bytes(read, address))
    if head.startswith(tile_ir.MAGIC):
        return Extent(address, _tile_ir_bytes(read, address))
    return Extent(address, 0, until_nul=True)


def _elf_bytes(read: Read, address: int) -> int:
    header = elf.header_at(_exactly(read, address, elf.HEADER.size))
    count, end = header.sections, elf.HEADER.size
    if not count and header.sections_at:
        first = _exactly(read, address + header.sections_at, elf.SECTION.size)
        count = elf.SECTION.unpack(first)[elf.SIZE]
    if count > SECTIONS_LIMIT:
        raise Malformed(f"an ELF file that says it has {count} sections")
    end = max(end, header.sections_at + count * header.section_bytes)
    end = max(end, header.segments_at + header.segments * header.segment_bytes)
    if header.section_bytes == elf.SECTION.size:
        table = _exactly(read, address + header.sections_at, count * elf.SECTION.size)
        for row in elf.SECTION.iter_unpack(table):
            if row[elf.TYPE] not in elf.NO_BYTES:
                end = max(end, row[elf.OFFSET] + row[elf.SIZE])
    return end


def _tile_ir_bytes(read: Read, address: int) -> int:
    """Doubles what is looked at until its end is in it: the sections say how long each is."""
    size = 1 << 16
    while True:
        data = read(address, size)
        try:
            return tile_ir.end_of(memoryview(data))
        except Malformed:
            if len(data) < size or size >= 1 << 29:
                raise
        size *= 2


def _exactly(read: Read, address: int, size: int) -> bytes:
    data = read(address, size)
    if len(data) != size:
        raise Malformed("the process's memory could not be read")
    return data


# -------------------------------------------------------------------- from a process


def read_running(pid: int, start_time_ns: int, image: Extent | int, limit: int) -> ReadImage:
    """Reads an image of a process in a child with a deadline: at an address, or of known extent."""
    copy: int | None = None
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            # What was opened stays that process's memory, whoever has its pid later.
            if holds(pid, start_time_ns) == "gone":
                raise Unavailable("the process had ended")
            copy = copies.empty("module")
            answer = errands.run(
                lambda kept: _copied(kept, image, limit),
                (memory, copy),
                deadline_seconds=DEADLINE_SECONDS,
            )
            missed = answer.decode("utf-8", "backslashreplace")
        finally:
            os.close(memory)
    except FileNotFoundError:
        missed = "the process had ended"
    except OSError as error:
        missed = f"the process's memory was not read: {error.strerror}"
    except (TimedOut, Unavailable) as error:
        missed = str(error)
    descriptor = None if copy is None else copies.sealed(copy)
    size = 0 if descriptor is None else os.fstat(descriptor).st_size
    return ReadImage(descriptor, size, missed)


def _copied(kept: Sequence[int], image: Extent | int, limit: int) -> bytes:
    """In the child: copies the image, gives the reason why bytes are missing."""
    memory, copy = kept

    def read(address: int, size: int) -> bytes:
        try:
            return os.pread(memory, size, address) if 0 <= address < 1 << 63 else b""
        except OSError:
            return b""

    written = 0
    try:
        for extent in [image] if isinstance(image, Extent) else extents(read, image):
            written += -written % _ALIGNMENT
            reason, length = _copy(read, copy, extent, written, limit)
            written += length
            if reason:
                return reason.encode()
    except Malformed as error:
        return str(error).encode("utf-8", "backslashreplace")
    return b""


def _copy(read: Read, copy: int, extent: Extent, at: int, limit: int) -> tuple[str, int]:
    address, size_bytes, until_nul = extent
    if at + size_bytes > limit:
        return "it is larger than what is copied", 0
    done = 0
    while until_nul or done < size_bytes:
        most = limit - at - done if until_nul else size_bytes - done
        # Text may end where its page does.
        piece = os.sysconf("SC_PAGESIZE") if until_nul else _PIECE_BYTES
        data = read(address + done, min(most, piece - (address + done) % piece))
        end = data.find(b"\0") if until_nul else -1
        if end >= 0:
            data = data[:end]
        if not data and end < 0:
            return "its text goes on" if not most else "the process's memory ended before it", done
        os.pwrite(copy, data, at + done)
        done += len(data)
        if end >= 0:
            break
    return "", done
