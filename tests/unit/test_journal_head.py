"""The daemon's look at the journal: its head is told, and that it no longer continues."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gpuwarden.finding import Finding
from gpuwarden.journal import verification
from gpuwarden.journal.book import Journal, head_of
from gpuwarden.journal.place import for_writing
from gpuwarden.watch.journal_head import (
    JOURNAL_RULES,
    KEPT_FILE,
    LOCKED_NS,
    STEP_BYTES,
    WHOLE_PASS_NS,
    JournalHead,
)
from tests.support.journals import forged, private_key, resealed, rewrite, unsynced, written

S = 10**9
NOW = 1_700_000_000 * S
WRITTEN, BROKEN = ["journal_written"], ["journal_written", "journal_broken"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal of four entries."""
    return written(tmp_path / "journal")


@pytest.fixture
def watched(path: Path, tmp_path: Path) -> JournalHead:
    """Whoever has seen these four."""
    head = JournalHead(str(path), str(tmp_path / KEPT_FILE))
    assert rules(head.findings(NOW)) == WRITTEN
    return head


def rules(found: list[Finding]) -> list[str]:
    assert {one.rule for one in found} <= JOURNAL_RULES
    assert all(one.subject.kind == "source" for one in found)
    return [one.rule for one in found]


def texts(found: list[Finding]) -> str:
    return "\n".join(one.text for finding in found for one in finding.evidence)


def test_without_a_journal_nothing_is_said(tmp_path: Path) -> None:
    head = JournalHead(str(tmp_path / "journal"), str(tmp_path / KEPT_FILE))
    assert head.findings(NOW) == []
    assert not (tmp_path / KEPT_FILE).exists()
    written(tmp_path / "journal")
    assert rules(head.findings(NOW + S)) == WRITTEN


def test_the_head_is_told_as_verify_takes_it_with_the_last_action(
    tmp_path: Path, path: Path, watched: JournalHead
) -> None:
    key = private_key()
    (first,) = watched.findings(NOW + S)
    entry = Journal(str(path), key=key).append("kill", {"pid": 1}, stage="done")
    (finding,) = watched.findings(NOW + 2 * S)
    assert (finding.rule, finding.severity) == ("journal_written", "info")
    # Told at once, and not as a change of the one before.
    assert finding.subject.name == f"journal 5:{entry.hash[:16]}"
    assert finding.id != first.id
    head, last, signed = (one.text for one in finding.evidence)
    assert head == f"head {head_of(str(path))}"
    assert last.startswith("last entry: kill (done), 20")
    assert signed == f"signed by {entry.signed_by}"
    kept = json.loads((tmp_path / KEPT_FILE).read_text())
    assert (kept["number"], kept["hash"]) == (5, entry.hash)


