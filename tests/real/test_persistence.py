"""Start-up places as real files that try to hold the scan up, or to lead it out of its root."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuwarden.host import Host
from gpuwarden.model import Gap, PersistenceEntry
from gpuwarden.sensors.persistence import read
from gpuwarden.sensors.seen import Seen
from tests.support.packages import require_root

pytestmark = pytest.mark.real

NOBODY = 65534
JOB = "* * * * * root /opt/inside\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "host/etc/cron.d").mkdir(parents=True)
    (tmp_path / "host/etc/crontab").write_text(JOB)
    return tmp_path / "host"


def _scan(root: Path) -> tuple[list[PersistenceEntry], dict[str, str]]:
    facts = list(read(Host(str(root)), Seen()))
    return (
        [fact for fact in facts if isinstance(fact, PersistenceEntry)],
        {fact.what: fact.reason for fact in facts if isinstance(fact, Gap)},
    )


@contextmanager
def _as_nobody() -> Iterator[None]:
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def test_a_fifo_in_cron_d_is_a_gap_and_nobody_waits(root: Path) -> None:
    os.mkfifo(root / "etc/cron.d/pipe")
    entries, gaps = _scan(root)
    assert [entry.path for entry in entries] == ["/etc/crontab"]
    assert gaps == {"/etc/cron.d/pipe": "not a regular file"}


def test_a_device_in_cron_d_is_never_opened(root: Path) -> None:
    require_root()
    # A driver with this number cannot be there: an open would fail with another reason.
    os.mknod(root / "etc/cron.d/device", 0o600 | stat.S_IFCHR, os.makedev(10, 130))
    entries, gaps = _scan(root)
    assert len(entries) == 1
    assert gaps == {"/etc/cron.d/device": "not a regular file"}


def test_a_huge_table_is_read_to_its_bound(root: Path) -> None:
    with (root / "etc/cron.d/huge").open("wb") as file:
        file.write(JOB.encode())
        file.truncate(1 << 40)
    entries, gaps = _scan(root)
    assert [entry.path for entry in entries] == ["/etc/crontab", "/etc/cron.d/huge"]
    assert gaps == {"/etc/cron.d/huge": "only the first 1 MiB were read"}


def test_links_that_loop_are_a_gap(root: Path) -> None:
    (root / "etc/cron.d/one").symlink_to("two")
    (root / "etc/cron.d/two").symlink_to("one")
    entries, gaps = _scan(root)
    assert len(entries) == 1
    assert gaps == {
        "/etc/cron.d/one": "too many symbolic links",
        "/etc/cron.d/two": "too many symbolic links",
    }


def test_absolute_and_climbing_links_stay_inside_the_root(root: Path) -> None:
    outside = root.parent / "outside"
    outside.write_text("* * * * * root /opt/outside\n")
    (root / "etc/cron.d/absolute").symlink_to(outside)
    (root / "etc/cron.d/climbing").symlink_to("../../../../../../../../.." + str(outside))
    (root / "etc/cron.d/same").symlink_to("/etc/crontab")
    entries, _ = _scan(root)
    assert {entry.commands[0] for entry in entries} == {"/opt/inside"}
    assert [entry.path for entry in entries] == ["/etc/crontab", "/etc/cron.d/same"]


def test_a_home_behind_a_link_is_read_inside_the_root(root: Path) -> None:
    (root / "etc/passwd").write_text("mira:x:1000:1000::/home/mira:/bin/sh\n")
    (root / "data/mira").mkdir(parents=True)
    (root / "data/mira/.bashrc").write_text("nohup /dev/shm/x &\n")
    (root / "home").mkdir()
    (root / "home/mira").symlink_to("/data/mira")
    entries, _ = _scan(root)
    assert [entry.path for entry in entries] == ["/etc/crontab", "/home/mira/.bashrc"]


def test_what_may_not_be_read_is_a_gap_with_the_next_step(root: Path) -> None:
    require_root()
    for folder in (root, *root.parents):
        if folder.stat().st_uid == 0 and folder.is_relative_to("/tmp/pytest-of-root"):
            folder.chmod(folder.stat().st_mode | 0o055)
    (root / "etc/cron.d/private").write_text(JOB)
    (root / "etc/cron.d/private").chmod(0o600)
    spool = root / "var/spool/cron/crontabs"
    spool.mkdir(parents=True)
    (spool / "mira").write_text("* * * * * /opt/secret\n")
    spool.chmod(0o700)
    with _as_nobody():
        facts = list(read(Host(str(root)), Seen()))
    gaps = {fact.what: (fact.reason, fact.remedy) for fact in facts if isinstance(fact, Gap)}
    assert gaps == {
        "/etc/cron.d/private": ("permission denied", "run as root"),
        "/var/spool/cron/crontabs": ("permission denied", "run as root"),
    }
    assert len([fact for fact in facts if isinstance(fact, PersistenceEntry)]) == 1


def test_names_that_are_no_text_are_a_gap(root: Path) -> None:
    path = os.fsencode(root) + b"/etc/cron.d/\xff\xfe"
    with open(path, "w") as file:
        file.write(JOB)
    entries, gaps = _scan(root)
    assert [entry.path for entry in entries] == ["/etc/crontab"]
    assert gaps == {"/etc/cron.d": "1 names that are not UTF-8 were not looked at"}


def test_this_machine_gives_entries_or_gaps() -> None:
    for fact in read(Host(), Seen()):
        assert isinstance(fact, PersistenceEntry | Gap)
        if isinstance(fact, PersistenceEntry):
            assert fact.path.startswith("/")
