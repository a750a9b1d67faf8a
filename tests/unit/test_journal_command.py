"""`gpuwarden journal`: the entries, whether they are as written, and the head."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from gpuwarden import cli
from gpuwarden.journal.book import Journal, head_of
from gpuwarden.journal.entry import Who
from gpuwarden.keys import make_key, read_private
from tests.support.journals import resealed, rewrite, written

WIDTHS = (80, 140)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder with k.key, k.pem and a policy that names the key."""
    private, public = make_key()
    (tmp_path / "k.key").touch(0o600)
    (tmp_path / "k.key").write_bytes(private)
    (tmp_path / "k.pem").write_bytes(public)
    (tmp_path / "policy.yaml").write_text(f"version: 1\nsigning_key: {tmp_path}/k.key\n")
    return tmp_path


@pytest.fixture
def journal(keys: Path) -> Path:
    """Four signed entries."""
    key = read_private((keys / "k.key").read_bytes(), "k.key")
    return written(keys / "journal", key)


def ran(*arguments: object) -> int:
    return cli.main(["journal", *map(str, arguments)])


@pytest.mark.parametrize("width", WIDTHS)
def test_entries_fit_the_terminal_and_do_nothing_to_it(
    journal: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    who = Who(uid=0, loginuid=1000, sudo_user="alice\x1b[2J")
    Journal(str(journal), who=who).append(
        "kill", {"argv": ["/tmp/a b", "„" * 300]}, "gone\n2 GiB were given back", stage="failed"
    )
    monkeypatch.setenv("COLUMNS", str(width))
    ran("--journal", journal)
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert all(len(line) <= width for line in lines)
    assert "\x1b" not in text
    at = [text.index(f"\n{number} ") for number in range(1, 6)]
    assert at == sorted(at)
    flat = " ".join(text.split())
    for wanted in ("freeze (intent)", "freeze: done (1)", "pid 4711", "kill: failed", "refused"):
        assert wanted in flat, wanted
    assert "alice\\e[2J? ui" in flat
    (about,) = [line for line in lines if "argv" in line]
    assert about.index("argv") == (6 if width == 80 else 67)
    assert "gone\\n2 GiB were given back" in flat


def test_only_what_is_newer(keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(keys / "journal", count=3)
    lines = path.read_bytes().splitlines()
    old = time.time_ns() - 7200 * 10**9
    rewrite(path, [resealed(lines[0], time_ns=old), *lines[1:]])
    ran("--journal", path, "--since", "1h", "--format", "json")
    document = json.loads(capsys.readouterr().out)
    assert [one["number"] for one in document["entries"]] == [2, 3]
    assert document["schema"] == "gpuwarden.journal"
    assert document["verification"]["entries"] == 3
    assert ran("--journal", path, "--since", "soon") == 64


def test_a_journal_that_is_not_sound_is_shown_and_said_to_be(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = journal.read_bytes().splitlines()
    rewrite(journal, [lines[0], *lines[2:]])
    assert ran("--journal", journal) == 1
    told = capsys.readouterr()
    assert "refused" in told.out
    assert "does not verify: entry 3 (line 2, byte" in told.err


def test_no_journal_is_no_error_but_nothing_to_verify(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "journal"
    assert ran("--journal", path) == 0
    assert "no journal: nothing was written down here" in " ".join(capsys.readouterr().out.split())
    assert ran("verify", "--journal", path) == 2
    assert ran("verify", "--journal", path, "--head", "1:" + "a" * 64) == 1
    assert "though a head of it was kept" in capsys.readouterr().err
    assert ran("head", "--journal", path) == 2
    path.touch()
    assert ran("head", "--journal", path) == 2
    assert ran("--journal", path) == 0
    assert "no entry" in " ".join(capsys.readouterr().out.split())


def test_verify_trusts_the_policys_key_or_those_that_are_named(
    keys: Path, journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (keys / "other.pem").write_bytes(make_key()[1])
    assert ran("verify", "--journal", journal) == 0
    assert "signatures are not checked" in " ".join(capsys.readouterr().out.split())
    for more in (["--key", keys / "k.pem"], ["--policy", keys / "policy.yaml"]):
        assert ran("verify", "--journal", journal, *more) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "4 entries, 4 signed by a trusted key: as they were written" in out
        assert "signatures are not checked" not in out
    assert ran("verify", "--journal", journal, "--key", keys / "other.pem") == 1
    assert "signed by another key" in " ".join(capsys.readouterr().out.split())
    both = ["--key", keys / "other.pem", "--key", keys / "k.pem"]
    assert ran("verify", "--journal", journal, *both) == 0
    assert ran("verify", "--journal", journal, "--key", keys / "k.key") == 64
    (keys / "k.key").chmod(0o644)
    capsys.readouterr()
    assert ran("verify", "--journal", journal, "--policy", keys / "policy.yaml") == 0
    told = capsys.readouterr()
    assert "others can read it" in told.err
    assert "signatures are not checked" in told.out


def test_a_head_that_was_kept_shows_what_was_cut_off(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran("head", "--journal", journal) == 0
    head = capsys.readouterr().out.strip()
    assert head == str(head_of(str(journal)))
    assert ran("verify", "--journal", journal, "--head", head) == 0
    capsys.readouterr()
    rewrite(journal, journal.read_bytes().splitlines()[:-1])
    assert ran("verify", "--journal", journal) == 0
    # Where a line ends depends on how long the path is.
    assert "whether the last entries were removed" in " ".join(capsys.readouterr().out.split())
    assert ran("verify", "--journal", journal, "--head", head, "--format", "json") == 1
    document = json.loads(capsys.readouterr().out)
    assert [(one["kind"], one["number"]) for one in document["problems"]] == [("cut", 4)]
    assert document["is_sound"] is False


def test_flags_that_mean_nothing_are_refused(journal: Path) -> None:
    assert ran("--journal", journal, "--head", "1:" + "a" * 64) == 64
    assert ran("head", "--journal", journal, "--key", "k.pem") == 64
    assert ran("verify", "--journal", journal, "--since", "1h") == 64
    assert ran("verify", "--journal", journal, "--head", "1") == 64
