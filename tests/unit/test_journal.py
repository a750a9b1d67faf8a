"""The journal: what an entry says, where it is written, and what a death leaves behind."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuwarden.errors import Denied, GpuwardenError, Malformed, TimedOut, Unavailable, UsageError
from gpuwarden.journal import place
from gpuwarden.journal.asker import asker
from gpuwarden.journal.book import Journal, head_of
from gpuwarden.journal.entry import (
    FIRST_PREVIOUS,
    LINE_LIMIT_BYTES,
    SET_ASIDE,
    Entry,
    hash_of,
    is_cut_off,
    parse,
    parse_head,
    whole,
)
from gpuwarden.journal.place import for_writing
from gpuwarden.journal.signing import public_key, signing_key
from gpuwarden.journal.verification import verify
from gpuwarden.keys import fingerprint, make_key
from tests.support.journals import PID, entries, private_key, raw_public, told, unsynced, written

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_an_entry_says_what_who_where_and_when(tmp_path: Path) -> None:
    key = private_key()
    path = tmp_path / "made" / "journal"
    journal = Journal(str(path), key=key, node="node-7")
    intent = journal.intend("hold-jobs", PID, "two jobs of user 1000")
    journal.conclude(intent, "held 12, 13")
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["number"], first["stage"], first["of"]) == (1, "intent", None)
    assert (second["number"], second["stage"], second["of"]) == (2, "done", 1)
    assert second["previous"] == first["hash"]
    assert first["previous"] == FIRST_PREVIOUS
    assert {one["action"] for one in (first, second)} == {"hold-jobs"}
    assert first["subject"] == {**PID, "exe": "/tmp/a \x1b[31m\x7f\\udcff„b“"}
    assert (first["node"], first["outcome"]) == ("node-7", "two jobs of user 1000")
    assert first["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert first["who"]["uid"] == os.getuid()
    assert first["signed_by"] == fingerprint(raw_public(key))
    assert 0 < first["time_ns"] <= second["time_ns"]
    assert str(journal.head()) == f"2:{second['hash']}"
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_line_shows_on_a_terminal_and_does_nothing_there(tmp_path: Path) -> None:
    text = written(tmp_path / "journal").read_bytes()
    assert all(byte == 0x0A or 0x20 <= byte < 0x7F for byte in text)


def test_who_asked_is_the_kernels_word_and_sudos_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_USER", "x" * 5000)
    who = asker("watch")
    assert (who.by, who.uid) == ("watch", os.getuid())
    assert len(who.sudo_user) < 100
    monkeypatch.delenv("SUDO_USER")
    assert asker().sudo_user == ""


@given(subject=st.dictionaries(st.text(), JSON, max_size=4), outcome=st.text())
@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_any_subject_makes_an_entry_that_reads_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subject: dict[str, Any], outcome: str
) -> None:
    unsynced(monkeypatch)
    path = tmp_path / "journal"
    entry = Journal(str(path)).append("note", subject, outcome)
    line = path.read_bytes().splitlines()[-1]
    assert whole(line) == entry == parse(line)
    assert len(line) < LINE_LIMIT_BYTES
    assert hash_of(line) == entry.hash


def test_what_is_too_much_for_an_entry_is_shortened_and_said(tmp_path: Path) -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"deeper": deep}
    subject = {
        "argv": ["x" * 9000] * 200,
        "wide": {str(number): 1 for number in range(300)},
        "big": 1 << 200,
        "infinite": float("inf"),
        "other": {1, 2},
        **{f"text{number}": "„" * 2000 for number in range(30)},
    }
    journal = Journal(str(tmp_path / "journal"))
    entry = journal.append("note", subject, "y" * 100_000)
    assert entry.outcome.endswith("… and 97952 more")
    assert "argv" in entry.subject["left_out"]
    assert entry.subject["wide"]["more"] == 236
    assert entry.subject["big"].startswith("0x1000")
    assert (entry.subject["infinite"], entry.subject["other"]) == ("inf", "{1, 2}")
    assert "1 items, too deep" in str(journal.append("note", {"deep": deep}).subject)
    wide = {"\U0001f600" * 64 + str(number): "\U0001f600" * 2000 for number in range(64)}
    journal.append("note", wide, "\U0001f600" * 100_000)
    assert verify(journal.path).is_sound


@pytest.mark.parametrize("word", ["", "Kill", "kill it", "x" * 40, "a\n"])
def test_an_action_is_a_word(tmp_path: Path, word: str) -> None:
    with pytest.raises(ValueError, match="a short word"):
        Journal(str(tmp_path / "journal")).append(word, {})
    assert not (tmp_path / "journal").exists()


@given(st.binary(max_size=300))
def test_any_line_is_an_entry_or_none(data: bytes) -> None:
    with pytest.raises(Malformed):
        parse(data)
    assert whole(data) is None
    is_cut_off(data, 1, FIRST_PREVIOUS)


@pytest.mark.parametrize("depth", [7, 300, 900, 10_000])
def test_a_subject_that_nests_deeper_than_any_is_no_entry(tmp_path: Path, depth: int) -> None:
    Journal(str(tmp_path / "journal")).append("note", {"a": "here"})
    line = (tmp_path / "journal").read_bytes()[:-1]
    nested = b'{"a":' * depth + b"1" + b"}" * depth
    rest = line[line.index(b",") :].replace(b'{"a":"here"}', nested)
    assert nested in rest
    with pytest.raises(Malformed):
        parse(b'{"bytes":%d' % (len(rest) - 1) + rest)


# ------------------------------------------------------------------ where it is written


def test_a_directory_that_others_can_change_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(Denied, match="others may write"):
        Journal(str(folder / "journal")).append("note", {})
    folder.chmod(0o700)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(Denied, match="a link"):
        Journal(str(tmp_path / "link" / "journal")).append("note", {})
    tmp_path.chmod(0o777)
    with pytest.raises(Denied, match="replace it, by way of"):
        Journal(str(folder / "journal")).append("note", {})
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "mode", "pipe", "twice", "directory"])
def test_a_file_that_others_can_change_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "journal"
    if kind == "link":
        path.symlink_to(written(tmp_path / "other"))
    elif kind == "mode":
        written(path).chmod(0o640)
    elif kind == "twice":
        os.link(written(path), tmp_path / "again")
    elif kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path, 0o600)
    with pytest.raises(Denied):
        Journal(str(path)).append("note", {})


def test_a_missing_directory_is_made_for_root_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Journal(str(tmp_path / "a" / "b" / "journal")).append("note", {})
    finally:
        os.umask(before)
    for one in ("a", "a/b"):
        assert (tmp_path / one).stat().st_mode & 0o777 == 0o700


def test_a_file_that_is_moved_away_while_we_wait_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "journal")
    old = path.read_bytes()
    lock = place.lock

    def moved_meanwhile(*arguments: Any) -> None:
        lock(*arguments)
        if not (tmp_path / "old").exists():
            path.rename(tmp_path / "old")

    monkeypatch.setattr(place, "lock", moved_meanwhile)
    assert Journal(str(path)).append("note", {}).number == 1
    assert (tmp_path / "old").read_bytes() == old


def test_a_lock_that_is_never_let_go_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(written(tmp_path / "journal"))
    monkeypatch.setattr(place, "LOCK_SECONDS", 0.05)
    monkeypatch.setattr(place.lock, "__defaults__", (0.05,))
    with for_writing(path), pytest.raises(TimedOut, match="locked by another process"):
        Journal(path).append("note", {})
    assert Journal(path).append("note", {}).number == 5


# ------------------------------------------------------------------ deaths and full disks


@pytest.mark.parametrize(("count", "is_signed"), [(1, True), (3, False)])
def test_a_death_at_any_byte_breaks_nothing_and_loses_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, is_signed: bool
) -> None:
    """The file cut at every byte, as a writer leaves it that is killed; then others write on."""
    unsynced(monkeypatch)
    key = private_key() if is_signed else None
    keys = [raw_public(key)] if is_signed else []
    path = written(tmp_path / "journal", key, count=count)
    data = path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(data) if byte == 0x0A]
    journal = Journal(str(path), key=key)
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        after_death = verify(str(path), keys=keys)
        assert after_death.is_sound, (size, told(after_death))
        # Only the newline is missing: the entry is all there.
        kept = sum(end <= size + 1 for end in ends)
        is_torn = size not in (0, *ends) and size + 1 not in ends
        assert after_death.entries == kept
        assert any("line that was cut off" in note for note in after_death.notes) == is_torn, size
        entry = journal.append("note", {"size": size})
        assert entry.number == kept + 1 + is_torn
        assert path.read_bytes().startswith(data[:size])
        shown: list[Entry] = []
        told_after = verify(str(path), keys=keys, show=shown.append)
        assert told_after.is_sound, (size, told(told_after))
        assert told_after.entries == entry.number
        assert [one.action for one in shown][kept:-1] == [SET_ASIDE] * is_torn


@given(cuts=st.lists(st.integers(1, 1400), min_size=2, max_size=6))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_deaths_while_a_death_is_cleared_up_break_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: list[int]
) -> None:
    unsynced(monkeypatch)
    path = tmp_path / "journal"
    path.unlink(missing_ok=True)
    journal = Journal(str(path))
    journal.append("note", {})
    for cut in cuts:
        before = path.stat().st_size
        journal.append("note", {"cut": cut})
        os.truncate(path, min(before + cut, path.stat().st_size))
        found = verify(str(path))
        assert found.is_sound, told(found)
    journal.append("note", {})
    found = verify(str(path))
    assert found.is_sound, told(found)


@pytest.mark.parametrize("kept", [0, 1, 9, 300])
@pytest.mark.parametrize("junk", [b"\0" * 4096, b"\nno entry", b"\n\n", "„".encode()])
def test_bytes_that_no_death_explains_are_set_aside_and_stay_a_problem(
    tmp_path: Path, kept: int, junk: bytes
) -> None:
    """Beside what a death could have left of an entry."""
    path = written(tmp_path / "journal", count=5)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4]) + lines[4][:kept] + junk)
    entry = Journal(str(path)).append("note", {})
    assert entry.number == 6
    (aside,) = [one for one in entries(path) if one.action == SET_ASIDE]
    assert aside.outcome == "bytes that are no entry"
    found = verify(str(path))
    assert {one.kind for one in found.problems} == {"edited"}
    assert found.problems[0].number == 5


def test_a_journal_that_ends_in_a_mib_of_anything_is_not_written_to(tmp_path: Path) -> None:
    path = written(tmp_path / "journal")
    with path.open("ab") as file:
        file.write(b"{}\n" * 400_000)
    with pytest.raises(Malformed, match="no entry in its last") as raised:
        Journal(str(path)).append("note", {})
    assert "mv " in raised.value.remedy


FULL = """
import resource, sys
from gpuwarden.errors import Unavailable
from gpuwarden.journal.book import Journal
path, limit = sys.argv[1], int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
try:
    Journal(path).append("kill", {})
