"""`gpuwarden evidence verify` and `show`: whether an archive holds, and what is in it."""

from __future__ import annotations

from gpuwarden.errors import UsageError
from gpuwarden.evidence import archive_text
from gpuwarden.evidence.verify import Verification, verify
from gpuwarden.journal.signing import public_key, signing_key
from gpuwarden.outputs.told import CLEAR, FINDING, Told
from gpuwarden.outputs.words import escape
from gpuwarden.policy import Policy


def verified(
    path: str, key: str | None, policy: Policy, *, as_json: bool, width: int, colour: bool
) -> Told:
    """`evidence verify`: 1 unless every byte is as it was written, and signed by ``key`` if named.

    Without one the policy's own key is asked for, where this process can read it. Errors:
    UsageError for a key that cannot be used; Unavailable, Denied, Malformed for no file.
    """
    trusted: list[bytes] = []
    complaint = ""
    if key is not None:
        trusted = [public_key(key)]
    elif policy.signing_key is not None:
        try:
            private = signing_key(policy.signing_key)
        except UsageError as error:
            complaint = escape(f"gpuwarden: {error}") + "\n"
        else:
            trusted = [] if private is None else [private.public_key().public_bytes_raw()]
    told = verify(path, trusted=trusted)
    holds = told.holds(key_named=bool(trusted))
    text = (
        archive_text.verification_json(path, told, holds=holds)
        if as_json
        else archive_text.verification(path, told, holds=holds, width=width, colour=colour)
    )
    return Told(text, CLEAR if holds else FINDING, complaint)


def shown(path: str, *, as_json: bool, width: int, colour: bool) -> Told:
    """`evidence show`: what is in it, said even if it does not verify; then 1.

    Errors: Unavailable, Denied, Malformed for no file.
    """
    told: Verification = verify(path)
    holds = told.holds(key_named=False)
    text = (
        archive_text.verification_json(path, told, holds=holds)
        if as_json
        else archive_text.contents(path, told, holds=holds, width=width, colour=colour)
    )
    return Told(text, CLEAR if holds else FINDING)
