"""A baseline file in use: mapped, its head checked at once, each chunk when it is first needed."""

from __future__ import annotations

import mmap
import os
import stat
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from gpuwarden.code.baseline.entries import TEXTS, Entry
from gpuwarden.code.baseline.layout import (
    CHUNK_BYTES,
    CODE_TAIL,
    DIGEST_TAIL,
    HASH_BYTES,
    HEAD,
    NO_CODE,
    ORIGIN,
    SEAL,
    STRING_NUMBER,
    TABLE_AT,
    Head,
    Run,
    parse_head,
    sha256,
)
from gpuwarden.code.baseline.provenance import SOURCES, Provenance
from gpuwarden.code.baseline.signing import Signer, judge_seal
from gpuwarden.code.baseline.strings import unpack_strings
from gpuwarden.errors import Denied, GpuwardenError, Malformed, Unavailable

ORIGINS_KEPT = 4096
STRING_CHUNKS_KEPT = 64

Bytes = bytes | mmap.mmap


class _Table(NamedTuple):
    """A run of records in order of their digests, and the first digest of each of its chunks."""

    run: Run
    firsts: Sequence[bytes]
    first_chunk: int
    per_chunk: int
    record_bytes: int


class Baseline:
    """A set of known digests; lookups read the mapping alone, also after a fork.

    A chunk is copied when it is checked, so that what was checked is what is looked up, whatever
    happens to the file. Errors of every lookup: Malformed when a chunk it needs is damaged.
    """

    def __init__(self, data: Bytes, path: str, head: Head, signer: Signer) -> None:
        """``data`` is a whole file whose head was parsed; see ``parse_baseline``."""
        self.path = path
        self.head = head
        self.signer = signer
        self._data = data
        table = bytes(data[TABLE_AT : TABLE_AT + head.table_bytes])
        if sha256(table) != head.table_hash:
            raise Malformed(f"{path}: damaged: its table is not the one its head names")
        self._chunks_at = head.chunks_at
        self._hashes = table[: head.chunks * HASH_BYTES]
        place = len(self._hashes)
        tables = []
        for run in (head.digest_run, head.code_run):
            end = place + run.chunks * head.digest_bytes
            firsts = [
                table[at : at + head.digest_bytes] for at in range(place, end, head.digest_bytes)
            ]
            tables.append(_Table(run, firsts, run.first_chunk, run.per_chunk, run.record_bytes))
            place = end
        self._digests, self._codes = tables
        self._string_firsts: list[int] = [
            number for (number,) in STRING_NUMBER.iter_unpack(table[place:])
        ]
        self._chunks: dict[int, bytes] = {}
        self._origins: dict[int, Provenance] = {}
        self._strings: dict[int, list[str]] = {}

    @property
    def name(self) -> str:
        """Its name, or its path when it has none."""
        return self.head.name or self.path

    def lookup(self, digest: str) -> Provenance | None:
        """The origin of a module's digest (hexadecimal), None when it is not known."""
        return self._lookup(self._digests, digest)

    def lookup_code(self, code_digest: str) -> Provenance | None:
        """An origin of a code digest (hexadecimal), None when it is not known or empty."""
        return self._lookup(self._codes, code_digest) if code_digest else None

    def _lookup(self, table: _Table, digest: str) -> Provenance | None:
        try:
            key = bytes.fromhex(digest)[: self.head.digest_bytes]
        except ValueError:
            return None
        size, record_bytes, per_chunk = len(key), table.record_bytes, table.per_chunk
        number = bisect_right(table.firsts, key) - 1
        if number < 0 or size < self.head.digest_bytes:
            return None
        chunk = self._chunk(table.first_chunk + number)
        low, high = 0, min(per_chunk, table.run.count - number * per_chunk)
        while low < high:
            middle = (low + high) // 2
            at = middle * record_bytes
            if chunk[at : at + size] < key:
                low = middle + 1
            else:
                high = middle
        at = low * record_bytes
        if chunk[at : at + size] != key or at + record_bytes > CHUNK_BYTES:
            return None
        return self._origin(*CODE_TAIL.unpack_from(chunk, at + size))

    def _chunk(self, number: int) -> bytes:
        chunk = self._chunks.get(number)
        if chunk is None:
            at = self._chunks_at + number * CHUNK_BYTES
            chunk = bytes(self._data[at : at + CHUNK_BYTES])
            if sha256(chunk) != self._hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES]:
                raise Malformed(
                    f"{self.path}: damaged: chunk {number} is not the one its table names"
                )
            self._chunks[number] = chunk
        return chunk

    def _records(self, run: Run) -> Iterator[bytes]:
        for number in range(run.chunks):
            chunk = self._chunk(run.first_chunk + number)
            count = min(run.per_chunk, run.count - number * run.per_chunk)
            for at in range(0, count * run.record_bytes, run.record_bytes):
                yield chunk[at : at + run.record_bytes]

    def _origin(self, number: int) -> Provenance:
        origin = self._origins.get(number)
        if origin is None:
            run = self.head.origin_run
            if number >= run.count:
                raise Malformed(f"{self.path}: damaged: a digest without its origin")
            chunk = self._chunk(run.first_chunk + number // run.per_chunk)
            *texts, when, source = ORIGIN.unpack_from(chunk, number % run.per_chunk * ORIGIN.size)
            if source >= len(SOURCES):
                raise Malformed(f"{self.path}: damaged: an origin of an unknown source")
            named = {name: self._string(text) for name, text in zip(TEXTS, texts, strict=True)}
            origin = Provenance(**named, when=when, source=SOURCES[source])
            if len(self._origins) >= ORIGINS_KEPT:
                self._origins.clear()
            self._origins[number] = origin
        return origin

    def _string(self, number: int) -> str:
        at = bisect_right(self._string_firsts, number) - 1
        if at < 0 or number >= self.head.strings:
            raise Malformed(f"{self.path}: damaged: a text that is not there")
        strings = self._strings.get(at)
        if strings is None:
            strings = unpack_strings(self._chunk(self.head.first_string_chunk + at))
            if len(self._strings) >= STRING_CHUNKS_KEPT:
                self._strings.clear()
            self._strings[at] = strings
        place = number - self._string_firsts[at]
        if not 0 <= place < len(strings):
            raise Malformed(f"{self.path}: damaged: a text that is not there")
        return strings[place]

    def origins(self) -> Iterator[Provenance]:
        """Every origin, in order."""
        return map(self._origin, range(self.head.origins))

    def entries(self) -> Iterator[Entry]:
        """Every known module, in order of its digest."""
        size = self.head.digest_bytes
        codes = [record[:size] for record in self._records(self._codes.run)]
        for record in self._records(self._digests.run):
            origin, code = DIGEST_TAIL.unpack_from(record, size)
            if code != NO_CODE and code >= len(codes):
                raise Malformed(f"{self.path}: damaged: a digest without its code digest")
            yield Entry(
                record[:size], b"" if code == NO_CODE else codes[code], self._origin(origin)
            )

    def code_digests(self) -> Iterator[tuple[bytes, Provenance]]:
        """Every code digest with its origin, in order."""
        size = self.head.digest_bytes
        for record in self._records(self._codes.run):
            yield record[:size], self._origin(*CODE_TAIL.unpack_from(record, size))

    def verify(self) -> None:
        """Reads every chunk and checks that records are in order and lead to what they name.

        Errors: Malformed with what is wrong first.
        """
        for number in range(self.head.chunks):
            self._chunk(number)
        for table in (self._digests, self._codes):
            before = b""
            for number, record in enumerate(self._records(table.run)):
                digest = record[: self.head.digest_bytes]
                chunk, place = divmod(number, table.run.per_chunk)
                if digest <= before or (not place and table.firsts[chunk] != digest):
                    raise Malformed(f"{self.path}: damaged: digests are not in order")
                before = digest
        for _ in self.entries():
            pass
        for _ in self.code_digests():
            pass
        for _ in self.origins():
            pass


def parse_baseline(
    data: Bytes,
    path: str,
    *,
    trusted: frozenset[bytes] = frozenset(),
    allow_unsigned: bool = False,
    installed_hash: bytes = b"",
) -> Baseline:
    """The baseline in ``data``; ``trusted`` are raw ed25519 public keys.

    ``installed_hash`` is the SHA-256 of the head of the one file that needs no signature. Errors:
    Malformed; Denied when no trusted key signed it, unless ``allow_unsigned``.
    """
    try:
        raw = bytes(data[: HEAD.size])
        head = parse_head(raw)
        if len(data) != head.file_bytes:
            raise Malformed(f"its head tells {head.file_bytes} bytes, it has {len(data)}")
        if installed_hash and sha256(raw) == installed_hash:
            signer = Signer("installed")
        else:
            signer = judge_seal(raw, bytes(data[HEAD.size : HEAD.size + SEAL.size]), trusted)
    except Malformed as error:
        raise Malformed(f"{path}: {error}") from error
    if not signer.holds and not allow_unsigned:
        raise Denied(f"{path}: {signer.refusal}", remedy=_REMEDY)
    return Baseline(data, path, head, signer)


_REMEDY = (
    "put the signer's public key into /etc/gpuwarden/keys/NAME.pem or name it with --key, "
    "or take it as it is with --allow-unsigned"
)


def open_baseline(
    path: str,
    *,
    trusted: frozenset[bytes] = frozenset(),
    allow_unsigned: bool = False,
    installed_hash: bytes = b"",
) -> Baseline:
    """Maps the baseline file at ``path``; see ``parse_baseline``.

    The descriptor is closed; the mapping stays through a fork. A file in use must be replaced by
    renaming, never be cut: what is mapped and gone ends the reader. Errors: Unavailable, Denied,
    Malformed.
    """
    parse = partial(
        parse_baseline,
        trusted=trusted,
        allow_unsigned=allow_unsigned,
        installed_hash=installed_hash,
    )
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Malformed(f"{path}: not a baseline: not a file")
        if status.st_size < TABLE_AT:
            return parse(os.pread(descriptor, TABLE_AT, 0), path)
        mapped = mmap.mmap(descriptor, status.st_size, mmap.MAP_SHARED, mmap.PROT_READ)
    except PermissionError as error:
        raise Denied(f"{path}: {error.strerror}") from error
    except (OSError, ValueError) as error:
        raise _unavailable(path, error) from error
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return parse(mapped, path)


def _unavailable(path: str, error: OSError | ValueError) -> GpuwardenError:
    return Unavailable(f"{path}: {getattr(error, 'strerror', None) or error}")
