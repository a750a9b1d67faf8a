"""A root file system in memory, as the cpio archive that a kernel unpacks at boot.

Format "newc": Documentation/driver-api/early-userspace/buffer-format.rst of the kernel.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

_MAGIC = b"070701"
_TRAILER = "TRAILER!!!"


class Archive:
    """Files by their path in the guest; a later one of the same path replaces the first."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[int, int, int, bytes]] = {}

    def folder(self, path: str) -> None:
        """A folder, and those above it."""
        for above in (*reversed(Path(path).parents), Path(path)):
            if str(above) != "/":
                self._entries.setdefault(str(above), (stat.S_IFDIR | 0o755, 0, 0, b""))

    def text(self, path: str, content: str, mode: int = 0o644) -> None:
        """A file with this content."""
        self._put(path, stat.S_IFREG | mode, content.encode())

    def link(self, path: str, target: str) -> None:
        """A symbolic link."""
        self._put(path, stat.S_IFLNK | 0o777, target.encode())

    def node(self, path: str, major: int, minor: int) -> None:
        """A character device node for everybody."""
        self._put(path, stat.S_IFCHR | 0o666, b"", device=os.makedev(major, minor))

    def file(self, source: Path, path: str | None = None) -> None:
        """A copy of a file, what a link points to, with its time: compiled Python names that."""
        status = source.stat()
        mode = stat.S_IFREG | stat.S_IMODE(status.st_mode)
        self._put(path or str(source), mode, source.read_bytes(), int(status.st_mtime))

    def _put(self, path: str, mode: int, content: bytes, seconds: int = 0, device: int = 0) -> None:
        self.folder(str(Path(path).parent))
        self._entries[path] = (mode, seconds, device, content)

    def write(self, path: Path) -> None:
        """Writes the archive, uncompressed: unpacking it would cost an emulated guest seconds."""
        with path.open("wb") as out:
            for number, (name, entry) in enumerate(sorted(self._entries.items()), 1):
                out.write(_member(number, name.lstrip("/"), *entry))
            out.write(_member(0, _TRAILER, 0, 0, 0, b""))


def _member(number: int, name: str, mode: int, seconds: int, device: int, content: bytes) -> bytes:
    raw = os.fsencode(name) + b"\0"
    links = 2 if stat.S_ISDIR(mode) else 1
    fields = (number, mode, 0, 0, links, seconds, len(content), 0, 0)
    numbers = (*fields, os.major(device), os.minor(device), len(raw), 0)
    head = _MAGIC + b"".join(b"%08X" % value for value in numbers) + raw
    return head + bytes(-len(head) % 4) + content + bytes(-len(content) % 4)
