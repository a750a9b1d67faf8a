"""Bytes copied out of somebody else's hands: memory files that nobody can change any more."""

from __future__ import annotations

import contextlib
import fcntl
import os


def empty(name: str) -> int:
    """A new memory file to be written; its descriptor is the caller's. Errors: OSError."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def seal(descriptor: int) -> int:
    """From now on its bytes and its length stay as they are; its length. Errors: OSError."""
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return os.fstat(descriptor).st_size


def sealed(descriptor: int) -> int | None:
    """Seals it and gives it back; closes it and gives None if it holds nothing."""
    with contextlib.suppress(OSError):
        if seal(descriptor):
            return descriptor
    os.close(descriptor)
    return None
