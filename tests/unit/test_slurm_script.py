"""The text of the prolog and the epilog, their deadlines, and what is said about slurm.conf."""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpuwarden.cli import build_parser
from gpuwarden.errors import UsageError
from gpuwarden.harden import slurm
from gpuwarden.harden.access import changers
from gpuwarden.harden.slurm_left import Phase
from gpuwarden.harden.slurm_script import Settings, script, whole_seconds
from gpuwarden.host import Host
from gpuwarden.outputs.told import Call
from gpuwarden.policy import Policy

PLAIN = Settings(program="/usr/local/bin/gpuwarden", deadline_seconds=25)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0\n"), min_size=1, max_size=30)


def checked(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-n"], input=text, text=True, capture_output=True, check=False, timeout=20
    )


@pytest.mark.parametrize("phase", ["prolog", "epilog"])
@pytest.mark.parametrize("drain", [False, True])
def test_a_script_is_sh_and_says_what_its_exit_code_means(phase: Phase, drain: bool) -> None:
    text = script(phase, PLAIN._replace(drain=drain))
    assert checked(text).returncode == 0
    assert ("exit 1" in text) is drain
    assert ("--drain" in text) is drain
    assert f"at most {whole_seconds(PLAIN)} s" in text
    for word in ("kill ", "eval", "scancel", "pkill"):
        assert word not in text.replace("timeout -k ", "").replace("It kills nothing", "")


@settings(max_examples=25, deadline=None)
@given(NAMES, NAMES)
@example("it's; reboot", "$(reboot)`reboot`@PHASE@")
def test_a_path_is_a_word_whatever_is_in_it(program: str, policy: str) -> None:
    text = script("epilog", PLAIN._replace(program=f"/{program}", policy=f"/{policy}"))
    start = text.index("program="), text.index("log=")
    shown = subprocess.run(
        ["sh", "-c", text[start[0] : start[1]] + 'printf %s "$program"'],
        capture_output=True,
        check=True,
        timeout=20,
    )
    assert shown.stdout == f"/{program}".encode()
    assert checked(text).returncode == 0


@pytest.mark.parametrize(
    ("conf", "asked", "seconds"),
    [
        (None, None, 25),
        ({}, None, 25),
        ({"PrologEpilogTimeout": "65534"}, None, 25),
        ({"PrologEpilogTimeout": "300"}, None, 25),
        ({"PrologEpilogTimeout": "30"}, None, 19),
        ({"PrologTimeout": "300", "EpilogTimeout": "20"}, None, 9),
        ({"PrologEpilogTimeout": "300"}, 100, 100),
    ],
)
def test_a_script_ends_before_slurm_ends_it(
    conf: Mapping[str, str] | None, asked: int | None, seconds: int
) -> None:
    assert slurm.deadline(asked, conf) == seconds


@pytest.mark.parametrize(("limit", "asked"), [("10", None), ("30", 25), ("65534", 3)])
def test_a_deadline_that_slurm_would_not_keep_is_refused(limit: str, asked: int | None) -> None:
    with pytest.raises(UsageError):
        slurm.deadline(asked, {"PrologEpilogTimeout": limit})


def test_what_slurm_conf_says_is_answered() -> None:
    conf = {
        "Prolog": "/etc/slurm/prolog.sh",
        "PrologFlags": "",
        "ProctrackType": "proctrack/linuxproc",
        "BatchStartTimeout": "10 sec",
        "SchedulerParameters": "bf_continue",
    }
    said = "\n".join(slurm.advice(PLAIN._replace(drain=True), conf, ""))
    for word in ("/etc/slurm/prolog.sh", "Alloc", "linuxproc", "BatchStartTimeout", "nohold"):
        assert word in said
    quiet = {
        "PrologFlags": "Alloc,Contain",
        "ProctrackType": "proctrack/cgroup",
        "BatchStartTimeout": "60 sec",
        "SchedulerParameters": "nohold_on_prolog_fail",
    }
    assert len(list(slurm.advice(PLAIN._replace(drain=True), quiet, ""))) == 2
    assert "not seen" in "\n".join(slurm.advice(PLAIN, None, "there is no Slurm here"))


def run(*words: str) -> tuple[int, str, str]:
    arguments = build_parser().parse_args(["harden", "slurm", *words])
    told = slurm.run(
        Call(arguments, Policy(), None, print, lambda _: False, width=100, colour=False)
    )
    return told.code, told.text, told.complaint


def test_scripts_are_written_where_asked_and_run_by_anyone(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    _, text, _ = run("-o", str(folder), "--program", "/bin/sh", "--root", str(tmp_path))
    for phase in ("prolog", "epilog"):
        path = folder / f"gpuwarden-{phase}"
        assert str(path) in text
        assert path.stat().st_mode & 0o777 == 0o755
        assert f"phase={phase}\n" in path.read_text()


def test_a_program_that_others_can_replace_is_told(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "gpuwarden"
    program.touch()
    (tmp_path / "bin").chmod(0o777)
    code, text, complaint = run("--root", str(tmp_path), "--program", "/bin/gpuwarden")
    assert code == 1
    assert "everybody (/bin) can change it" in complaint
    assert "phase=epilog" in text


@pytest.mark.parametrize(
    "words",
    [
        ("--program", "gpuwarden"),
        ("--program", "/bin/x", "--policy", "policy.yaml"),
        ("--program", "/bin/x", "--log", "a.log"),
        ("--job", "12"),
        ("-o", "/dev/null/scripts", "--program", "/bin/x"),
        ("--check", "epilog"),
        ("--check", "epilog", "--job", "12;reboot"),
        ("--check", "epilog", "--job", "0"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(words: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        run(*words, "--root", str(tmp_path))


def test_flags_may_stand_before_or_behind_the_site() -> None:
    parser = build_parser()
    before = parser.parse_args(["harden", "--policy", "/p", "--root", "/r", "slurm"])
    behind = parser.parse_args(["harden", "slurm", "--policy", "/p", "--root", "/r"])
    assert vars(before) == vars(behind)
    assert isinstance(before, argparse.Namespace)


@pytest.mark.skipif(os.geteuid() != 0, reason="owners are root's to give")
def test_who_can_change_a_path_is_who_owns_or_writes_any_part_of_it(tmp_path: Path) -> None:
    host = Host(str(tmp_path))
    for name in ("a", "a/b", "sticky"):
        (tmp_path / name).mkdir()
    tmp_path.chmod(0o755)
    for name in ("a/b/file", "sticky/file"):
        (tmp_path / name).touch()
    assert changers(host, "/a/b/file") == ()
    (tmp_path / "sticky").chmod(0o1777)
    assert changers(host, "/sticky/file") == ()
    os.chown(tmp_path / "a", 1000, 0)
    assert changers(host, "/a/b/file") == ("uid 1000 (/a)",)
    (tmp_path / "a").chmod(0o775)
    os.chown(tmp_path / "a", 0, 100)
    assert changers(host, "/a/b/file") == ("group 100 (/a)",)
    (tmp_path / "link").symlink_to("/a/b/file")
    assert changers(host, "/link") == ("group 100 (/a)",)
