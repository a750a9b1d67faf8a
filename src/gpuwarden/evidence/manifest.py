"""The last two members of an archive: what is in it, and the seal over that.

The manifest fixes every other byte of the archive; the seal fixes the manifest. Both are JSON in
one spelling only: a reader writes them anew and compares.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, Literal, TypeVar

import msgspec
from msgspec import Struct

from gpuwarden import tar_format
from gpuwarden.errors import Malformed
from gpuwarden.keys import fingerprint

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SCHEMA: Final = "gpuwarden-evidence"
SEAL_SCHEMA: Final = "gpuwarden-evidence-seal"
VERSION: Final = 1
MANIFEST, SEAL = "manifest.json", "seal.json"
SQUEEZED = ".zst"
MEMBERS_LIMIT = tar_format.MEMBERS_LIMIT - 2
OMISSIONS_LIMIT = 4096
TEXT_LIMIT = 512
MANIFEST_LIMIT_BYTES = 32 << 20
SEAL_LIMIT_BYTES = 4096
_DOMAIN = b"gpuwarden evidence 1\0"

T = TypeVar("T", bound=Struct)


class _Record(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of the manifest; nothing that it does not know is in it."""


class Clock(_Record, frozen=True, kw_only=True):
    """What the machine's clocks said at one moment."""

    realtime_ns: int
    boottime_ns: int
    """Since the start of the machine, sleep included."""
    boot_id: str | None
    time_zone: str | None
    utc_offset_seconds: int
    synchronised: bool | None
    """What the kernel says of its clock (adjtimex); None: it did not say."""
    max_error_us: int | None = None
    unread: dict[str, str] = {}


class Tool(_Record, frozen=True, kw_only=True):
    """The program that wrote the archive."""

    name: str
    version: str
    python: str
    command: str = ""


class Machine(_Record, frozen=True, kw_only=True):
    """The host: names and versions."""

    hostname: str
    kernel: str | None
    architecture: str
    system: str | None = None
    """PRETTY_NAME of os-release."""
    driver_version: str | None = None
    cuda_version: str | None = None
    unread: dict[str, str] = {}


class Subject(_Record, frozen=True, kw_only=True):
    """What the archive is about."""

    kind: Literal["process", "container", "gpu"]
    text: str
    """For a person."""
    pid: int | None = None
    start_time_ticks: int | None = None
    boot_id: str | None = None
    exe: str | None = None
    exe_device: str | None = None
    exe_inode: int | None = None
    exec_count: int | None = None
    exec_mark: str | None = None
    container_id: str | None = None
    gpu: str | None = None
    pids: tuple[int, ...] = ()
    """Of all processes that were looked at, parents not counted."""


class Account(_Record, frozen=True, kw_only=True):
    """What whoever collects says of the whole; the writer adds the rest."""

    subject: Subject
    machine: Machine
    why: str
    """Who or what asked for it."""
    finding: str | None = None
    """Id of the finding that it was written for."""
    findings: tuple[str, ...] = ()
    """One line for each finding about the subject."""
    ended: tuple[str, ...] = ()
    """What ended or changed while it was read, and when."""


class Member(_Record, frozen=True, kw_only=True):
    """One file of the archive."""

    name: str
    what: str
    size_bytes: int
    """As stored."""
    sha256: str
    """As stored."""
    read_at_ns: int
    """When reading it began."""
    plain_size_bytes: int | None = None
    """Of a member that was compressed: before that."""
    plain_sha256: str | None = None
    cut: str = ""
    """Why it is only the beginning of what it is of."""


class Omission(_Record, frozen=True, kw_only=True):
    """Something that is not in the archive, and why."""

    what: str
    why: str
    size_bytes: int | None = None


class Manifest(_Record, frozen=True, kw_only=True):
    """Everything about an archive but its members' bytes."""

    schema: Literal["gpuwarden-evidence"] = SCHEMA
    version: Literal[1] = VERSION
    tool: Tool
    begun: Clock
    ended: Clock
    account: Account
    limit_bytes: int
    members: tuple[Member, ...]
    left_out: tuple[Omission, ...] = ()
    """For want of room."""
    left_out_more: int = 0
    unread: tuple[Omission, ...] = ()
    """What could not be read."""
    unread_more: int = 0


class Seal(_Record, frozen=True, kw_only=True):
    """Fixes the manifest; without a key anybody could have written it."""

    schema: Literal["gpuwarden-evidence-seal"] = SEAL_SCHEMA
    version: Literal[1] = VERSION
    manifest_sha256: str
    signed: bool
    public_key: str = ""
    fingerprint: str = ""
    signature: str = ""


def encode(record: Struct) -> bytes:
    """The one spelling of a manifest or a seal. Errors: Malformed if its text is not Unicode."""
    try:
        return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"
    except (ValueError, OverflowError, RecursionError) as error:
        raise Malformed(f"cannot be written as JSON: {error}") from error


def decode(data: bytes, kind: type[T]) -> T:
    """A manifest or a seal in its one spelling. Errors: Malformed."""
    try:
        record = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
        raise Malformed(f"does not read: {error}") from error
    if encode(record) != data:
        raise Malformed("is not spelt as it was written")
    return record


def seal(manifest: bytes, key: Ed25519PrivateKey | None) -> Seal:
    """The seal over a manifest's bytes."""
    digest = hashlib.sha256(manifest)
    if key is None:
        return Seal(manifest_sha256=digest.hexdigest(), signed=False)
    public = key.public_key().public_bytes_raw()
    return Seal(
        manifest_sha256=digest.hexdigest(),
        signed=True,
        public_key=public.hex(),
        fingerprint=fingerprint(public),
        signature=key.sign(_DOMAIN + digest.digest()).hex(),
    )


def is_signed_by(stated: Seal, public: bytes) -> bool:
    """Whether the seal's signature is that key's, over the manifest that the seal names."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        signature = bytes.fromhex(stated.signature)
        digest = bytes.fromhex(stated.manifest_sha256)
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _DOMAIN + digest)
    except (InvalidSignature, ValueError):
        return False
    return True


def is_member_name(name: str) -> bool:
    """Whether a name leaves room for ``.zst`` and is not one of the last two members'."""
    return (
        tar_format.is_name(name)
        and len(name) <= tar_format.NAME_LIMIT - len(SQUEEZED)
        and name not in (MANIFEST, SEAL)
    )
