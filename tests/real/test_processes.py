"""Processes that try not to be recognised, on the real machine: who each really is."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from gpuwarden.host import Host
from gpuwarden.sensors.process import details, stat_lines
from gpuwarden.sensors.process.executables import EVERYBODY
from gpuwarden.sensors.seen import Seen
from tests.support.idle import SLEEP, Idlers, wait_for
from tests.support.process_sensors import binary, process

pytestmark = pytest.mark.real

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make nodes and users")


def test_a_process_that_goes_by_another_name(idle: Idlers) -> None:
    pid = idle.binary(SLEEP, ["[kworker/0:1]"])
    found = process(pid)
    assert found.argv == ("[kworker/0:1]", "3600")
    assert found.exe is not None
    assert os.path.samefile(found.exe.path, SLEEP)
    assert (found.exe.deleted, found.exe.elf, found.kernel_thread) == (False, True, False)
    assert found.exe.path_is_genuine in (True, None)


def test_a_process_that_renamed_itself(idle: Idlers) -> None:
    pid, _ = idle.python("open('/proc/self/comm', 'w').write('python3\\n)'); print('ready')")
    found = process(pid)
    assert found.comm == "python3\n)"
    assert found.exe is not None and "python" in found.exe.path
    assert found.exe.links_python is True


def test_a_deleted_binary_and_one_that_was_replaced(idle: Idlers, folder: Path) -> None:
    path = folder / "python3"
    shutil.copy(SLEEP, path)
    pid = idle.binary(path)
    assert (binary(pid).deleted, binary(pid).links_python) == (False, False)
    path.unlink()
    exe = binary(pid)
    assert (exe.path, exe.deleted, exe.replaced, exe.link_count) == (str(path), True, False, 0)
    assert exe.elf is True
    path.write_text("another")
    assert binary(pid).replaced is True


def test_a_deleted_binary_that_has_another_link(idle: Idlers, folder: Path) -> None:
    path = folder / "worker"
    shutil.copy(SLEEP, path)
    pid = idle.binary(path)
    os.link(path, folder / "kept")
    path.unlink()
    exe = binary(pid)
    assert (exe.path, exe.deleted, exe.link_count) == (str(path), True, 1)


def test_a_file_really_called_deleted(idle: Idlers, folder: Path) -> None:
    path = folder / "x (deleted)"
    shutil.copy(SLEEP, path)
    pid = idle.binary(path)
    assert (binary(pid).path, binary(pid).deleted) == (str(path), False)
    path.unlink()
    assert (binary(pid).path, binary(pid).deleted) == (str(path), True)


def test_a_binary_that_is_in_memory_only(idle: Idlers) -> None:
    code = """
    import os, sys
    copy = os.memfd_create("kworker", 0)
    os.write(copy, open(sys.argv[1], "rb").read())
    pid = os.fork()
    if pid == 0:
        os.execve(copy, ["sshd", "3600"], {})
    print(pid)
    """
    parent, words = idle.python(code, SLEEP)
    pid = int(words[0])
    try:
        wait_for(lambda: "memfd" in _exe(pid), "the copy in memory runs")
        exe = binary(pid)
        assert (exe.path, exe.memfd, exe.deleted) == ("/memfd:kworker", True, True)
        assert (exe.elf, exe.filesystem) == (True, "tmpfs")
        assert process(pid).ppid == parent
    finally:
        os.kill(pid, signal.SIGKILL)


def _exe(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""


def test_a_hidden_folder_that_everybody_can_write(idle: Idlers, folder: Path) -> None:
    place = folder / ".cache"
    place.mkdir()
    place.chmod(0o777)
    shutil.copy(SLEEP, place / "x")
    pid = idle.binary(place / "x", cwd=place)
    found = process(pid)
    assert found.exe is not None
    assert found.exe.directory_writable_by == (EVERYBODY,)
    assert (found.cwd, found.cwd_deleted) == (str(place), False)
    (place / "x").unlink()
    place.rmdir()
    found = process(pid)
    assert (found.cwd, found.cwd_deleted) == (str(place), True)


def test_what_a_process_says_of_its_surroundings(idle: Idlers) -> None:
    hints = {"SLURM_JOB_ID": "7", "LD_PRELOAD": "", "SECRET": "no", "POOL_URL": "x" * 9000}
    pid = idle.binary(SLEEP, env=hints)
    assert process(pid).environment == {
        "SLURM_JOB_ID": "7",
        "LD_PRELOAD": "",
        "POOL_URL": "x" * 512,
    }


def test_the_kernels_own_facts(idle: Idlers) -> None:
    pid = idle.binary(SLEEP)
    found = process(pid)
    assert found.ppid == os.getpid()
    assert (found.uid, found.gid) == (os.getuid(), os.getgid())
    assert found.namespaces["pid"] == os.stat("/proc/self/ns/pid").st_ino
    assert found.pids_in_namespaces[-1] == pid or len(found.pids_in_namespaces) == 1
    assert found.state in ("S", "R")
    seen = Seen(table=stat_lines.read(Host()))
    assert details.ancestors(seen, [pid])[0] == os.getpid()


def test_a_zombie_says_that_it_is_one(idle: Idlers) -> None:
    _, words = idle.python(
        """
        import os
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        print(pid)
        """
    )
    found = process(int(words[0]))
    assert (found.state, found.exe, found.argv) == ("Z", None, None)
    assert "has ended" in found.unread["exe"]


def test_a_process_whose_first_thread_has_ended_is_no_zombie(idle: Idlers) -> None:
    pid, _ = idle.python(
        """
        import ctypes, platform, threading, time
        threading.Thread(target=time.sleep, args=(3600,)).start()
        print("ready", flush=True)
        ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
        """
    )
    wait_for(lambda: stat_lines.read_line(Host(), pid).state == "Z", "the first thread ends")
    wait_for(lambda: _sleeping_thread(pid), "the other thread sleeps")
    found = process(pid)
    assert (found.pid, found.state) == (pid, "S")
    assert found.exe is not None and "python" in found.exe.path
    assert found.argv is not None and "python" in found.argv[0]


def _sleeping_thread(pid: int) -> bool:
    thread = stat_lines.living_thread(Host(), stat_lines.read_line(Host(), pid))
    return thread is not None and thread.state == "S"


@as_root
def test_a_process_in_namespaces_of_its_own(idle: Idlers, folder: Path) -> None:
    unshare = shutil.which("unshare")
    assert unshare, "util-linux is part of every supported system"
    shutil.copy(SLEEP, folder / "inner")
    outer = subprocess.Popen(
        [unshare, "--pid", "--mount", "--fork", "--kill-child", str(folder / "inner"), "3600"]
    )
    try:
        inner = wait_for(lambda: _child_of(outer.pid), "the process inside runs")
        wait_for(lambda: _exe(inner).endswith("/inner"), "its binary is run")
        found = process(inner)
        own = {kind: os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "mnt", "net")}
        assert found.namespaces["pid"] != own["pid"]
        assert found.namespaces["mnt"] != own["mnt"]
        assert found.namespaces["net"] == own["net"]
        assert found.pids_in_namespaces[-2:] == (inner, 1)
        assert found.exe is not None
        assert (found.exe.path, found.exe.path_is_genuine) == (str(folder / "inner"), True)
    finally:
        outer.kill()
        outer.wait()


@as_root
@pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="this kernel has no FUSE")
def test_a_server_that_never_answers_costs_only_what_lies_behind_it(
    idle: Idlers, folder: Path
) -> None:
    shutil.copy(SLEEP, folder / "worker")
    pid = idle.binary(folder / "worker")
    server = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0"
    calls = ctypes.CDLL(None, use_errno=True)
    try:
        assert calls.mount(b"silent", bytes(folder), b"fuse", 0, options.encode()) == 0
        found = process(pid)
    finally:
        calls.umount2(bytes(folder), 2)
        os.close(server)
    assert found.exe is not None
    assert found.exe.path == str(folder / "worker")
    assert "did not answer" in found.exe.unread["path_is_genuine"]


@as_root
def test_a_file_laid_over_a_system_program_in_mounts_of_its_own_is_not_it(folder: Path) -> None:
    script = 'mount --bind "$0" "$1" && exec "$1" 3600'
    unshare = shutil.which("unshare")
    assert unshare, "util-linux is part of every supported system"
    sleep, target = str(SLEEP), "/usr/bin/env"
    running = subprocess.Popen([unshare, "--mount", "sh", "-c", script, sleep, target])
    try:
        wait_for(lambda: _exe(running.pid).endswith("/env"), "the program is laid over and runs")
        found = process(running.pid)
        assert found.exe is not None
        assert (found.exe.path, found.exe.path_is_genuine) == (target, None)
    finally:
        running.kill()
        running.wait()


def _child_of(pid: int) -> int | None:
    for line in stat_lines.read(Host()).values():
        if line.ppid == pid:
            return line.pid
    return None
