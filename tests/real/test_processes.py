"""The process sensors on the real machine, over processes that try not to be recognised."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwarden.errors import Denied, Unavailable
from gpuwarden.host import FileMapping, FileStatus, Host
from gpuwarden.model import Connection, Executable, Gap, HiddenProcess, Holder, Process
from gpuwarden.sensors import hidden, holders, sockets
from gpuwarden.sensors.process import details, stat_lines
from gpuwarden.sensors.process.executables import EVERYBODY
from gpuwarden.sensors.seen import Seen
from tests.support.failing_host import failing
from tests.support.idle import SLEEP, Idlers, idlers, wait_for
from tests.support.process_sensors import look
from tests.support.stand_in import StandInHost

pytestmark = pytest.mark.real

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make nodes and users")


@pytest.fixture
def idle() -> Iterator[Idlers]:
    with idlers() as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder under /tmp, since pytest's own may be elsewhere; one that others can enter."""
    for parent in [tmp_path, *tmp_path.parents]:
        if parent.stat().st_uid == os.geteuid() and str(parent) not in ("/", "/tmp"):
            parent.chmod(parent.stat().st_mode | 0o011)
    return tmp_path


def process(pid: int, host: Host | None = None) -> Process:
    host = host or Host()
    seen = Seen(table=stat_lines.read(host))
    found = list(details.read(host, seen, [pid]))
    assert len(found) == 1 and isinstance(found[0], Process), found
    return found[0]


def binary(pid: int, host: Host | None = None) -> Executable:
    exe = process(pid, host).exe
    assert exe is not None
    return exe


def node(path: Path, minor: int = 3) -> Path:
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
    path.chmod(0o666)
    return path


def held(host: Host, pids: set[int]) -> tuple[Seen, dict[int, list[Holder]], list[Gap]]:
    seen = Seen(table=stat_lines.read(host))
    facts = list(holders.read(host, seen))
    found: dict[int, list[Holder]] = {}
    for fact in facts:
        if isinstance(fact, Holder) and fact.pid in pids:
            found.setdefault(fact.pid, []).append(fact)
    return seen, found, [fact for fact in facts if isinstance(fact, Gap)]


# -------------------------------------------------------------------- who it really is


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


# -------------------------------------------------------------------- who holds a node


@as_root
def test_holders_are_known_by_number_whatever_the_node_is_called(
    idle: Idlers, folder: Path
) -> None:
    plain, renamed = node(folder / "nvidia0"), node(folder / "null")
    host = StandInHost(nodes={str(plain): (195, 0), str(renamed): (195, 1)})
    code = "import os, sys\nfor path in sys.argv[1:]: os.open(path, os.O_RDWR)\nprint('ready')"
    first, _ = idle.python(code, str(plain), str(plain))
    second, _ = idle.python(code, str(renamed))
    bystander, _ = idle.python(code, "/dev/null")
    renamed.unlink()
    _, found, _ = held(host, {first, second, bystander})
    assert set(found) == {first, second}
    assert [(h.major, h.minor, h.path, len(h.descriptors)) for h in found[first]] == [
        (195, 0, str(plain), 2)
    ]
    assert [(h.minor, h.path, h.renamed, h.kind) for h in found[second]] == [
        (1, f"{renamed} (deleted)", True, "nvidia-gpu")
    ]


@as_root
def test_descriptors_that_were_inherited_or_passed_are_held_too(idle: Idlers, folder: Path) -> None:
    path = node(folder / "nvidia0")
    code = """
    import array, os, socket, sys
    node = os.open(sys.argv[1], os.O_RDWR)
    ours, theirs = socket.socketpair()
    heir = os.fork()
    if heir == 0:
        os.closerange(node + 1, 64)
    else:
        receiver = os.fork()
        if receiver == 0:
            os.close(node)
            ours.close()
            theirs.recvmsg(1, 64)
        else:
            ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [node]))])
            os.close(node)
            print(heir, receiver)
    """
    giver, words = idle.python(code, str(path), start_new_session=True)
    heir, receiver = map(int, words)
    try:
        host = StandInHost(nodes={str(path): (195, 0)})

        def both() -> dict[int, list[Holder]] | None:
            found = held(host, {giver, heir, receiver})[1]
            return found if len(found) == 2 else None

        assert set(wait_for(both, "both hold the node")) == {heir, receiver}
    finally:
        os.killpg(giver, signal.SIGKILL)


