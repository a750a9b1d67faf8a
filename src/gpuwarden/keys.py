"""ed25519 keys in PEM files: with them baselines, evidence and the journal are signed.

`cryptography` is imported where a key is made or read, and nowhere else.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from gpuwarden.errors import UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PEM_LIMIT_BYTES = 16 << 10


def fingerprint(public: bytes) -> str:
    """The short name of a raw public key: half its SHA-256 in hexadecimal."""
    return hashlib.sha256(public).hexdigest()[:32]


def make_key() -> tuple[bytes, bytes]:
    """A new private key and its public key, both as PEM."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return private, public


def read_private(pem: bytes, where: str) -> Ed25519PrivateKey:
    """The private key in a PEM text without a passphrase. Errors: UsageError."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        key = serialization.load_pem_private_key(pem[:PEM_LIMIT_BYTES], None)
    except TypeError as error:
        raise UsageError(f"{where}: the key has a passphrase, which is not asked for") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{where}: no private key in PEM") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{where}: not an ed25519 key", remedy="gpuwarden baseline keygen FILE")
    return key


def read_public(pem: bytes, where: str) -> bytes:
    """The raw public key in a PEM text. Errors: UsageError."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = serialization.load_pem_public_key(pem[:PEM_LIMIT_BYTES])
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{where}: no public key in PEM") from error
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError(f"{where}: not an ed25519 key")
    return key.public_bytes_raw()
