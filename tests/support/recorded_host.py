"""A node recorded as a folder of plain files: ``tests/hosts/<case>/{proc,sys,dev,etc,…}``.

git keeps neither device nodes nor owners nor link counts, so two text tables beside the tree say
what the kernel would have said. Blank lines and lines that start with ``#`` are skipped.

``devices.txt`` says which paths are character devices::

    # path  major  minor  [attribute=value …]
    /dev/nvidia0           195 0  mode=0666 uid=0 gid=0 inode=501
    /dev/dri/renderD128    226 128
    /proc/400/fd/7         195 1
    /tmp/a name with spaces 195 0

A path under /dev need not exist as a file: it is listed and answers ``status`` all the same. A
descriptor (a dangling symbolic link such as ``proc/100/fd/3 -> /dev/nvidia0``) is a device when
its own path is in the table, or else its target is; a `` (deleted)`` at the target's end is
ignored for the second. Give a link its own line when its text must not decide.

``files.txt`` says what statx says of a link's target or of a path::

    # path  attribute=value …
    /proc/100/exe          nlink=0 inode=77 device=8:1 mode=0755 uid=1000 size=4096
    /usr/bin/python3.11    uid=0 mode=0755

A link ``socket:[N]`` is a socket with inode N.

Attributes: mode (octal permissions; with a file type for others than regular files), uid, gid,
inode, device (``major:minor``), nlink, size. What a table leaves out is mode 0755, uid and gid 0,
one link, and an inode that is derived from the path a link leads to, so that a link and its target
are the same file. Files that exist in the tree have their own size and type, and never the
checkout's owner or write permissions.
"""

from __future__ import annotations

import re
import stat
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from gpuwarden.errors import Unavailable
from gpuwarden.host import FileStatus, Host, OpenFiles

DELETED = " (deleted)"
_SOCKET = re.compile(r"socket:\[(\d+)\]")


@dataclass(frozen=True)
class _Entry:
    number: tuple[int, int] | None = None
    attributes: dict[str, str] = field(default_factory=dict)


def _rows(table: Path) -> list[str]:
    if not table.exists():
        return []
    lines = [line.strip() for line in table.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def _split(row: str) -> tuple[list[str], dict[str, str]]:
    words = row.split(" ")
    attributes: dict[str, str] = {}
    while words and ("=" in words[-1] or not words[-1]):
        if words[-1]:
            key, _, value = words[-1].partition("=")
            attributes[key] = value
        words.pop()
    return words, attributes


def _device_row(row: str) -> tuple[str, _Entry]:
    words, attributes = _split(row)
    words = " ".join(words).rsplit(None, 2)
    if len(words) != 3:
        raise ValueError(f"devices.txt: expected 'path major minor', got {row!r}")
    return words[0], _Entry((int(words[1]), int(words[2])), attributes)


def _file_row(row: str) -> tuple[str, _Entry]:
    words, attributes = _split(row)
    return " ".join(words).strip(), _Entry(None, attributes)


class RecordedHost(Host):
    """A ``Host`` over a recorded folder; see the module's text for the two tables."""

    def __init__(self, root: str | Path) -> None:
        super().__init__(str(root))
        entries = [_file_row(row) for row in _rows(Path(root) / "files.txt")]
        entries += [_device_row(row) for row in _rows(Path(root) / "devices.txt")]
        self.entries: dict[str, _Entry] = dict(entries)

    def path(self, path: str) -> str:
        """Links under /proc stay in the tree too: ``proc/100/exe`` is never the machine's file."""
        return self._resolve(path)

    def open_files(self, directory: str) -> OpenFiles:
        return self._open_files_one_by_one(directory)

    def kernel_pids(self) -> list[int]:
        return self.pids()

    def names(self, path: str) -> list[str]:
        parent = path.rstrip("/")
        if parent.startswith("/proc"):
            return super().names(path)
        recorded = {
            entry[len(parent) + 1 :].split("/", 1)[0]
            for entry in self.entries
            if entry.startswith(parent + "/")
        }
        try:
            return sorted(recorded | set(super().names(path)))
        except Unavailable:
            if not recorded:
                raise
            return sorted(recorded)

    def status(self, path: str) -> FileStatus:
        if path in self.entries:
            return self._recorded(path, self.entries[path])
        if any(entry.startswith(path.rstrip("/") + "/") for entry in self.entries):
            return self._made(path, stat.S_IFDIR | 0o755, {}, None)
        return self._found(path)

    def link_target_status(self, path: str) -> FileStatus:
        target = self.read_link(path)
        if path in self.entries:
            return self._recorded(path, self.entries[path], inode_of=target)
        for name in (target, target.removesuffix(DELETED)):
            if name in self.entries:
                return self._recorded(name, self.entries[name])
        socket = _SOCKET.fullmatch(target)
        if socket:
            return self._made(target, stat.S_IFSOCK | 0o777, {"inode": socket.group(1)}, None)
        if not target.startswith("/"):
            return self._made(target, stat.S_IFREG | 0o600, {}, None)
        return self._found(target)

    def _found(self, path: str) -> FileStatus:
        real = super().status(path)
        mode = stat.S_IFMT(real.mode) | 0o755
        return self._made(path, mode, {"size": str(real.size_bytes)}, None)

    def _recorded(self, path: str, entry: _Entry, inode_of: str = "") -> FileStatus:
        kind = stat.S_IFREG if entry.number is None else stat.S_IFCHR
        mode = int(entry.attributes.get("mode", "0755" if entry.number is None else "0666"), 8)
        return self._made(
            inode_of or path,
            mode if stat.S_IFMT(mode) else kind | mode,
            entry.attributes,
            entry.number,
        )

    def _made(
        self, path: str, mode: int, attributes: dict[str, str], number: tuple[int, int] | None
    ) -> FileStatus:
        major, _, minor = attributes.get("device", "8:1").partition(":")
        return FileStatus(
            mode=mode,
            uid=int(attributes.get("uid", "0")),
            gid=int(attributes.get("gid", "0")),
            inode=int(attributes.get("inode", str(zlib.crc32(path.encode())))),
            size_bytes=int(attributes.get("size", "0")),
            link_count=int(attributes.get("nlink", "1")),
            device=(int(major), int(minor)),
            special=number or (0, 0),
        )
