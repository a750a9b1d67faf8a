"""Which files the programs of autostarts lead to: PATH, directories, homes, links, servers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.errors import Denied
from gpuwarden.host import FileStatus, Host
from gpuwarden.model import PersistenceEntry, StartedProgram
from gpuwarden.sensors.autostarts import program_files
from gpuwarden.sensors.autostarts.cron import parse_anacrontab, parse_at_job, parse_crontab
from gpuwarden.sensors.autostarts.program_files import ProgramFiles
from gpuwarden.sensors.autostarts.startup_files import search_path
from gpuwarden.sensors.autostarts.supervisord import parse_supervisord
from gpuwarden.sensors.autostarts.systemd_units import parse_unit
from gpuwarden.sensors.persistence import read
from gpuwarden.sensors.seen import Seen


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for place in ("usr/bin", "opt/x", "home/mira"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "bin").symlink_to("usr/bin")
    _program(tmp_path / "usr/bin/python3.11")
    (tmp_path / "usr/bin/python3").symlink_to("python3.11")
    _program(tmp_path / "opt/x/python3")
    _program(tmp_path / "opt/x/run")
    (tmp_path / "opt/x/t.py").write_text("")
    _program(tmp_path / "home/mira/mine")
    return tmp_path


def _program(path: Path) -> None:
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


def _files(root: Path, remote: str = "/none") -> ProgramFiles:
    homes = {"mira": "/home/mira"}
    return ProgramFiles(Host(str(root)), homes, lambda path: path.startswith(remote))


def _found(root: Path, entry: PersistenceEntry) -> dict[str, str | None]:
    return {one.name: one.path for one in _files(root).found(entry).programs}


def _cron(command: str, **fields: object) -> PersistenceEntry:
    made = PersistenceEntry(kind="cron", path="/etc/crontab", commands=(command,))
    return PersistenceEntry(**{**{n: getattr(made, n) for n in made.__struct_fields__}, **fields})


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        (
            _cron("python3 /opt/x/t.py"),
            {"python3": "/usr/bin/python3.11", "/opt/x/t.py": "/opt/x/t.py"},
        ),
        (_cron("python3 -o", search_path="/opt/x:/usr/bin"), {"python3": "/opt/x/python3"}),
        (_cron("PATH=/opt/x:$PATH; python3 -o"), {"python3": "/opt/x/python3"}),
        (_cron("python3", search_path="/nowhere:$PATH"), {"python3": "/usr/bin/python3.11"}),
        (_cron("run"), {"run": None}),
        (_cron("/bin/python3"), {"/bin/python3": "/usr/bin/python3.11"}),
        (_cron("cd /opt/x && ./run"), {"./run": "/opt/x/run"}),
        (
            _cron("cd /opt/x && python3 t.py"),
            {"python3": "/usr/bin/python3.11", "t.py": "/opt/x/t.py"},
        ),
        (_cron("./mine", user="mira"), {"./mine": "/home/mira/mine"}),
        (_cron("~/mine", user="mira"), {"~/mine": "/home/mira/mine"}),
        (_cron("~mira/mine"), {"~mira/mine": "/home/mira/mine"}),
        (_cron("$HOME/mine", user="mira"), {"$HOME/mine": None}),
        (_cron("./mine"), {"./mine": None}),
        (_cron("t.py", search_path="/opt/x"), {"t.py": None}),
        (_cron("/opt/x"), {"/opt/x": None}),
        (_cron("/opt/../../../opt/x/run"), {"/opt/../../../opt/x/run": "/opt/x/run"}),
        (
            PersistenceEntry(
                kind="systemd-service", path="/a", commands=("./run",), directory="/opt/x"
            ),
            {"./run": "/opt/x/run"},
        ),
        (
            PersistenceEntry(kind="container-restart", path="docker:a", commands=("/bin/python3",)),
            {},
        ),
    ],
)
def test_where_the_programs_of_a_line_lead(
    root: Path, entry: PersistenceEntry, found: dict[str, str | None]
) -> None:
    assert _found(root, entry) == found


def test_a_program_is_known_by_its_device_and_inode(root: Path) -> None:
    (one,) = _files(root).found(_cron("python3")).programs
    status = (root / "usr/bin/python3.11").stat()
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    assert one == StartedProgram(
        name="python3", path="/usr/bin/python3.11", device=device, inode=status.st_ino
    )


def test_absent_is_not_the_same_as_not_looked_up(root: Path) -> None:
    absent, unsettled, adrift, remote = (
        _files(root, "/opt").found(_cron(command)).programs[0]
        for command in ("run", "$X/run", "./run", "/opt/x/run")
    )
    assert (absent.path, absent.unread) == (None, {})
    assert "variables" in unsettled.unread["path"]
    assert "directory" in adrift.unread["path"]
    assert "network" in remote.unread["path"]


def test_a_refusal_is_a_reason(root: Path) -> None:
    class Refusing(Host):
        def status(self, path: str) -> FileStatus:
            raise Denied(f"{path}: permission denied")

    files = ProgramFiles(Refusing(str(root)), {}, lambda path: False)
    (one,) = files.found(_cron("/opt/x/run")).programs
    assert one.unread == {"path": "/opt/x/run: permission denied"}


def test_too_many_programs_are_a_gap(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_files, "PROGRAMS_LIMIT", 3)
    (root / "etc").mkdir()
    (root / "etc/crontab").write_text("* * * * * root a;b;c;d;e\n")
    facts = list(read(Host(str(root)), Seen()))
    assert len(getattr(facts[0], "programs", ())) == 3
    assert "too many to look all of them up: 1 entries" in getattr(facts[-1], "reason", "")


def test_one_users_many_programs_cost_nobody_else_theirs(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_files, "USER_LOOK_UPS_LIMIT", 2)
    files = _files(root)
    found = [files.found(_cron(c, owner_uid=uid)).programs for c, uid in (("a;b;c", 7), ("d", 7))]
    assert [len(programs) for programs in found] == [2, 0]
    assert files.left_out == 2
    assert [len(files.found(_cron("e", owner_uid=uid)).programs) for uid in (8, 0)] == [1, 1]


def test_a_path_made_long_by_links_is_not_kept_but_its_file_is(root: Path) -> None:
    deep = root / "/".join(["home/mira", *["d" * 200] * 6])
    deep.mkdir(parents=True)
    _program(deep / "run")
    (root / "opt/x/short").symlink_to("/" + str((deep / "run").relative_to(root)))
    (one,) = _files(root).found(_cron("/opt/x/short")).programs
    assert (one.path, one.inode) == (None, (deep / "run").stat().st_ino)
    assert one.unread


@pytest.mark.parametrize(
    ("entries", "search", "directory"),
    [
        (parse_crontab('PATH="/a:/b"\n* * * * * x\n', "/t", False), "/a:/b", None),
        (parse_crontab("PATH = /a\n* * * * * root x\n", "/t", True), "/a", None),
        (parse_crontab("* * * * * x\nPATH=/a\n", "/t", False), None, None),
        (parse_crontab("MYPATH=/a\n* * * * * x\n", "/t", False), None, None),
        (parse_anacrontab("PATH=/a\n1 5 n x\n", "/t"), "/a", None),
        (
            [parse_at_job("#!/bin/sh\nPATH=/a\\:/b; export PATH\n/opt/x\n", "/t")],
            "/a:/b",
            None,
        ),
        (
            parse_unit("[Service]\nExecStart=x\nEnvironment=A=b PATH=/a:/b\n", "/x/a.service"),
            "/a:/b",
            None,
        ),
        (
            parse_unit(
                "[Service]\nExecSearchPath=/e\nEnvironment=PATH=/a\nExecStart=x\n"
                "WorkingDirectory=-/w\n",
                "/x/a.service",
            ),
            "/e",
            "/w",
        ),
        (
            parse_supervisord(
                '[program:p]\ncommand=x\ndirectory=/w\nenvironment=A="1",PATH="/a:/b"\n', "/c"
            ),
            "/a:/b",
            "/w",
        ),
    ],
)
def test_the_path_and_the_directory_that_a_file_sets(
    entries: list[PersistenceEntry | None], search: str | None, directory: str | None
) -> None:
    (entry,) = entries
    assert entry is not None
    assert (entry.search_path, entry.directory) == (search, directory)


@pytest.mark.parametrize(
    ("script", "search"),
    [
        ("a\n export PATH=/a:/b; c", "/a:/b"),
        ('PATH="/a b:$PATH"\n', "/a b:$PATH"),
        ("XPATH=/a\n# PATH=/b\n", None),
        ("PATH=\n", None),
    ],
)
def test_the_path_that_a_script_sets(script: str, search: str | None) -> None:
    assert search_path(script) == search


@given(st.text(max_size=80), st.text(max_size=40), st.sampled_from([None, "/opt/x", "~", "\0"]))
def test_any_line_is_looked_up_in_bounds(command: str, search: str, directory: str | None) -> None:
    entry = _cron(command, search_path=search, directory=directory)
    for one in ProgramFiles(Host("/nonexistent"), {}, lambda path: False).found(entry).programs:
        assert one.path is None and len(one.name) <= 4096
