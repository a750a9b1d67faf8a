"""The eBPF probe in this kernel: every way to open a node, floods, denials, holders."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuwarden.errors import Denied, Malformed, Unavailable, UsageError
from gpuwarden.host import Host
from gpuwarden.probes import btf, cgroup2, choose, layouts, loader
from gpuwarden.probes.events import (
    TOOLS,
    Event,
    ExecEvent,
    ExitEvent,
    GroupEvent,
    OpenEvent,
    OpenReturn,
)
from gpuwarden.probes.loader import DeviceOpenProbe
from gpuwarden.probes.poll import HolderPoll
from gpuwarden.probes.settings import Number, Settings
from gpuwarden.probes.states import Attempts, Twins
from tests.support import containers
from tests.support.idle import wait_for
from tests.support.packages import require, require_root, unavailable
from tests.support.stand_in import StandInHost

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parents[2]
# Majors of drivers that this machine lacks give ENXIO; /dev/full and /dev/zero stand in for nodes
# that open. /dev/null is never watched.
NVIDIA = (195, None)
FULL = (1, 7)
ZERO = (1, 5)
UNUSED = (195, 100 + os.getpid() % 100)
OPENERS = f"/tmp/gpuwarden-openers-{os.getpid()}"
EVERYTHING = Settings(limit_events=0)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    require_root()
    require("clang", "llvm", "libbpf-dev", "libc6-dev", "libbpf1", "gcc")
    done = run(ROOT / "scripts/build_probes")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def opener() -> Iterator[Path]:
    binary = Path(OPENERS) / "opener"
    binary.parent.mkdir()
    try:
        run("gcc", "-O2", "-o", binary, ROOT / "tests/support/openers.c", check=True)
        yield binary
    finally:
        shutil.rmtree(OPENERS)


@contextmanager
def probing(settings: Settings = EVERYTHING, *numbers: Number) -> Iterator[DeviceOpenProbe]:
    probe = DeviceOpenProbe(numbers or (NVIDIA, FULL), settings)
    try:
        probe.__enter__()
    except Unavailable as error:
        unavailable(f"this kernel takes no such probe: {error}")
    try:
        yield probe
    finally:
        probe.close()


def node(path: Path, number: tuple[int, int]) -> Path:
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(*number))
    return path


def run(
    *argv: object, check: bool = False, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in argv]
    return subprocess.run(words, check=check, env=env, capture_output=True, text=True, timeout=60)


def drained(probe: DeviceOpenProbe) -> list[Event]:
    """What was told of this test's processes before now: the ring is empty after the last batch."""
    events: list[Event] = []
    while batch := probe.poll(0):
        events += [event for event in batch if not isinstance(event, OpenEvent) or is_ours(event)]
    return events


def is_ours(event: OpenEvent) -> bool:
    """Other programs of the machine may use the stand-ins meanwhile."""
    who = event.process
    return (
        os.getpid() in (who.pid, who.ppid)
        or "gpuwarden-test" in (who.cgroup_path or "")
        or (who.exe_path or "").startswith(OPENERS)
    )


def opens(events: list[Event], **wanted: object) -> list[OpenEvent]:
    return [
        event
        for event in events
        if isinstance(event, OpenEvent)
        and all(getattr(event, name) == value for name, value in wanted.items())
    ]


def by(pid: int, events: list[Event]) -> list[OpenEvent]:
    return [event for event in opens(events) if event.process.pid == pid]


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


