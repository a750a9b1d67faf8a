"""Who signed a baseline: ed25519 keys in PEM files, and what is said of a signature.

`cryptography` is imported where a signature is made or checked, and nowhere else: a scan with the
baseline that is installed needs none.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from gpuwarden.errors import Malformed, UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gpuwarden.code.baseline.layout import HEAD, SEAL, SIGNED_AS

Trust = Literal["trusted", "installed", "unknown key", "unsigned", "wrong signature"]
"""``installed``: the one that came with gpuwarden, told by the hash of its head."""

PEM_LIMIT_BYTES = 16 << 10
NO_SEAL = bytes(SEAL.size)


class Signer(Struct, frozen=True):
    """What the seal of a baseline is worth."""

    trust: Trust
    key: str = ""
    """The signing key's fingerprint; empty when it is not signed."""

    @property
    def refusal(self) -> str:
        """Why the seal does not hold, after the file's name; empty when it holds."""
        return {
            "unsigned": "nobody signed it",
            "unknown key": f"signed by key {self.key}, which is not trusted here",
            "wrong signature": f"its signature by key {self.key} does not fit it",
        }.get(self.trust, "")

    @property
    def holds(self) -> bool:
        return self.trust in ("trusted", "installed")


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


def seal(head: bytes, key: Ed25519PrivateKey | None) -> bytes:
    """The seal of a head; without a key one that says that nobody signed it."""
    if key is None:
        return NO_SEAL
    return SEAL.pack(key.public_key().public_bytes_raw(), key.sign(SIGNED_AS + head))


def judge_seal(head: bytes, raw_seal: bytes, trusted: frozenset[bytes]) -> Signer:
    """Whether a trusted key signed ``head``; keys are raw public keys. Errors: Malformed."""
    if len(head) != HEAD.size or len(raw_seal) != SEAL.size:
        raise Malformed("baseline: cut short")
    if raw_seal == NO_SEAL:
        return Signer("unsigned")
    public, signature = SEAL.unpack(raw_seal)
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, SIGNED_AS + head)
    except (InvalidSignature, ValueError):
        return Signer("wrong signature", fingerprint(public))
    return Signer("trusted" if public in trusted else "unknown key", fingerprint(public))
