"""Whether anybody is logged in: by logind's session files, else by utmp; any bytes."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.errors import Denied, GpuwardenError, Unavailable
from gpuwarden.host import Host
from gpuwarden.sensors.logins import parse_session, parse_utmp, somebody_logged_in

ENTRY_BYTES = 384
"""sizeof(struct utmp) on Linux, 32 and 64 bits alike (utmp(5))."""
USER_PROCESS, LOGIN_PROCESS, DEAD_PROCESS = 7, 6, 8
NO_SUCH_PID = 2**22 + 1
"""Beyond the greatest pid there is (proc(5), pid_max)."""

PERSON = """\
# This is private data. Do not parse.
UID=1000
USER=alice
ACTIVE=1
STATE=active
REMOTE=1
TYPE=tty
CLASS=user
SCOPE=session-3.scope
LEADER=4242
"""


def entry(pid: int, kind: int = USER_PROCESS, user: bytes = b"alice") -> bytes:
    """One entry: its type and pid at their offsets, as glibc lays it out."""
    head = struct.pack("<hxxi32s4s32s256s", kind, pid, b"pts/0", b"ts/0", user, b"10.0.0.9")
    return head.ljust(ENTRY_BYTES, b"\0")


def host(root: Path, sessions: dict[str, str] | None = None, utmp: bytes | None = None) -> Host:
    (root / "run").mkdir(exist_ok=True)
    if sessions is not None:
        folder = root / "run/systemd/sessions"
        folder.mkdir(parents=True)
        for name, text in sessions.items():
            (folder / name).write_text(text)
    if utmp is not None:
        (root / "run/utmp").write_bytes(utmp)
    return Host(str(root))


# ------------------------------------------------------------------ session files


@pytest.mark.parametrize(("old", "new", "person"), [
    ("", "", True),
    ("STATE=active", "STATE=online", True),
    ("STATE=active", "STATE=closing", False),
    ("CLASS=user", "CLASS=user-early", True),
    ("CLASS=user", "CLASS=manager", False),
    ("CLASS=user", "CLASS=greeter", False),
    ("CLASS=user", "CLASS=background", False),
    ("CLASS=user\n", "", True),
    ("USER=alice", "USER=CLASS=greeter", True),
])  # fmt: skip
def test_a_session_file(old: str, new: str, person: bool) -> None:
    assert parse_session(PERSON.replace(old, new)) is person


@given(st.text(max_size=200))
def test_any_text_is_a_session_or_none(text: str) -> None:
    assert parse_session(text) in (True, False)


def test_one_person_among_services_is_somebody(tmp_path: Path) -> None:
    manager = PERSON.replace("CLASS=user", "CLASS=manager")
    assert somebody_logged_in(host(tmp_path, {"c1": manager, "3": PERSON})) is True


def test_without_a_session_of_a_person_there_is_nobody(tmp_path: Path) -> None:
    manager = PERSON.replace("CLASS=user", "CLASS=manager")
    # A ``.ref`` is the pipe that a session holds open, not another session.
    found = host(tmp_path, {"c1": manager, "3.ref": PERSON}, utmp=entry(os.getpid()))
    assert somebody_logged_in(found) is False


def test_where_logind_is_and_no_session_there_is_nobody(tmp_path: Path) -> None:
    assert somebody_logged_in(host(tmp_path, {})) is False


@pytest.mark.parametrize(
    ("error", "alone"), [(Denied("not ours"), None), (Unavailable("gone"), False)]
)
def test_a_session_file_that_cannot_be_read_hides_no_other(
    tmp_path: Path, error: GpuwardenError, alone: bool | None
) -> None:
    class Reluctant(Host):
        def names(self, path: str) -> list[str]:
            return sorted(super().names(path))

        def read_text(self, path: str, limit: int = 1 << 20) -> str:
            if path.endswith("/1"):
                raise error
            return super().read_text(path, limit)

    host(tmp_path, {"1": PERSON, "3": PERSON})
    assert somebody_logged_in(Reluctant(str(tmp_path))) is True
    (tmp_path / "run/systemd/sessions/3").unlink()
    # One that has ended is nobody; one that may not be read may be anybody.
    assert somebody_logged_in(Reluctant(str(tmp_path))) is alone


# ------------------------------------------------------------------ utmp


def test_the_login_processes_of_a_utmp_file() -> None:
    data = entry(10) + entry(11, LOGIN_PROCESS) + entry(12, DEAD_PROCESS) + entry(-1) + entry(13)
    assert parse_utmp(data) == [10, 13]


@given(
    st.lists(st.tuples(st.integers(1, 2**31 - 1), st.sampled_from([1, 2, 5, 6, 7, 8])), max_size=9),
    st.binary(max_size=ENTRY_BYTES - 1),
)
def test_a_damaged_end_is_left_out(entries: list[tuple[int, int]], rest: bytes) -> None:
    data = b"".join(entry(pid, kind) for pid, kind in entries)
    assert parse_utmp(data + rest) == [pid for pid, kind in entries if kind == USER_PROCESS]


@given(st.binary(max_size=5 * ENTRY_BYTES))
def test_any_bytes_give_pids(data: bytes) -> None:
    assert all(pid > 0 for pid in parse_utmp(data))


def test_without_logind_utmp_tells_by_processes_that_live(tmp_path: Path) -> None:
    class Here(Host):
        """This machine, with another /run."""

        is_live = True

    for pid, somebody in ((os.getpid(), True), (NO_SUCH_PID, False)):
        host(tmp_path, utmp=entry(pid))
        assert somebody_logged_in(Here(str(tmp_path))) is somebody
    host(tmp_path, utmp=b"")
    assert somebody_logged_in(Here(str(tmp_path))) is False


def test_another_hosts_utmp_tells_by_that_hosts_processes(tmp_path: Path) -> None:
    other = host(tmp_path, utmp=entry(4242))
    assert somebody_logged_in(other) is None  # its /proc is not here: nobody can tell
    (tmp_path / "proc/1").mkdir(parents=True)
    assert somebody_logged_in(other) is False
    (tmp_path / "proc/4242").mkdir()
    assert somebody_logged_in(other) is True
    host(tmp_path, utmp=b"")
    assert somebody_logged_in(other) is False


def test_where_neither_is_it_cannot_be_told(tmp_path: Path) -> None:
    assert somebody_logged_in(host(tmp_path)) is None
