"""Which pages of a process are there to be read: an absent page is never asked for.

Reading an untouched page of a process makes it: page tables, and on memory files the page itself;
reading one that is in swap or on a GPU brings it back. All of that is the workload's memory, so
only pages that are present are read. Asked by PAGEMAP_SCAN (kernel 6.7), else from the text of
smaps and the entries of pagemap.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import os
import re
import struct
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from gpuwarden.codescan.memory_map import Region
from gpuwarden.codescan.tasks import Span
from gpuwarden.pattern import pattern

# linux/fs.h: struct pm_scan_arg (size, flags, start, end, walk_end, vec, vec_len, max_pages,
# category_inverted, category_mask, category_anyof_mask, return_mask), struct page_region (start,
# end, categories), _IOWR('f', 16, struct pm_scan_arg).
_SCAN = struct.Struct("=12Q")
_PAGE_REGION = struct.Struct("=3Q")
_SCAN_REQUEST = 0xC0606610
_IS_FILE, _IS_PRESENT, _IS_SWAPPED, _IS_ZERO_PAGE = 1 << 2, 1 << 3, 1 << 4, 1 << 5
_REGIONS_A_CALL = 4096
# Documentation/admin-guide/mm/pagemap.rst: u64 a page; bit 63 present, 62 swapped, 61 of a file.
_ENTRY_BYTES = 8
_PRESENT, _SWAPPED, _FILE = 1 << 63, 1 << 62, 1 << 61
_ENTRIES_A_READ = 1 << 17
_SMAPS_LIMIT_BYTES = 256 << 20
_SMAPS_COUNT = pattern(
    rb"^([0-9a-f]{1,16})-[0-9a-f]{1,16} [r-][w-][x-][ps] |^(Rss|Swap): +(\d{1,16}) kB$", re.M
)
SPARSE_LIMIT_BYTES = 1 << 40
"""Without PAGEMAP_SCAN: a process whose regions in use span more is looked through up to here."""

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Presence(Struct):
    """What of some regions is there: the spans by address, and what is not to be read."""

    spans: list[Span]
    swapped_bytes: int = 0
    """In swap, being moved, or in a device's memory: the kernel keeps one mark for all three."""
    unseen_bytes: int = 0
    """Of regions that are too sparse to be looked through here."""

    @property
    def bytes(self) -> int:
        return sum(span.size for span in self.spans)