@pytest.mark.parametrize("begins", TOOLS)
def test_a_management_tool_is_told_without_a_device(begins: str, tmp_path: Path) -> None:
    binary, script = tmp_path / f"{begins}.bin", tmp_path / f"{begins}-script"
    shutil.copy(shutil.which("true") or "", binary)
    script.write_text("#!/bin/sh\nexit 0\n")
    script.chmod(0o755)
    (tmp_path / "alias").symlink_to(binary)
    with probing(Settings()) as probe:
        children = [subprocess.Popen([path]) for path in (binary, script, tmp_path / "alias")]
        others = [subprocess.Popen(["true"])]
        for child in children + others:
            child.wait()
        events = drained(probe)
    told = {e.process.pid: e for e in events if isinstance(e, ExecEvent)}
    assert [told[child.pid].tool for child in children] == [binary.name, script.name, binary.name]
    assert not any(told[child.pid].touched for child in children)
    assert told[children[0].pid].process.exe_path == str(binary)
    assert others[0].pid not in told


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
            path = mounts[name] / f"gpuwarden-test-made-{os.getpid()}"
            path.mkdir()
            try:
                (event,) = [e for e in drained(probe) if isinstance(e, GroupEvent)]
                key = cgroup2.group_key(Host(), str(path))
                assert (event.hierarchy, event.cgroup_id) == (key.hierarchy, key.id)
                assert (event.path, event.path_cut) == (f"/{path.name}", False)
            finally:
                path.rmdir()
    with probing(Settings()) as probe:
        path.mkdir()
        path.rmdir()
        assert not [e for e in drained(probe) if isinstance(e, GroupEvent)]


# -------------------------------------------------------------------- floods


def test_a_flood_is_counted_exactly_and_hides_nobody(opener: Path, tmp_path: Path) -> None:
    path = node(tmp_path / "n", UNUSED)
    events: list[Event] = []
    with probing(Settings(limit_events=16), UNUSED) as probe:
        flood = subprocess.Popen([opener, "open", path, "200000"], stdout=subprocess.DEVNULL)
        others = []
        while flood.poll() is None:
            other = subprocess.Popen([opener, "open", path, "5"], stdout=subprocess.DEVNULL)
            other.wait()
            others.append(other.pid)
            events += drained(probe)
        events += drained(probe)
        counted = {(one.pid, one.how): one.hits for one in probe.counts()}
        counters = probe.counters()
        start = by(flood.pid, events)[0].process.start_time_ns
        probe.forget(others[1], 1, [(*UNUSED, "open")])
        probe.forget(flood.pid, start, [(*UNUSED, "open"), (*UNUSED, "access")])
        by_walking = by(others[1], events)[0].process.start_time_ns
        assert others[1] in {one.pid for one in probe.counts()}
        probe.forget(others[1], by_walking)
        left = {one.pid for one in probe.counts()}
    assert counted[(flood.pid, "open")] == 200_000
    assert {len(by(pid, events)) for pid in others} == {5}
    assert len(by(flood.pid, events)) < 20_000
    assert counters.dropped == 0 and counters.limiter_full == 0
    assert counters.limited == 200_000 - len(by(flood.pid, events))
    assert not {flood.pid, others[1]} & left and others[0] in left


def test_a_flood_of_access_does_not_hide_an_open(tmp_path: Path) -> None:
    path = node(tmp_path / "n", FULL)
    with probing(Settings(limit_events=4, limit_window_seconds=3600)) as probe:
        for _ in range(100):
            os.access(path, os.R_OK)
        os.close(os.open(path, os.O_RDONLY))
        mine = by(os.getpid(), drained(probe))
    assert [e.how for e in mine] == ["access"] * 4 + ["open"]


def test_without_the_limit_every_open_is_an_event(opener: Path, tmp_path: Path) -> None:
    paths = [node(tmp_path / "a", FULL), node(tmp_path / "b", ZERO)]
    events: list[Event] = []
    with probing(EVERYTHING, FULL, ZERO) as probe:
        storm = subprocess.Popen([opener, "storm", "20", "100", *paths])
        while storm.poll() is None:
            events += drained(probe)
        events += drained(probe)
        assert probe.counters().dropped == 0
    told = [e for e in opens(events) if e.process.exe_path == str(opener)]
    assert [sum((e.major, e.minor) == number for e in told) for number in (FULL, ZERO)] == [
        1000,
        1000,
    ]


