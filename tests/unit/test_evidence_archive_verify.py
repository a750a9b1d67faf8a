"""Verification of evidence archives: no byte differs unseen, and any bytes give a result."""

from __future__ import annotations

import hashlib
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden import tar_format
from gpuwarden.errors import Malformed, Unavailable
from gpuwarden.evidence import manifest as words
from gpuwarden.evidence.archive import ArchiveWriter
from gpuwarden.evidence.verify import Verification, verify
from tests.support.archives import (
    LIMIT_BYTES,
    MEMBERS,
    judged,
    key_pair,
    mtime_of,
    put_together,
    sealed,
    taken_apart,
)

Members = list[tuple[str, bytes]]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """One that is sealed and not signed."""
    path = tmp_path_factory.mktemp("archive") / "one.tar"
    sealed(path)
    return path.read_bytes()


def place_of(data: bytes, at: int) -> str:
    """The member whose headers, content or padding hold a byte."""
    begin = 0
    for name, content in taken_apart(data):
        begin += tar_format.HEADER_BYTES + len(content) + -len(content) % tar_format.BLOCK_BYTES
        if at < begin:
            return name
    return "the end"


def test_what_was_sealed_is_intact(archive: bytes) -> None:
    told = judged(archive)
    assert (told.state, told.signature, told.problems) == ("intact", "unsigned", ())
    assert [one.name for one in told.whole] == [*MEMBERS, words.MANIFEST, words.SEAL]
    assert told.manifest is not None and told.manifest.account.why


def test_one_flipped_bit_anywhere_is_told_with_its_member(tmp_path: Path) -> None:
    sealed(tmp_path / "out" / "one.tar", {"a/b": b"x" * 513})
    archive = (tmp_path / "out" / "one.tar").read_bytes()
    changed = bytearray(archive)
    for at in range(len(changed)):
        bit = 1 << at % 8
        changed[at] ^= bit
        told = judged(bytes(changed))
        assert told.state == "damaged", at
        assert place_of(archive, at) in told.problems[0], (at, told.problems)
        changed[at] ^= bit


def test_one_flipped_bit_of_a_signed_one(tmp_path: Path) -> None:
    key, public, _ = key_pair(tmp_path)
    sealed(tmp_path / "out" / "one.tar", {"a": b"x"}, key=key)
    data = (tmp_path / "out" / "one.tar").read_bytes()
    assert judged(data, [public]).signature == "trusted"
    for at in range(0, len(data), 5):
        changed = bytearray(data)
        changed[at] ^= 0x80 >> at % 8
        assert not judged(bytes(changed), [public]).holds(key_named=True), at


@given(st.data())
def test_however_it_is_changed_it_is_told(archive: bytes, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, len(archive)))
    end = data.draw(st.integers(begin, min(len(archive), begin + 2000)))
    changed = archive[:begin] + data.draw(st.binary(max_size=64)) + archive[end:]
    if changed != archive:
        told = judged(changed)
        assert told.state != "intact" and told.problems


@given(st.binary(max_size=8192))
def test_any_bytes_give_a_result(data: bytes) -> None:
    assert judged(data).state != "intact"


def test_wherever_it_is_cut_off_it_is_incomplete(archive: bytes) -> None:
    for length in range(0, len(archive), 37):
        told = judged(archive[:length])
        assert told.state == "incomplete", (length, told.problems)
        assert not told.holds(key_named=False)


def test_what_is_whole_before_the_cut_is_named(archive: bytes) -> None:
    first, second, _ = MEMBERS
    size = 2 * tar_format.HEADER_BYTES + tar_format.BLOCK_BYTES
    told = judged(archive[: size + tar_format.HEADER_BYTES + 100])
    assert [one.name for one in told.whole] == [first, second]
    assert "files/1: cut off: 100 of" in told.problems[0]


def test_a_writer_that_was_killed_leaves_its_whole_members(tmp_path: Path) -> None:
    path = tmp_path / "out" / "one.tar"

    def killed() -> object:
        yield b"x" * 3000
        told.append(judged(path.with_name("one.tar.partial").read_bytes()))
        yield b"y"

    told: list[Verification] = []
    with ArchiveWriter(str(path), limit_bytes=LIMIT_BYTES) as writer:
        writer.add("before", b"kept", what="what")
        writer.add("during", killed(), what="what")  # type: ignore[arg-type]
    (partial,) = told
    assert partial.state == "incomplete" and partial.signature == "none"
    assert [one.name for one in partial.whole] == ["before"]
    assert any("during: was being written: 3000 bytes" in one for one in partial.problems)