except Unavailable as error:
    print(error)
"""


@pytest.mark.parametrize("room", [0, 1, 200])
def test_where_there_is_no_room_nothing_is_left_behind(tmp_path: Path, room: int) -> None:
    path = written(tmp_path / "journal")
    before = path.read_bytes()
    ran = subprocess.run(
        [sys.executable, "-c", FULL, str(path), str(len(before) + room)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "the entry was not written: File too large" in ran.stdout
    assert path.read_bytes() == before
    assert Journal(str(path)).append("note", {}).number == 5
    assert verify(str(path)).is_sound


def test_what_cannot_be_taken_back_is_set_aside_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with the append-only attribute, where a file cannot be shortened."""
    path = written(tmp_path / "journal")

    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    write = os.write

    def full(descriptor: int, data: memoryview) -> int:
        if len(data) < 300:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:200])

    with monkeypatch.context() as patched:
        patched.setattr(os, "ftruncate", refused)
        patched.setattr(os, "write", full)
        with pytest.raises(Unavailable, match="No space left"):
            Journal(str(path)).append("kill", {})
    assert Journal(str(path)).append("note", {}).number == 6
    found = verify(str(path))
    assert found.is_sound, told(found)


def test_an_entry_is_synced_before_it_counts_and_so_is_a_new_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync: Callable[[int], None] = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    path = tmp_path / "new" / "journal"
    Journal(str(path)).append("note", {})
    assert synced == [str(tmp_path), str(tmp_path / "new"), str(path)]
    Journal(str(path)).append("note", {})
    assert synced[3:] == [str(path)]