def test_what_finds_no_room_is_counted(opener: Path, tmp_path: Path) -> None:
    path = node(tmp_path / "n", UNUSED)
    with probing(Settings(limit_events=0, ring_bytes=1 << 16), UNUSED) as probe:
        run(opener, "open", path, "1000")
        told = len(opens(drained(probe)))
        counters = probe.counters()
    assert counters.dropped_opens > 0
    assert told + counters.dropped_opens == counters.hits == 1000


# -------------------------------------------------------------------- how it ended


@pytest.fixture
def tracefs() -> Iterator[None]:
    if any(map(os.path.isdir, loader.TRACEFS)):
        yield
        return
    run("mount", "-t", "tracefs", "tracefs", "/sys/kernel/tracing", check=True)
    yield
    run("umount", "-l", "/sys/kernel/tracing")


@pytest.mark.usefixtures("tracefs")
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


@pytest.mark.usefixtures("tracefs")
def test_what_a_containers_own_rules_refuse_is_an_attempt(tmp_path: Path) -> None:
    require("runc", "busybox-static")
    root = containers.busybox_root(tmp_path / "root")
    node(root / "dev/gpu", (195, 0))
    identity = f"gpuwarden-test-{os.getpid()}"
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


# -------------------------------------------------------------------- denials


@pytest.fixture
def groups() -> Iterator[Callable[[str], Path]]:
    """Makes control groups in the hierarchy of a name ("" is version 2), and removes them."""
    made: list[Path] = []

    def make(hierarchy: str) -> Path:
        mounts = containers.cgroup_mounts()
        if hierarchy not in mounts:
            pytest.skip(f"no hierarchy {hierarchy or 'of version 2'} is mounted here")
        for path in ("gpuwarden-test-denied", "gpuwarden-test-denied/below"):
            made.append(mounts[hierarchy] / path)
            made[-1].mkdir(exist_ok=True)
        return made[-2]

    yield make
    for path in made[::-1]:
        path.rmdir()


def opened_in(group: Path, opener: Path, path: Path) -> bool:
    script = 'echo $$ > "$1/cgroup.procs" && exec "$2" open "$3"'
    done = run("sh", "-c", script, "sh", group, opener, path)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip() == "1"


@pytest.mark.parametrize("hierarchy", ["", "devices", "pids"])
def test_a_denial_holds_for_one_group_and_ends_with_the_probe(
    hierarchy: str, groups: Callable[[str], Path], opener: Path, tmp_path: Path
) -> None:
    group, path = groups(hierarchy), node(tmp_path / "n", FULL)
    with probing(Settings(limit_events=1, limit_window_seconds=3600)) as probe:
        key = probe.deny(str(group))
        for where in (group, group / "below"):
            assert not opened_in(where, opener, path)
        assert run(opener, "open", path).stdout.strip() == "1"
        states = [(e.state, e.denial) for e in opens(drained(probe)) if e.path == str(path)]
        assert states == [("denied", "denied")] * 2 + [("attempted", "")]
        assert probe.counters().denied == 2
        probe.allow(key)
        assert opened_in(group, opener, path)
        probe.deny(str(group), dry_run=True)
        assert opened_in(group, opener, path)
        assert [e.denial for e in opens(drained(probe))][-1] == "would deny"
        probe.deny(str(group))
        assert not opened_in(group, opener, path)
        assert run("sh", "-c", "echo > /dev/null").returncode == 0
    assert opened_in(group, opener, path)


def test_a_flood_does_not_pass_a_denial(
    groups: Callable[[str], Path], opener: Path, tmp_path: Path
) -> None:
    group, path = groups(""), node(tmp_path / "n", FULL)
    with probing(Settings(limit_events=2, ring_bytes=1 << 16)) as probe:
        probe.deny(str(group))
        script = 'echo $$ > "$1/cgroup.procs" && exec "$2" open "$3" 20000'
        done = run("sh", "-c", script, "sh", group, opener, path)
        assert done.stdout.strip() == "0"
        assert probe.counters().denied == 20_000