def test_a_damaged_member_of_a_partial_one_is_told(archive: bytes) -> None:
    changed = bytearray(archive[:-4000])
    changed[tar_format.HEADER_BYTES] ^= 1
    told = judged(bytes(changed))
    assert told.state == "damaged"
    assert next(iter(MEMBERS)) not in [one.name for one in told.whole]


@pytest.mark.parametrize("tail", [b"\0", bytes(512), b"more", bytes(1024)])
def test_bytes_after_the_end(archive: bytes, tail: bytes) -> None:
    told = judged(archive + tail)
    assert told.state == "damaged"
    assert f"{len(tail)} bytes after the end" in told.problems[0]


def swapped(members: Members) -> Members:
    return [members[1], members[0], *members[2:]]


def one_more(members: Members) -> Members:
    return [("extra", b"planted"), *members]


def one_less(members: Members) -> Members:
    return members[1:]


def another(members: Members) -> Members:
    return [(members[0][0], b"other"), *members[1:]]


def renamed(members: Members) -> Members:
    return [("proc/1/cmdline", members[0][1]), *members[1:]]


def twice(members: Members) -> Members:
    return [members[0], *members]


def after_the_seal(members: Members) -> Members:
    return [*members, ("late", b"planted")]


def no_seal(members: Members) -> Members:
    return members[:-1]


def no_manifest(members: Members) -> Members:
    return [*members[:-2], members[-1]]


def seal_first(members: Members) -> Members:
    return [*members[:-2], members[-1], members[-2]]


def manifest_changed(members: Members) -> Members:
    name, data = members[-2]
    return [*members[:-2], (name, data.replace(b"node-1", b"node-2")), members[-1]]


def manifest_spelt_otherwise(members: Members) -> Members:
    """Its seal fits, its spelling does not."""
    name, data = members[-2]
    other = data.replace(b"\n ", b"\n  ")
    digest, old = (hashlib.sha256(one).hexdigest().encode() for one in (other, data))
    return [*members[:-2], (name, other), (words.SEAL, members[-1][1].replace(old, digest))]


@pytest.mark.parametrize(
    ("change", "words_of_it"),
    [
        (swapped, "not in the order of the manifest"),
        (one_more, "extra: not in the manifest"),
        (one_less, "proc/4711/cmdline: missing"),
        (another, "proc/4711/cmdline: not the content that the manifest names"),
        (renamed, "proc/1/cmdline: not in the manifest"),
        (twice, "proc/4711/cmdline is there twice"),
        (after_the_seal, "not the last two members"),
        (no_seal, "seal.json: missing"),
        (no_manifest, "manifest.json: missing"),
        (seal_first, "not the last two members"),
        (manifest_changed, "manifest.json: not the one that was sealed"),
        (manifest_spelt_otherwise, "manifest.json: is not spelt as it was written"),
    ],
)
def test_put_together_anew_it_is_damaged(
    archive: bytes, change: Callable[[Members], Members], words_of_it: str
) -> None:
    told = judged(put_together(change(taken_apart(archive)), mtime_of(archive)))
    assert told.state == "damaged"
    assert any(words_of_it in one for one in told.problems), told.problems


def test_put_together_as_it_was_it_is_the_same(archive: bytes) -> None:
    assert put_together(taken_apart(archive), mtime_of(archive)) == archive


def test_another_time_in_all_headers_is_told(archive: bytes) -> None:
    told = judged(put_together(taken_apart(archive), mtime_of(archive) + 1))
    assert told.state == "damaged" and "another time" in told.problems[0]


# -------------------------------------------------------------------------------- who sealed it