# ------------------------------------------------------------------ keys and heads


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    private, public = make_key()
    secret = tmp_path / "k.key"
    secret.write_bytes(private)
    secret.chmod(0o600)
    assert signing_key(None) is None
    key = signing_key(str(secret))
    assert key is not None
    (tmp_path / "k.pem").write_bytes(public)
    assert public_key(str(tmp_path / "k.pem")) == raw_public(key)
    (tmp_path / "link").symlink_to(secret)
    for path in (tmp_path / "link", tmp_path / "absent", tmp_path):
        with pytest.raises(UsageError):
            signing_key(str(path))
    secret.chmod(0o640)
    with pytest.raises(UsageError, match="others can read it"):
        signing_key(str(secret))


def test_a_head_goes_to_text_and_back(tmp_path: Path) -> None:
    path = written(tmp_path / "journal")
    head = head_of(str(path))
    assert head is not None
    assert parse_head(str(head)) == head
    for text in ("", "1", "0:" + "a" * 64, "1:" + "A" * 64, "1:" + "a" * 64 + "\n"):
        with pytest.raises(UsageError):
            parse_head(text)


def test_a_journal_without_an_entry_has_no_head(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with pytest.raises(GpuwardenError, match="no such file"):
        head_of(str(path))
    path.touch()
    assert head_of(str(path)) is None
