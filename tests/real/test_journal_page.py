"""docs/journal.md: what it says that a reader can check without gpuwarden."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import msgspec
import pytest

from gpuwarden.journal.book import JOURNAL, Journal
from gpuwarden.journal.entry import Entry
from gpuwarden.journal.signing import signing_key
from gpuwarden.keys import make_key
from tests.support.packages import require

pytestmark = pytest.mark.real

PAGE = (Path(__file__).parents[2] / "docs" / "journal.md").read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A signed journal and PUBLIC.pem."""
    private, public = make_key()
    (tmp_path / "PUBLIC.pem").write_bytes(public)
    (tmp_path / "k.key").touch(0o600)
    (tmp_path / "k.key").write_bytes(private)
    journal = Journal(str(tmp_path / "journal"), key=signing_key(str(tmp_path / "k.key")))
    journal.append("deny", {"pod": "team/pod", "signature": "none"}, "it opens \t no more")
    return tmp_path


def run(folder: Path, after: str) -> str:
    """Runs the first indented block after a text of the page."""
    block = re.search(r"\n\n((?:    .*\n)+)", PAGE[PAGE.index(after) :])
    assert block is not None
    script = block[1].replace(JOURNAL, "journal")
    ran = subprocess.run(
        ["sh", "-e", "-c", script], cwd=folder, capture_output=True, text=True, check=True
    )
    return ran.stdout


def test_hash_and_signature_are_checked_with_coreutils_and_openssl(folder: Path) -> None:
    require("openssl")
    told = run(folder, "## Checking it without gpuwarden")
    entry = msgspec.json.decode((folder / "journal").read_bytes())
    assert told.split()[0] == entry["hash"]
    assert "Signature Verified Successfully" in told


def test_jq_shows_entries(folder: Path) -> None:
    require("jq")
    with (folder / "journal").open("ab") as file:
        file.write(b'{"bytes":900,"numb\n')
    assert run(folder, "With `jq`") == "1\tdeny\tfact\tit opens \\t no more\n"


def test_every_field_of_an_entry_is_on_the_page() -> None:
    rows = "".join(line for line in PAGE.splitlines(keepends=True) if line.startswith("| `"))
    named = set(re.findall(r"`(\w+)`", rows))
    assert set(Entry.__struct_fields__) | {"bytes"} <= named
