"""What lines would start: programs behind wrappers, what interpreters are given, any text."""

from __future__ import annotations

import pytest
from hypothesis import given as examples
from hypothesis import strategies as st

from gpuwarden.command_lines.interpreters import Given, given
from gpuwarden.command_lines.starts import Start, starts_of
from gpuwarden.sensors.process.fan_out import in_child


def _programs(line: str) -> list[tuple[str, ...]]:
    return [(start.program, *start.arguments) for start in starts_of(line)]


@pytest.mark.parametrize(
    ("line", "programs"),
    [
        ("/opt/x/miner -a b", [("/opt/x/miner", "-a", "b")]),
        ("cd /opt/x && ./run 'a b' >/dev/null 2>&1 &", [("./run", "a b")]),
        ("test -x /usr/sbin/a || exit 0; [ -f /b ]; . /etc/c; echo d", []),
        ("nohup /opt/run x &", [("nohup", "/opt/run", "x"), ("/opt/run", "x")]),
        (
            "flock -n /run/l timeout 60 python3 /opt/t.py",
            [
                ("flock", "-n", "/run/l", "timeout", "60", "python3", "/opt/t.py"),
                ("timeout", "60", "python3", "/opt/t.py"),
                ("python3", "/opt/t.py"),
            ],
        ),
        ("/opt/x/nice -o pool", [("/opt/x/nice", "-o", "pool"), ("pool",)]),
        (
            "su alice -c '/srv/a --b; c'",
            [("su", "alice", "-c", "/srv/a --b; c"), ("/srv/a", "--b"), ("c",)],
        ),
        ("a; a; a", [("a",)]),
        ("D=/opt/x; $D/run", [("/opt/x/run",)]),
        ("if true; then /a; else /b; fi", [("/a",), ("/b",)]),
        (
            "docker exec box /opt/m -x",
            [("docker", "exec", "box", "/opt/m", "-x"), ("/opt/m", "-x")],
        ),
        (
            "start_daemon -p /run/p /opt/a -b",
            [("start_daemon", "-p", "/run/p", "/opt/a", "-b"), ("/opt/a", "-b")],
        ),
        ("daemon --user=x /opt/a", [("daemon", "--user=x", "/opt/a"), ("/opt/a",)]),
        (
            "start-stop-daemon -S -x /opt/a -- -b",
            [("start-stop-daemon", "-S", "-x", "/opt/a", "--", "-b"), ("/opt/a", "-b")],
        ),
        ("slurmd)", []),
        ("  start|restart) /opt/run -x ;;", [("/opt/run", "-x")]),
        ("*) exec run", [("exec", "run"), ("run",)]),
        ("/opt/run)", [("/opt/run",)]),
        ("(run)", [("run",)]),
        ("", []),
    ],
)
def test_the_programs_of_a_line(line: str, programs: list[tuple[str, ...]]) -> None:
    assert _programs(line) == programs


def test_a_line_says_where_and_along_which_path_it_starts_something() -> None:
    (start,) = starts_of("cd /srv; PATH=/opt/b:$PATH; cd in && run x")
    assert start == Start("run", ("x",), (), "/srv/in", "/opt/b:$PATH")
    (_, start) = starts_of("env PATH=/x run")
    assert (start.program, start.through, start.search_path) == ("run", ("env",), "/x")


@pytest.mark.parametrize(
    ("words", "runs"),
    [
        ("python3 -u -W ignore /a.py -c b", Given("script", "/a.py", ("-c", "b"))),
        ("/usr/bin/python3.11 -m a.b --c", Given("module", "a.b", ("--c",))),
        ("python -c code x", Given("code", "code", ("x",))),
        ("bash -euo pipefail /a.sh", Given("script", "/a.sh", ())),
        ("bash -lc code", Given("code", "code", ())),
        ("sh -- -x", Given("script", "-x", ())),
        ("perl -I /l a.pl", Given("script", "a.pl", ())),
        ("node -r ts index.js", Given("script", "index.js", ())),
        ("java -cp /x Main a", Given("module", "Main", ("a",))),
        ("java -Xmx1g -jar /a.jar b", Given("script", "/a.jar", ("b",))),
        ("/lib64/ld-linux-x86-64.so.2 --library-path /l /m", Given("script", "/m", ())),
        ("python3", None),
        ("python3 -c", None),
        ("sleep 5", None),
        ("pythonic a", None),
    ],
)
def test_what_an_interpreter_is_given(words: str, runs: Given | None) -> None:
    name, *arguments = words.split()
    assert given(name, arguments) == runs


PIECES = st.sampled_from(
    "a /b/c ./d ' \" \\ ; && || | ( ) { } $( ` $X ${X} X=/y PATH=/z cd sh -c su nohup timeout 5 "
    "docker run exec env if then fi # < <<< > & % * \n \t python3 -m".split(" ")
)
LINES = st.lists(PIECES | st.text(max_size=4), max_size=40).map(" ".join)


@examples(LINES)
def test_any_line_gives_programs_made_of_it(line: str) -> None:
    starts = starts_of(line)
    assert len(set(starts)) == len(starts)
    for start in starts:
        assert start.program not in ("cd", "test", "echo")
        runs = given(start.program, start.arguments)
        assert runs is None or runs.text in start.arguments


@examples(st.lists(st.from_regex(r"/[a-z]{1,8}(?:/[a-z]{1,8}){0,3}", fullmatch=True), min_size=1))
def test_every_plain_program_of_a_list_is_found(paths: list[str]) -> None:
    line = "; ".join(f"{path} -x {number}" for number, path in enumerate(paths))
    assert _programs(line) == [(path, "-x", str(n)) for n, path in enumerate(paths)]


@pytest.mark.parametrize(
    "piece",
    ["nohup ", "sh -c '", "$(", "`", "a;", "env A=b ", "su -c ", "\\", '"', "timeout 1 ", "a|"],
)
def test_a_line_made_to_hurt_ends(piece: str) -> None:
    """The deadline only ends a test that would hang."""
    text = (piece * 200_000)[:200_000]
    assert in_child(lambda: repr(len(starts_of(text))).encode(), 60)
