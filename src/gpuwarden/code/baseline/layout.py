"""The bytes of a baseline file: one head, one table of hashes, then chunks of equal size.

    head        HEAD, then SEAL: who signed the head
    table       SHA-256 of each chunk; first digest of each digest chunk, first code digest of each
                code chunk, number of the first string of each string chunk
    chunks      digests, code digests, origins, strings; each kind begins a chunk of its own

The head holds the SHA-256 of the table and the table that of each chunk, so that a signature over
the head holds for all. Records do not cross chunks; what is left of a chunk is zero. Numbers are
little-endian.
"""

from __future__ import annotations

import hashlib
import struct

from msgspec import Struct

from gpuwarden.errors import Malformed

MAGIC = b"GPUWBASE"
VERSION = 1
CHUNK_BYTES = 8192
HASH_BYTES = 32
SHORTEST_DIGEST_BYTES = 16
"""A second preimage of 128 bits is out of reach, among millions of digests too."""
LONGEST_DIGEST_BYTES = 32

# magic, version, digest bytes, zero, digests, code digests, origins, strings, string chunks, zero,
# created (s), name, version, tool, SHA-256 of the table.
HEAD = struct.Struct("<8sHBxIQQIIIIQ96s48s48s32s")
# Public key and signature (ed25519, RFC 8032) over SIGNED_AS and the head; zeros: not signed.
SEAL = struct.Struct("<32s64s")
SIGNED_AS = b"gpuwarden baseline head\0"
# Number of its origin, and of its code digest, after the digest; NO_CODE: it has none.
DIGEST_TAIL = struct.Struct("<II")
CODE_TAIL = struct.Struct("<I")
NO_CODE = 0xFFFFFFFF
# package, version, file, container, container digest, tool, note (numbers of strings); when (s);
# number of the source.
ORIGIN = struct.Struct("<7IQB3x")
STRING_NUMBER = struct.Struct("<I")

TABLE_AT = HEAD.size + SEAL.size
DIGESTS_LIMIT = 1 << 26
ORIGINS_LIMIT = 1 << 24
STRINGS_LIMIT = 1 << 26
STRING_LIMIT_BYTES = 4096
STRING_CHUNK_LIMIT_BYTES = 256 << 10
"""Of the strings of one chunk in full length."""
NAME_BYTES, VERSION_BYTES, TOOL_BYTES = 96, 48, 48


class Run(Struct, frozen=True):
    """One kind of record: how many there are, how long each is, and the chunks that hold them."""

    count: int
    record_bytes: int
    first_chunk: int

    @property
    def per_chunk(self) -> int:
        return CHUNK_BYTES // self.record_bytes

    @property
    def chunks(self) -> int:
        return -(-self.count // self.per_chunk)


class Head(Struct, frozen=True, kw_only=True):
    """The head of a baseline file."""

    name: str
    version: str
    tool: str
    created: int
    digest_bytes: int
    digests: int
    codes: int
    origins: int
    strings: int
    string_chunks: int
    table_hash: bytes

    @property
    def digest_run(self) -> Run:
        return Run(self.digests, self.digest_bytes + DIGEST_TAIL.size, 0)

    @property
    def code_run(self) -> Run:
        return Run(self.codes, self.digest_bytes + CODE_TAIL.size, self.digest_run.chunks)

    @property
    def origin_run(self) -> Run:
        code = self.code_run
        return Run(self.origins, ORIGIN.size, code.first_chunk + code.chunks)

    @property
    def first_string_chunk(self) -> int:
        return self.origin_run.first_chunk + self.origin_run.chunks

    @property
    def chunks(self) -> int:
        return self.first_string_chunk + self.string_chunks

    @property
    def table_bytes(self) -> int:
        firsts = (self.digest_run.chunks + self.code_run.chunks) * self.digest_bytes
        return self.chunks * HASH_BYTES + firsts + self.string_chunks * STRING_NUMBER.size

    @property
    def chunks_at(self) -> int:
        return TABLE_AT + self.table_bytes

    @property
    def file_bytes(self) -> int:
        return self.chunks_at + self.chunks * CHUNK_BYTES


def text_field(text: str, limit: int, what: str) -> bytes:
    """A text of the head as bytes. Errors: ValueError when it is too long or holds a NUL."""
    raw = text.encode()
    if len(raw) > limit or b"\0" in raw:
        raise ValueError(f"{what}: expected at most {limit} bytes without NUL")
    return raw


def pack_head(head: Head) -> bytes:
    """The head as bytes. Errors: ValueError when a text is too long."""
    return HEAD.pack(
        MAGIC,
        VERSION,
        head.digest_bytes,
        0,
        head.digests,
        head.codes,
        head.origins,
        head.strings,
        head.string_chunks,
        0,
        head.created,
        text_field(head.name, NAME_BYTES, "the baseline's name"),
        text_field(head.version, VERSION_BYTES, "the baseline's version"),
        text_field(head.tool, TOOL_BYTES, "the tool's version"),
        head.table_hash,
    )


def parse_head(raw: bytes) -> Head:
    """The head in ``raw``, all its numbers within bounds. Errors: Malformed."""
    if len(raw) < HEAD.size or not raw.startswith(MAGIC):
        raise Malformed("not a baseline: it does not begin as one")
    fields = HEAD.unpack_from(raw)
    version, digest_bytes, zero, digests, codes, origins, strings = fields[1:8]
    string_chunks, zero_too, created = fields[8:11]
    if version != VERSION:
        raise Malformed(f"a baseline of version {version}; this gpuwarden reads version {VERSION}")
    if not SHORTEST_DIGEST_BYTES <= digest_bytes <= LONGEST_DIGEST_BYTES or zero or zero_too:
        raise Malformed("baseline head: unknown digest length or fields")
    if (
        max(digests, codes) > DIGESTS_LIMIT
        or origins > ORIGINS_LIMIT
        or string_chunks > strings
        or strings > STRINGS_LIMIT
    ):
        raise Malformed("baseline head: more records than a baseline may hold")
    try:
        name, own_version, tool = (field.rstrip(b"\0").decode() for field in fields[11:14])
    except UnicodeDecodeError as error:
        raise Malformed("baseline head: a text that is not UTF-8") from error
    return Head(
        name=name,
        version=own_version,
        tool=tool,
        created=created,
        digest_bytes=digest_bytes,
        digests=digests,
        codes=codes,
        origins=origins,
        strings=strings,
        string_chunks=string_chunks,
        table_hash=fields[14],
    )


def sha256(data: bytes | memoryview) -> bytes:
    """The SHA-256 of ``data``."""
    return hashlib.sha256(data).digest()
