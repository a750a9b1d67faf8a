"""A baseline's file: written beside its place and renamed, so a reader sees a whole one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from typing import TYPE_CHECKING

from gpuwarden.code.baseline.entries import Entries
from gpuwarden.code.baseline.signing import seal
from gpuwarden.errors import Denied, UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def write_baseline(
    path: str,
    entries: Entries,
    *,
    name: str = "",
    version: str = "",
    tool: str = "",
    created: int = 0,
    key: Ed25519PrivateKey | None = None,
) -> bytes:
    """Writes a baseline and returns its head; the same arguments give the same bytes.

    Errors: UsageError when a text does not fit, Denied when it cannot be written.
    """
    try:
        head, parts = entries.pack(name=name, version=version, tool=tool, created=created)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
    write_whole(path, [head, seal(head, key), *parts], mode=0o644)
    return head


def write_whole(path: str, parts: Iterable[bytes], *, mode: int) -> None:
    """Writes a file all or nothing. Errors: Denied."""
    path = os.path.abspath(path)
    temporary = ""
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=".", dir=os.path.dirname(path))
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.writelines(parts)
            file.flush()
            os.fsync(descriptor)
        os.rename(temporary, path)
    except OSError as error:
        if temporary:
            try:
                os.unlink(temporary)
            except OSError:
                pass
        raise Denied(f"{path}: cannot be written: {error.strerror}") from error


def write_new(path: str, data: bytes, *, mode: int) -> None:
    """Writes a file that is not there yet. Errors: UsageError when it is, Denied."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
    except FileExistsError as error:
        raise UsageError(f"{path}: is there already; a key is never overwritten") from error
    except OSError as error:
        raise Denied(f"{path}: cannot be written: {error.strerror}") from error
