from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuwarden.errors import Malformed, TimedOut, Unavailable
from gpuwarden.host import FileStatus, Host
from gpuwarden.model import LOGINUID_UNSET, Gap, Process
from gpuwarden.sensors.process import (
    details,
    environment,
    fan_out,
    formats,
    mapped_libraries,
    mounts,
    stat_lines,
    users,
)
from gpuwarden.sensors.process.executables import EVERYBODY, split_deleted, writers_of
from gpuwarden.sensors.seen import Seen, StatLine
from tests.support.recorded_host import RecordedHost

NODE = Path(__file__).parent.parent / "hosts" / "nvidia-node"


def look(host: RecordedHost, pids: list[int]) -> dict[int, Process]:
    seen = Seen(table=stat_lines.read(host))
    return {p.pid: p for p in details.read(host, seen, pids) if isinstance(p, Process)}


def test_a_job_is_told_by_what_the_kernel_keeps() -> None:
    trainer = look(RecordedHost(NODE), [100])[100]
    assert trainer.argv == ("python3", "train.py", "--name", "two\nlines  and blanks")
    assert (trainer.user, trainer.group, trainer.login_user) == ("alice", "alice", "alice")
    assert (trainer.tty, trainer.cwd, trainer.ppid) == ("pts/2", "/home/alice", 90)
    assert trainer.started_at_ns == (1_700_000_000 + 50) * 1_000_000_000
    assert trainer.cgroup is not None and trainer.cgroup.slurm_job == "7"
    assert trainer.namespaces["pid"] == 4026531836
    exe = trainer.exe
    assert exe is not None
    assert (exe.path, exe.deleted, exe.filesystem, exe.path_is_genuine) == (
        "/usr/bin/python3.11",
        False,
        "ext4",
        True,
    )
    assert [lib.path for lib in trainer.driver_libraries] == [
        "/usr/lib/x86_64-linux-gnu/libcuda.so.550.54.15"
    ]


def test_only_known_hints_are_kept_and_the_first_one_counts() -> None:
    trainer = look(RecordedHost(NODE), [100])[100]
    assert trainer.environment == {
        "SLURM_JOB_ID": "7",
        "CUDA_VISIBLE_DEVICES": "0",
        "KUBERNETES_SERVICE_HOST": environment.PRESENT,
    }


def test_a_deleted_binary_in_another_mount_namespace() -> None:
    miner = look(RecordedHost(NODE), [200])[200]
    exe = miner.exe
    assert exe is not None
    assert (exe.path, exe.deleted, exe.link_count, exe.filesystem, exe.owner_uid) == (
        "/tmp/.x/kworker",
        True,
        0,
        "tmpfs",
        1002,
    )
    assert exe.path_is_genuine is None and "path_is_genuine" not in exe.unread
    assert (miner.cwd, miner.cwd_deleted) == ("/tmp/.x", True)
    assert (miner.pids_in_namespaces, miner.loginuid) == ((200, 12), LOGINUID_UNSET)


def test_a_dead_process_has_no_binary_and_says_why() -> None:
    dead = look(RecordedHost(NODE), [500])[500]
    assert (dead.exe, dead.argv, dead.state) == (None, None, "Z")
    assert "has ended" in dead.unread["exe"]


def test_one_that_is_gone_is_left_out() -> None:
    assert set(look(RecordedHost(NODE), [100, 3999, 0, -4])) == {100}


def test_a_number_that_another_process_took_is_left_out() -> None:
    host = RecordedHost(NODE)
    table = stat_lines.read(host)
    table[100] = replace(table[100], start_time_ticks=1)
    assert list(details.read(host, Seen(table=table), [100])) == []


def test_one_that_proc_hides_from_us_is_a_gap_and_not_gone() -> None:
    class Hidepid(RecordedHost):
        def answers_signal(self, pid: int) -> bool:
            return pid == 3999

    facts = list(details.read(Hidepid(NODE), Seen(), [3999, 3998]))
    assert [f.what for f in facts if isinstance(f, Gap)] == ["process 3999"]


def line(pid: int, ppid: int) -> StatLine:
    return StatLine(pid, "x", "S", ppid, pid, pid, 0, 0, 1, 0, 1)


