from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.errors import Unavailable
from gpuwarden.host import FILE_LIMIT_BYTES
from gpuwarden.model import Gap, GpuClient, HiddenProcess, Holder
from gpuwarden.sensors import hidden
from gpuwarden.sensors.seen import Seen
from tests.support.recorded_host import RecordedHost

NODE = Path(__file__).parent.parent / "hosts" / "nvidia-node"
HIDEPID = b"25 22 0:22 / /proc rw,relatime shared:5 - proc proc rw,hidepid=invisible\n"
PLAIN = b"25 22 0:22 / /proc rw,relatime shared:5 - proc proc rw\n"


class Rootkit(RecordedHost):
    """A live machine whose listings of /proc omit some pids, and whose kernel knows some."""

    is_live = True

    def __init__(
        self,
        *,
        omitted: set[int],
        by_the_kernel: set[int] | None = None,
        alive: set[int] | None = None,
        looks_omitted: int = 99,
        mountinfo: bytes = PLAIN,
        no_status: set[int] | None = None,
    ) -> None:
        super().__init__(NODE)
        self.omitted = omitted
        self.by_the_kernel = omitted if by_the_kernel is None else by_the_kernel
        self.alive = {100, 200, 300} if alive is None else alive
        self.looks_left = looks_omitted
        self.mountinfo = mountinfo
        self.no_status = no_status or set()

    def pids(self) -> list[int]:
        self.looks_left -= 1
        hidden_now = self.omitted if self.looks_left >= 0 else set()
        return [pid for pid in super().pids() if pid not in hidden_now]

    def kernel_pids(self) -> list[int]:
        return [pid for pid in super().pids() if pid not in self.by_the_kernel]

    def answers_signal(self, pid: int) -> bool:
        return pid in self.alive

    def answering_pids(self, pids: range) -> list[int]:
        return [pid for pid in pids if pid in self.alive]

    def read_bytes(self, path: str, limit: int = FILE_LIMIT_BYTES) -> bytes:
        if path == "/proc/self/mountinfo":
            return self.mountinfo.replace(b" /proc", f" {self.root}/proc".encode())
        if path == "/proc/sys/kernel/pid_max":
            return b"4000\n"
        if path.endswith("/status") and int(path.split("/")[2]) in self.no_status:
            raise Unavailable(f"{path}: not there")
        if path == "/proc/501/status":
            return b"Name:\tx\nTgid:\t500\nPid:\t501\n"
        return super().read_bytes(path, limit)


def client(pid: int) -> GpuClient:
    return GpuClient(gpu_id="GPU-1", pid=pid, kinds=("C",))


def holder(pid: int) -> Holder:
    return Holder(pid=pid, major=195, minor=0, kind="nvidia-gpu", path="/dev/nvidia0")


def test_nobody_is_hidden_on_an_honest_machine() -> None:
    seen = Seen(clients=[client(100)], holders=[holder(200)])
    assert list(hidden.read(Rootkit(omitted=set()), seen)) == []


def test_a_listed_client_that_proc_omits_is_hidden() -> None:
    seen = Seen(clients=[client(200)], holders=[holder(200)])
    assert list(hidden.read(Rootkit(omitted={200}), seen)) == [
        HiddenProcess(
            pid=200, seen_by=("driver", "holder", "kill", "lookup"), thread_group_leader=True
        )
    ]


def test_a_process_that_a_preloaded_library_omits_is_hidden_without_being_named() -> None:
    host = Rootkit(omitted={200}, by_the_kernel=set())
    assert list(hidden.read(host, Seen())) == [
        HiddenProcess(
            pid=200, seen_by=("kernel listing", "kill", "lookup"), thread_group_leader=True
        )
    ]


def test_one_born_between_the_looks_is_cleared_by_the_second() -> None:
    host = Rootkit(omitted={200}, looks_omitted=1)
    assert list(hidden.read(host, Seen(clients=[client(200)]))) == []


