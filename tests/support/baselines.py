"""Baselines for tests: strategies for what is in one, and whole files in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import strategies as st

from gpuwarden.code.baseline.entries import Entries, Entry
from gpuwarden.code.baseline.layout import STRING_LIMIT_BYTES
from gpuwarden.code.baseline.provenance import SOURCES, Provenance
from gpuwarden.code.baseline.reader import Baseline, parse_baseline
from gpuwarden.code.baseline.signing import seal
from gpuwarden.code.module import Module, Place

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
TRUSTED = frozenset([KEY.public_key().public_bytes_raw()])

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.just("n" * 300)
provenances = st.builds(
    Provenance,
    package=texts,
    version=texts,
    file=texts,
    container=texts,
    container_digest=texts,
    source=st.sampled_from(SOURCES),
    when=st.integers(0, 2**63),
    tool=texts,
    note=texts,
)
# Few values, so that digests and code digests are there twice.
digests = st.integers(0, 40).map(lambda n: hashlib.sha256(b"%d" % n).digest()) | st.binary(
    min_size=32, max_size=32
)
entries = st.lists(
    st.builds(Entry, digest=digests, code=st.just(b"") | digests, provenance=provenances),
    max_size=30,
)


def collected(found: Iterable[Entry], digest_bytes: int = 32) -> Entries:
    """A set of these entries."""
    whole = Entries(digest_bytes)
    whole.merge(iter(found))
    return whole


def packed(found: Entries, key: Ed25519PrivateKey | None = None, name: str = "tests") -> bytes:
    """The file of a set."""
    head, parts = found.pack(name=name, version="1", tool="tests", created=5)
    return b"".join([head, seal(head, key), *parts])


def opened(found: Entries) -> Baseline:
    """A baseline of a set, unsigned."""
    return parse_baseline(packed(found), "a.baseline", allow_unsigned=True)


def numbered(count: int, package: str = "torch", first: int = 0) -> list[Entry]:
    """``count`` entries of one package, whose digests are those of their numbers."""
    return [
        Entry(
            hashlib.sha256(b"module %d" % number).digest(),
            hashlib.sha256(b"code %d" % number).digest(),
            Provenance(package=package, version="1.0", file=f"lib/{number % 7}.so"),
        )
        for number in range(first, first + count)
    ]


def module(digest: str = "ab" * 32, code_digest: str = "", broken: str = "") -> Module:
    """A module of which only the digests matter."""
    return Module(
        kind="cubin",
        arch="sm_90",
        digest=digest,
        code_digest=code_digest,
        stored_bytes=10,
        image_bytes=10,
        place=Place(target="x"),
        broken=broken,
    )


LONG = "x" * (STRING_LIMIT_BYTES + 10)
