"""Whether an archive is what its writer sealed: any byte of it that differs is told of."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator
from typing import Literal, TypeVar

from msgspec import Struct

from gpuwarden import tar_format
from gpuwarden.errors import Malformed
from gpuwarden.evidence import manifest as words
from gpuwarden.evidence.manifest import Manifest, Seal
from gpuwarden.evidence.reading import Found, Reading, open_archive, read
from gpuwarden.keys import fingerprint

State = Literal["intact", "damaged", "incomplete"]
Signature = Literal["trusted", "unchecked", "another", "broken", "unsigned", "none"]
"""By a key that was named; by one that nobody named; not by the one named; not over this; by
nobody; not even sealed."""

T = TypeVar("T", Manifest, Seal)
_NANOSECONDS = 10**9


class Verification(Struct, frozen=True, kw_only=True):
    """What was found of an archive."""

    size_bytes: int
    state: State
    """``incomplete``: nothing that is there is damaged, but it was never sealed, or was cut off."""
    signature: Signature
    fingerprint: str = ""
    """Of the key in the seal."""
    manifest_sha256: str = ""
    problems: tuple[str, ...] = ()
    """Each with the member it is in."""
    whole: tuple[Found, ...] = ()
    """Members whose content is what was written."""
    manifest: Manifest | None = None
    """As it stands there, if it reads; of a damaged archive it may say anything."""

    def holds(self, *, key_named: bool) -> bool:
        """Whether nothing is wrong, and it is signed by the named key if one was named."""
        good = ("trusted",) if key_named else ("trusted", "unchecked", "unsigned")
        return self.state == "intact" and self.signature in good


def verify(path: str, *, trusted: Collection[bytes] = ()) -> Verification:
    """Reads the file once. ``trusted``: raw public keys; one of them must have signed it.

    Errors: Unavailable, Denied; Malformed for what is no file. Any content gives a result.
    """
    handle = open_archive(path)
    try:
        reading = read(handle)
    finally:
        os.close(handle)
    return judge(reading, trusted)


def judge(reading: Reading, trusted: Collection[bytes]) -> Verification:
    """What a reading comes to."""
    found = reading.found
    kept = {one.name: one for one in found if one.data is not None}
    manifest, no_manifest = _parsed(kept.get(words.MANIFEST), Manifest)
    seal, no_seal = _parsed(kept.get(words.SEAL), Seal)
    damage = [
        *_faults(reading, manifest),
        *(f"{one.name}: {one.fault}" for one in found if one.state == "damaged"),
        *no_manifest,
        *no_seal,
    ]
    problems = [
        f"{one.name}: {one.fault}" for one in found if one.state not in ("whole", "damaged")
    ]
    if reading.tail:
        problems.append(reading.tail)
    signature: Signature = "none"
    if seal is not None:
        signature = _signature(seal, trusted)
        if signature == "broken":
            damage.append(f"{words.SEAL}: its signature is not over this manifest")
    if {words.MANIFEST, words.SEAL}.isdisjoint(one.name for one in found):
        problems.append("not sealed: no manifest says what belongs in it")
    else:
        lacking = list(_lacking(reading, manifest))
        # What is cut off lacks what came after; it need not be damaged as well.
        (problems if _is_cut(reading) else damage).extend(lacking)
        damage += _differences(reading, manifest, seal)
    return Verification(
        size_bytes=reading.size_bytes,
        state="damaged" if damage else "incomplete" if problems else "intact",
        signature=signature,
        fingerprint="" if seal is None else seal.fingerprint[:64],
        manifest_sha256="" if seal is None else seal.manifest_sha256[:64],
        problems=(*damage, *problems),
        whole=tuple(one for one in found if one.state == "whole"),
        manifest=manifest,
    )


def _parsed(found: Found | None, kind: type[T]) -> tuple[T | None, list[str]]:
    if found is None or found.data is None:
        return None, []
    try:
        return words.decode(found.data, kind), []
    except Malformed as error:
        return None, [f"{found.name}: {error}"]


def _faults(reading: Reading, manifest: Manifest | None) -> Iterator[str]:
    """What is wrong between members, by the name of the member whose place it is."""
    names: list[str] = []
    if manifest is not None:
        names = [*(one.name for one in manifest.members), words.MANIFEST, words.SEAL]
    for lost, fault in enumerate(reading.faults):
        place = fault.before + lost
        name = f"{names[place]}: " if place < len(names) else ""
        if [one.name for one in reading.found[fault.before :]] == [words.SEAL]:
            name = f"{words.MANIFEST}: "
        yield f"{name}at byte {fault.at}: {fault.text}"
    if reading.more_faults:
        yield f"and {reading.more_faults} more places"


def _is_cut(reading: Reading) -> bool:
    """Whether the file ends before its archive does."""
    return not reading.is_ended and not reading.faults


def _lacking(reading: Reading, manifest: Manifest | None) -> Iterator[str]:
    """What ought to be there and is not."""
    names = {one.name for one in reading.found}
    for name in (words.MANIFEST, words.SEAL):
        if name not in names:
            yield f"{name}: missing"
    if manifest is not None:
        for member in manifest.members:
            if member.name not in names:
                yield f"{member.name}: missing"
    if not reading.is_ended and not reading.faults:
        yield "the two blocks at the end of the archive are missing"


def _differences(reading: Reading, manifest: Manifest | None, seal: Seal | None) -> Iterator[str]:
    """What is not as the manifest, and the manifest not as the seal, has it."""
    found = reading.found
    last = {one.name: one for one in found if one.name in (words.MANIFEST, words.SEAL)}
    if words.SEAL in last:
        if [one.name for one in found[-2:]] != [words.MANIFEST, words.SEAL]:
            yield f"{words.MANIFEST}, {words.SEAL}: not the last two members"
        if seal is None and not last[words.SEAL].fault:
            yield f"{words.SEAL}: too large to be one"
    sealed = last.get(words.MANIFEST)
    if sealed is not None and sealed.data is None and not sealed.fault:
        yield f"{words.MANIFEST}: too large to be one"
    text = None if sealed is None else sealed.data
    if seal is not None and text is not None and not _is_sealed(text, seal):
        yield f"{words.MANIFEST}: not the one that was sealed"
    if manifest is None:
        return
    moment = max(0, manifest.begun.realtime_ns // _NANOSECONDS) & tar_format.MTIME_LIMIT
    listed = {member.name: member for member in manifest.members}
    for one in found:
        if one.header.mtime != moment:
            yield f"{one.name}: its headers have another time than the manifest"
        if one.name in last:
            continue
        member = listed.get(one.name)
        if member is None:
            yield f"{one.name}: not in the manifest"
        elif (member.size_bytes, member.sha256) != (one.header.size, one.header.sha256.hex()):
            yield f"{one.name}: not the content that the manifest names"
    if len(listed) != len(manifest.members):
        yield f"{words.MANIFEST}: names a member twice"
    there = {one.name for one in found}
    order = [member.name for member in manifest.members if member.name in there]
    present = [one.name for one in found if one.name in listed]
    swapped = next((has for has, name in zip(present, order, strict=False) if has != name), None)
    if swapped is not None:
        yield f"{swapped}: not in the order of the manifest"


def _is_sealed(manifest: bytes, seal: Seal) -> bool:
    return hashlib.sha256(manifest).hexdigest() == seal.manifest_sha256


def _signature(seal: Seal, trusted: Collection[bytes]) -> Signature:
    if not seal.signed:
        # Nothing of a signature may stand in a seal that says it has none.
        return "broken" if seal.public_key or seal.fingerprint or seal.signature else "unsigned"
    try:
        public = bytes.fromhex(seal.public_key)
    except ValueError:
        return "broken"
    if (public.hex(), fingerprint(public)) != (seal.public_key, seal.fingerprint):
        return "broken"
    if not words.is_signed_by(seal, public):
        return "broken"
    if not trusted:
        return "unchecked"
    return "trusted" if public in trusted else "another"
