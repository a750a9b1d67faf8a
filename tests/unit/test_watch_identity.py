"""Who opened a device: the kernel's word of that moment, /proc's of now, and both together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuwarden.host import Host
from gpuwarden.probes.events import ProcessIdentity, ticks
from gpuwarden.watch import identity as module
from gpuwarden.watch.identity import GONE, Identities, merged, of_kernel, placement
from tests.support.nodes import container_id
from tests.support.open_watching import BOOT_TIME_NS, write_process
from tests.support.opening import contained, identity


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc").mkdir()
    return tmp_path


def identities(root: Path, *, same_pids: bool = True) -> Identities:
    return Identities(Host(str(root)), boot_time_ns=BOOT_TIME_NS, same_pids=same_pids)


# ------------------------------------------------------------------ the kernel's word


def test_a_process_that_is_gone_keeps_what_the_kernel_told(root: Path) -> None:
    who = contained(ppid=40, gid=100, loginuid=1000, tty="pts0")
    found = identities(root)
    process = found.process(who)
    assert found.vanished == 1
    assert (process.pid, process.start_time_ticks) == (200, who.start_time_ns // 10_000_000)
    assert process.started_at_ns == BOOT_TIME_NS + who.start_time_ns
    assert process.exe is not None
    assert (process.exe.path, process.exe.device, process.exe.inode) == (
        "/usr/bin/python3.11",
        "8:1",
        77,
    )
    assert process.argv == ("python3", "serve.py")
    assert (process.comm, process.ppid, process.uid, process.gid) == ("python3", 40, 1000, 100)
    assert (process.loginuid, process.tty) == (1000, "pts0")
    assert process.namespaces["mnt"] == who.mount_namespace
    assert process.cgroup is not None
    assert process.cgroup.container_id == container_id("c1")
    assert process.pids_in_namespaces == (200, 1)
    # What only /proc tells is not known, and never empty.
    assert process.environment is None or not process.environment
    assert process.unread["environment"] == process.unread["cwd"] == GONE
    assert process.exe.unread["owner_uid"] == GONE


@pytest.mark.parametrize(("path", "shown", "deleted", "memfd"), [
    ("/tmp/x (deleted)", "/tmp/x", True, False),
    ("/memfd:kernel (deleted)", "/memfd:kernel", True, True),
    ("/usr/bin/x", "/usr/bin/x", False, False),
])  # fmt: skip
def test_a_binary_that_has_no_file(path: str, shown: str, deleted: bool, memfd: bool) -> None:
    exe = of_kernel(identity(exe_path=path), BOOT_TIME_NS).exe
    assert exe is not None
    assert (exe.path, exe.deleted, exe.memfd) == (shown, deleted, memfd)


def test_what_the_kernel_did_not_tell_is_not_made_up() -> None:
    bare = ProcessIdentity(pid=7, start_time_ns=1, unread={"exe": "not readable"})
    process = of_kernel(bare, None)
    assert process.exe is None
    assert process.argv is None
    assert process.uid is None
    assert process.cgroup is None
    assert process.namespaces == {}
    assert process.started_at_ns is None
    assert process.unread["exe"] == "not readable"
    assert process.pids_in_namespaces == (7,)


@pytest.mark.parametrize("hierarchy", [0, 5])
def test_a_path_that_was_cut_still_names_what_is_nearest(hierarchy: int) -> None:
    who = identity(
        cgroup_path=f"lice/docker-{container_id('c1')}.scope",
        cgroup_path_cut=True,
        cgroup_path_hierarchy=hierarchy,
    )
    placed = placement(who)
    assert placed is not None
    assert placed.container_id == container_id("c1")
    assert placement(identity(cgroup_path=None)) is None


@given(
    st.builds(
        identity,
        st.integers(1, 1 << 22),
        comm=st.text(max_size=20),
        argv=st.none() | st.lists(st.text(max_size=20), max_size=4).map(tuple),
        exe_path=st.none() | st.text(max_size=60),
        cgroup_path=st.none() | st.text(max_size=100),
        cgroup_path_cut=st.booleans(),
        cgroup_path_hierarchy=st.none() | st.integers(0, 20),
        mount_namespace=st.none() | st.integers(0, 1 << 32),
        pid_in_namespace=st.none() | st.integers(0, 1 << 22),
    )
)
def test_any_names_give_a_process(who: ProcessIdentity) -> None:
    process = of_kernel(who, BOOT_TIME_NS)
    assert (process.pid, process.comm, process.argv) == (who.pid, who.comm, who.argv)
    assert (process.exe is None) is (who.exe_path is None)


def test_start_times_are_those_of_proc() -> None:
    assert ticks(7_999_999_999) == 799
    assert identity(start_time_ns=7_999_999_999).start_time_ticks == 799


# ------------------------------------------------------------------ together


def test_what_it_has_become_since_does_not_change_who_opened_it(root: Path) -> None:
    who = contained()
    now = replace(
        who, comm="sleep", argv=("sleep", "9"), uid=1001, exe_path="/bin/sleep", exe_inode=5
    )
    write_process(root, now)
    process = identities(root).process(who)
    assert process.exe is not None
    assert (process.exe.path, process.exe.inode) == ("/usr/bin/python3.11", 77)
    assert (process.comm, process.argv) == ("python3", ("python3", "serve.py"))
    assert process.uid == 1000


def test_proc_adds_what_the_kernel_does_not_tell(root: Path) -> None:
    who = contained(argv=None)
    write_process(root, replace(who, argv=("python3", "from", "proc")), environ="A=1\0")
    found = identities(root)
    process = found.process(who)
    assert found.vanished == 0
    assert process.argv == ("python3", "from", "proc")
    assert process.unread.get("environment") != GONE
    assert process.cgroup is not None
    assert process.cgroup.container_id == container_id("c1")


def test_a_command_line_that_was_cut_is_completed() -> None:
    told = of_kernel(identity(argv=("python3", "tr"), argv_truncated=True), BOOT_TIME_NS)
    read = of_kernel(identity(argv=("python3", "train.py", "--all")), BOOT_TIME_NS)
    assert merged(told, read).argv == ("python3", "train.py", "--all")
    assert not merged(told, read).argv_truncated
    assert merged(told, replace(read, argv=None)).argv == ("python3", "tr")


def test_a_group_that_proc_cannot_name_is_the_kernels(root: Path) -> None:
    who = contained()
    write_process(root, who, cgroup=None)
    process = identities(root).process(who)
    assert process.cgroup is not None
    assert process.cgroup.container_id == container_id("c1")


def test_another_process_of_that_number_is_not_it(root: Path) -> None:
    who = contained()
    write_process(root, replace(identity(200), start_time_ns=99 * 10**9, comm="other"))
    found = identities(root)
    process = found.process(who)
    assert found.vanished == 1
    assert process.comm == "python3"
    assert process.cgroup is not None
    assert process.cgroup.container_id == container_id("c1")


def test_where_numbers_are_others_proc_is_not_looked_at(root: Path) -> None:
    write_process(root, contained(comm="other"))
    found = identities(root, same_pids=False)
    process = found.process(contained())
    assert process.unread["cwd"] == GONE
    assert found.lineage(process) == []
    assert found.is_alive((200, 1))


# ------------------------------------------------------------------ remembered


def test_it_is_read_once_until_it_becomes_another_program(root: Path) -> None:
    who = contained()
    write_process(root, who, environ="A=1\0")
    found = identities(root)
    first = found.process(who)
    write_process(root, replace(who, comm="changed"))
    assert found.process(who) is first
    other = replace(who, exe_path="/tmp/x", exe_inode=9, comm="x")
    assert found.process(other) is not first
    exe = found.process(other).exe
    assert exe is not None
    assert exe.path == "/tmp/x"
    found.forget((who.pid, who.start_time_ticks))
    assert found.process(who) is not first


def test_one_that_changed_its_user_is_read_again(root: Path) -> None:
    found = identities(root)
    assert found.process(contained()).uid == 1000
    assert found.process(contained(uid=0)).uid == 0


def test_one_known_by_a_descriptor_is_who_is_known(root: Path) -> None:
    found = identities(root)
    first = found.process(contained())
    bare = ProcessIdentity(pid=200, start_time_ns=contained().start_time_ns, uid=1000, comm="x")
    assert found.process(bare) is first


def test_parents_are_named_up_to_the_first(root: Path) -> None:
    write_process(root, identity(1, ppid=0, comm="init", argv=("/sbin/init",)))
    write_process(root, identity(40, ppid=1, comm="sshd"))
    write_process(root, identity(41, ppid=40, comm="bash"))
    found = identities(root)
    process = found.process(contained(ppid=41))
    assert [one.comm for one in found.lineage(process)] == ["bash", "sshd", "init"]
    # They are those of when it was first seen: a runtime ends before its container does.
    write_process(root, identity(41, ppid=1, comm="other", start_time_ns=99 * 10**9))
    assert [one.comm for one in found.lineage(process)] == ["bash", "sshd", "init"]
    assert [one.comm for one in identities(root).lineage(process)] == ["other", "init"]


def test_a_circle_of_parents_ends(root: Path) -> None:
    write_process(root, identity(40, ppid=41))
    write_process(root, identity(41, ppid=40))
    found = identities(root)
    assert len(found.lineage(found.process(contained(ppid=41)))) == 2


def test_alive_is_the_same_process(root: Path) -> None:
    who = contained()
    found = identities(root)
    key = (who.pid, who.start_time_ticks)
    assert not found.is_alive(key)
    write_process(root, who)
    assert found.is_alive(key)
    assert not found.is_alive((who.pid, who.start_time_ticks + 1))


def test_names_of_users_are_told_of_those_that_are_gone(root: Path) -> None:
    (root / "etc").mkdir()
    (root / "etc/passwd").write_text("alice:x:1000:1000::/home/alice:/bin/sh\n")
    process = identities(root).process(contained(loginuid=1000))
    assert (process.user, process.login_user) == ("alice", "alice")
    nobody = identities(root).process(contained(loginuid=-1))
    assert nobody.login_user is None


def test_memory_is_bounded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KNOWN_LIMIT", 3)
    found = identities(root)
    known: list[Any] = [found.process(contained(200 + n)) for n in range(4)]
    assert found.process(contained(203)) is known[3]
    assert found.process(contained(200)) is not known[0]
