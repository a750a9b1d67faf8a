"""The key that signs on this node, read only from a file that nobody else can read."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from gpuwarden.errors import UsageError
from gpuwarden.keys import PEM_LIMIT_BYTES, read_private, read_public

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def signing_key(path: str | None) -> Ed25519PrivateKey | None:
    """The private key that the policy's ``signing_key`` names; None when it names none.

    Errors: UsageError for one that is not there, that others can read, or that is no key.
    """
    if path is None:
        return None
    pem, status = _read(path, os.O_NOFOLLOW)
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o077:
        raise UsageError(
            f"signing_key {path}: others can read it",
            remedy=f"chown root: {path} && chmod 600 {path}; better a new key",
        )
    return read_private(pem, f"signing_key {path}")


def public_key(path: str) -> bytes:
    """The raw public key of a PEM file. Errors: UsageError."""
    return read_public(_read(path)[0], path)


def _read(path: str, flags: int = 0) -> tuple[bytes, os.stat_result]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{path}: not a file")
        return os.read(descriptor, PEM_LIMIT_BYTES), status
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    finally:
        os.close(descriptor)
