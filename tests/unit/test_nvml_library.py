"""Which NVML library is opened, and which is refused."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwarden.host import Host
from gpuwarden.sensors.nvml import library as nvml_library
from gpuwarden.sensors.nvml.library import LIBRARY_NAME, candidates, check_library
from tests.support.fakenvml import build_library, library_directory

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can make a library that is root's alone"
)


@pytest.fixture
def safe() -> Iterator[Path]:
    """A directory that is root's alone, with every directory above it."""
    made = Path(tempfile.mkdtemp(prefix="case-", dir=library_directory()))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def library(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for part in (directory, *directory.parents):
        if part == library_directory():
            break
        part.chmod(0o755)
    return Path(shutil.copy(build_library(), directory / LIBRARY_NAME))


def test_roots_own_library_is_accepted_and_identified(safe: Path) -> None:
    path = library(safe)
    check = check_library(str(path))
    assert (check.accepted, check.reason, check.resolved) == (True, "", str(path))
    assert check.inode == path.stat().st_ino
    assert check.build_id == "fa4e0000000000000000000000000000000000aa"


def test_it_is_opened_by_its_resolved_path(safe: Path, tmp_path: Path) -> None:
    path = library(safe)
    link = tmp_path / "anywhere.so"
    link.symlink_to(path)
    check = check_library(str(link))
    assert (check.accepted, check.resolved) == (True, str(path))


def test_a_relative_path_is_refused(safe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library(safe)
    monkeypatch.chdir(safe)
    check = check_library(LIBRARY_NAME)
    assert not check.accepted
    assert "absolute" in check.reason


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o1777])
def test_a_directory_above_that_others_can_write_is_refused(safe: Path, mode: int) -> None:
    path = library(safe / "open" / "deep")
    (safe / "open").chmod(mode)
    check = check_library(str(path))
    assert not check.accepted
    assert f"{safe}/open can be written" in check.reason


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_library_that_others_can_write_is_refused(safe: Path, mode: int) -> None:
    path = library(safe)
    path.chmod(mode)
    assert not check_library(str(path)).accepted


def test_another_owner_is_refused(safe: Path) -> None:
    path = library(safe / "own")
    os.chown(path, 4242, 0)
    assert "uid 4242" in check_library(str(path)).reason
    os.chown(path, 0, 0)
    os.chown(path.parent, 4242, 0)
    assert "uid 4242" in check_library(str(path)).reason


def test_a_link_from_a_good_place_to_a_bad_one_is_refused(safe: Path, tmp_path: Path) -> None:
    bad = shutil.copy(build_library(), tmp_path / "evil.so")
    (safe / LIBRARY_NAME).symlink_to(bad)
    check = check_library(str(safe / LIBRARY_NAME))
    assert not check.accepted
    assert check.resolved == str(bad)


def test_what_is_no_library_is_refused(safe: Path) -> None:
    text = safe / "text"
    text.write_text("hello")
    os.mkfifo(safe / "fifo", 0o600)
    for path, word in (
        (text, "ELF"),
        (safe, "regular"),
        (safe / "fifo", "regular"),
        (safe / "none", "No such file"),
    ):
        check = check_library(str(path))
        assert not check.accepted
        assert word in check.reason


def test_our_own_library_comes_before_the_hosts(
    safe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = library(safe / "container")
    theirs = library(safe / "host" / "usr" / "lib64")
    host = Host(str(safe / "host"))
    monkeypatch.setattr(nvml_library, "DIRECTORIES", (str(ours.parent), "/usr/lib64"))
    found = [(c.check.resolved, c.from_other_root) for c in candidates(host, None)]
    assert found == [(str(ours), False), (str(theirs), True)]


def test_the_hosts_links_stay_on_the_host(safe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = library(safe / "host" / "usr" / "lib" / "nvidia")
    (safe / "host" / "usr" / "lib64").mkdir()
    (safe / "host" / "usr" / "lib64" / LIBRARY_NAME).symlink_to("/usr/lib/nvidia/" + LIBRARY_NAME)
    monkeypatch.setattr(nvml_library, "DIRECTORIES", ("/usr/lib64",))
    host = Host(str(safe / "host"))
    found = [c.check.resolved for c in candidates(host, None) if c.from_other_root]
    assert found == [str(theirs)]


def test_a_named_library_is_the_only_candidate(safe: Path) -> None:
    path = library(safe)
    assert [c.check.path for c in candidates(Host(), str(path))] == [str(path)]
