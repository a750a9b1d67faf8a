"""`gpuwarden evidence verify` and `show`, and a scan of the snapshot inside an archive."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuwarden import snapshot, tar_format
from gpuwarden.cli import main
from gpuwarden.errors import Malformed
from gpuwarden.evidence import archive, flags, writing
from gpuwarden.evidence.archive import ArchiveWriter
from gpuwarden.evidence.manifest import Machine, Subject
from gpuwarden.evidence.wanted import Wanted
from gpuwarden.model import NodeFacts, Snapshot
from gpuwarden.policy import Evidence
from gpuwarden.watch import evidence_side
from tests.support.archives import (
    ACCOUNT,
    LIMIT_BYTES,
    MEMBERS,
    key_pair,
    mtime_of,
    put_together,
    sealed,
    taken_apart,
)

HOSTILE = "pid 7 \x1b[2J\u202eevil"
NODE = Snapshot(taken_at_ns=1_700_000_000 * 10**9, node=NodeFacts(hostname="recorded-1"))
Out = pytest.CaptureFixture[str]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out" / "one.tar"


def unbroken(text: str) -> str:
    """A page in one line: where its lines end depends on how long the paths in it are."""
    return " ".join(text.split())


def damaged(path: Path, at: int = 700) -> Path:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    other = path.with_name("damaged.tar")
    other.write_bytes(bytes(data))
    return other


def test_verify_says_that_it_holds(path: Path, capsys: Out) -> None:
    told = sealed(path)
    assert main(["evidence", "verify", str(path)]) == 0
    out = unbroken(capsys.readouterr().out)
    assert "every byte is as it was written" in out
    assert "unsigned" in out and told.manifest_sha256 in out


def test_verify_says_where_it_does_not(path: Path, capsys: Out) -> None:
    sealed(path)
    assert main(["evidence", "verify", str(damaged(path))]) == 1
    out = unbroken(capsys.readouterr().out)
    assert "NOT AS IT WAS WRITTEN" in out and "proc/4711/cmdline" in out
    assert "4 members are whole" in out


def test_verify_with_a_key(path: Path, tmp_path: Path, capsys: Out) -> None:
    key, _, public = key_pair(tmp_path)
    told = sealed(path, key=key)
    assert main(["evidence", "verify", str(path), "--key", str(public)]) == 0
    assert told.fingerprint in capsys.readouterr().out
    (tmp_path / "other").mkdir()
    _, _, other = key_pair(tmp_path / "other")
    assert main(["evidence", "verify", str(path), "--key", str(other)]) == 1
    assert "ANOTHER key" in capsys.readouterr().out


def test_an_unsigned_one_does_not_satisfy_a_key(path: Path, tmp_path: Path, capsys: Out) -> None:
    _, _, public = key_pair(tmp_path)
    sealed(path)
    assert main(["evidence", "verify", str(path), "--key", str(public)]) == 1
    assert "unsigned" in capsys.readouterr().out


def test_a_partial_one_is_incomplete_and_names_what_is_whole(path: Path, capsys: Out) -> None:
    with ArchiveWriter(str(path), limit_bytes=LIMIT_BYTES) as writer:
        writer.add("proc/7/maps", b"x", what="its maps")
    assert main(["evidence", "verify", f"{path}.partial"]) == 1
    out = capsys.readouterr().out
    assert "INCOMPLETE" in out and "proc/7/maps" in out


def test_verify_as_json(path: Path, capsys: Out) -> None:
    sealed(path)
    assert main(["evidence", "verify", str(path), "--format", "json"]) == 0
    page = json.loads(capsys.readouterr().out)
    assert (page["schema"], page["version"], page["holds"]) == ("gpuwarden.evidence", 1, True)
    assert page["manifest"]["account"]["subject"]["pid"] == 4711


def test_show_says_what_is_in_it_and_what_is_not(path: Path, capsys: Out) -> None:
    account = replace(ACCOUNT, findings=("critical cryptominer",), ended=("pid 4712 ended",))
    with ArchiveWriter(str(path), limit_bytes=LIMIT_BYTES) as writer:
        writer.add("exe/1", b"x" * 77, what="its binary")
        writer.left_out("its heap", "nobody asked for it", 5 << 30)
        writer.unread("its environment", "permission denied")
        writer.close(account, None)
    assert main(["evidence", "show", str(path)]) == 0
    out = capsys.readouterr().out
    for text in (
        "pid 4711 python3",
        "node-1",
        "critical cryptominer",
        "pid 4712 ended",
        "exe/1",
        "77",
        "its binary",
        "its heap (5120.0 MiB): nobody asked for it",
        "its environment: permission denied",
    ):
        assert text in out


def test_show_of_a_damaged_one_says_so(path: Path, capsys: Out) -> None:
    sealed(path)
    assert main(["evidence", "show", str(damaged(path))]) == 1
    out = unbroken(capsys.readouterr().out)
    assert "NOT AS IT WAS WRITTEN" in out and "pid 4711 python3" in out


def test_nothing_in_it_acts_on_the_terminal(path: Path, capsys: Out) -> None:
    account = replace(
        ACCOUNT,
        subject=Subject(kind="process", text=HOSTILE),
        machine=Machine(hostname=HOSTILE, kernel=HOSTILE, architecture=""),
        ended=(HOSTILE,),
    )
    with ArchiveWriter(str(path), limit_bytes=LIMIT_BYTES) as writer:
        writer.add("a", b"x", what=HOSTILE)
        writer.unread(HOSTILE, HOSTILE)
        writer.close(account, None)
    assert main(["evidence", "show", str(path)]) == 0
    assert main(["evidence", "show", str(path), "--format", "json"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\u202e" not in out
    assert "\\e[2J" in out


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["verify"],
        ["verify", "a", "b"],
        ["show", "a", "--gpu", "0"],
        ["1", "2"],
        ["1", "--container", "abc"],
        ["nonsense"],
        ["0"],
        ["99999999999"],
        ["--gpu", "0", "--start-time", "5"],
        ["1", "--key", "k"],
        ["1", "--by-watch"],
        ["1", "--max-mib", "0"],
    ],
)
def test_a_command_line_that_says_no_one_thing(words: list[str], capsys: Out) -> None:
    try:
        code = main(["evidence", *words])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 64
    assert capsys.readouterr().err


def test_what_is_not_there_cannot_be_verified(tmp_path: Path, capsys: Out) -> None:
    assert main(["evidence", "verify", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err


# --------------------------------------------------------------------------- the snapshot in it


def with_snapshot(path: Path) -> Path:
    sealed(path, {**MEMBERS, snapshot.IN_ARCHIVE: snapshot.encode(NODE)})
    return path


def test_a_scan_replays_the_snapshot_inside(path: Path, capsys: Out) -> None:
    assert main(["scan", str(with_snapshot(path))]) == 2
    assert "recorded-1" in capsys.readouterr().out


def test_an_archive_without_one_says_so(path: Path, capsys: Out) -> None:
    sealed(path)
    assert main(["scan", str(path)]) == 64
    assert "without a whole snapshot.json.gz" in capsys.readouterr().err


def test_a_snapshot_that_was_changed_is_not_replayed(path: Path) -> None:
    data = with_snapshot(path).read_bytes()
    at = data.index(snapshot.encode(NODE)) + 20
    with pytest.raises(Malformed, match="not what was written"):
        snapshot.open_recording(str(damaged(path, at)))


def test_a_partial_archive_gives_its_snapshot_too(path: Path) -> None:
    data = with_snapshot(path).read_bytes()
    path.write_bytes(data[:-2000])
    assert snapshot.open_recording(str(path)).node.hostname == "recorded-1"


def test_a_snapshot_of_any_claimed_size_is_bounded(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "INFLATED_LIMIT_BYTES", 10)
    with pytest.raises(Malformed, match="more than 0 MiB"):
        snapshot.open_recording(str(with_snapshot(path)))


def test_headers_that_claim_much_end_the_search(path: Path) -> None:
    sealed(path)
    header = tar_format.Header("a", tar_format.SIZE_LIMIT_BYTES, 0, b"\x01" * 32)
    path.write_bytes(tar_format.encode(header))
    with pytest.raises(Malformed, match="without a whole"):
        snapshot.open_recording(str(path))


# ------------------------------------------------------------------------ the one there is already


def test_the_archive_of_this_very_process_is_found(tmp_path: Path) -> None:
    account = replace(
        ACCOUNT,
        subject=Subject(kind="process", text="t", pid=4711, start_time_ticks=77, boot_id="b"),
    )
    names = [f"evidence-2026010{day}T000000Z-{Wanted(pid=4711).name}-aa.tar" for day in (1, 2)]
    for name in names:
        sealed(tmp_path / "out" / name, account=account)
    directory = str(tmp_path / "out")

    def found(pid: int = 4711, start: int = 77, boot: str = "b") -> str | None:
        return writing.written_before(directory, pid=pid, start_time_ticks=start, boot_id=boot)

    assert found() == str(tmp_path / "out" / names[1])
    assert found(start=78) is None
    assert found(boot="c") is None
    assert found(pid=471) is None
    newest = tmp_path / "out" / names[1]
    data = newest.read_bytes()
    newest.write_bytes(put_together(taken_apart(data)[:-2], mtime_of(data)))
    assert found() == str(tmp_path / "out" / names[0])
    newest.write_bytes(b"junk")
    assert found() == str(tmp_path / "out" / names[0])


# ---------------------------------------------------------------------------------- the page


def test_the_page_names_the_flags_and_the_limits_there_are() -> None:
    page = (Path(__file__).parents[2] / "docs" / "evidence.md").read_text()
    parser = argparse.ArgumentParser()
    flags.add_flags(parser)
    hidden = {"--by-watch", "--help"}
    there = {one for one in parser._option_string_actions if one.startswith("--")} - hidden
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page)) - {"--password"}
    # The short name is the one that people write.
    assert named == there - {"--output"}
    text = " ".join(page.split())
    for limit in (
        f"{archive.DISK_RESERVE_BYTES >> 20} MiB of the disk stay free",
        f"{evidence_side.QUEUE_LIMIT} waiting at most",
    ):
        assert limit in text
    assert evidence_side.DEADLINE_SECONDS == 120 and "within two minutes" in text
    assert evidence_side.TOLD_NS == 3600 * 10**9 and "a finding for an hour" in text
    assert f"`evidence.archive_mib` ({Evidence().archive_mib})" in text
