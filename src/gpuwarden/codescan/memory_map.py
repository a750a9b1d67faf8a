"""A process's address space as its maps file tells it: files, and memory that is in none.

Source: proc_pid_maps(5). A path there is only a name, which anyone can give to any file: what a
mapping is a mapping of is asked of the file behind it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec import Struct

from gpuwarden.pattern import pattern

MAPS_LIMIT_BYTES = 256 << 20
"""A process may have two thousand million mappings; an ordinary one has at most 65,530."""
ADDRESS_LIMIT = 1 << 57
"""User space ends below on every machine: five levels of page tables."""
DELETED = " (deleted)"

_LINE = pattern(
    rb"^([0-9a-f]{1,16})-([0-9a-f]{1,16}) ([r-][w-][x-][ps]) ([0-9a-f]{1,16}) "
    rb"([0-9a-f]{1,8}):([0-9a-f]{1,8}) (\d{1,20})(?: +([^\n]{0,4200}))?$",
    re.M,
)
_ESCAPED = pattern(r"\\([0-3][0-7]{2})")
# Pages of the kernel's own: arch_setup_additional_pages, the gate area, uprobes' slots.
_KERNELS = frozenset({"[vdso]", "[vsyscall]", "[uprobes]", "[sigpage]", "[vectors]"})

FileKey = tuple[tuple[int, int], int]
"""((major, minor) of the file system, inode) as maps tells them."""


class Region(Struct, frozen=True):
    """One line of a maps file; ``path`` as it stands there, unescaped, empty for anonymous."""

    start: int
    end: int
    permissions: str
    """``rw-p``: s is shared, p is private."""
    offset: int
    device: tuple[int, int]
    inode: int
    path: str = ""

    @property
    def is_file(self) -> bool:
        """Whether it is a mapping of a file, be it one of a memory file system or a device."""
        return self.inode != 0 or self.device != (0, 0)

    @property
    def is_shared(self) -> bool:
        return self.permissions[3] == "s"

    @property
    def is_kernels(self) -> bool:
        """Whether the kernel itself put it there; anonymous memory cannot be named like this."""
        return not self.is_file and (self.path in _KERNELS or self.path.startswith("[vvar"))

    @property
    def key(self) -> FileKey:
        return self.device, self.inode


def parse_maps(data: bytes) -> list[Region]:
    """The regions in the text of /proc/<pid>/maps by address; lines that are none are skipped."""
    found = []
    for start, end, permissions, offset, major, minor, inode, path in _LINE.findall(data):
        low, high = int(start, 16), int(end, 16)
        if not low < high <= ADDRESS_LIMIT:
            continue
        found.append(
            Region(
                low,
                high,
                permissions.decode("ascii"),
                int(offset, 16),
                (int(major, 16), int(minor, 16)),
                int(inode),
                _unescaped(path),
            )
        )
    found.sort(key=lambda region: region.start)
    return found


def _unescaped(path: bytes) -> str:
    text = path.decode("utf-8", "backslashreplace")
    if "\\" not in text:
        return text
    return _ESCAPED.sub(lambda octal: chr(int(octal[1], 8)), text)


def by_file(regions: Iterable[Region]) -> dict[FileKey, list[Region]]:
    """The mappings of each file, in the order of the files' lowest addresses."""
    found: dict[FileKey, list[Region]] = {}
    for region in regions:
        if region.is_file:
            found.setdefault(region.key, []).append(region)
    return found
