"""Where the bytes of images wait: in memory of ours first, then in sealed memory files.

A memory file costs its writer a page at a time, several times what copying takes; a ring buffer
that is emptied that slowly fills up. So what is large goes to plain memory in huge pages while it
comes, and into its file a slice at a time, with the ring emptied in between.
"""

from __future__ import annotations

import ctypes
import mmap
import os

from gpuwarden.probes.cuda import copies

STAGED_FROM_BYTES = 1 << 20
"""Smaller images are written to their file at once."""
BLOCK_BYTES = 4 << 20
SPARE_BLOCKS = 16
"""Kept for the next image: pages that were used before come at once, even in a virtual machine."""
SLICE_BYTES = 4 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.pwrite.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]
_libc.pwrite.restype = ctypes.c_ssize_t


class Blocks:
    """Plain memory, in blocks; some are kept when they are given back."""

    def __init__(self) -> None:
        self._spare: list[mmap.mmap] = []

    def take(self) -> mmap.mmap:
        """A block. Errors: OSError."""
        if self._spare:
            return self._spare.pop()
        block = mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            block.madvise(mmap.MADV_HUGEPAGE)
        return block

    def give(self, block: mmap.mmap) -> None:
        """Takes a block back."""
        if len(self._spare) < SPARE_BLOCKS:
            self._spare.append(block)
        else:
            block.close()

    def release(self) -> None:
        """Lets go of what is kept."""
        while self._spare:
            self._spare.pop().close()


class Image:
    """The bytes of one image, in order. ``close`` it unless ``file`` was taken."""

    def __init__(self, blocks: Blocks, expected_bytes: int) -> None:
        self._spare = blocks
        self._is_staged = expected_bytes >= STAGED_FROM_BYTES
        self._blocks: list[mmap.mmap] = []
        self._descriptor: int | None = None
        self._moved = self._given = 0
        self.bytes = 0

    def append(self, address: int, length: int, offset: int) -> None:
        """Adds memory of this process, which comes at ``offset``: at the end, or a little behind.

        Errors: OSError, ValueError when there is no room for it.
        """
        if not length:
            return
        if not self._is_staged:
            _write(self._file(), address, length, offset)
            self.bytes = offset + length
            return
        end, gap = offset + length, offset - self.bytes
        while end > len(self._blocks) * BLOCK_BYTES:
            self._blocks.append(self._spare.take())
        for at in range(self.bytes, self.bytes + gap):
            # What a block held before is somebody else's.
            self._blocks[at // BLOCK_BYTES][at % BLOCK_BYTES] = 0
        while offset < end:
            index, at = divmod(offset, BLOCK_BYTES)
            part = min(end - offset, BLOCK_BYTES - at)
            view = (ctypes.c_char * part).from_buffer(self._blocks[index], at)
            ctypes.memmove(view, address, part)
            del view
            address, offset = address + part, offset + part
        self.bytes = end

    def append_file(self, descriptor: int, skipped_bytes: int) -> None:
        """Adds what is in another file behind its first bytes. Errors: OSError."""
        self.move(self.bytes)
        file, left = self._file(), os.fstat(descriptor).st_size - skipped_bytes
        at = skipped_bytes
        while left > 0:
            data = os.pread(descriptor, min(left, SLICE_BYTES), at)
            if not data:
                break
            os.pwrite(file, data, self.bytes)
            at, left, self.bytes = at + len(data), left - len(data), self.bytes + len(data)
        self._moved = self.bytes

    def last(self, size: int) -> bytes:
        """Its last bytes, ``size`` or fewer; not once it was moved. Errors: OSError."""
        size = min(size, self.bytes)
        start = self.bytes - size
        if not self._is_staged:
            return os.pread(self._file(), size, start) if size else b""
        found = b""
        while size:
            index, at = divmod(start, BLOCK_BYTES)
            part = self._blocks[index][at : at + size]
            found, start, size = found + part, start + len(part), size - len(part)
        return found

    def move(self, most_bytes: int = SLICE_BYTES) -> int:
        """Moves on into its file; how many bytes, 0 when all are there. Errors: OSError."""
        if not self._is_staged or self._moved >= self.bytes:
            return 0
        moved = 0
        while moved < most_bytes and self._moved < self.bytes:
            index, at = divmod(self._moved, BLOCK_BYTES)
            part = min(self.bytes - self._moved, BLOCK_BYTES - at, most_bytes - moved)
            view = (ctypes.c_char * part).from_buffer(self._blocks[index], at)
            try:
                _write(self._file(), ctypes.addressof(view), part, self._moved)
            finally:
                del view
            moved, self._moved = moved + part, self._moved + part
            if self._moved == self.bytes or self._moved % BLOCK_BYTES == 0:
                self._give_back(index + 1)
        return moved

    def file(self) -> int | None:
        """Its sealed file, for the caller to close; None when it has no bytes. Errors: OSError."""
        self.move(self.bytes)
        descriptor, self._descriptor = self._descriptor, None
        self.close()
        return None if descriptor is None else copies.sealed(descriptor)

    def close(self) -> None:
        """Lets go of everything."""
        self._give_back(len(self._blocks))
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _give_back(self, count: int) -> None:
        """The first ``count`` blocks, as far as that was not done before."""
        for index in range(self._given, count):
            self._spare.give(self._blocks[index])
        self._given = max(self._given, count)

    def _file(self) -> int:
        if self._descriptor is None:
            self._descriptor = copies.empty("module")
        return self._descriptor


def _write(descriptor: int, address: int, length: int, offset: int) -> None:
    # Pages that are asked for at once come in half the time that each takes when written to.
    os.posix_fallocate(descriptor, offset, length)
    while length:
        wrote = _libc.pwrite(descriptor, address, length, offset)
        if wrote <= 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        address, length, offset = address + wrote, length - wrote, offset + wrote
