"""The journal's file and its directory: made, opened and locked, and refused when not safe."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from gpuwarden.errors import Denied, TimedOut, Unavailable

JOURNAL = "/var/lib/gpuwarden/journal"
LOCK_SECONDS = 10.0
_LOCK_PAUSE_SECONDS = 0.001
"""Shorter than a writer is between two entries: one who always writes lets others in, too."""
_REOPENINGS = 8
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITING = os.O_RDWR | os.O_APPEND | _FLAGS


@contextmanager
def for_writing(path: str) -> Iterator[int]:
    """A descriptor of the file, made with its directory if need be, and locked for one writer.

    Errors: Denied when somebody else could change it, TimedOut, Unavailable.
    """
    directory, name = os.path.split(os.path.abspath(path))
    try:
        _make(directory)
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise _told(directory, error) from error
    try:
        _check_directory(directory, os.fstat(folder))
        for _ in range(_REOPENINGS):
            descriptor = _opened(folder, name, path)
            try:
                _check_file(path, os.fstat(descriptor))
                lock(descriptor, fcntl.LOCK_EX, path)
                if _is_still(descriptor, folder, name):
                    yield descriptor
                    return
            finally:
                os.close(descriptor)
        raise Unavailable(f"{path}: it is replaced again and again")
    except OSError as error:
        raise _told(path, error) from error
    finally:
        os.close(folder)


@contextmanager
def for_reading(path: str, *, patience_seconds: float = LOCK_SECONDS) -> Iterator[tuple[int, int]]:
    """A descriptor of the file and the size that it has between two writers.

    The lock is let go at once; what is written later is beyond that size.
    Errors: Unavailable, TimedOut, Denied.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    except OSError as error:
        raise _told(path, error) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Denied(f"{path}: not a file")
        lock(descriptor, fcntl.LOCK_SH, path, patience_seconds)
        size = os.fstat(descriptor).st_size
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        yield descriptor, size
    except OSError as error:
        raise _told(path, error) from error
    finally:
        os.close(descriptor)


def lock(descriptor: int, kind: int, path: str, patience_seconds: float = LOCK_SECONDS) -> None:
    """Errors: TimedOut when others have it all the time."""
    until = time.monotonic() + patience_seconds
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except OSError as error:
            if time.monotonic() >= until:
                raise TimedOut(
                    f"{path}: locked by another process", remedy=f"fuser -v {path}"
                ) from error
            time.sleep(_LOCK_PAUSE_SECONDS)
        else:
            return


def _make(directory: str) -> None:
    """The directory and what is missing above it, each for root alone and on disk at once."""
    missing = []
    while not os.path.lexists(directory):
        missing.append(directory)
        directory = os.path.dirname(directory)
    for one in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(one, 0o700)
        _sync_directory(os.path.dirname(one))


def _sync_directory(directory: str) -> None:
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _opened(folder: int, name: str, path: str) -> int:
    try:
        with suppress(FileExistsError):
            made = os.open(name, _WRITING | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
            os.fsync(folder)
            return made
        return os.open(name, _WRITING, dir_fd=folder)
    except OSError as error:
        raise _told(path, error) from error


def _check_directory(directory: str, status: os.stat_result) -> None:
    if not _is_ours(status) or status.st_mode & _OTHERS_WRITE:
        raise Denied(
            f"{directory}: others may write there",
            remedy=f"chown root: {directory} && chmod 700 {directory}",
        )
    above = os.path.realpath(directory)
    while above != "/":
        above = os.path.dirname(above)
        status = os.stat(above)
        open_to_all = status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
        if not _is_ours(status) or open_to_all:
            raise Denied(
                f"{directory}: others may replace it, by way of {above}",
                remedy="keep the journal in a directory of root's",
            )


def _check_file(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise Denied(f"{path}: not a file")
    if status.st_nlink > 1:
        raise Denied(f"{path}: it has another name elsewhere", remedy=f"find / -samefile {path}")
    if not _is_ours(status) or status.st_mode & 0o077:
        raise Denied(
            f"{path}: others may read or write it",
            remedy=f"chown root: {path} && chmod 600 {path}; gpuwarden journal verify",
        )


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid())


def _is_still(descriptor: int, folder: int, name: str) -> bool:
    """The name still means this file: whoever moved it away while we waited has an old one."""
    try:
        named = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    mine = os.fstat(descriptor)
    return (named.st_dev, named.st_ino) == (mine.st_dev, mine.st_ino)


def _told(path: str, error: OSError) -> Unavailable | Denied:
    if isinstance(error, FileNotFoundError):
        return Unavailable(f"{path}: no such file")
    if isinstance(error, NotADirectoryError):
        return Denied(f"{path}: not a directory, or a link to one")
    if error.errno == errno.ELOOP:
        return Denied(f"{path}: a link, which is not followed")
    return Denied(f"{path}: {error.strerror}")
