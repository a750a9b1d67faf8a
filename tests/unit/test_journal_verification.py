"""Whatever is done to a journal's file is told, with the entry and the place."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.errors import Denied, Unavailable
from gpuwarden.journal.book import Journal, head_of
from gpuwarden.journal.chain import PROBLEMS_LIMIT, Walk
from gpuwarden.journal.entry import LINE_LIMIT_BYTES, SET_ASIDE, Head, hash_of, parse, sealed
from gpuwarden.journal.verification import Verification, verify
from tests.support.journals import (
    forged,
    private_key,
    raw_public,
    resealed,
    rewrite,
    told,
    written,
)

COUNT = 6
KEY = private_key()


def _file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return written(Path(folder) / "journal", count=3).read_bytes()


FILE = _file()


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Six entries, signed."""
    return written(tmp_path / "journal", KEY, count=COUNT)


def looked_at(path: Path, head: Head | None = None) -> Verification:
    return verify(str(path), keys=[raw_public(KEY)], head=head)


def found(verification: Verification) -> list[tuple[str, int]]:
    """Each problem's kind and entry."""
    return [(one.kind, one.number) for one in verification.problems]


def walked(data: bytes) -> Walk:
    """A whole file's bytes, without keys."""
    walk = Walk()
    *lines, last = data.split(b"\n")
    for line in lines:
        walk.feed(line, ended=True)
    if last:
        walk.feed(last, ended=False)
    walk.finish()
    return walk


def test_a_journal_that_nobody_touched_is_sound(journal: Path) -> None:
    verification = looked_at(journal, head_of(str(journal)))
    assert verification.is_sound, told(verification)
    assert (verification.entries, verification.signed) == (COUNT, COUNT)
    assert verification.head == head_of(str(journal))
    assert verification.notes == ()
    without = verify(str(journal))
    assert without.is_sound
    assert "nobody can tell whether the last entries were removed" in told(without)
    assert "signatures are not checked" in told(without)


@pytest.mark.parametrize("change", [lambda byte: byte ^ 1, lambda byte: byte ^ 0x80, lambda _: 10])
def test_one_changed_byte_anywhere_is_told_without_any_key(
    journal: Path, change: Callable[[int], int]
) -> None:
    lines = journal.read_bytes().splitlines(keepends=True)[:2]
    data = b"".join(lines)
    for at, byte in enumerate(data):
        changed = change(byte)
        if changed == byte:
            continue
        walk = walked(data[:at] + bytes([changed]) + data[at + 1 :])
        assert walk.problems, (at, data[at - 20 : at + 20], walk.notes)
        assert walk.problems[0].number == 1 + (at >= len(lines[0]))
        assert walk.problems[0].offset in (0, len(lines[0]), at + 1), at


@given(st.data())
def test_bytes_removed_or_put_in_anywhere_but_at_the_end_are_told(data: st.DataObject) -> None:
    text = FILE
    at = data.draw(st.integers(0, len(text) - 1))
    size = data.draw(st.integers(0, 900))
    put = data.draw(st.binary(max_size=40))
    changed = text[:at] + put + text[at + size :]
    rest = changed
    for line in text.splitlines(keepends=True):
        if not rest.startswith(line):
            break
        rest = rest.removeprefix(line)
    # Whole lines, and nothing or part of a line: a truncation, or what deaths leave behind.
    if b"\n" in rest[:-1] or len(rest) >= len(line):
        assert walked(changed).problems, (at, size, put)


@given(st.lists(st.sampled_from(FILE.split(b"\n")) | st.binary(max_size=200), max_size=12))
def test_any_file_is_walked_along(lines: list[bytes]) -> None:
    data = b"\n".join(lines)
    walk = walked(data)
    assert walk.offset == len(data)
    assert walk.entries <= len(lines)
    assert walk.problems or walk.number == walk.entries


def test_a_changed_entry_is_told_with_its_place(journal: Path) -> None:
    lines = journal.read_bytes().splitlines()
    lines[2] = lines[2].replace(b'"finding"', b'"funding"')
    rewrite(journal, lines)
    (problem,) = looked_at(journal).problems
    offset = len(lines[0]) + len(lines[1]) + 2
    assert (problem.kind, problem.number, problem.line) == ("edited", 3, 3)
    assert str(problem).startswith(f"entry 3 (line 3, byte {offset}): its bytes do not have")


@pytest.mark.parametrize("number", range(1, COUNT))
def test_a_removed_entry_is_missed(journal: Path, number: int) -> None:
    lines = journal.read_bytes().splitlines()
    del lines[number - 1]
    rewrite(journal, lines)
    verification = looked_at(journal)
    assert found(verification) == [("missing", number + 1)]
    assert f"is missing: {number}" in told(verification)