def test_a_round_without_a_change_reads_nothing(
    watched: JournalHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError("read")

    monkeypatch.setattr("gpuwarden.watch.journal_head.for_reading", read)
    assert rules(watched.findings(NOW + S)) == WRITTEN


def test_what_is_added_is_read_and_no_more(
    path: Path, watched: JournalHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    lines = verification.lines

    def noted(descriptor: int, start: int, end: int) -> object:
        started.append(start)
        return lines(descriptor, start, end)

    monkeypatch.setattr("gpuwarden.watch.journal_head.lines", noted)
    size = path.stat().st_size
    Journal(str(path)).append("note", {})
    watched.findings(NOW + S)
    Journal(str(path)).append("note", {})
    watched.findings(NOW + WHOLE_PASS_NS)
    assert started == [size, 0]


def cut(path: Path) -> None:
    rewrite(path, path.read_bytes().splitlines()[:2])


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def removed(path: Path) -> None:
    path.unlink()


def begun_anew(path: Path) -> None:
    path.unlink()
    written(path, count=6)


def chained_anew(path: Path) -> None:
    lines = path.read_bytes().splitlines()
    rewrite(path, forged([lines[0], lines[0], *lines[2:], *lines]))


def edited_in_the_middle(path: Path) -> None:
    """The times set back, as far as they can be."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(20)
        file.write(b"7")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def last_entry_exchanged(path: Path) -> None:
    lines = path.read_bytes().splitlines()
    rewrite(path, [*lines[:-1], resealed(lines[-1], outcome="another thing")])
    Journal(str(path)).append("note", {})


def edited_and_gone_on(path: Path) -> None:
    """An edit of the last one, and then an honest entry: the file only seems to have grown."""
    lines = path.read_bytes().splitlines()
    rewrite(path, [*lines[:-1], lines[-1].replace(b"refused", b"refuses")])
    Journal(str(path)).append("note", {})


def exchanged_for_an_edited_copy(path: Path) -> None:
    """A file that has only grown, but for an edit deep inside, under the same name."""
    copy = path.with_name("copy")
    copy.touch(0o600)
    copy.write_bytes(path.read_bytes().replace(b"freeze", b"thawed", 1))
    copy.replace(path)
    Journal(str(path)).append("note", {})


@pytest.mark.parametrize(
    "deed",
    [
        cut,
        emptied,
        removed,
        begun_anew,
        chained_anew,
        edited_in_the_middle,
        last_entry_exchanged,
        edited_and_gone_on,
        exchanged_for_an_edited_copy,
    ],
)
@pytest.mark.parametrize("is_restarted", [False, True])
def test_whatever_is_done_to_it_is_told_also_after_a_restart(
    tmp_path: Path,
    path: Path,
    watched: JournalHead,
    deed: object,
    is_restarted: bool,
) -> None:
    before = head_of(str(path))
    assert callable(deed)
    deed(path)
    if is_restarted:
        watched = JournalHead(str(path), str(tmp_path / KEPT_FILE))
    found = watched.findings(NOW + S)
    assert "journal_broken" in rules(found)
    assert {one.severity for one in found} <= {"info", "error"}
    # It stays, and what is added later does not make it good.
    if deed is not removed:
        Journal(str(path)).append("note", {})
    assert "journal_broken" in rules(watched.findings(NOW + 2 * S))
    again = JournalHead(str(path), str(tmp_path / KEPT_FILE))
    assert "journal_broken" in rules(again.findings(NOW + 3 * S))
    assert again.seen == before
    # Whoever has looked into it says so by removing what is remembered.
    (tmp_path / KEPT_FILE).unlink()
    path.unlink(missing_ok=True)
    written(path)
    assert rules(JournalHead(str(path), str(tmp_path / KEPT_FILE)).findings(NOW)) == WRITTEN


def test_a_deep_edit_together_with_an_entry_is_found_within_the_hour(
    path: Path, watched: JournalHead
) -> None:
    with path.open("r+b") as file:
        file.seek(20)
        file.write(b"7")
    Journal(str(path)).append("note", {})
    assert rules(watched.findings(NOW + S)) == WRITTEN
    Journal(str(path)).append("note", {})
    assert rules(watched.findings(NOW + WHOLE_PASS_NS)) == BROKEN


def test_a_file_that_comes_back_as_it_was_is_no_trouble_any_longer(
    path: Path, watched: JournalHead
) -> None:
    data = path.read_bytes()
    path.unlink()
    assert rules(watched.findings(NOW + S)) == ["journal_broken"]
    path.write_bytes(data)
    assert rules(watched.findings(NOW + 2 * S)) == WRITTEN


def test_what_a_dead_writer_left_is_no_trouble(path: Path, watched: JournalHead) -> None:
    Journal(str(path)).append("note", {})
    os.truncate(path, path.stat().st_size - 9)
    assert rules(watched.findings(NOW + S)) == WRITTEN
    assert rules(watched.findings(NOW + 2 * S)) == WRITTEN
    Journal(str(path)).append("note", {})
    found = watched.findings(NOW + 3 * S)
    assert rules(found) == WRITTEN
    assert f"head {head_of(str(path))}" in texts(found)


def test_a_long_journal_is_read_in_steps_and_its_finding_stays_meanwhile(
    tmp_path: Path, path: Path, watched: JournalHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsynced(monkeypatch)
    journal = Journal(str(path))
    for _ in range(60):
        journal.append("note", {"text": ["x" * 1000] * 15})
    assert path.stat().st_size > 3 * STEP_BYTES
    head = str(head_of(str(path)))
    rounds = [watched.findings(NOW + number * S) for number in range(1, 6)]
    assert [rules(one) for one in rounds] == [WRITTEN] * 5
    assert head not in texts(rounds[0])
    assert head in texts(rounds[4])
    late = JournalHead(str(path), str(tmp_path / KEPT_FILE))
    assert [rules(late.findings(NOW)) for _ in range(5)] == [[], [], [], WRITTEN, WRITTEN]


def test_who_keeps_its_lock_is_told_of_after_a_while(path: Path, watched: JournalHead) -> None:
    with for_writing(str(path)) as descriptor:
        os.write(descriptor, b'{"bytes"')
        assert rules(watched.findings(NOW + S)) == WRITTEN
        found = watched.findings(NOW + S + LOCKED_NS)
    assert rules(found) == BROKEN
    assert "a process keeps its lock since 2023" in texts(found)
    assert rules(watched.findings(NOW + 2 * S + LOCKED_NS)) == WRITTEN


def test_a_link_in_its_place_is_trouble(tmp_path: Path, path: Path, watched: JournalHead) -> None:
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    found = watched.findings(NOW + S)
    assert rules(found) == ["journal_broken"]
    assert "a link, which is not followed" in texts(found)


@pytest.mark.parametrize("memory", [b"", b"{}", b'{"number":1,"hash":7}', b"[" * 5000, b"\xff"])
def test_a_memory_that_cannot_be_read_is_told(tmp_path: Path, path: Path, memory: bytes) -> None:
    (tmp_path / KEPT_FILE).write_bytes(memory)
    found = JournalHead(str(path), str(tmp_path / KEPT_FILE)).findings(NOW)
    assert rules(found) == BROKEN
    assert "the head last seen is not known" in texts(found)


def test_a_memory_that_cannot_be_kept_is_no_hindrance(tmp_path: Path, path: Path) -> None:
    head = JournalHead(str(path), str(tmp_path / "absent" / KEPT_FILE))
    assert rules(head.findings(NOW)) == WRITTEN
    assert rules(JournalHead(str(path)).findings(NOW)) == WRITTEN
