"""Who can write or read a path of a host, by owner and mode of it and of every directory above."""

from __future__ import annotations

import os
import stat

from gpuwarden.host import FileStatus, Host

EVERYBODY, GROUP = "everybody", "group"


def who(status: FileStatus, *, write: bool) -> tuple[str, ...]:
    """Who but root has that right by owner and mode: ``uid N``, ``group N``, ``everybody``.

    An access list shows in the group's bits, so what it gives at most is counted.
    """
    user, group, other = (
        (stat.S_IWUSR, stat.S_IWGRP, stat.S_IWOTH)
        if write
        else (stat.S_IRUSR, stat.S_IRGRP, stat.S_IROTH)
    )
    found: list[str] = []
    if status.uid != 0 and (write or status.mode & user):
        # An owner can always give itself the right to write.
        found.append(f"uid {status.uid}")
    if status.mode & group and status.gid != 0:
        found.append(f"{GROUP} {status.gid}")
    if status.mode & other:
        found.append(EVERYBODY)
    return tuple(found)


def changers(host: Host, path: str) -> tuple[str, ...]:
    """Who but root can put something else at ``path``: each with the file or directory by which.

    Links are followed. A directory with the sticky bit lets nobody replace root's files.
    Errors: Unavailable, Denied, Malformed.
    """
    found: list[str] = []
    real = host.resolved(path)
    here = real
    while True:
        status = host.status(here)
        writers = who(status, write=True)
        if here != real and status.mode & stat.S_ISVTX:
            writers = tuple(one for one in writers if one.startswith("uid"))
        found += [f"{one} ({here})" for one in writers]
        if here == "/":
            return tuple(found)
        here = os.path.dirname(here) or "/"
