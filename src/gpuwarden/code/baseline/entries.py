"""Known modules before they are a file: collected, merged, packed the same way each time."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from gpuwarden.code.baseline.layout import (
    CHUNK_BYTES,
    CODE_TAIL,
    DIGEST_TAIL,
    DIGESTS_LIMIT,
    LONGEST_DIGEST_BYTES,
    NO_CODE,
    ORIGIN,
    ORIGINS_LIMIT,
    SHORTEST_DIGEST_BYTES,
    STRING_LIMIT_BYTES,
    STRING_NUMBER,
    Head,
    Run,
    pack_head,
    sha256,
)
from gpuwarden.code.baseline.provenance import SOURCES, Provenance
from gpuwarden.code.baseline.strings import pack_strings

TEXTS = ("package", "version", "file", "container", "container_digest", "tool", "note")


class Entry(msgspec.Struct, frozen=True):
    """One known module."""

    digest: bytes
    code: bytes
    """Its code digest; empty when it has none."""
    provenance: Provenance


class Entries:
    """A set of known modules; adding is commutative: order and repetition change nothing."""

    def __init__(self, digest_bytes: int = LONGEST_DIGEST_BYTES) -> None:
        if not SHORTEST_DIGEST_BYTES <= digest_bytes <= LONGEST_DIGEST_BYTES:
            raise ValueError(
                f"digests of {digest_bytes} bytes; expected {SHORTEST_DIGEST_BYTES} "
                f"to {LONGEST_DIGEST_BYTES}"
            )
        self.digest_bytes = digest_bytes
        self._origins: dict[Provenance, int] = {}
        self._digests: dict[bytes, tuple[int, bytes]] = {}
        self._listed: list[Provenance] = []

    def __len__(self) -> int:
        return len(self._digests)

    @property
    def codes(self) -> int:
        """How many code digests there are."""
        return len({code for _, code in self._digests.values() if code})

    def add(self, digest: bytes, code: bytes, provenance: Provenance) -> None:
        """Takes one module in; of two origins of a digest the lower one stays.

        Errors: ValueError when a digest is shorter than this set's.
        """
        if len(digest) < self.digest_bytes or 0 < len(code) < self.digest_bytes:
            raise ValueError(f"a digest of fewer than {self.digest_bytes} bytes")
        digest, code = digest[: self.digest_bytes], code[: self.digest_bytes]
        origin = self._origins.get(provenance)
        if origin is None:
            origin = self._origins[provenance] = len(self._listed)
            self._listed.append(provenance)
        there = self._digests.get(digest)
        if there is not None:
            # One image has one code digest; where two tools disagree, the same one wins each time.
            code = max(code, there[1])
            origin = self._lower(origin, there[0])
        self._digests[digest] = (origin, code)

    def _lower(self, one: int, other: int) -> int:
        if one == other:
            return one
        return min(one, other, key=lambda number: self._listed[number].order)

    def merge(self, entries: Iterator[Entry]) -> None:
        """Takes the entries of another set in. Errors: as ``add``."""
        for entry in entries:
            self.add(entry.digest, entry.code, entry.provenance)

    def __iter__(self) -> Iterator[Entry]:
        for digest in sorted(self._digests):
            origin, code = self._digests[digest]
            yield Entry(digest, code, self._listed[origin])

    def pack(
        self, *, name: str, version: str, tool: str, created: int
    ) -> tuple[bytes, list[bytes]]:
        """The head, and the parts that follow it after its seal: the table, then the chunks.

        Errors: ValueError when there is more than a file may hold, or a text of the head is too
        long.
        """
        origin_of: dict[bytes, int] = {}
        for origin, code in self._digests.values():
            if code:
                origin_of[code] = self._lower(origin, origin_of.get(code, origin))
        used = {origin for origin, _ in self._digests.values()}
        order = sorted(used, key=lambda number: self._listed[number].order)
        number_of = {origin: number for number, origin in enumerate(order)}
        if len(self._digests) > DIGESTS_LIMIT or len(order) > ORIGINS_LIMIT:
            raise ValueError(f"at most {DIGESTS_LIMIT} digests of {ORIGINS_LIMIT} origins")
        codes = sorted(origin_of)
        code_number = {code: number for number, code in enumerate(codes)}
        strings, origins = self._pack_origins(order)
        string_chunks, string_firsts = pack_strings(strings)
        head = Head(
            name=name,
            version=version,
            tool=tool,
            created=created,
            digest_bytes=self.digest_bytes,
            digests=len(self._digests),
            codes=len(codes),
            origins=len(order),
            strings=len(strings),
            string_chunks=len(string_chunks),
            table_hash=b"",
        )
        digests = sorted(self._digests)
        digest_records = [
            digest + DIGEST_TAIL.pack(number_of[origin], code_number[code] if code else NO_CODE)
            for digest in digests
            for origin, code in (self._digests[digest],)
        ]
        code_records = [code + CODE_TAIL.pack(number_of[origin_of[code]]) for code in codes]
        chunks = [
            *_pack_run(head.digest_run, digest_records),
            *_pack_run(head.code_run, code_records),
            *_pack_run(head.origin_run, origins),
            *string_chunks,
        ]
        table = b"".join(
            [
                *map(sha256, chunks),
                *digests[:: head.digest_run.per_chunk],
                *codes[:: head.code_run.per_chunk],
                *map(STRING_NUMBER.pack, string_firsts),
            ]
        )
        head = msgspec.structs.replace(head, table_hash=sha256(table))
        return pack_head(head), [table, *chunks]

    def _pack_origins(self, order: list[int]) -> tuple[list[bytes], list[bytes]]:
        texts = [
            tuple(_text(getattr(self._listed[number], name)) for name in TEXTS) for number in order
        ]
        strings = sorted({text for row in texts for text in row})
        place = {string: number for number, string in enumerate(strings)}
        records = [
            ORIGIN.pack(
                *(place[text] for text in row),
                self._listed[number].when,
                SOURCES.index(self._listed[number].source),
            )
            for number, row in zip(order, texts, strict=True)
        ]
        return strings, records


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "backslashreplace")
    if len(raw) > STRING_LIMIT_BYTES:
        # Cut between characters: what is stored is UTF-8.
        raw = raw[: STRING_LIMIT_BYTES - 3].decode("utf-8", "ignore").encode() + "…".encode()
    return raw


def _pack_run(run: Run, records: list[bytes]) -> Iterator[bytes]:
    for start in range(0, run.count, run.per_chunk):
        yield b"".join(records[start : start + run.per_chunk]).ljust(CHUNK_BYTES, b"\0")
