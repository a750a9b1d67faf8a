"""A baseline's file against a plain dictionary, and against every kind of damage."""

from __future__ import annotations

import hashlib
import os
import random
import struct
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.code.baseline.entries import Entries, Entry
from gpuwarden.code.baseline.file_writer import write_baseline
from gpuwarden.code.baseline.layout import CHUNK_BYTES, HEAD, ORIGIN, TABLE_AT
from gpuwarden.code.baseline.provenance import Provenance
from gpuwarden.code.baseline.reader import Baseline, open_baseline, parse_baseline
from gpuwarden.code.baseline.strings import pack_strings, unpack_strings
from gpuwarden.errors import Denied, Malformed, Unavailable, UsageError
from tests.support.baselines import (
    KEY,
    LONG,
    OTHER_KEY,
    TRUSTED,
    collected,
    entries,
    numbered,
    opened,
    packed,
)


def plain(found: list[Entry], size: int = 32) -> tuple[dict[str, Provenance], dict[str, bytes]]:
    """What a baseline of these should answer, the slow way."""
    origins: dict[str, Provenance] = {}
    codes: dict[str, bytes] = {}
    for entry in found:
        digest = entry.digest[:size].hex()
        known = origins.get(digest)
        if known is None or entry.provenance.order < known.order:
            origins[digest] = entry.provenance
        codes[digest] = max(codes.get(digest, b""), entry.code[:size])
    return origins, codes


@given(entries, st.sampled_from([16, 20, 32]))
def test_it_answers_as_a_dictionary_does(found: list[Entry], size: int) -> None:
    baseline = opened(collected(found, size))
    baseline.verify()
    origins, codes = plain(found, size)
    rest = "00" * (32 - size)
    assert {d: baseline.lookup(d + rest) for d in origins} == origins
    listed = {e.digest.hex(): (e.code, e.provenance) for e in baseline.entries()}
    assert listed == {d: (codes[d], origins[d]) for d in origins}
    for code in set(codes.values()) - {b""}:
        of_code = min((origins[d] for d in origins if codes[d] == code), key=lambda p: p.order)
        assert baseline.lookup_code(code.hex() + rest) == of_code
    for asked in ("", "zz", "00" * 32, "ff" * 32, "ab", *(d[:10] for d in origins)):
        assert baseline.lookup(asked) is None or asked[: 2 * size] in origins
    assert baseline.lookup_code("") is None


@given(entries, st.randoms(use_true_random=False))
def test_order_and_repetition_change_no_byte(found: list[Entry], order: random.Random) -> None:
    shuffled = [*found, *found]
    order.shuffle(shuffled)
    assert packed(collected(found)) == packed(collected(shuffled))


@settings(max_examples=40)
@given(entries, entries, entries)
def test_merging_is_a_union(one: list[Entry], two: list[Entry], three: list[Entry]) -> None:
    whole = packed(collected([*one, *two, *three]))
    left, right = opened(collected([*one, *two])), opened(collected([*three, *one]))
    merged = collected(right.entries())
    merged.merge(left.entries())
    assert packed(merged) == whole


def test_thousands_of_digests_over_many_chunks() -> None:
    found = [entry for n in range(9) for entry in numbered(700, f"package {n}", n * 700)]
    baseline = opened(collected(found))
    assert baseline.head.digest_run.chunks > 20
    baseline.verify()
    for entry in found:
        assert baseline.lookup(entry.digest.hex()) == entry.provenance
        assert baseline.lookup_code(entry.code.hex()) == entry.provenance
    missing = [hashlib.sha256(b"not %d" % n).hexdigest() for n in range(2000)]
    assert not any(map(baseline.lookup, missing))
    assert {origin.title for origin in baseline.origins()} == {e.provenance.title for e in found}


def answers(baseline: Baseline, found: list[Entry]) -> list[Provenance | None]:
    return [
        *(baseline.lookup(e.digest.hex()) for e in found),
        *(baseline.lookup_code(e.code.hex()) for e in found),
    ]


# Three chunks of digests, and one of each other kind at least.
DAMAGED = numbered(420)
WHOLE = packed(collected(DAMAGED), KEY)