class Pages:
    """The pages of one process, by its open pagemap and, without PAGEMAP_SCAN, its smaps."""

    def __init__(self, pagemap: int, smaps: int, *, by_scan: bool = True) -> None:
        self._pagemap = pagemap
        self._smaps = smaps
        self._vector = ctypes.create_string_buffer(_REGIONS_A_CALL * _PAGE_REGION.size)
        self._by_scan = by_scan
        self._used: dict[int, bool] | None = None
        self._looked_through = 0

    def presence(self, regions: Sequence[Region]) -> Presence:
        """What of these regions is there, by address; nothing of files that nobody wrote to.

        A private mapping of a file is the file itself until it is written to, in whatever place.
        Errors: OSError, as when the process has ended.
        """
        found = Presence([])
        for region in regions:
            pending_start = pending_end = region.start
            for start, end, is_swapped in self._of(region, found):
                if is_swapped:
                    found.swapped_bytes += end - start
                elif pending_end == start:
                    pending_end = end
                else:
                    _add(found, region, pending_start, pending_end)
                    pending_start, pending_end = start, end
            _add(found, region, pending_start, pending_end)
        return found

    def _of(self, region: Region, found: Presence) -> Iterable[tuple[int, int, bool]]:
        if region.is_file and not any(True for _ in self._marked(region, found, _IS_FILE)):
            return ()
        return self._marked(region, found, 0)

    def _marked(
        self, region: Region, found: Presence, not_wanted: int
    ) -> Iterator[tuple[int, int, bool]]:
        """(start, end, whether swapped) of pages that are there or in swap."""
        if self._by_scan:
            try:
                yield from self._scanned(region, not_wanted | _IS_ZERO_PAGE)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTTY, errno.EINVAL):
                    raise
                self._by_scan = False
        if self._used is None:
            self._used = _regions_in_use(self._smaps)
        # A region that smaps did not tell of is new.
        if self._used.get(region.start, True):
            yield from self._entries(region, found, not_wanted)

    def _scanned(self, region: Region, not_wanted: int) -> Iterator[tuple[int, int, bool]]:
        """By PAGEMAP_SCAN, which passes over what is not there and over mappings of devices."""
        at = region.start
        while at < region.end:
            argument = bytearray(
                _SCAN.pack(
                    _SCAN.size,
                    0,
                    at,
                    region.end,
                    0,
                    ctypes.addressof(self._vector),
                    _REGIONS_A_CALL,
                    0,
                    not_wanted,
                    not_wanted,
                    _IS_PRESENT | _IS_SWAPPED,
                    _IS_SWAPPED,
                )
            )
            count = fcntl.ioctl(self._pagemap, _SCAN_REQUEST, argument)
            walked_to = _SCAN.unpack(argument)[4]
            for i in range(count):
                start, end, marks = _PAGE_REGION.unpack_from(self._vector, i * _PAGE_REGION.size)
                yield start, end, bool(marks & _IS_SWAPPED)
            if walked_to <= at:
                return
            at = walked_to

    def _entries(
        self, region: Region, found: Presence, not_wanted: int
    ) -> Iterator[tuple[int, int, bool]]:
        """By the entries of pagemap, one a page; those of devices' mappings read as absent."""
        # Imported here: a kernel that can scan needs none of it.
        import numpy as np

        at, last = region.start, region.end
        self._looked_through += last - at
        if self._looked_through > SPARSE_LIMIT_BYTES:
            found.unseen_bytes += last - at
            return
        while at < last:
            wanted = min(_ENTRIES_A_READ, (last - at) // PAGE_BYTES)
            raw = os.pread(self._pagemap, wanted * _ENTRY_BYTES, at // PAGE_BYTES * _ENTRY_BYTES)
            if len(raw) < _ENTRY_BYTES:
                return
            entries = np.frombuffer(raw[: len(raw) // _ENTRY_BYTES * _ENTRY_BYTES], dtype="=u8")
            if not entries.any():
                at += len(entries) * PAGE_BYTES
                continue
            state = np.where(entries & np.uint64(_PRESENT), 1, 0).astype(np.int8)
            state[(entries & np.uint64(_SWAPPED)) != 0] = 2
            if not_wanted & _IS_FILE:
                state[(entries & np.uint64(_FILE)) != 0] = 0
            edges = np.flatnonzero(np.diff(state)) + 1
            bounds = [0, *edges.tolist(), len(state)]
            for first, behind in itertools.pairwise(bounds):
                if state[first]:
                    yield (
                        at + first * PAGE_BYTES,
                        at + behind * PAGE_BYTES,
                        bool(state[first] == 2),
                    )
            at += len(entries) * PAGE_BYTES


def _add(found: Presence, region: Region, start: int, end: int) -> None:
    if start < end:
        found.spans.append(Span(start=start, size=end - start, mapping=region.path))


def _regions_in_use(smaps: int) -> dict[int, bool]:
    """Start of a region → whether smaps counts any page of it as there or in swap."""
    chunks: list[bytes] = []
    size = 0
    while size < _SMAPS_LIMIT_BYTES and (chunk := os.read(smaps, 1 << 20)):
        chunks.append(chunk)
        size += len(chunk)
    return parse_smaps(b"".join(chunks))


def parse_smaps(data: bytes) -> dict[int, bool]:
    """Start of each region in the text of /proc/<pid>/smaps → whether it has pages, or swap.

    Source: proc_pid_smaps(5). Any bytes give a result.
    """
    found: dict[int, bool] = {}
    start: int | None = None
    for head, name, amount in _SMAPS_COUNT.findall(data):
        if not name:
            start = int(head, 16)
            found[start] = False
        elif start is not None and int(amount):
            found[start] = True
    return found
