"""Who signed a baseline, and what is said of its signature; keys are those of ``keys.py``.

`cryptography` is imported where a signature is made or checked, and nowhere else: a scan with the
baseline that is installed needs none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from gpuwarden.errors import Malformed
from gpuwarden.keys import fingerprint

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gpuwarden.code.baseline.layout import HEAD, SEAL, SIGNED_AS

Trust = Literal["trusted", "installed", "unknown key", "unsigned", "wrong signature"]
"""``installed``: the one that came with gpuwarden, told by the hash of its head."""

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