@settings(max_examples=80)
@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
def test_a_changed_byte_is_never_an_answer(place: int, change: int) -> None:
    mutant = bytearray(WHOLE)
    mutant[place] ^= change
    right = [e.provenance for e in DAMAGED] * 2
    try:
        baseline = parse_baseline(bytes(mutant), "a", trusted=TRUSTED)
    except (Malformed, Denied):
        return
    # Only the chunks are read later: head, seal and table were checked above.
    assert place >= baseline.head.chunks_at
    with pytest.raises(Malformed):
        baseline.verify()
    for entry, origin in zip(DAMAGED, right, strict=False):
        try:
            assert baseline.lookup(entry.digest.hex()) == origin
            assert baseline.lookup_code(entry.code.hex()) == origin
        except Malformed:
            pass


@pytest.mark.parametrize("place", ["head", "seal", "table", "table's end", "digests", "strings"])
def test_every_region_is_protected(place: str) -> None:
    baseline = parse_baseline(WHOLE, "a", trusted=TRUSTED)
    head = baseline.head
    at = {
        "head": 60,
        "seal": HEAD.size + 40,
        "table": TABLE_AT,
        "table's end": head.chunks_at - 1,
        "digests": head.chunks_at + 5,
        "strings": head.chunks_at + head.first_string_chunk * CHUNK_BYTES + 9,
    }[place]
    mutant = bytearray(WHOLE)
    mutant[at] ^= 1
    with pytest.raises(Denied if place in ("head", "seal") else Malformed):
        answers(parse_baseline(bytes(mutant), "a", trusted=TRUSTED), DAMAGED)


@pytest.mark.parametrize(
    "length", [0, 7, 8, HEAD.size, TABLE_AT - 1, TABLE_AT, len(WHOLE) - CHUNK_BYTES, len(WHOLE) - 1]
)
def test_a_file_that_was_cut_is_malformed(length: int, tmp_path: Path) -> None:
    file = tmp_path / "cut"
    file.write_bytes(WHOLE[:length])
    with pytest.raises(Malformed):
        open_baseline(str(file), trusted=TRUSTED)
    file.write_bytes(WHOLE + b"\0")
    with pytest.raises(Malformed, match="its head tells"):
        open_baseline(str(file), trusted=TRUSTED)


SMALL = packed(collected(DAMAGED[:40]))
SMALL_HEAD = parse_baseline(SMALL, "a", allow_unsigned=True).head


def honest(mutant: bytearray) -> bytes:
    """A file whose hashes fit its bytes, as a hostile author would make it."""
    chunks = mutant[SMALL_HEAD.chunks_at :]
    hashes = b"".join(
        hashlib.sha256(chunks[at : at + CHUNK_BYTES]).digest()
        for at in range(0, len(chunks), CHUNK_BYTES)
    )
    mutant[TABLE_AT : TABLE_AT + len(hashes)] = hashes
    table = hashlib.sha256(mutant[TABLE_AT : SMALL_HEAD.chunks_at]).digest()
    mutant[HEAD.size - len(table) : HEAD.size] = table
    return bytes(mutant)


def used(data: bytes) -> list[str]:
    """What is wrong with a file, by each way of using it; nothing when all went well."""
    found: list[str] = []
    try:
        baseline = parse_baseline(data, "a", allow_unsigned=True)
    except (Malformed, Denied) as error:
        return [str(error)]
    uses: tuple[Callable[[], object], ...] = (
        lambda: answers(baseline, DAMAGED[:40]),
        lambda: list(baseline.entries()),
        lambda: list(baseline.code_digests()),
        lambda: list(baseline.origins()),
        baseline.verify,
    )
    for use in uses:
        try:
            use()
        except Malformed as error:
            found.append(str(error))
    return found


mutations = st.lists(
    st.tuples(st.integers(0, len(SMALL) - 1), st.binary(min_size=1, max_size=8)), max_size=5
)


@settings(max_examples=80)
@given(mutations, st.booleans())
def test_any_content_under_honest_hashes_gives_answers_or_malformed(
    changes: list[tuple[int, bytes]], whole_head: bool
) -> None:
    mutant = bytearray(SMALL)
    for place, change in changes:
        mutant[place : place + len(change)] = change[: len(mutant) - place]
    if whole_head:
        mutant[: HEAD.size] = SMALL[: HEAD.size]
    used(honest(mutant))


