"""Evidence archives for tests: small ones that are sealed, and others put together anew."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gpuwarden import tar_format
from gpuwarden.evidence.archive import ArchiveWriter, Sealed
from gpuwarden.evidence.manifest import Account, Machine, Subject
from gpuwarden.evidence.reading import read
from gpuwarden.evidence.verify import Verification, judge
from gpuwarden.keys import make_key, read_private, read_public

LIMIT_BYTES = 8 << 20
MEMBERS: Mapping[str, bytes] = {
    "proc/4711/cmdline": b"python3\0train.py\0",
    "proc/4711/empty": b"",
    "files/1": b"\x7fELF" + bytes(range(256)) * 3,
}
ACCOUNT = Account(
    subject=Subject(kind="process", text="pid 4711 python3", pid=4711, start_time_ticks=77),
    machine=Machine(hostname="node-1", kernel="6.1.0", architecture="x86_64"),
    why="asked for on the command line",
)


def key_pair(directory: Path) -> tuple[Ed25519PrivateKey, bytes, Path]:
    """A private key, its raw public key, and that as a PEM file."""
    private, public = make_key()
    path = directory / "public.pem"
    path.write_bytes(public)
    return read_private(private, "test"), read_public(public, "test"), path


def sealed(
    path: Path,
    members: Mapping[str, bytes] = MEMBERS,
    *,
    account: Account = ACCOUNT,
    key: Ed25519PrivateKey | None = None,
) -> Sealed:
    """A small archive with these members."""
    with ArchiveWriter(str(path), limit_bytes=LIMIT_BYTES) as writer:
        for name, data in members.items():
            assert writer.add(name, data, what=f"the file {name}") is not None
        return writer.close(account, key)


def judged(data: bytes, trusted: Collection[bytes] = ()) -> Verification:
    """What is said of an archive of these bytes."""
    handle = os.memfd_create("archive")
    try:
        os.write(handle, data)
        return judge(read(handle), trusted)
    finally:
        os.close(handle)


def taken_apart(data: bytes) -> list[tuple[str, bytes]]:
    """The members of an archive that is whole, in their order."""
    members, at = [], 0
    while not data.startswith(tar_format.END, at):
        header = tar_format.decode(data[at : at + tar_format.HEADER_BYTES])
        at += tar_format.HEADER_BYTES
        members.append((header.name, data[at : at + header.size]))
        at += header.size + header.padding
    return members


def put_together(members: Sequence[tuple[str, bytes]], mtime: int) -> bytes:
    """An archive with headers as its writer makes them, of any members."""
    parts = []
    for name, data in members:
        digest = hashlib.sha256(data).digest()
        header = tar_format.Header(name, len(data), mtime, digest)
        parts += [tar_format.encode(header), data, bytes(header.padding)]
    return b"".join(parts) + tar_format.END


def mtime_of(data: bytes) -> int:
    """The time in the headers of an archive."""
    return tar_format.decode(data[: tar_format.HEADER_BYTES]).mtime
