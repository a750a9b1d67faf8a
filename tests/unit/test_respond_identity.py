"""The identity an action is held against: the mark of an exec, comparisons, held processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuwarden.errors import GpuwardenError, Malformed, Unavailable
from gpuwarden.finding import Subject
from gpuwarden.host import Host
from gpuwarden.model import Executable, Gap, NodeFacts, Process, Snapshot
from gpuwarden.node import Node
from gpuwarden.probes import exec_count
from gpuwarden.probes.exec_count import ExecCounts
from gpuwarden.respond import identity
from gpuwarden.respond.identity import Changed, difference, hold, read_identity
from gpuwarden.respond.step import Identity
from gpuwarden.respond.untouchable import Untouchable, daemon_pid
from gpuwarden.rules.hit import process_subject
from gpuwarden.sensors.process import details, exec_mark
from gpuwarden.sensors.seen import Seen
from gpuwarden.watch.identity import merged

STAT = (
    b"7 (a) b) S 1 7 7 0 -1 4194304 98 0 0 0 0 0 0 0 20 0 1 0 4598623 3133440 361 "
    b"18446744073709551615 1000 2000 3000 0 0 0 0 0 0 0 0 0 17 1 0 0 0 0 0 11 12 13 "
    b"4000 4100 4100 4200 0\n"
)
HELD = Identity(
    pid=7,
    start_time_ticks=70,
    boot_id="b",
    exe_device="8:1",
    exe_inode=5,
    exec_count=3,
    exec_mark="aa",
)
NO_COUNTS = ExecCounts("/nonexistent")


@contextmanager
def sleeping(*argv: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(argv or ("sleep", "60"))
    try:
        while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n":
            time.sleep(0.001)
        yield process
    finally:
        process.kill()
        process.wait()


# ---------------------------------------------------------------- the mark


def test_the_addresses_in_a_stat_line() -> None:
    assert exec_mark.parse_addresses(STAT) == (1000, 3000, 4000, 4100)


@pytest.mark.parametrize("stat", [b"", b"7 (a", STAT[:90], STAT.replace(b"4000", b"-400")])
def test_a_damaged_stat_line_is_malformed(stat: bytes) -> None:
    with pytest.raises(Malformed):
        exec_mark.parse_addresses(stat)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_mark_or_malformed(data: bytes) -> None:
    for parse in (exec_mark.parse_addresses, exec_mark.parse_personality):
        try:
            parse(data)
        except Malformed:
            pass
    exec_count.parse(data)


def test_a_mark_is_of_addresses_auxiliary_vector_and_binary() -> None:
    exe = ("8:1", 5)
    one = exec_mark.mark(STAT, b"aux", exe)
    assert one is not None and len(one) == 32
    assert one == exec_mark.mark(STAT.replace(b"98 0 0", b"99 0 1"), b"aux", exe)
    others = {
        exec_mark.mark(STAT.replace(b" 3000 ", b" 3001 "), b"aux", exe),
        exec_mark.mark(STAT.replace(b" 1000 ", b" 1001 "), b"aux", exe),
        exec_mark.mark(STAT, b"auy", exe),
        exec_mark.mark(STAT, b"aux", ("8:1", 6)),
        exec_mark.mark(STAT, b"aux", None),
    }
    assert len(others) == 5 and one not in others


def test_there_is_no_mark_of_what_has_no_memory_or_is_hidden_from_us() -> None:
    assert exec_mark.mark(STAT, b"", None) is None
    assert exec_mark.mark(STAT.replace(b" 3000 ", b" 0 "), b"aux", None) is None


def test_no_mark_where_addresses_are_not_drawn() -> None:
    host = Host()
    assert exec_mark.addresses_are_drawn(host)
    with sleeping() as drawn, sleeping("setarch", "-R", "sleep", "60") as fixed:
        assert exec_mark.read_mark(host, drawn.pid, None, drawn=True) is not None
        assert exec_mark.read_mark(host, drawn.pid, None, drawn=False) is None
        assert exec_mark.read_mark(host, fixed.pid, None, drawn=True) is None


def test_a_subject_says_which_exec_was_judged() -> None:
    process = Process(
        pid=7,
        start_time_ticks=70,
        exe=Executable(path="/x", device="8:1", inode=5),
        exec_mark="aa",
    )
    node = Node(Snapshot(taken_at_ns=0, node=NodeFacts(hostname="n", boot_id="b")))
    subject = process_subject(node, 7, process, ())
    assert identity.of_subject(subject) == replace(HELD, exec_count=None)
    assert identity.of_process(process, "b") == replace(HELD, exec_count=None)
    assert identity.of_subject(Subject(kind="gpu", name="GPU-1")) is None


# ---------------------------------------------------------------- comparing


def test_the_same_is_no_difference_by_count_or_by_mark() -> None:
    assert difference(HELD, HELD) == ""
    assert difference(HELD, replace(HELD, exec_mark="bb")) == ""
    assert difference(replace(HELD, exec_count=None), HELD) == ""
    assert difference(replace(HELD, exec_mark=None), replace(HELD, exec_mark=None)) == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": 8},
        {"start_time_ticks": 71},
        {"boot_id": "c"},
        {"boot_id": None},
        {"exe_device": "8:2"},
        {"exe_inode": 6},
        {"exe_inode": None, "exe_device": None},
        {"exec_count": 4},
        {"exec_count": None, "exec_mark": "bb"},
        {"exec_count": None, "exec_mark": None},
    ],
)
def test_each_part_alone_makes_a_difference(changes: dict[str, object]) -> None:
    assert difference(HELD, replace(HELD, **changes)) != ""


def test_an_identity_without_a_boot_or_an_exec_is_never_the_same() -> None:
    for changes in ({"boot_id": None}, {"exec_count": None, "exec_mark": None}):
        without = replace(HELD, **changes)
        assert difference(without, without) != ""


# ---------------------------------------------------------------- holding


def test_a_process_is_held_and_signalled() -> None:
    host = Host()
    with sleeping() as process:
        found = read_identity(host, process.pid, NO_COUNTS)
        assert found.exec_mark is not None and found.exec_count is None
        status = os.stat(f"/proc/{process.pid}/exe")
        assert found.exe_inode == status.st_ino
        with hold(host, found, NO_COUNTS) as held:
            assert "addresses alone" in held.weaker
            assert not held.has_ended()
            held.send(signal.SIGTERM)
            assert held.has_ended(5)
            with pytest.raises(Changed):
                held.send(signal.SIGKILL)
        assert process.wait() == -signal.SIGTERM


@pytest.mark.parametrize(
    "changes", [{"start_time_ticks": 1}, {"exec_mark": "00"}, {"exe_inode": 1}, {"boot_id": "x"}]
)
def test_another_process_is_not_held(changes: dict[str, object]) -> None:
    host = Host()
    with sleeping() as process:
        found = replace(read_identity(host, process.pid, NO_COUNTS), **changes)
        with pytest.raises(Changed, match="judged"), hold(host, found, NO_COUNTS):
            pass
        assert process.poll() is None


def test_one_that_has_ended_and_one_that_was_never_there_are_not_held() -> None:
    host = Host()
    with sleeping() as process:
        found = read_identity(host, process.pid, NO_COUNTS)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(Changed), hold(host, found, NO_COUNTS):
            pass  # a zombie
    for pid in (found.pid, 0, -5, 1 << 40):
        with pytest.raises(GpuwardenError), hold(host, replace(found, pid=pid), NO_COUNTS):
            pass


def test_what_was_read_of_a_number_counts_only_while_its_process_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host()
    with sleeping() as process:
        found = read_identity(host, process.pid, NO_COUNTS)
        with hold(host, found, NO_COUNTS) as held:
            process.kill()
            process.wait()
            # As another process with the same number and looks would be read.
            monkeypatch.setattr(identity, "read_identity", lambda *_: found)
            with pytest.raises(Changed, match="ended"):
                held.check()


def test_nothing_is_held_on_a_recorded_machine(tmp_path: Path) -> None:
    recorded = Host(str(tmp_path))
    with pytest.raises(Unavailable, match="not this machine"), hold(recorded, HELD, NO_COUNTS):
        pass


def test_an_object_that_is_not_there_says_why() -> None:
    with ExecCounts("/nonexistent") as counts:
        # What is missing first: the library, the kernel's types, the object.
        assert any(word in counts.unavailable for word in ("libbpf.so.1", "BTF", "not built"))
        assert counts.of(os.getpid()) is None and counts.all() == {}


# ---------------------------------------------------------------- where marks come from


def test_subjects_have_marks_and_their_ancestors_none() -> None:
    host = Host()
    with sleeping() as process:
        subject = one_of(details.read(host, Seen(), [process.pid]))
        ancestor = one_of(details.read(host, Seen(), [process.pid], role="ancestor"))
        assert subject.exec_mark == read_identity(host, process.pid, NO_COUNTS).exec_mark
        assert subject.exec_mark is not None and ancestor.exec_mark is None


def one_of(facts: Iterator[Process | Gap]) -> Process:
    (found,) = (fact for fact in facts if isinstance(fact, Process))
    return found


def test_what_an_event_saw_has_no_mark_of_what_it_became() -> None:
    exe = Executable(path="/x", device="8:1", inode=5)
    now = Process(pid=7, start_time_ticks=70, argv=("x", "1"), exe=exe, exec_mark="aa")
    seen = replace(now, exec_mark=None)
    assert merged(seen, now).exec_mark == "aa"
    assert merged(replace(seen, argv=None), now).exec_mark == "aa"
    assert merged(replace(seen, argv=("x", "2")), now).exec_mark is None
    assert merged(replace(seen, exe=replace(exe, inode=6)), now).exec_mark is None


def test_letting_go_asks_for_the_process_alone() -> None:
    other_exec = replace(HELD, exe_inode=6, exec_count=9, exec_mark="cc")
    assert difference(HELD, other_exec, any_exec=True) == ""
    for changes in ({"start_time_ticks": 71}, {"boot_id": "c"}, {"pid": 8}):
        assert difference(HELD, replace(HELD, **changes), any_exec=True) != ""


# ---------------------------------------------------------------- out of bounds


def test_who_is_out_of_bounds() -> None:
    untouchable = Untouchable(Host(), socket_path="/nonexistent")
    for pid in (0, 1, 2, os.getpid(), os.getppid()):
        assert untouchable.reason(pid) != "", pid
    with sleeping() as process:
        assert Untouchable(Host(), socket_path="/nonexistent").reason(process.pid) == ""
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        reason = Untouchable(Host(), socket_path="/nonexistent").reason(child)
        assert reason == "a process of this program"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_the_daemon_is_who_listens_on_its_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "control.sock")
    code = (
        "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); "
        "s.listen(); print('ready', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE) as daemon:
        try:
            assert daemon.stdout is not None and daemon.stdout.readline() == b"ready\n"
            assert daemon_pid(path) == daemon.pid
            assert "daemon" in Untouchable(Host(), socket_path=path).reason(daemon.pid)
            assert Untouchable(Host(), socket_path=f"{path}x").reason(daemon.pid) == ""
        finally:
            daemon.kill()
