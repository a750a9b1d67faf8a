"""Which file system a device number is, as a process's own mount table tells it."""

from __future__ import annotations

from msgspec import Struct, field

from gpuwarden.host import Host
from gpuwarden.pattern import pattern

# proc_pid_mountinfo(5): id parent major:minor root mount-point options [optional…] - type source …
_LIMIT_BYTES = 4 << 20
_LINES_LIMIT = 50_000
_ESCAPE = pattern(rb"\\([0-7]{3})")
_SEPARATOR = b" - "

NETWORK_TYPES = (
    "nfs",
    "cifs",
    "smb",
    "9p",
    "afs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "fuse",
    "glusterfs",
    "orangefs",
    "pvfs2",
    "panfs",
    "wekafs",
    "autofs",
)
"""File systems whose server may not answer; compared with the beginning of the type."""


class Mount(Struct, frozen=True):
    """One mounted file system."""

    device: tuple[int, int]
    point: str
    filesystem: str


class MountTable(Struct):
    """The mounts of one mount namespace."""

    mounts: list[Mount] = field(default_factory=list)
    types: dict[tuple[int, int], str] = field(default_factory=dict)

    def filesystem(self, device: tuple[int, int], path: str) -> str | None:
        """The type of the file system with that device number, else of the one over ``path``.

        overlayfs and btrfs give files device numbers that no mount has.
        """
        if device in self.types:
            return self.types[device]
        best: Mount | None = None
        for mount in self.mounts:
            if _is_under(path, mount.point) and (
                best is None or len(mount.point) >= len(best.point)
            ):
                best = mount
        return None if best is None else best.filesystem

    def asks_a_server(self, path: str) -> bool:
        """Whether walking down ``path`` goes over a mount whose server may not answer."""
        return any(is_network(m.filesystem) and _is_under(path, m.point) for m in self.mounts)


def _is_under(path: str, point: str) -> bool:
    return point in ("/", path) or path.startswith(point + "/")


def is_network(filesystem: str | None) -> bool:
    """Whether a file there may be served by a machine that does not answer."""
    return filesystem is not None and filesystem.startswith(NETWORK_TYPES)


def parse_mountinfo(data: bytes) -> MountTable:
    """The mounts in the text of /proc/<pid>/mountinfo; lines that are no mounts are skipped.

    Source: proc_pid_mountinfo(5).
    """
    table = MountTable()
    for line in data.split(b"\n", _LINES_LIMIT)[:_LINES_LIMIT]:
        head, separator, tail = line.partition(_SEPARATOR)
        words = head.split(b" ")
        if not separator or len(words) < 6:
            continue
        major, colon, minor = words[2].partition(b":")
        if not (colon and _is_number(major) and _is_number(minor)):
            continue
        filesystem = tail.split(b" ", 1)[0][:64].decode("utf-8", "backslashreplace")
        point = _ESCAPE.sub(lambda m: bytes([int(m.group(1), 8) & 0xFF]), words[4])
        mount = Mount(
            (int(major), int(minor)), point.decode("utf-8", "backslashreplace"), filesystem
        )
        table.mounts.append(mount)
        table.types.setdefault(mount.device, filesystem)
    return table


def _is_number(text: bytes) -> bool:
    return text.isdigit() and len(text) <= 10


def read_mounts(host: Host, pid: int | str) -> MountTable:
    """The mount table of a process. Errors: Unavailable, Denied."""
    return parse_mountinfo(host.read_bytes(f"/proc/{pid}/mountinfo", _LIMIT_BYTES))