def chunk_at(number: int) -> int:
    return SMALL_HEAD.chunks_at + number * CHUNK_BYTES


ORIGINS_AT = chunk_at(SMALL_HEAD.origin_run.first_chunk)
LIES = {
    "the origin of a digest": (chunk_at(0) + 32, "a digest without its origin"),
    "the code of a digest": (chunk_at(0) + 36, "a digest without its code digest"),
    "the origin of a code": (chunk_at(1) + 32, "a digest without its origin"),
    "a text's number": (ORIGINS_AT, "a text that is not there"),
    "a source": (ORIGINS_AT + ORIGIN.size - 4, "an origin of an unknown source"),
    "how many strings a chunk holds": (chunk_at(SMALL_HEAD.first_string_chunk), "strings: "),
    "the first string of a chunk": (SMALL_HEAD.chunks_at - 4, "a text that is not there"),
    "a first digest": (TABLE_AT + SMALL_HEAD.chunks * 32, "not in order"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_under_honest_hashes_is_malformed(lie: str) -> None:
    at, said = LIES[lie]
    mutant = bytearray(SMALL)
    mutant[at : at + 2] = b"\xf0\x7f"
    assert any(said in told for told in used(honest(mutant))), used(honest(mutant))


def test_digests_out_of_order_are_malformed() -> None:
    mutant = bytearray(SMALL)
    size = SMALL_HEAD.digest_run.record_bytes
    one, two = chunk_at(0) + size, chunk_at(0) + 2 * size
    mutant[one : one + size], mutant[two : two + size] = (
        mutant[two : two + size],
        mutant[one : one + size],
    )
    assert "not in order" in used(honest(mutant))[-1]


@given(st.lists(st.binary(max_size=60), unique=True, max_size=300))
def test_strings_come_back(strings: list[bytes]) -> None:
    texts = sorted({string.hex().encode() for string in strings})
    chunks, firsts = pack_strings(texts)
    assert [text.encode() for chunk in chunks for text in unpack_strings(chunk)] == texts
    assert [texts[first] for first in firsts] == [
        unpack_strings(chunk)[0].encode() for chunk in chunks
    ]


def test_a_chunk_of_strings_stays_within_its_bounds() -> None:
    first = struct.pack("<HH", 0, 4000) + b"x" * 4000
    again = struct.pack("<HH", 4000, 0)
    for count, body, said in (
        (2, first + struct.pack("<HH", 4001, 0), "leads out"),
        (2, first + struct.pack("<HH", 4000, 200) + b"y" * 200, "leads out"),
        (70, first + again * 69, "more text"),
        (1, struct.pack("<HH", 0, 1) + b"\xff", "UTF-8"),
        (9000, b"", "cut short"),
    ):
        with pytest.raises(Malformed, match=said):
            unpack_strings((struct.pack("<H", count) + body).ljust(CHUNK_BYTES, b"\0"))
    # As many long ones as there may be make chunks that can be read.
    chunks, _ = pack_strings([b"p" * 4000 + b"%03d" % n for n in range(200)])
    assert sum(len(unpack_strings(chunk)) for chunk in chunks) == 200


@given(st.binary(max_size=TABLE_AT + 100), st.booleans())
def test_any_bytes_are_malformed(data: bytes, with_magic: bool) -> None:
    with pytest.raises((Malformed, Denied)):
        parse_baseline((b"GPUWBASE\1\0\40\0" if with_magic else b"") + data, "any", trusted=TRUSTED)


def test_only_a_trusted_key_opens_it_and_only_when_told_another() -> None:
    found = collected(numbered(3))
    signed, other, unsigned = packed(found, KEY), packed(found, OTHER_KEY), packed(found)
    wrong = signed[: HEAD.size + 32] + bytes(64) + signed[TABLE_AT:]
    assert parse_baseline(signed, "a", trusted=TRUSTED).signer.trust == "trusted"
    for data, trust in (
        (other, "unknown key"),
        (unsigned, "unsigned"),
        (wrong, "wrong signature"),
    ):
        with pytest.raises(Denied) as caught:
            parse_baseline(data, "a", trusted=TRUSTED)
        assert "--allow-unsigned" in caught.value.remedy
        told = parse_baseline(data, "a", trusted=TRUSTED, allow_unsigned=True)
        assert told.signer.trust == trust
        assert not told.signer.holds
    head = hashlib.sha256(unsigned[: HEAD.size]).digest()
    assert parse_baseline(unsigned, "a", installed_hash=head).signer.trust == "installed"
    with pytest.raises(Denied):
        parse_baseline(unsigned, "a", installed_hash=bytes(32))


def test_a_signature_is_no_use_for_another_head() -> None:
    one, two = (packed(collected(numbered(n)), KEY) for n in (3, 4))
    moved = two[: HEAD.size] + one[HEAD.size : TABLE_AT] + two[TABLE_AT:]
    with pytest.raises(Denied, match="does not fit"):
        parse_baseline(moved, "a", trusted=TRUSTED)


def test_what_is_opened_answers_in_a_child_after_the_file_is_gone(tmp_path: Path) -> None:
    file = str(tmp_path / "a.baseline")
    found = numbered(500)
    write_baseline(file, collected(found), key=KEY)
    baseline = open_baseline(file, trusted=TRUSTED)
    os.unlink(file)
    child = os.fork()
    if not child:
        os.closerange(3, 1000)
        right = all(baseline.lookup(e.digest.hex()) == e.provenance for e in found)
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_checked_chunk_stays_what_it_was(tmp_path: Path) -> None:
    file = tmp_path / "a.baseline"
    found = numbered(300)
    write_baseline(str(file), collected(found), key=KEY)
    baseline = open_baseline(str(file), trusted=TRUSTED)
    first = [baseline.lookup(e.digest.hex()) for e in found]
    with file.open("r+b") as writable:
        writable.seek(baseline.head.chunks_at)
        writable.write(bytes(CHUNK_BYTES))
    assert [baseline.lookup(e.digest.hex()) for e in found] == first
    with pytest.raises(Malformed, match="damaged"):
        open_baseline(str(file), trusted=TRUSTED).verify()


def test_the_same_arguments_write_the_same_file(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a", "b")]
    for path, found in zip(paths, (numbered(90), numbered(90)[::-1]), strict=True):
        write_baseline(path, collected(found), name="n", version="1", tool="t", created=7, key=KEY)
    one, two = (Path(path).read_bytes() for path in paths)
    assert one == two
    head = open_baseline(paths[0], trusted=TRUSTED).head
    assert (head.name, head.version, head.tool, head.created) == ("n", "1", "t", 7)
    assert os.stat(paths[0]).st_mode & 0o777 == 0o644
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_what_cannot_be_opened_says_why(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="No such file"):
        open_baseline(str(tmp_path / "none"))
    with pytest.raises(Malformed, match="not a file"):
        open_baseline(str(tmp_path))
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(Malformed, match="not a file"):
        open_baseline(str(tmp_path / "fifo"))
    with pytest.raises(Unavailable):
        open_baseline("a\0b")
    with pytest.raises(Denied, match="cannot be written"):
        write_baseline(str(tmp_path / "no" / "file"), collected([]))


def test_texts_that_are_too_long_are_cut_or_refused() -> None:
    found = Entries()
    found.add(bytes(32), b"", Provenance(package="é" * 4000, file=LONG, note="\udcff"))
    origin = opened(found).lookup("00" * 32)
    assert origin is not None
    assert origin.package.endswith("é…")
    assert origin.file.endswith("x…")
    assert origin.note == "\\udcff"
    for name, version in product(("n" * 97, "a\0b"), ("",)):
        with pytest.raises(UsageError, match="name"):
            write_baseline("unwritten", found, name=name, version=version)


def test_digests_that_are_too_short_are_refused() -> None:
    found = Entries(32)
    with pytest.raises(ValueError, match="fewer than 32"):
        found.add(bytes(16), b"", Provenance(package="p"))
    with pytest.raises(ValueError, match="fewer than 32"):
        found.add(bytes(32), bytes(16), Provenance(package="p"))
    for size in (15, 33):
        with pytest.raises(ValueError, match="expected 16 to 32"):
            Entries(size)
    # A shorter one may be made from longer ones, and opens as every other.
    short = Entries(16)
    short.merge(opened(collected(numbered(5))).entries())
    assert opened(short).lookup(numbered(5)[3].digest.hex()) == numbered(5)[3].provenance