def test_ancestors_end_at_init_and_in_loops() -> None:
    table = {p: line(p, parent) for p, parent in {1: 0, 5: 1, 6: 5, 7: 6, 20: 21, 21: 20}.items()}
    seen = Seen(table=table)
    assert details.ancestors(seen, [7]) == [6, 5, 1]
    assert details.ancestors(seen, [7, 6]) in ([5, 1],)
    assert details.ancestors(seen, [20]) == [21]
    assert details.ancestors(seen, [99]) == []
    deep = {p: line(p, p - 1) for p in range(2, 300)}
    assert len(details.ancestors(Seen(table=deep), [299])) == 64


@given(st.lists(st.binary(max_size=8).filter(lambda b: b"\0" not in b), min_size=1))
def test_arguments_are_split_at_nul_alone(words: list[bytes]) -> None:
    argv, truncated = formats.parse_argv(b"\0".join(words) + b"\0")
    assert argv == tuple(word.decode("utf-8", "backslashreplace") for word in words)
    assert not truncated


def test_too_many_and_too_long_arguments_are_cut_and_said_so() -> None:
    argv, truncated = formats.parse_argv(b"a\0" * 5000)
    assert (len(argv), truncated) == (4096, True)
    argv, truncated = formats.parse_argv(b"a" * (formats.ARGV_LIMIT_BYTES + 1))
    assert (len(argv[0]), truncated) == (formats.ARGV_LIMIT_BYTES, True)
    assert formats.parse_argv(b"") == ((), False)


@given(st.binary(max_size=300))
def test_any_bytes_give_a_result_or_malformed(data: bytes) -> None:
    for parse in (formats.parse_status, formats.parse_loginuid):
        try:
            parse(data)
        except Malformed:
            pass
    texts = [
        *formats.parse_argv(data)[0],
        *formats.parse_cgroup_lines(data),
        *(text for pair in environment.parse_environ(data).items() for text in pair),
        *environment.parse_environ(b"LD_PRELOAD=" + data).values(),
        *(name for name, _, _ in users.parse_passwd(data)),
        *(name for name, _, _ in users.parse_group(data + b":x:5:" + data)),
        *(mount.point for mount in mounts.parse_mountinfo(b"1 2 8:1 / /" + data).mounts),
        *(lib.path for lib in mapped_libraries.parse_driver_libraries(data)),
    ]
    for text in texts:
        text.encode("utf-8")
    formats.parse_boot_time(data)
    formats.parse_boot_time(b"\nbtime " + data)


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (0, None),
        (34816, "pts/0"),
        (34819, "pts/3"),
        (0x10008800, "pts/65536"),
        (1025, "tty1"),
        (1088, "ttyS0"),
        (1281, "console"),
        (-1, "4095:1048575"),
    ],
)
def test_terminals(number: int, name: str | None) -> None:
    assert formats.tty_name(number) == name


def status(**fields: int) -> FileStatus:
    given_fields = {
        "mode": 0o40755, "uid": 0, "gid": 0, "inode": 5, "size_bytes": 1, "link_count": 1, **fields
    }  # fmt: skip
    return FileStatus(**given_fields, device=(8, 1), special=(0, 0))


def test_who_can_write_a_directory() -> None:
    names = users.UserNames(members={2000: {1001, 1002, 0}})
    assert writers_of(status(), names) == ()
    assert writers_of(status(mode=0o41777), names) == (EVERYBODY,)
    assert writers_of(status(uid=1001), names) == (1001,)
    assert writers_of(status(mode=0o40775, gid=2000), names) == (1001, 1002)
    assert writers_of(status(mode=0o40575, uid=1003, gid=2000), names) == (1001, 1002)


class OneFile(RecordedHost):
    def __init__(self, root: Path, at_text: FileStatus | None) -> None:
        super().__init__(root)
        self.at_text = at_text

    def status(self, path: str) -> FileStatus:
        if self.at_text is None:
            raise Unavailable(f"{path}: not there")
        return self.at_text


