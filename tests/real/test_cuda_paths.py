"""Files loaded by name are read as their process finds them, and nothing else is."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuwarden.cuda import paths
from gpuwarden.cuda.paths import NamedFile, read_named
from tests.support.idle import PATIENCE_SECONDS, Idlers, idlers
from tests.support.packages import require_root
from tests.support.probes import ROOT
from tests.support.stopping import start_time_ns

pytestmark = pytest.mark.real

SECRET = b"a file of the host's"
LIMIT = 1 << 20


class Jail:
    """A process whose root is a folder, with every kind of path in it."""

    def __init__(self, folder: Path, idle: Idlers) -> None:
        (folder / "secret").write_bytes(SECRET)
        self.root = folder / "root"
        inside = self.root / "data"
        inside.mkdir(parents=True)
        (inside / "module").write_bytes(b"inside")
        (self.root / "secret").write_bytes(b"its own")
        (inside / "absolute").symlink_to("/data/module")
        (inside / "up").symlink_to("../../../../../secret")
        (inside / "host").symlink_to(folder / "secret")
        (inside / "loop").symlink_to("loop")
        (inside / "dangling").symlink_to("nowhere")
        os.mkfifo(inside / "fifo")
        os.mknod(inside / "zero", 0o666 | 0o020000, os.makedev(1, 5))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(inside / "socket"))
        (self.root / "proc").mkdir()
        subprocess.run(["mount", "-t", "proc", "proc", str(self.root / "proc")], check=True)
        self.pid, _ = idle.python(
            """
            import os, signal, sys
            memory = os.memfd_create("module")
            os.write(memory, b"in memory")
            os.dup2(memory, 200)
            os.chdir(sys.argv[1] + "/data")
            os.chroot(sys.argv[1])
            print(0)
            """,
            str(self.root),
        )
        self.start = start_time_ns(self.pid)

    def read(self, path: str, **how: int) -> NamedFile:
        return patiently(self.pid, self.start, path, how.pop("limit", LIMIT), **how)


def patiently(pid: int, start: int, path: str, limit: int = LIMIT, **how: int) -> NamedFile:
    """``read_named`` with a deadline that no busy machine misses."""
    return read_named(pid, start, path, limit, deadline_seconds=PATIENCE_SECONDS, **how)


@pytest.fixture(scope="module")
def jail(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jail]:
    require_root()
    folder = tmp_path_factory.mktemp("jail")
    with idlers() as idle:
        try:
            yield Jail(folder, idle)
        finally:
            subprocess.run(["umount", "-l", str(folder / "root/proc")], check=False)


def content(file: NamedFile) -> bytes | None:
    """What was read; its descriptor is closed."""
    if file.descriptor is None:
        return None
    try:
        return os.pread(file.descriptor, LIMIT + 1, 0)
    finally:
        os.close(file.descriptor)


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("/data/module", b"inside"),
        ("module", b"inside"),
        ("./../data/../data/module", b"inside"),
        ("absolute", b"inside"),
        ("/secret", b"its own"),
        ("../../../../../../secret", b"its own"),
        ("/../../secret", b"its own"),
        ("up", b"its own"),
        ("/proc/self/fd/200", b"in memory"),
        ("//proc//thread-self//fd//200", b"in memory"),
        ("/dev/fd/200", b"in memory"),
    ],
)
def test_a_path_leads_where_it_leads_its_process(jail: Jail, path: str, wanted: bytes) -> None:
    found = jail.read(path)
    assert (found.problem, found.size) == ("", len(wanted))
    assert found.descriptor is not None
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(found.descriptor, b"x", 0)
    assert content(found) == wanted


def test_its_own_pid_is_its_own_descriptors(jail: Jail) -> None:
    assert content(jail.read(f"/proc/{jail.pid}/fd/200")) == b"in memory"
    other = jail.read(f"/proc/{os.getpid()}/fd/0")
    assert other.descriptor is None
    assert "only the process follows" in other.problem


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("host", "No such file"),
        ("dangling", "No such file"),
        ("loop", "in a circle"),
        ("/data", "no regular file"),
        ("fifo", "no regular file"),
        ("zero", "no regular file"),
        ("socket", "no regular file"),
        ("/dev/fd/0", "no regular file"),
        ("/dev/fd/201", "No such file"),
        ("/proc/version", "a file of the kernel's (proc)"),
        ("/proc/self/root/secret", "only the process follows"),
        ("/proc/self/exe", "only the process follows"),
        ("module/", "Not a directory"),
        ("", "no path"),
        ("a\0b", "no path"),
        ("x" * 4096, "no path"),
        ("x" * 300, "File name too long"),
        ("\udcff\udcfe", "No such file"),
    ],
)
def test_what_is_not_read_is_said(jail: Jail, path: str, problem: str) -> None:
    found = jail.read(path)
    assert content(found) is None
    assert problem in found.problem


PARTS = ("..", ".", "", "data", "module", "secret", "up", "host", "absolute", "loop", "proc")
MORE = ("self", "root", "cwd", "fd", "200", "0", "1", "task", "dev", "etc", "passwd", "fifo")
hostile = st.one_of(
    st.lists(st.sampled_from(PARTS + MORE), max_size=12).map("/".join),
    st.lists(st.sampled_from(PARTS + MORE), max_size=12).map("/".join).map("/".__add__),
    st.binary(max_size=64).map(os.fsdecode),
)


@given(path=hostile)
@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_path_leads_out_of_a_root(jail: Jail, path: str) -> None:
    found = jail.read(path)
    assert content(found) in (None, b"inside", b"its own", b"in memory")
    assert found.problem or found.descriptor is not None or found.size == 0


# -------------------------------------------------------------------- when, how much, by whom


def test_a_large_file_is_read_to_the_limit(jail: Jail) -> None:
    found = jail.read("module", limit=3)
    assert found.problem == "only the first 3 of its 6 bytes were read"
    assert content(found) == b"ins"


def test_a_file_that_was_changed_since_is_said_to_be(jail: Jail) -> None:
    changed = (jail.root / "data/module").stat().st_ctime_ns
    found = jail.read("module", called_ns=changed - 1)
    assert "changed after it was loaded" in found.problem
    assert found.file is not None
    assert found.file[2] == changed
    assert content(found) == b"inside"
    assert jail.read("module", called_ns=changed).problem == ""


def test_an_ended_process_and_another_of_its_number_have_no_files(tmp_path: Path) -> None:
    require_root()
    (tmp_path / "module").write_bytes(b"of all")
    process = subprocess.Popen(["sleep", "60"], cwd=tmp_path)
    start = start_time_ns(process.pid)
    ours = os.stat("/proc/self/ns/mnt").st_ino
    other = patiently(process.pid, start + 10**9, "module")
    assert other == NamedFile(None, None, paths.ENDED)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    # A zombie has no root any more; then there is nothing at all.
    for _ in range(2):
        for path in ("module", "/dev/fd/0", "/proc/self/fd/0"):
            found = patiently(process.pid, start, path, mount_namespace=ours)
            assert found == NamedFile(None, None, paths.ENDED)
        path = str(tmp_path / "module")
        found = patiently(process.pid, start, path, mount_namespace=ours)
        assert content(found) == b"of all"
        assert "had ended" in found.problem
        assert patiently(process.pid, start, path).problem == paths.ENDED
        process.wait()


def test_where_root_may_not_read_its_user_may(tmp_path: Path) -> None:
    require_root()
    tmp_path.chmod(0o711)
    for folder in tmp_path.parents[:2]:
        folder.chmod(0o711)
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "module").write_bytes(b"a user's")
    (home / "module").chmod(0o600)
    for path in (home, home / "module"):
        os.chown(path, 4711, 4711)
    sleeper = subprocess.Popen(["sleep", "60"], user=4711, group=4711, extra_groups=[], cwd="/")
    code = (
        "import os, sys; from gpuwarden.cuda.paths import read_named\n"
        "pid, start, seconds = map(int, sys.argv[1:4])\n"
        "found = read_named(pid, start, sys.argv[4], 99, deadline_seconds=seconds)\n"
        "print(found.problem or os.pread(found.descriptor, 99, 0))"
    )
    try:
        argv = [sys.executable, "-c", code, sleeper.pid, start_time_ns(sleeper.pid)]
        argv.append(int(PATIENCE_SECONDS))
        # As on a file server that takes root for nobody.
        done = subprocess.run(
            ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
            + [str(word) for word in (*argv, home / "module")],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.strip() == str(b"a user's"), done.stderr
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_file_system_that_does_not_answer_hangs_nobody(
    jail: Jail, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "DEADLINE_SECONDS", 0.3)
    libc = ctypes.CDLL(None, use_errno=True)
    # fanotify(7): who opens the file waits for an answer, which never comes.
    asked = libc.fanotify_init(0x4 | 0x1, os.O_RDONLY)
    if asked < 0:
        pytest.skip(f"no fanotify here: {os.strerror(ctypes.get_errno())}")
    file = jail.root / "data/slow"
    file.write_bytes(b"slow")
    try:
        if libc.fanotify_mark(asked, 0x1, ctypes.c_uint64(0x10000), -100, bytes(file)) != 0:
            pytest.skip(f"no fanotify here: {os.strerror(ctypes.get_errno())}")
        paths._unanswered.clear()
        for _ in range(paths.HANGING_BEFORE_IMPATIENT):
            found = read_named(jail.pid, jail.start, "slow", LIMIT)
            assert found == NamedFile(None, None, "its file system did not answer in 0.3 s")
        found = read_named(jail.pid, jail.start, "slow", LIMIT)
        assert found.problem == "its file system did not answer in 0.05 s"
        assert content(jail.read("module")) == b"inside"
    finally:
        os.close(asked)
        paths._unanswered.clear()
    assert content(jail.read("slow")) == b"slow"


def test_a_program_that_is_gone_at_once_is_told_apart() -> None:
    require_root()
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert patiently(process.pid, start_time_ns(process.pid), "/x").problem == paths.ENDED
    process.wait()