class MappedFileAsNode(StandInHost):
    """Takes one regular file for a node, since no node here can be mapped without its driver."""

    mapped_file = ""
    by_text = False

    def link_target_status(self, path: str) -> FileStatus:
        status = super().link_target_status(path)
        real = os.stat(self.mapped_file)
        if status.is_regular and status.inode == real.st_ino:
            return FileStatus(0o20666, 0, 0, status.inode, 0, 1, status.device, (195, 0))
        return status

    def shared_mappings(self, pid: int) -> list[FileMapping] | None:
        return None if self.by_text else super().shared_mappings(pid)


@as_root
@pytest.mark.parametrize("by_text", [False, True], ids=["by query", "by text"])
def test_a_mapping_is_a_holding_when_the_descriptor_is_closed(
    idle: Idlers, folder: Path, by_text: bool
) -> None:
    path = folder / "mapped"
    path.write_bytes(bytes(4096))
    code = """
    import mmap, sys
    with open(sys.argv[1], "r+b") as file:
        kept = mmap.mmap(file.fileno(), 4096)
    print("ready")
    """
    pid, _ = idle.python(code, str(path))
    other, _ = idle.python("print('ready')")
    host = MappedFileAsNode(numbers={(250, 250): (195, 99)})
    host.mapped_file, host.by_text = str(path), by_text
    _, found, _ = held(host, {pid, other})
    assert set(found) == {pid}
    assert [(h.mapped, h.path) for h in found[pid]] == [(True, str(path))]


@as_root
def test_one_who_is_nobody_learns_why_it_sees_little(idle: Idlers, folder: Path) -> None:
    path = node(folder / "nvidia0")
    code = "import os, sys\nos.open(sys.argv[1], os.O_RDWR)\nprint('ready')"
    pid, _ = idle.python(code, str(path))
    nobody = 65534
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        lines = ["failed"]
        try:
            os.setgroups([])
            os.setgid(nobody)
            os.setuid(nobody)
            host = StandInHost(nodes={str(path): (195, 0)})
            found = process(pid, host)
            _, _, gaps = held(host, {pid})
            lines = [f"{key}: {found.unread.get(key)}" for key in ("exe", "cwd", "environment")]
            lines += [f"{gap.what}|{gap.count > 0}|{bool(gap.remedy)}" for gap in gaps]
        finally:
            os.write(writer, "\n".join(lines).encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = pipe.read().splitlines()
    os.waitpid(child, 0)
    assert len(told) >= 4, told
    assert all("permission denied" in line for line in told[:3]), told
    assert told[3] == "open descriptors of other users' processes|True|True"


# -------------------------------------------------------------------- whom it talks to


@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.1")]
)
def test_a_listener_its_client_and_the_peer_between_them(
    idle: Idlers, family: socket.AddressFamily, address: str
) -> None:
    serve = """
    import socket
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    """
    connect = """
    import socket, sys
    client = socket.socket(int(sys.argv[1]))
    client.connect((sys.argv[2], int(sys.argv[3])))
    print(client.getsockname()[1])
    """
    proxy, words = idle.python(serve)
    port = int(words[0])
    worker, words = idle.python(connect, str(int(family)), address, str(port))
    local = int(words[0])
    host = StandInHost(numbers={(250, 250): (195, 99)})

    def connections() -> list[Connection] | None:
        seen = Seen(table=stat_lines.read(host))
        list(holders.read(host, seen))
        found = sockets.read(host, seen, [worker, proxy])
        told = [fact for fact in found if isinstance(fact, Connection)]
        return told if len(told) == 3 else None

    told = wait_for(connections, "the connection is accepted")
    by_key = {(c.pid, c.state, c.local_port): c for c in told}
    outgoing = by_key[worker, "ESTABLISHED", local]
    assert (outgoing.remote_address, outgoing.remote_port) == ("127.0.0.1", port)
    assert outgoing.peer_pid == proxy
    assert by_key[proxy, "LISTEN", port].remote_address is None
    assert by_key[proxy, "ESTABLISHED", port].peer_pid == worker


# -------------------------------------------------------------------- who hides


def test_nobody_hides_on_a_machine_without_a_rootkit(idle: Idlers) -> None:
    # Threads answer kill as processes do: they must not be taken for hidden ones.
    idle.python(
        """
        import threading, time
        for _ in range(20):
            threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
        print("ready")
        """
    )
    facts = list(hidden.read(Host(), Seen(deep=True)))
    assert [fact for fact in facts if isinstance(fact, HiddenProcess)] == []


