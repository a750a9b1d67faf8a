"""Which autostarts are tied to a process by what they start, and which are not; any lines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuwarden.model import (
    Executable,
    Process,
    StartedProgram,
)
from gpuwarden.rules.autostart_ties import Tie
from tests.support.autostarts import (
    BUSYBOX,
    DASH,
    FALSE_PYTHON,
    PYTHON,
    RIG,
    SLEEP,
    entry,
    process,
    tie,
    told,
)

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


def test_an_interpreter_that_was_not_looked_up_is_tied_by_its_script_all_the_same() -> None:
    one = entry("/bin/sh /opt/w.sh", {})
    assert tie(one, process(DASH, "/opt/w.sh")) == Tie("script", True, "script /opt/w.sh")
    assert tie(one, process(DASH, "/opt/v.sh")) is None
    assert tie(one, process(SLEEP, "/opt/w.sh")) is None


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


WORDS = st.sampled_from(
    "python3 /v/py sleep sh -c -m /opt/t.py t.py rig /home/alice/rig 600 $X ; && cd /opt 'a".split()
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