def test_a_dead_pid_that_the_driver_still_lists_is_not_hidden() -> None:
    assert list(hidden.read(Rootkit(omitted=set()), Seen(clients=[client(3999)]))) == []


@pytest.mark.parametrize("no_status", [set[int](), {501}], ids=["looked up", "not looked up"])
def test_a_thread_is_not_a_hidden_process(no_status: set[int]) -> None:
    # 501 is a thread of 500: kill answers for it, and no listing of /proc shows it.
    host = Rootkit(omitted=set(), alive={500, 501}, no_status=no_status)
    assert list(hidden.read(host, Seen(clients=[client(501)]))) == []


def test_a_number_taken_after_the_second_look_is_not_hidden() -> None:
    host = Rootkit(omitted={200}, looks_omitted=2)
    assert list(hidden.read(host, Seen(clients=[client(200)]))) == []


def test_hidepid_is_a_gap_and_no_hiding() -> None:
    host = Rootkit(omitted={1, 2, 200}, mountinfo=HIDEPID, no_status={200})
    facts = list(hidden.read(host, Seen(clients=[client(200)], deep=True)))
    assert [type(fact) for fact in facts] == [Gap]
    assert "hidepid" in getattr(facts[0], "reason", "")


def test_hidepid_does_not_blind_one_who_sees_everything() -> None:
    host = Rootkit(omitted={200}, mountinfo=HIDEPID)
    facts = list(hidden.read(host, Seen(clients=[client(200)])))
    assert [type(fact) for fact in facts] == [HiddenProcess]


def test_only_the_deep_sweep_finds_one_that_nobody_names() -> None:
    host = Rootkit(omitted={200, 300}, alive={100, 200, 300, 501})
    assert list(hidden.read(host, Seen())) == []
    found = list(hidden.read(host, Seen(deep=True)))
    assert [(f.pid, f.seen_by) for f in found if isinstance(f, HiddenProcess)] == [
        (200, ("kill", "lookup")),
        (300, ("kill", "lookup")),
    ]


def test_a_sweep_past_its_time_names_what_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden, "SWEEP_SECONDS", -1.0)
    facts = list(hidden.read(Rootkit(omitted=set()), Seen(deep=True)))
    assert [(f.what, f.count) for f in facts if isinstance(f, Gap)] == [("pids 1 to 4000", 4000)]


def test_a_recorded_tree_says_that_it_cannot_be_swept() -> None:
    facts = list(hidden.read(RecordedHost(NODE), Seen(deep=True)))
    assert [type(fact) for fact in facts] == [Gap]


def test_a_mount_over_a_process_is_hiding() -> None:
    mount = b"40 25 0:30 /empty /proc/300 rw - tmpfs tmpfs rw\n"
    assert list(hidden.read(Rootkit(omitted=set(), mountinfo=PLAIN + mount), Seen())) == [
        HiddenProcess(pid=300, seen_by=("mount",), thread_group_leader=True)
    ]


@pytest.mark.parametrize(
    ("options", "hides"),
    [
        (b"rw", False),
        (b"rw,hidepid=0", False),
        (b"rw,hidepid=off,gid=4", False),
        (b"rw,gid=4,hidepid=2", True),
        (b"rw,hidepid=invisible", True),
        (b"rw,hidepid=ptraceable", True),
    ],
)
def test_hidepid_as_the_kernel_writes_it(options: bytes, hides: bool) -> None:
    line = b"25 22 0:22 / /proc rw,relatime shared:5 master:1 - proc proc " + options + b"\n"
    assert hidden.parse_hidepid(b"1 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + line) is hides
    assert hidden.parse_hidepid(line, "/host/proc") is False


@given(st.binary(max_size=300))
def test_any_bytes_as_mountinfo(data: bytes) -> None:
    hidden.parse_hidepid(data)
    assert 7 in hidden.parse_covered(data + b"\n1 2 0:3 / /proc/7 rw - tmpfs x rw\n")