def test_a_preloaded_library_that_hides_a_process_is_seen_through(
    idle: Idlers, folder: Path
) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    pid = idle.binary(SLEEP)
    source = folder / "hide.c"
    source.write_text(
        """
        #define _GNU_SOURCE
        #include <dirent.h>
        #include <dlfcn.h>
        #include <string.h>
        #include <stdlib.h>
        #define HOOK(NAME, TYPE) struct TYPE *NAME(DIR *d) { \\
            struct TYPE *(*next)(DIR *) = dlsym(RTLD_NEXT, #NAME); \\
            struct TYPE *e; \\
            while ((e = next(d)) && !strcmp(e->d_name, getenv("HIDE"))); \\
            return e; }
        HOOK(readdir, dirent)
        HOOK(readdir64, dirent64)
        """
    )
    library = folder / "hide.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    code = (
        "import os\n"
        "from gpuwarden.host import Host\n"
        "from gpuwarden.sensors import hidden\n"
        "from gpuwarden.sensors.process import stat_lines\n"
        "from gpuwarden.sensors.seen import Seen\n"
        "host = Host()\n"
        f"assert {pid} not in host.pids()\n"
        f"assert {pid} in stat_lines.read(host)\n"
        "print([(f.pid, f.seen_by) for f in hidden.read(host, Seen())])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LD_PRELOAD": str(library), "HIDE": str(pid)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"[({pid}, ('kernel listing', 'kill', 'lookup'))]\n", done.stderr


@as_root
def test_a_mount_over_a_process_is_seen(idle: Idlers, folder: Path) -> None:
    pid = idle.binary(SLEEP)
    code = (
        "import subprocess\n"
        f"subprocess.run(['mount', '--bind', {str(folder)!r}, '/proc/{pid}'], check=True)\n"
        "from gpuwarden.host import Host\n"
        "from gpuwarden.sensors import hidden\n"
        "from gpuwarden.sensors.seen import Seen\n"
        "print([(f.pid, f.seen_by) for f in hidden.read(Host(), Seen())])\n"
    )
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"[({pid}, ('mount',))]\n", done.stderr


# -------------------------------------------------------------------- a machine in motion


def test_five_thousand_processes_that_come_and_go(idle: Idlers, folder: Path) -> None:
    bystander = idle.binary(SLEEP)
    # Each forks until it is told to stop, and says when it has done its half of 5,000.
    code = """
    import os, sys
    print("ready", flush=True)
    stop, enough = sys.argv[1:]
    count = 0
    while not os.path.exists(stop):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        count += 1
        if count == 2500:
            open(enough, "w").close()
    """
    stop, enough = folder / "stop", [folder / "first", folder / "second"]
    forking = [idle.python(code, str(stop), str(path))[0] for path in enough]
    host = StandInHost(numbers={(250, 250): (195, 99)})
    rounds = 0
    try:
        while rounds < 3 or not all(path.exists() for path in enough):
            assert "Z" not in {stat_lines.read_line(Host(), pid).state for pid in forking}
            facts = look(host)
            rounds += 1
            told = {fact.pid: fact for fact in facts if isinstance(fact, Process)}
            assert bystander in told
            assert not [fact for fact in facts if isinstance(fact, HiddenProcess)]
    finally:
        stop.touch()


def test_every_single_look_at_a_process_may_fail(idle: Idlers) -> None:
    victim, bystander = idle.binary(SLEEP), idle.binary(SLEEP)
    pids = [victim, bystander]

    def fresh() -> Host:
        return StandInHost(numbers={(250, 250): (195, 99)})

    whole = [f for f in look(fresh(), pids) if isinstance(f, Process)]
    assert len(whole) == 2
    errors: list[Exception] = [Unavailable("gone: not there"), Denied("kept: permission denied")]
    host, count = failing(fresh(), errors[0], -1, under=f"/proc/{victim}/")
    look(host, pids)
    assert count() > 15
    for error in errors:
        for at in range(count()):
            facts = look(failing(fresh(), error, at, under=f"/proc/{victim}/")[0], pids)
            kept = [f for f in facts if isinstance(f, Process) and f.pid == bystander]
            assert [_still(f) for f in kept] == [_still(whole[1])], at


def _still(process: Process) -> tuple[object, ...]:
    return (process.pid, process.argv, process.exe, process.namespaces, process.cwd)
