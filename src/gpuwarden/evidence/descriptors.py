"""Every descriptor of a process: what it leads to, where it stands, how it was opened.

Nothing behind one is opened here: links are read, statx is asked, and the kernel's notes.
"""

from __future__ import annotations

import stat
import time
from collections import Counter
from typing import Any

from msgspec import Struct

from gpuwarden.errors import Denied, GpuwardenError
from gpuwarden.evidence.opened_process import OpenedProcess
from gpuwarden.evidence.shelf import Shelf
from gpuwarden.host_calls import FileStatus
from gpuwarden.outputs.words import escape

SEEN_LIMIT = 200_000
TOLD_LIMIT = 8192
"""The telling ones first: devices, files without a name, sockets; then the rest by number."""
SECONDS = 1.0
"""After which no further ones are told of: a hundred thousand are a way to hide one."""
NOTES_LIMIT_BYTES = 8192
TARGET_LIMIT = 4096
NAME_BYTES_LIMIT = 12
_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
    stat.S_IFSOCK: "socket",
    stat.S_IFIFO: "pipe",
    stat.S_IFLNK: "link",
}


class Descriptor(Struct, frozen=True):
    """One of them, without its notes."""

    number: int
    status: FileStatus

    @property
    def is_nameless(self) -> bool:
        """A regular file that no name leads to: deleted, or a memfd."""
        return self.status.is_regular and self.status.link_count == 0

    @property
    def rank(self) -> tuple[int, int]:
        """What to tell first."""
        telling = self.is_nameless or self.status.is_character_device
        is_socket = stat.S_ISSOCK(self.status.mode)
        return (0 if telling else 1 if is_socket else 2), self.number


def descriptors(process: OpenedProcess, shelf: Shelf) -> list[Descriptor]:
    """All of them by number; those that close meanwhile are left out."""
    found: list[Descriptor] = []
    refused = 0
    with shelf.trying("descriptors"):
        names = process.names("fd")
        numbers = sorted(
            int(name)
            for name in names
            if name.isascii() and name.isdigit() and len(name) < NAME_BYTES_LIMIT
        )
        if len(numbers) > SEEN_LIMIT:
            shelf.left_out(f"{len(numbers) - SEEN_LIMIT} descriptors", f"more than {SEEN_LIMIT}")
        for number in numbers[:SEEN_LIMIT]:
            try:
                found.append(Descriptor(number, process.status(f"fd/{number}")))
            except Denied:
                refused += 1
            except GpuwardenError:
                continue
    if refused:
        shelf.unread(f"{refused} descriptors", "what is behind them may not be seen")
    return found


def collect(process: OpenedProcess, shelf: Shelf) -> list[Descriptor]:
    """Tells of them in ``descriptors.json``; all that were seen."""
    found = descriptors(process, shelf)
    until = time.monotonic() + SECONDS
    told: list[dict[str, Any]] = []
    for one in sorted(found, key=lambda one: one.rank)[:TOLD_LIMIT]:
        if time.monotonic() > until:
            break
        told.append(_told(process, one))
    if len(told) < len(found):
        left = len(found) - len(told)
        shelf.left_out(f"{left} descriptors", f"only {len(told)} are told, the telling ones first")
    told.sort(key=lambda one: int(one["descriptor"]))
    kinds = Counter(_kind(one.status) for one in found)
    document = {"count": len(found), "kinds": dict(sorted(kinds.items())), "descriptors": told}
    if found:
        shelf.put_json("descriptors.json", document, "descriptors")
    return found


def _kind(status: FileStatus) -> str:
    # An eventfd, an epoll, a BPF map have no kind of their own: their target says which.
    return _KINDS.get(stat.S_IFMT(status.mode), "anonymous")


def _told(process: OpenedProcess, one: Descriptor) -> dict[str, Any]:
    status = one.status
    told: dict[str, Any] = {"descriptor": one.number, "target": None, "kind": _kind(status)}
    try:
        told["target"] = escape(process.link(f"fd/{one.number}")[:TARGET_LIMIT])
    except GpuwardenError as error:
        told["unread"] = str(error)
    told["device"] = f"{status.device[0]}:{status.device[1]}"
    told["inode"] = status.inode
    if status.is_character_device or stat.S_ISBLK(status.mode):
        told["number"] = f"{status.special[0]}:{status.special[1]}"
    if status.is_regular:
        told |= {"size_bytes": status.size_bytes, "links": status.link_count, "uid": status.uid}
    try:
        notes = process.read(f"fdinfo/{one.number}", NOTES_LIMIT_BYTES)
    except GpuwardenError:
        return told
    # pos, flags, mnt_id, ino, then what that kind of file adds (proc_pid_fdinfo(5)).
    told["notes"] = parse_notes(notes)
    return told


def parse_notes(data: bytes) -> dict[str, str]:
    """The lines of /proc/PID/fdinfo/N by name; any bytes give a result, later ones count."""
    notes: dict[str, str] = {}
    for line in data.decode("utf-8", "backslashreplace").split("\n")[:256]:
        name, colon, value = line.partition(":")
        if colon:
            notes[escape(name.strip())] = escape(value.strip())
    return notes