def test_several_removed_entries_are_counted(journal: Path) -> None:
    lines = journal.read_bytes().splitlines()
    rewrite(journal, [lines[0], *lines[4:]])
    assert "is missing: 2 to 4" in told(looked_at(journal))


def test_entries_in_another_order_and_entries_put_in_are_told(journal: Path) -> None:
    lines = journal.read_bytes().splitlines()
    rewrite(journal, [*lines[:2], lines[3], lines[2], *lines[4:]])
    assert {("missing", 4), ("order", 3)} <= set(found(looked_at(journal)))
    rewrite(journal, [*lines[:3], lines[1], *lines[3:]])
    assert ("order", 2) in found(looked_at(journal))
    rewrite(journal, [*lines, lines[-1]])
    assert found(looked_at(journal)) == [("order", COUNT)]


def test_an_entry_whose_hash_was_made_right_again_is_found_by_the_next_and_by_its_signature(
    journal: Path,
) -> None:
    lines = journal.read_bytes().splitlines()
    changed = resealed(lines[2], outcome="nothing was done")
    rewrite(journal, [*lines[:2], changed, *lines[3:]])
    assert found(looked_at(journal)) == [("signature", 3), ("replaced", 4)]
    assert found(verify(str(journal))) == [("replaced", 4)]
    rewrite(journal, [*lines[:-1], resealed(lines[-1], outcome="nothing was done")])
    assert found(looked_at(journal)) == [("signature", COUNT)]


def test_a_removed_signature_is_told_with_and_without_a_key(journal: Path) -> None:
    lines = journal.read_bytes().splitlines()
    rewrite(journal, [*lines[:-1], resealed(lines[-1], signature="")])
    assert found(looked_at(journal)) == found(verify(str(journal))) == [("signature", COUNT)]
    assert "removed" in told(looked_at(journal))
    rewrite(journal, [*lines[:-1], resealed(lines[-1], signature="", signed_by="")])
    assert found(looked_at(journal)) == found(verify(str(journal))) == [("signature", COUNT)]


def test_a_file_written_anew_without_the_key_does_not_pass_with_it(journal: Path) -> None:
    lines = journal.read_bytes().splitlines()
    head = head_of(str(journal))
    rewrite(journal, forged(lines[1:]))
    verification = looked_at(journal)
    assert found(verification) == [("signature", 1)]
    assert "neither is any entry after it" in told(verification)
    rewrite(journal, forged(lines[1:], private_key()))
    assert {kind for kind, _ in found(looked_at(journal))} == {"signature"}
    assert "signed by another key" in told(looked_at(journal))
    # Nothing shows it but a head from before, as the page says.
    assert verify(str(journal)).is_sound
    assert found(verify(str(journal), head=head))[0][0] == "cut"
    rewrite(journal, forged([*lines[1:], lines[0]], KEY))
    assert looked_at(journal).is_sound
    assert found(looked_at(journal, head)) == [("replaced", COUNT)]


def test_a_key_that_is_changed_for_another_needs_both(tmp_path: Path) -> None:
    path = written(tmp_path / "journal", KEY)
    other = private_key()
    Journal(str(path), key=other).append("note", {})
    assert verify(str(path), keys=[raw_public(KEY), raw_public(other)]).is_sound
    assert found(verify(str(path), keys=[raw_public(KEY)])) == [("signature", 5)]


def test_entries_from_before_the_key_are_covered_by_the_first_signed_one(tmp_path: Path) -> None:
    path = written(tmp_path / "journal", count=3)
    assert found(looked_at(path)) == [("signature", 1)]
    Journal(str(path), key=KEY).append("note", {})
    verification = looked_at(path)
    assert verification.is_sound
    assert "entries from 1 up to the first signed one" in told(verification)
    Journal(str(path)).append("note", {})
    assert found(looked_at(path)) == [("signature", 5)]


@pytest.mark.parametrize("kept", range(COUNT))
def test_what_was_cut_off_shows_against_a_head_and_only_so(journal: Path, kept: int) -> None:
    head = head_of(str(journal))
    lines = journal.read_bytes().splitlines()
    rewrite(journal, lines[:kept])
    assert found(looked_at(journal, head)) == [("cut", kept + 1)]
    assert looked_at(journal).is_sound
    # As if a writer had died in the middle of the next entry.
    with journal.open("ab") as file:
        file.write(lines[kept][:-9])
    assert found(looked_at(journal, head)) == [("cut", kept + 1)]
    Journal(str(journal), key=KEY).append("note", {})
    assert not looked_at(journal, head).is_sound