def test_a_denial_ends_when_the_agent_is_killed(
    groups: Callable[[str], Path], opener: Path, tmp_path: Path
) -> None:
    group, path = groups(""), node(tmp_path / "n", FULL)
    code = (
        "import sys, time\n"
        "from gpuwarden.probes.loader import DeviceOpenProbe\n"
        "with DeviceOpenProbe([(1, 7)]) as probe:\n"
        "    probe.deny(sys.argv[1]); print('denying', flush=True); time.sleep(60)\n"
    )
    agent = subprocess.Popen(
        [sys.executable, "-c", code, str(group)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert agent.stdout is not None
    try:
        assert agent.stdout.readline() == "denying\n"
        assert not opened_in(group, opener, path)
    finally:
        agent.kill()
        agent.wait()
        agent.stdout.close()
    wait_for(lambda: opened_in(group, opener, path), "the end of the denial")


def test_the_root_group_is_not_denied() -> None:
    mounts = containers.cgroup_mounts()
    with probing() as probe:
        for root in {mounts[name] for name in ("", "devices", "pids") if name in mounts}:
            with pytest.raises(UsageError):
                probe.deny(str(root))


# -------------------------------------------------------------------- holders


@pytest.mark.parametrize("how", ["inherit", "pass"])
def test_holders_that_never_opened_are_found(how: str, opener: Path, tmp_path: Path) -> None:
    path = node(tmp_path / "n", FULL)
    with probing() as probe:
        process = subprocess.Popen([opener, how, path], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        holder = int(process.stdout.readline().split()[1])
        try:
            process.wait()
            events = drained(probe)
            held = wait_for(
                lambda: [one for one in probe.holders() if one.pid == holder], "a holder"
            )
        finally:
            os.kill(holder, signal.SIGKILL)
            process.stdout.close()
    assert by(holder, events) == []
    assert {(one.major, one.minor, one.comm) for one in held} == {(*FULL, "opener")}


def test_the_iterator_finds_what_proc_shows() -> None:
    with probing(EVERYTHING, FULL) as probe, open("/dev/full", "rb") as held:
        mine = {one.descriptor for one in probe.holders() if one.pid == os.getpid()}
        shown = {
            int(fd)
            for fd in filter(_is_open, os.listdir("/proc/self/fd"))
            if os.stat(f"/proc/self/fd/{fd}").st_rdev == os.makedev(*FULL)
        }
        assert held.fileno() in mine and mine == shown


# -------------------------------------------------------------------- loading


def test_the_object_has_the_layouts_that_events_are_read_by() -> None:
    layouts.check(btf.structures(Path(loader.OBJECT).read_bytes()))


def test_a_wrong_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = tuple(layouts.LAYOUTS["open_record"][1:])
    monkeypatch.setattr(layouts, "LAYOUTS", {**layouts.LAYOUTS, "open_record": wrong})
    with pytest.raises(Malformed, match="struct open_record: hits is at bytes 8 to 15"):
        DeviceOpenProbe([FULL]).__enter__()


def test_a_missing_object_says_how_to_build_it(tmp_path: Path) -> None:
    probe = DeviceOpenProbe([FULL], object_path=str(tmp_path / "none.o"))
    with pytest.raises(Unavailable) as error:
        probe.__enter__()
    assert "build_probes" in error.value.remedy


def test_a_failure_half_way_leaves_nothing_attached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(host: Host) -> int:
        raise Unavailable("no hierarchy")

    with monkeypatch.context() as patch:
        patch.setattr(cgroup2, "open_root", refused)
        probe = DeviceOpenProbe([FULL])
        with pytest.raises(Unavailable, match="no hierarchy"):
            probe.__enter__()
    names = filter(_is_open, os.listdir("/proc/self/fd"))
    assert not [fd for fd in names if "bpf" in os.readlink(f"/proc/self/fd/{fd}")]


def _is_open(descriptor: str) -> bool:
    """Not so for the descriptor that listing them needed."""
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


def test_without_rights_it_is_denied_and_says_what_it_takes() -> None:
    with probing():
        pass  # libbpf is loaded before the rights go
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        told = "loaded"
        try:
            os.setgid(65534)
            os.setuid(65534)
            DeviceOpenProbe([FULL]).__enter__()
        except Denied as error:
            told = f"denied: {error.remedy}"
        finally:
            os.write(writer, told.encode())
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader, encoding="utf-8") as answer:
        told = answer.read()
    assert told.startswith("denied") and "CAP_BPF" in told


def test_a_refused_program_is_told_with_the_verifiers_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A program that reads beyond its context, in an object that has the same layouts."""
    source = ROOT / "src/gpuwarden/probes/device_open.bpf.c"
    text = source.read_text()
    wrong = tmp_path / "src/gpuwarden/probes/device_open.bpf.c"
    wrong.parent.mkdir(parents=True)
    wrong.write_text(text.replace("context->minor;", "((__u32 *)context)[99];", 1))
    assert wrong.read_text() != text
    shutil.copy(source.with_name("kernel_types.h"), wrong.parent)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/build_probes", tmp_path / "scripts")
    run(tmp_path / "scripts/build_probes", check=True)
    with pytest.raises((Unavailable, Denied)) as error:
        DeviceOpenProbe([FULL], object_path=str(wrong.with_suffix(".o"))).__enter__()
    notes = " ".join(error.value.__notes__)
    assert "device_access" in notes and "invalid bpf_context access" in notes


def test_a_closed_probe_says_so() -> None:
    with probing() as probe:
        pass
    for ask in (probe.poll, probe.holders, probe.counters, probe.counts, probe.fileno):
        with pytest.raises(Unavailable, match="not loaded"):
            ask()


def test_the_hierarchys_root_needs_no_mount() -> None:
    descriptor = cgroup2._open_unmounted()
    try:
        assert os.fstat(descriptor).st_ino == cgroup2.ROOT_INODE
    finally:
        os.close(descriptor)


def test_a_cgroup_namespace_of_its_own_is_said_to_be_one() -> None:
    if Path("/proc/self/cgroup").read_text().splitlines()[-1] == "0::/":
        pytest.skip("this process is in the root group, which its namespace would begin at")
    code = (
        "from gpuwarden.probes import cgroup2; from gpuwarden.host import Host\n"
        "try: cgroup2.open_root(Host())\nexcept Exception as e: print(type(e).__name__, e.remedy)"
    )
    script = (
        "umount /sys/fs/cgroup/unified 2>/dev/null || umount -R /sys/fs/cgroup; "
        f"exec {sys.executable} -c '{code}'"
    )
    unshare = ("unshare", "--mount", "--cgroup", "--pid", "--fork", "--mount-proc")
    done = run(*unshare, "sh", "-c", script, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    assert done.stdout.startswith("Unavailable") and "--cgroupns=host" in done.stdout, done


def test_the_way_is_chosen_by_trying(tmp_path: Path) -> None:
    with choose.chosen([FULL]) as choice:
        assert choice.probe is not None and choice.way.startswith("eBPF")
    with choose.chosen([FULL], object_path=str(tmp_path / "none")) as choice:
        assert choice.probe is None and choice.poll is not None
        assert "not built" in str(choice) and "polls /proc" in str(choice)


def test_polling_finds_new_holders(tmp_path: Path) -> None:
    poll = HolderPoll(StandInHost(numbers={FULL: (195, 0)}))
    assert [e for e in poll.look() if e.process.comm == "sleep"] == []
    with open("/dev/full", "rb") as held:
        child = subprocess.Popen(["sleep", "60"], stdin=held)
    try:
        wait_for(lambda: Path(f"/proc/{child.pid}/comm").read_text() == "sleep\n", "exec")
        (event,) = [e for e in poll.look() if e.process.pid == child.pid]
        assert (event.how, event.state, event.source) == ("held", "opened", "proc poll")
        assert event.process.argv == ("sleep", "60")
        assert event.process.exe_path == os.path.realpath(shutil.which("sleep") or "")
        assert [e for e in poll.look() if e.process.pid == child.pid] == []
    finally:
        child.kill()
        child.wait()
