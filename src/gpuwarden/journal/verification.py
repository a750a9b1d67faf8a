"""Whether a journal is as it was written: entries, chain, signatures, and a head kept elsewhere.

What nobody can see without such a head: entries cut off at the end, or the whole file written anew
by somebody who has the key, or when it is not signed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from gpuwarden.journal.chain import Check, Problem, Walk
from gpuwarden.journal.entry import LINE_LIMIT_BYTES, Entry, Head
from gpuwarden.journal.place import for_reading
from gpuwarden.keys import fingerprint
from gpuwarden.model import Fact

NO_HEAD = "no head from elsewhere was given: nobody can tell whether the last entries were removed"
NO_KEY = "signatures are not checked: no public key was given"


class Verification(Fact, frozen=True, kw_only=True, omit_defaults=False):
    """What `gpuwarden journal verify` says."""

    path: str
    is_sound: bool
    entries: int
    signed: int
    checked_signatures: bool
    head: Head | None
    problems: tuple[Problem, ...]
    more_problems: int
    notes: tuple[str, ...]
    """What is no fault of the file, and what could not be seen."""


def verify(
    path: str,
    *,
    keys: Iterable[bytes] = (),
    head: Head | None = None,
    show: Callable[[Entry], None] | None = None,
) -> Verification:
    """Reads a journal from beginning to end, line by line.

    ``keys`` are raw public keys, each trusted: with one, everything must be signed by one of them,
    but for entries from before the first signature. ``head`` is one that was kept elsewhere.
    ``show`` gets each entry whose own hash is right. Errors: Unavailable, Denied, TimedOut.
    """
    trusted = {fingerprint(key): _check(key) for key in keys}
    walk = Walk(keys=trusted or None, head=head)
    with for_reading(path) as (descriptor, size):
        for line, ended in lines(descriptor, 0, size):
            entry = walk.feed(line, ended=ended)
            if entry is not None and show is not None:
                show(entry)
    walk.finish()
    notes = list(walk.notes)
    if walk.more_notes:
        notes.append(f"and {walk.more_notes} more notes of these kinds")
    if head is None:
        notes.append(NO_HEAD)
    if walk.signed and not trusted:
        notes.append(NO_KEY)
    return Verification(
        path=path,
        is_sound=walk.is_sound,
        entries=walk.entries,
        signed=walk.signed,
        checked_signatures=bool(trusted),
        head=head_after(walk),
        problems=tuple(walk.problems),
        more_problems=walk.more_problems,
        notes=tuple(notes),
    )


def head_after(walk: Walk) -> Head | None:
    """The head of what was walked along; None without an entry."""
    if walk.last is None:
        return None
    last = walk.last
    return Head(number=last.number, hash=last.hash, signed_by=last.signed_by)


def lines(descriptor: int, start: int, end: int) -> Iterable[tuple[bytes, bool]]:
    """Lines without their newline, and whether they had one; long ones in pieces."""
    with open(os.dup(descriptor), "rb") as file:
        file.seek(start)
        while start < end:
            line = file.readline(min(LINE_LIMIT_BYTES + 2, end - start))
            if not line:
                return
            start += len(line)
            ended = line.endswith(b"\n")
            yield line[: len(line) - ended], ended


def _check(key: bytes) -> Check:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    public = Ed25519PublicKey.from_public_bytes(key)

    def check(signature: bytes, message: bytes) -> bool:
        try:
            public.verify(signature, message)
        except InvalidSignature:
            return False
        return True

    return check
