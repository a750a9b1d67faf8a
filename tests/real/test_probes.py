"""The eBPF probe in this kernel: every way to open a node, who it was, how it ended."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwarden.errors import UsageError
from gpuwarden.host import Host
from gpuwarden.probes import cgroup2
from gpuwarden.probes.events import (
    TOOLS,
    Event,
    ExecEvent,
    ExitEvent,
    GroupEvent,
    OpenEvent,
    OpenReturn,
)
from gpuwarden.probes.settings import Settings
from gpuwarden.probes.states import Attempts, Twins
from tests.support import containers
from tests.support.packages import require
from tests.support.probes import (
    EVERYTHING,
    FULL,
    NVIDIA,
    RUN,
    UNUSED,
    by,
    drained,
    node,
    opens,
    probing,
    run,
    tracefs,
)

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("built")]


@pytest.fixture
def tracing() -> Iterator[None]:
    with tracefs():
        yield


# -------------------------------------------------------------------- ways to open


def test_a_renamed_node_and_a_copy_are_seen_by_their_number(opener: Path, tmp_path: Path) -> None:
    with probing() as probe:
        copy = node(tmp_path / "notes.txt", (195, 0))
        run(opener, "open", copy)
        renamed = copy.rename(tmp_path / "renamed")
        run(opener, "open", renamed)
        events = drained(probe)
    made = opens(events, how="mknod")
    opened = opens(events, how="open")
    assert [(e.major, e.minor, e.path) for e in made] == [(195, 0, str(copy))]
    assert made[0].process.pid == os.getpid()
    assert [(e.major, e.minor, e.path) for e in opened] == [
        (195, 0, str(copy)),
        (195, 0, str(renamed)),
    ]
    assert {e.state for e in opened} == {"attempted"}
    assert all(e.reads and not e.writes for e in opened)


def test_access_is_told_from_an_open(opener: Path, tmp_path: Path) -> None:
    path = node(tmp_path / "n", FULL)
    with probing() as probe:
        run(opener, "access", path)
        run(opener, "open", path)
        events = drained(probe)
    assert [(e.how, e.path) for e in opens(events)] == [
        ("access", str(path)),
        ("open", str(path)),
    ]


def test_an_open_through_io_uring_is_seen(opener: Path, tmp_path: Path) -> None:
    path = node(tmp_path / "n", FULL)
    with probing() as probe:
        done = run(opener, "uring", path)
        if done.returncode == 77:
            pytest.skip("this kernel or its settings refuse io_uring")
        assert int(done.stdout) >= 0
        (event,) = opens(drained(probe))
    assert event.io_uring and event.how == "open"
    assert event.process.exe_path == str(opener)


def test_what_is_not_watched_is_not_told(opener: Path, tmp_path: Path) -> None:
    with probing(EVERYTHING, NVIDIA) as probe:
        path = node(tmp_path / "n", FULL)
        run(opener, "open", path)
        assert opens(drained(probe)) == []
        probe.watch({FULL})
        run(opener, "open", path)
        run(opener, "open", node(tmp_path / "m", (195, 1)))
        assert {(e.major, e.minor) for e in opens(drained(probe))} == {FULL}


def test_null_is_never_watched() -> None:
    with probing() as probe:
        for number in ((1, 3), (1, None)):
            with pytest.raises(UsageError):
                probe.watch({number})


def test_one_open_on_overlayfs_is_one_event(tmp_path: Path) -> None:
    require("busybox-static")
    root = containers.busybox_root(tmp_path / "root")
    node(root / "dev/gpu", UNUSED)
    for name in ("upper", "work", "merged"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={root},upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    merged = tmp_path / "merged"
    done = run("mount", "-t", "overlay", "overlay", "-o", options, merged)
    if done.returncode != 0:
        pytest.skip(f"no overlayfs on {tmp_path}: {done.stderr.strip()}")
    try:
        with probing(EVERYTHING, UNUSED) as probe:
            run("chroot", merged, "/bin/cat", "/dev/gpu")
            hits = opens(drained(probe))
    finally:
        run("umount", merged, check=True)
    twins = Twins()
    assert [e.path for e in hits if not twins.is_second(e)] == ["/dev/gpu"]
    assert all((e.process.exe_path or "").endswith("/bin/busybox") for e in hits)
    assert twins.merged == len(hits) - 1


# -------------------------------------------------------------------- who it was


def test_the_event_says_who_it_was(opener: Path, tmp_path: Path) -> None:
    path = node(tmp_path / "n", FULL)
    with probing() as probe:
        child = subprocess.Popen([opener, "open", path], stdout=subprocess.DEVNULL)
        child.wait()
        (event,) = by(child.pid, drained(probe))
    who = event.process
    file = opener.stat()
    assert who.argv == (str(opener), "open", str(path)) and not who.argv_truncated
    assert who.exe_path == str(opener) and not who.exe_path_cut
    assert who.exe_inode == file.st_ino
    assert who.exe_device == f"{os.major(file.st_dev)}:{os.minor(file.st_dev)}"
    assert (who.ppid, who.uid, who.gid) == (os.getpid(), os.getuid(), os.getgid())
    assert (who.comm, who.parent_comm) == (
        "opener",
        Path("/proc/self/comm").read_text().strip(),
    )
    assert who.mount_namespace == os.stat("/proc/self/ns/mnt").st_ino
    assert who.pid_namespace == os.stat("/proc/self/ns/pid").st_ino
    login = int(Path("/proc/self/loginuid").read_text())
    assert who.loginuid == (-1 if login == 0xFFFFFFFF else login)
    assert abs(event.at_ns - time.time_ns()) < 60e9


def test_the_start_time_is_that_of_proc() -> None:
    with probing() as probe, open("/dev/full", "rb"):
        (event, *_) = by(os.getpid(), drained(probe))
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    assert event.process.start_time_ticks == int(fields[19])


def test_long_arguments_are_cut_and_said_to_be(opener: Path, tmp_path: Path) -> None:
    path = node(tmp_path / "n", FULL)
    with probing() as probe:
        run(opener, "open", path, "1", "x" * 4000)
        (event,) = opens(drained(probe))
    assert event.process.argv_truncated
    assert event.process.argv is not None and event.process.argv[:2] == (str(opener), "open")


def test_each_of_500_short_lived_processes_is_seen(opener: Path, tmp_path: Path) -> None:
    path = str(node(tmp_path / "n", FULL))
    pids = {}
    events: list[Event] = []
    quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    with probing() as probe:
        for number in range(500):
            argv = [str(opener), "open", path, "1", f"run-{number}"]
            pid = os.posix_spawn(argv[0], argv, {}, file_actions=quiet)
            os.waitpid(pid, 0)
            pids[pid] = tuple(argv)
            if number % 100 == 0:
                events += drained(probe)
        events += drained(probe)
        assert probe.counters().dropped == 0
    seen = {e.process.pid: e.process for e in opens(events) if e.process.pid in pids}
    assert {pid: who.argv for pid, who in seen.items()} == pids
    assert {who.exe_path for who in seen.values()} == {str(opener)}
    ended = {e.pid for e in events if isinstance(e, ExitEvent)}
    assert set(pids) <= ended


def test_a_new_program_with_an_old_descriptor_is_told(tmp_path: Path) -> None:
    with probing() as probe, open("/dev/full", "rb") as held:
        child = subprocess.Popen(["sleep", "0"], stdin=held)
        child.wait()
        events = drained(probe)
    execs = [e for e in events if isinstance(e, ExecEvent) and e.process.pid == child.pid]
    assert [e.process.argv for e in execs] == [("sleep", "0")]
    assert all(e.touched for e in execs)


def test_every_exec_is_told_when_asked_for() -> None:
    with probing(Settings(every_exec=True)) as probe:
        child = subprocess.Popen(["true"])
        child.wait()
        events = drained(probe)
    assert [e.touched for e in events if isinstance(e, ExecEvent) and e.process.pid == child.pid]


def test_each_management_tool_is_told_without_a_device(tmp_path: Path) -> None:
    started: dict[int, str] = {}
    with probing(Settings()) as probe:
        for begins in TOOLS:
            binary, script = tmp_path / f"{begins}.bin", tmp_path / f"{begins}-script"
            shutil.copy(shutil.which("true") or "", binary)
            script.write_text("#!/bin/sh\nexit 0\n")
            script.chmod(0o755)
            (tmp_path / f"alias-{begins}").symlink_to(binary)
            for path, tool in (
                (binary, binary.name),
                (script, script.name),
                (tmp_path / f"alias-{begins}", binary.name),
            ):
                child = subprocess.Popen([path])
                child.wait()
                started[child.pid] = tool
        other = subprocess.Popen(["true"])
        other.wait()
        events = drained(probe)
    told = {e.process.pid: e for e in events if isinstance(e, ExecEvent)}
    assert {pid: told[pid].tool for pid in started} == started
    assert not any(told[pid].touched for pid in started) and other.pid not in told
    direct = [told[pid].process.exe_path for pid in started][0::3]
    assert direct == [str(tmp_path / f"{begins}.bin") for begins in TOOLS]


def test_a_tool_deep_below_is_told_and_a_directory_of_its_name_is_none(tmp_path: Path) -> None:
    deep = tmp_path / "nvidia-smi" / "/".join(["d" * 200] * 12)
    deep.mkdir(parents=True)
    for name in ("nvidia-smi", "nvidia-sm", "anvidia-smi"):
        (deep / name).write_text("#!/bin/sh\n")
        (deep / name).chmod(0o755)
    with probing(Settings()) as probe:
        pids = []
        for name in ("nvidia-smi", "nvidia-sm", "anvidia-smi"):
            child = subprocess.Popen([deep / name])
            child.wait()
            pids.append(child.pid)
        events = drained(probe)
    told = {e.process.pid: e.tool for e in events if isinstance(e, ExecEvent)}
    assert [told.get(pid) for pid in pids] == ["nvidia-smi", None, None]


def test_a_new_group_is_told_before_it_holds_anybody() -> None:
    mounts = containers.cgroup_mounts()
    hierarchies = [name for name in ("", "devices", "pids") if name in mounts]
    with probing(Settings(groups=True)) as probe:
        for name in hierarchies:
            path = mounts[name] / f"gpuwarden-test-made-{RUN}"
            path.mkdir()
            try:
                # Others make groups too, whenever they like.
                told = [e for e in drained(probe) if isinstance(e, GroupEvent)]
                (event,) = [e for e in told if e.path == f"/{path.name}"]
                key = cgroup2.group_key(Host(), str(path))
                assert (event.hierarchy, event.cgroup_id) == (key.hierarchy, key.id)
                assert not event.path_cut
            finally:
                path.rmdir()
    with probing(Settings()) as probe:
        path.mkdir()
        path.rmdir()
        assert not [e for e in drained(probe) if isinstance(e, GroupEvent)]


# -------------------------------------------------------------------- how it ended


@pytest.mark.usefixtures("tracing")
def test_return_values_settle_attempts(opener: Path, tmp_path: Path) -> None:
    good, absent = node(tmp_path / "good", FULL), node(tmp_path / "absent", (195, 9))
    (tmp_path / "link").symlink_to(good)
    attempts = Attempts(return_values=True)
    settled = []
    with probing(Settings(return_values=True)) as probe:
        run(opener, "open", tmp_path / "link")
        run(opener, "open", absent)
        for event in drained(probe):
            if isinstance(event, OpenEvent):
                attempts.add(event)
            elif isinstance(event, OpenReturn):
                settled.append(attempts.returned(event))
    assert [(e.state, e.path, e.path_is_claimed, e.error) for e in settled if e] == [
        ("opened", str(good), False, None),
        ("attempted", str(absent), True, 6),
    ]


def test_a_held_descriptor_settles_an_attempt(tmp_path: Path) -> None:
    attempts = Attempts()
    with probing() as probe, node(tmp_path / "n", FULL).open("rb"):
        for event in by(os.getpid(), drained(probe)):
            attempts.add(event)
        (settled,) = attempts.held(probe.holders())
    assert (settled.state, settled.process.pid) == ("opened", os.getpid())


@pytest.mark.usefixtures("tracing")
def test_what_a_containers_own_rules_refuse_is_an_attempt(tmp_path: Path) -> None:
    require("runc", "busybox-static")
    root = containers.busybox_root(tmp_path / "root")
    node(root / "dev/gpu", (195, 0))
    identity = f"gpuwarden-test-{RUN}"
    attempts = Attempts(return_values=True)
    with (
        containers.no_new_cgroups(),
        containers.bare_runc(
            tmp_path / "run", root, identity=identity, cgroup=f"/gpuwarden-test/{identity}"
        ),
        probing(Settings(return_values=True)) as probe,
    ):
        run("runc", "exec", identity, "/bin/cat", "/dev/gpu")
        events = drained(probe)
    asked = [e for e in opens(events, how="open") if e.path == "/dev/gpu"]
    assert len(asked) == 1 and asked[0].state == "attempted"
    who = asked[0].process
    assert who.cgroup_path == f"/gpuwarden-test/{identity}"
    assert who.exe_path == "/bin/busybox" and who.pid_in_namespace != who.pid
    attempts.add(asked[0])
    ends = [attempts.returned(e) for e in events if isinstance(e, OpenReturn)]
    assert [e.state for e in ends if e] == ["denied"]
