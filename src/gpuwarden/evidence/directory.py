"""The directory that archives are written into, and how much they take there."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import NoReturn

from gpuwarden.errors import Denied, Unavailable, UsageError

ENTRIES_LIMIT = 65536


def open_directory(path: str) -> int:
    """A descriptor of the directory, which is made with mode 0700 if it is not there.

    One that others may write is refused unless it is sticky, as /tmp is: they could put another
    archive in the place of this one. Errors: UsageError, Denied, Unavailable.
    """
    try:
        with contextlib.suppress(FileExistsError):
            os.makedirs(path, mode=0o700)
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        refuse(error, path)
    found = os.fstat(handle)
    trouble = ""
    if found.st_uid not in (0, os.geteuid()):
        trouble = f"belongs to the user {found.st_uid}"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
        trouble = "others may write into it"
    if trouble:
        os.close(handle)
        raise UsageError(f"{path}: {trouble}", remedy=f"chmod 700 {path}, or another directory")
    return handle


def free_bytes(handle: int) -> int:
    """What the file system has left for this user. Errors: Unavailable."""
    try:
        left = os.fstatvfs(handle)
    except OSError as error:
        raise Unavailable(f"the file system does not say what is free: {error.strerror}") from error
    return left.f_bavail * left.f_frsize


def held_bytes(path: str) -> int:
    """What the files of a directory take, not counting those below it; 0 if it is not there.

    Errors: Denied, Unavailable.
    """
    total = 0
    try:
        with os.scandir(path) as entries:
            for count, entry in enumerate(entries):
                if count >= ENTRIES_LIMIT:
                    raise Unavailable(f"{path}: more than {ENTRIES_LIMIT} files")
                with contextlib.suppress(FileNotFoundError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
    except FileNotFoundError:
        return 0
    except OSError as error:
        refuse(error, path)
    return total


def refuse(error: OSError | ValueError, path: str) -> NoReturn:
    """Raises what the project calls an error of the system."""
    if isinstance(error, PermissionError):
        raise Denied(f"{path}: permission denied") from error
    if isinstance(error, OSError):
        raise Unavailable(f"{path}: {error.strerror or error}") from error
    raise UsageError(f"{path!r}: not a path") from error
