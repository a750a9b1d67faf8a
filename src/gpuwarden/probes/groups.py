"""The control groups that a process is in, as the probe looks them up to deny: path, place, number.

One in version 2 and one in each version 1 hierarchy of ``DENIABLE_CONTROLLERS``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from msgspec import Struct

from gpuwarden.errors import GpuwardenError
from gpuwarden.host import Host
from gpuwarden.probes import cgroup2
from gpuwarden.probes.cgroup2 import DENIABLE_CONTROLLERS, GroupKey

LINES_LIMIT = 64
DEPTH_LIMIT = 64
_LIMIT_BYTES = 64 << 10


class Group(Struct, frozen=True):
    """A control group that is not a root."""

    key: GroupKey
    path: str
    """In its hierarchy, as /proc/<pid>/cgroup has it."""
    directory: str
    """Where it is mounted here."""


def parse_lines(text: str) -> list[tuple[int, tuple[str, ...], str]]:
    """(hierarchy, controllers, path) of each well-formed line of a /proc/<pid>/cgroup."""
    found = []
    for line in text.splitlines()[:LINES_LIMIT]:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number.isascii() and number.isdigit() and len(number) < 10 and path.startswith("/"):
            found.append((int(number), tuple(controllers.split(",")) if controllers else (), path))
    return found


def groups_of(
    pid: int | str, host: Host | None = None, *, with_parents: bool = False
) -> list[Group]:
    """The groups of a process that are in sight here, with those above them if asked for.

    A root group is left out, and so is one that only another mount of its hierarchy shows.
    Errors: none; nothing of a process that is gone.
    """
    host = host or Host()
    try:
        text = host.read_bytes(f"/proc/{pid}/cgroup", _LIMIT_BYTES).decode(
            "utf-8", "surrogateescape"
        )
        mounts = cgroup2.parse_mounts(host.read_text("/proc/self/mountinfo"))
    except GpuwardenError:
        return []
    found = []
    for number, controllers, path in parse_lines(text):
        if number != 0 and not set(controllers) & set(DENIABLE_CONTROLLERS):
            continue
        if ".." in path.split("/"):
            continue
        paths = [path.removesuffix(" (deleted)")]
        if with_parents:
            paths += _above(path)
        where = [
            mount.where
            for mount in mounts
            if (mount.kind == "cgroup2" and number == 0)
            or (mount.kind == "cgroup" and number != 0 and set(controllers) <= set(mount.options))
        ]
        for one in paths:
            group = _group(host, where, number, one)
            if group is not None:
                found.append(group)
    return found


def _above(path: str) -> Iterator[str]:
    parts = path.strip("/").split("/")[:DEPTH_LIMIT]
    for count in range(len(parts) - 1, 0, -1):
        yield "/" + "/".join(parts[:count])


def _group(host: Host, where: list[str], number: int, path: str) -> Group | None:
    if path == "/":
        return None
    for mount in where:
        directory = os.path.normpath(mount + path)
        try:
            key = cgroup2.group_key(host, directory)
        except GpuwardenError:
            continue
        if key.hierarchy == number:
            return Group(key, path, directory)
    return None