def test_a_head_of_the_middle_is_enough_for_what_stood_before(journal: Path) -> None:
    lines = journal.read_bytes().splitlines()
    middle = parse(lines[3])
    head = Head(number=4, hash=middle.hash)
    assert looked_at(journal, head).is_sound
    rewrite(journal, lines[:4])
    assert looked_at(journal, head).is_sound
    assert found(looked_at(journal, Head(number=4, hash="0" * 64))) == [("replaced", 4)]


def test_a_cut_line_that_no_entry_sets_aside_was_made(journal: Path) -> None:
    lines = journal.read_bytes().splitlines()
    rewrite(journal, [*lines[:3], lines[3][:-5], *lines[3:]])
    assert found(looked_at(journal)) == [("edited", 4)]
    rewrite(journal, [*lines[:3], lines[3][:-5]])
    Journal(str(journal), key=KEY).append("note", {})
    assert looked_at(journal).is_sound
    data = journal.read_bytes()
    journal.write_bytes(data.replace(lines[3][:-5] + b"\n", lines[3][:-6] + b"\n"))
    assert [one.kind for one in looked_at(journal).problems] == ["edited"]
    journal.write_bytes(data.replace(lines[3][:-5] + b"\n", b""))
    assert "which are not there: removed" in told(looked_at(journal))


def test_setting_aside_does_not_make_an_edit_good(journal: Path) -> None:
    """An edit of the last entry: the next writer cannot go on from it, and it stays told."""
    lines = journal.read_bytes().splitlines()
    head = Head(number=COUNT, hash=parse(lines[-1]).hash)
    rewritten = [*lines[:-1], lines[-1].replace(b'"node"', b'"nude"')]
    rewrite(journal, rewritten)
    assert Journal(str(journal), key=KEY).append("note", {}).number == COUNT + 1
    assert ("edited", COUNT) in found(looked_at(journal))
    assert ("replaced", COUNT) in found(looked_at(journal, head))
    assert rewritten[-1] in journal.read_bytes()


def test_an_entry_that_has_another_reading_is_none(journal: Path) -> None:
    """A key twice, a blank more: one line, one meaning."""
    line = journal.read_bytes().splitlines()[0]
    entry = parse(line)
    _, text = sealed(entry)
    for changed in (
        text.replace(b'"action"', b' "action"'),
        text.replace(b'"action"', b'"action":"kill","action"'),
        text.replace(b"freeze", b"fr\\u0065eze"),
        text.replace(b'"of":null', b'"of":null,"more":1'),
    ):
        size = len(changed) - changed.index(b",") - 1
        sized = b'{"bytes":%d' % size + changed[changed.index(b",") :]
        right = sized[:-66] + hash_of(sized).encode() + b'"}'
        assert hash_of(right) == hash_of(sized)
        walk = walked(right + b"\n")
        assert [one.number for one in walk.problems] == [1], right


def test_an_intent_without_an_outcome_is_noted(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    Journal(path).conclude(Journal(path).intend("freeze", {}), "frozen")
    Journal(path).intend("kill", {"pid": 1})
    verification = verify(path)
    assert verification.is_sound
    assert "entry 3: what came of this intent (kill) is not written down" in told(verification)
    assert "entry 1" not in told(verification)


def test_a_clock_that_was_set_back_is_noted(tmp_path: Path) -> None:
    path = written(tmp_path / "journal", count=2)
    lines = path.read_bytes().splitlines()
    rewrite(path, [lines[0], resealed(lines[1], time_ns=5)])
    assert "entry 2 is earlier than the one before" in told(verify(str(path)))


def test_lines_without_end_and_many_problems_are_bounded(tmp_path: Path) -> None:
    path = written(tmp_path / "journal", count=2)
    first, second = path.read_bytes().splitlines()
    rewrite(path, [first, b"x" * (5 * LINE_LIMIT_BYTES), second, *[b"{}"] * 500])
    verification = verify(str(path))
    assert verification.entries == 2
    assert len(verification.problems) == PROBLEMS_LIMIT
    assert verification.more_problems > 300
    assert verification.problems[0].offset == len(first) + 1


def test_a_set_aside_entry_with_any_subject_is_judged(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    Journal(str(path)).append(SET_ASIDE, {"bytes": [1] * 60, "sha256": None})
    assert found(verify(str(path))) == [("missing", 1)]


def test_what_is_no_journal_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        verify(str(tmp_path / "absent"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Denied):
        verify(str(tmp_path / "pipe"))
    (tmp_path / "text").write_text("a journal?\n")
    assert found(verify(str(tmp_path / "text"))) == [("edited", 1)]
    (tmp_path / "empty").touch()
    assert verify(str(tmp_path / "empty")).is_sound