def test_deleted_is_the_kernels_mark_only_if_nothing_is_called_so(tmp_path: Path) -> None:
    text = "/tmp/x (deleted)"
    nothing = OneFile(tmp_path, None)
    assert split_deleted(nothing, 5, "/tmp/x", status()) == ("/tmp/x", False)
    assert split_deleted(nothing, 5, text, status(link_count=0)) == ("/tmp/x", True)
    assert split_deleted(nothing, 5, text, status()) == ("/tmp/x", True)
    assert split_deleted(OneFile(tmp_path, status()), 5, text, status()) == (text, False)
    assert split_deleted(OneFile(tmp_path, status(inode=6)), 5, text, status()) == ("/tmp/x", True)


def test_file_systems_by_number_then_by_path() -> None:
    table = mounts.parse_mountinfo(
        b"1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
        b"2 1 0:50 / /var/lib/a\\040b rw shared:1 - overlay overlay rw\n"
        b"broken\n"
    )
    assert table.filesystem((8, 1), "/var/lib/a b/x") == "ext4"
    assert table.filesystem((0, 77), "/var/lib/a b/x") == "overlay"
    assert table.filesystem((0, 77), "/var/lib/a bc") == "ext4"
    assert mounts.is_network("nfs4") and mounts.is_network("fuse.sshfs")
    assert not mounts.is_network("ext4") and not mounts.is_network(None)


def test_a_path_over_a_servers_mount_is_told_from_one_beside_it() -> None:
    table = mounts.parse_mountinfo(
        b"1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        b"2 1 0:44 / /net/home rw - nfs4 server:/home rw\n"
        b"3 2 8:2 / /net/home/alice/local rw - ext4 /dev/sdb rw\n"
    )
    assert table.asks_a_server("/net/home/alice/local/train")
    assert not table.asks_a_server("/net/homes/train")


def test_processes_whose_reading_did_not_end_are_not_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host()
    seen = Seen(table=stat_lines.read(host))
    late = TimedOut("no answer before the deadline")
    monkeypatch.setattr(details, "workers_for", lambda count, least_each: 2)
    monkeypatch.setattr(details, "fan_out", lambda items, work, **_: [(items, late)])
    facts = list(details.read(host, seen, [os.getpid(), os.getppid()]))
    found = {f.pid: f for f in facts if isinstance(f, Process)}
    assert set(found) == {os.getpid(), os.getppid()}
    me = found[os.getpid()]
    assert (me.exe, me.argv, me.uid, me.state) == (None, None, None, "R")
    assert "did not end" in me.unread["exe"]
    assert [f.count for f in facts if isinstance(f, Gap)] == [2]


def hang(*_: object) -> bytes:
    time.sleep(60)
    return b""


def test_work_that_hangs_ends_at_its_deadline() -> None:
    started = time.monotonic()
    with pytest.raises(TimedOut):
        fan_out.in_child(hang, 0.05)
    assert time.monotonic() - started < 30


def test_work_that_fails_is_unavailable() -> None:
    with pytest.raises(Unavailable):
        fan_out.in_child(lambda: bytes(1 // 0), 30)


def test_every_share_is_answered_and_a_failing_one_costs_only_itself() -> None:
    here = os.getpid()

    def work(items: Sequence[int]) -> bytes:
        if 3 in items and os.getpid() != here:
            raise ValueError
        return bytes(items)

    done = fan_out.fan_out(list(range(9)), work, workers=3, deadline_seconds=30)
    assert sorted(item for share, _ in done for item in share) == list(range(9))
    failed = [share for share, answer in done if isinstance(answer, Exception)]
    assert [list(share) for share in failed] == [[0, 3, 6]]
    assert all(answer == bytes(share) for share, answer in done if isinstance(answer, bytes))


def test_a_name_service_that_hangs_leaves_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "_ask", hang)
    monkeypatch.setattr(users, "_LOOKUP_SECONDS", 0.05)
    names = users.UserNames()
    users.look_up(Host(), names, [54321], [])
    assert names.users == {} and names.failure is not None
    assert "deadline" in names.failure


def test_names_come_from_that_hosts_files_and_never_from_ours(tmp_path: Path) -> None:
    names = users.read_names(RecordedHost(NODE))
    assert names.users == {0: "root", 1001: "alice", 1002: "bob"}
    assert names.members[2000] == {1001, 1002}
    users.look_up(RecordedHost(NODE), names, [65534], [])
    assert 65534 not in names.users and names.failure is not None