def test_signed_by_another_key_than_the_one_named(tmp_path: Path) -> None:
    key, public, _ = key_pair(tmp_path)
    _, stranger, _ = key_pair(tmp_path)
    path = tmp_path / "out" / "one.tar"
    told = sealed(path, key=key)
    assert verify(str(path), trusted=[stranger]).signature == "another"
    assert not verify(str(path), trusted=[stranger]).holds(key_named=True)
    good = verify(str(path), trusted=[stranger, public])
    assert (good.signature, good.fingerprint) == ("trusted", told.fingerprint)
    assert good.holds(key_named=True)
    assert verify(str(path)).signature == "unchecked"


def test_an_unsigned_one_does_not_pass_for_a_signed_one(archive: bytes, tmp_path: Path) -> None:
    _, public, _ = key_pair(tmp_path)
    told = judged(archive, [public])
    assert (told.state, told.signature) == ("intact", "unsigned")
    assert told.holds(key_named=False) and not told.holds(key_named=True)


@pytest.mark.parametrize("field", ["public_key", "fingerprint", "signature"])
def test_a_seal_with_a_field_of_another_seal(tmp_path: Path, field: str) -> None:
    key, public, _ = key_pair(tmp_path)
    other, _, _ = key_pair(tmp_path)
    sealed(tmp_path / "out" / "one.tar", key=key)
    data = (tmp_path / "out" / "one.tar").read_bytes()
    members = taken_apart(data)
    seal, alien = words.seal(members[-2][1], key), words.seal(b"another manifest", other)
    mixed = {name: getattr(seal, name) for name in seal.__struct_fields__}
    mixed[field] = getattr(alien, field)
    members[-1] = (words.SEAL, words.encode(words.Seal(**mixed)))
    told = judged(put_together(members, mtime_of(data)), [public])
    assert (told.state, told.signature) == ("damaged", "broken")


def test_an_unsigned_seal_names_no_key(archive: bytes) -> None:
    members = taken_apart(archive)
    seal = words.decode(members[-1][1], words.Seal)
    claims = words.Seal(
        manifest_sha256=seal.manifest_sha256, signed=False, public_key="", fingerprint="ab" * 16
    )
    members[-1] = (words.SEAL, words.encode(claims))
    assert judged(put_together(members, mtime_of(archive))).state == "damaged"


# ------------------------------------------------------------------------------ hostile ones


def test_many_large_manifests_are_not_all_kept(archive: bytes) -> None:
    members = [(words.MANIFEST, b"[" * (1 << 20))] * 40
    data = put_together(members, mtime_of(archive))
    tracemalloc.start()
    try:
        told = judged(data)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert told.state == "damaged"
    assert most < 12 << 20


def test_a_manifest_that_nests_deeply_is_no_manifest(archive: bytes) -> None:
    nested = b'{"account":' * 100_000
    told = judged(put_together([(words.MANIFEST, nested)], mtime_of(archive)))
    assert told.state == "damaged" and any("does not read" in one for one in told.problems)


def test_more_members_than_a_writer_makes(archive: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "MEMBERS_LIMIT", 8)
    data = put_together([(f"m{number}", b"") for number in range(30)], mtime_of(archive))
    told = judged(data)
    assert len(told.whole) == 10 and "more than 8 members" in told.problems[0]


def test_faults_are_bounded() -> None:
    noise = (b"PaxHeaders/sha256" + b"\0" * 495) * 3000
    told = judged(noise)
    assert told.state == "damaged" and len(told.problems) < 300


def test_a_member_that_claims_eight_gigabytes(archive: bytes) -> None:
    header = tar_format.Header("a", tar_format.SIZE_LIMIT_BYTES, 0, b"\x01" * 32)
    told = judged(tar_format.encode(header) + b"x")
    assert told.state == "incomplete" and "cut off: 1 of" in told.problems[0]


def test_what_is_no_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        verify(str(tmp_path / "none"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Malformed):
        verify(str(tmp_path / "pipe"))
    with pytest.raises(Malformed):
        verify(str(tmp_path))


@given(st.binary(min_size=1, max_size=1600), st.booleans())
def test_headers_are_read_back_or_refused(data: bytes, padded: bool) -> None:
    block = (
        data.ljust(tar_format.HEADER_BYTES, b"\0")[: tar_format.HEADER_BYTES] if padded else data
    )
    try:
        header = tar_format.decode(block)
    except Malformed:
        return
    assert tar_format.encode(header) == block
