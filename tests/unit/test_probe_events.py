"""Records of the probe: any bytes give an event or Malformed; layouts against BTF; states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuwarden.errors import Malformed, Unavailable
from gpuwarden.probes import btf, choose, layouts, loader, loading
from gpuwarden.probes.cgroup2 import parse_mounts
from gpuwarden.probes.decoder import Decoder, parse_holders
from gpuwarden.probes.events import (
    ExecEvent,
    ExitEvent,
    GroupEvent,
    HeldDescriptor,
    OpenEvent,
    OpenReturn,
    ProcessIdentity,
    Source,
)
from gpuwarden.probes.libbpf import Libbpf
from gpuwarden.probes.settings import Settings
from gpuwarden.probes.states import PENDING_LIMIT, Attempts, Twins, ended
from gpuwarden.sensors.device_nodes import Majors
from tests.support.records import identity, record, text

SIZES = [
    layouts.size(name)
    for name in ("open_record", "return_record", "exec_record", "exit_record", "group_record")
]


def opened(**values: Any) -> OpenEvent:
    event = Decoder().decode(record("open_record", kind=1, **{"how": 1, **values}))
    assert isinstance(event, OpenEvent)
    return event


# -------------------------------------------------------------------- decoding


def test_an_open_in_full() -> None:
    event = Decoder(boot_offset_ns=1_000).decode(
        record(
            "open_record",
            time_ns=5,
            hits=3,
            kind=1,
            major=195,
            minor=1,
            access=6,
            how=1,
            syscall=257,
            open_flags=0o2,
            path_length=10,
            path=b"/dev/gpu1\0junk",
            process=identity(
                ppid=1,
                uid=1000,
                gid=1001,
                loginuid=0xFFFFFFFF,
                exe_device=254 << 20 | 3,
                cgroup_id=77,
                comm=b"python3\0junk",
                parent_comm=b"bash",
                tty=b"pts3",
                argv_bytes=9,
                argv_read=9,
                argv=b"train\0-v\0junk",
                exe=text(b"train\0bin\0usr\0"),
                cgroup=text(b"job_7\0slurm\0"),
            ),
        )
    )
    assert isinstance(event, OpenEvent)
    who = event.process
    assert (event.at_ns, event.since_boot_ns, event.hits) == (1_005, 5, 3)
    assert (event.major, event.minor, event.how, event.state) == (195, 1, "open", "attempted")
    assert event.reads and event.writes and event.open_flags == 2
    assert (event.path, event.thread_id, event.system_call) == ("/dev/gpu1", 101, 257)
    assert (who.pid, who.start_time_ticks, who.ppid, who.uid, who.gid) == (100, 700, 1, 1000, 1001)
    assert (who.loginuid, who.tty) == (-1, "pts3")
    assert (who.comm, who.parent_comm) == ("python3", "bash")
    assert (who.argv, who.argv_truncated) == (("train", "-v"), False)
    assert (who.exe_path, who.exe_device, who.exe_inode) == ("/usr/bin/train", "254:3", 5)
    assert (who.cgroup_path, who.cgroup_id, who.unread) == ("/slurm/job_7", 77, {})


@pytest.mark.parametrize(
    ("how", "denial", "expected"),
    [
        (0, 0, ("other", False, "attempted", "")),
        (2, 0, ("mknod", False, "attempted", "")),
        (3, 0, ("access", False, "attempted", "")),
        (4, 0, ("open", True, "attempted", "")),
        (1, 1, ("open", False, "denied", "denied")),
        (1, 2, ("open", False, "attempted", "would deny")),
    ],
)
def test_how_and_state(how: int, denial: int, expected: tuple[str, bool, str, str]) -> None:
    event = opened(how=how, denial=denial)
    assert (event.how, event.io_uring, event.state, event.denial) == expected


@pytest.mark.parametrize("source", loader.WAYS)
def test_an_event_names_its_way_and_what_that_knows_of_its_end(source: Source) -> None:
    raw = record("open_record", kind=1, how=1, opened=1)
    event = Decoder(source=source).decode(raw)
    assert isinstance(event, OpenEvent)
    assert (event.source, event.state) == (source, "opened")
    assert opened().state == "attempted" and opened(opened=1, denial=1).state == "denied"


def test_unread_is_not_empty() -> None:
    event = opened(path_length=-14, process=identity(argv_bytes=30, exe_inode=0))
    who = event.process
    assert event.path is None and "path" in event.unread
    assert who.argv is None and "argv" in who.unread
    assert who.exe_path is None and "exe" in who.unread
    assert opened(process=identity()).process.argv == ()


def test_cut_paths_and_arguments_say_so() -> None:
    who = opened(
        process=identity(traits=2, exe=text(b"a\0b\0"), argv_bytes=900, argv_read=4, argv=b"x\0yz")
    ).process
    assert (who.exe_path, who.exe_path_cut) == ("b/a", True)
    assert (who.argv, who.argv_truncated) == (("x", "yz"), True)


def test_empty_arguments_are_kept() -> None:
    who = opened(process=identity(argv_bytes=5, argv_read=5, argv=b"a\0\0b\0")).process
    assert who.argv == ("a", "", "b")


def test_the_other_kinds() -> None:
    decoder = Decoder()
    end = decoder.decode(
        record("return_record", kind=2, pid=101, tgid=100, result=-6, attempt_ns=9)
    )
    assert isinstance(end, OpenReturn)
    assert (end.pid, end.thread_id, end.result, end.path) == (100, 101, -6, None)
    run = decoder.decode(record("exec_record", kind=3, touched=1, process=identity()))
    assert isinstance(run, ExecEvent) and run.touched and run.process.pid == 100
    assert run.tool is None
    run = decoder.decode(
        record("exec_record", kind=3, tool=1, tool_name={"text": b"nvtop\0x"}, process=identity())
    )
    assert isinstance(run, ExecEvent) and run.tool == "nvtop" and not run.touched
    made = decoder.decode(
        record("group_record", kind=5, time_ns=3, cgroup_id=9, path_length=4, path=b"/a\n\0junk")
    )
    assert made == GroupEvent(at_ns=3, cgroup_id=9, hierarchy=0, path="/a\n")
    gone = decoder.decode(record("exit_record", kind=4, tgid=100, exit_code=256, comm=b"x"))
    assert gone == ExitEvent(at_ns=0, pid=100, start_time_ns=0, exit_code=256, comm="x")


def test_the_same_process_is_decoded_once_and_another_is_not_taken_for_it() -> None:
    decoder = Decoder()

    def decode(**values: Any) -> ProcessIdentity:
        event = decoder.decode(record("open_record", kind=1, process=identity(**values)))
        assert isinstance(event, OpenEvent)
        return event.process

    assert decode(comm=b"a") is decode(comm=b"a")
    assert decode(argv=b"junk") is decode(argv=b"more")
    assert decode(comm=b"b").comm == "b"
    assert decode(argv_bytes=2, argv_read=2, argv=b"z\0").argv == ("z",)


@pytest.mark.parametrize(
    "raw",
    [
        record("open_record", kind=2),
        record("open_record", kind=1, how=5),
        record("open_record", kind=1, denial=3),
        record("open_record", kind=1, path_length=257),
        record("open_record", kind=1, process={"argv_read": 513}),
        record("open_record", kind=1, process={"exe": {"length": layouts.EXE_BYTES + 1}}),
        record("return_record", kind=2, path={"length": 1 << 31}),
        record("group_record", kind=5, path_length=1025),
        b"",
        b"\0" * 47,
    ],
)
def test_what_is_no_event_is_malformed(raw: bytes) -> None:
    with pytest.raises(Malformed):
        Decoder().decode(raw)


@given(
    st.binary(max_size=64)
    | st.sampled_from(SIZES).flatmap(lambda n: st.binary(min_size=n, max_size=n))
)
def test_any_bytes_are_an_event_or_malformed(raw: bytes) -> None:
    try:
        Decoder().decode(raw)
    except Malformed:
        pass


@given(
    st.sampled_from(["open_record", "exec_record"]),
    st.integers(0, layouts.ARGV_BYTES + 4),
    st.integers(0, layouts.EXE_BYTES + 4),
    st.binary(max_size=layouts.ARGV_BYTES),
    st.binary(max_size=layouts.EXE_BYTES),
)
def test_any_text_in_an_event_can_be_told(
    name: str, argv_read: int, exe_length: int, argv: bytes, exe: bytes
) -> None:
    process = identity(
        argv_bytes=600, argv_read=argv_read, argv=argv, exe={"length": exe_length, "text": exe}
    )
    kind = 1 if name == "open_record" else 3
    try:
        event = Decoder().decode(record(name, kind=kind, process=process))
    except Malformed:
        assert argv_read > layouts.ARGV_BYTES or exe_length > layouts.EXE_BYTES
        return
    assert isinstance(event, OpenEvent | ExecEvent)
    for word in event.process.argv or ():
        word.encode()
    (event.process.exe_path or "").encode()


@given(st.binary(max_size=300))
def test_any_bytes_are_holders_or_malformed(raw: bytes) -> None:
    try:
        assert len(parse_holders(raw)) * layouts.size("holder_record") == len(raw)
    except Malformed:
        assert len(raw) % layouts.size("holder_record")


def test_holders() -> None:
    raw = record("holder_record", tgid=7, pid=8, descriptor=3, major=1, minor=7, comm=b"a")
    (one, two) = parse_holders(raw * 2)
    assert one == two
    assert (one.pid, one.thread_id, one.descriptor, one.comm) == (7, 8, 3, "a")


def test_one_of_each_process_and_device() -> None:
    raw = b"".join(
        record("holder_record", start_ns=start, tgid=pid, descriptor=number, major=195, minor=minor)
        for number, (start, pid, minor) in enumerate([(1, 7, 0), (1, 7, 0), (1, 7, 1), (2, 7, 0)])
    )
    found = [
        (one.start_time_ns, one.minor, one.descriptor) for one in parse_holders(raw, once=True)
    ]
    assert found == [(1, 0, 0), (1, 1, 2), (2, 0, 3)]


# -------------------------------------------------------------------- layouts


def described() -> dict[str, tuple[int, layouts.Members]]:
    return {name: (layouts.size(name), layouts.declared(name)) for name in layouts.LAYOUTS}


def test_the_same_layouts_are_accepted() -> None:
    layouts.check(described())


def _moved(built: dict[str, tuple[int, layouts.Members]]) -> None:
    built["open_record"][1]["how"] = (40, 8)


def _lacking(built: dict[str, tuple[int, layouts.Members]]) -> None:
    del built["identity"][1]["tty"]


def _more(built: dict[str, tuple[int, layouts.Members]]) -> None:
    built["settings"][1]["new"] = (24, 4)


def _longer(built: dict[str, tuple[int, layouts.Members]]) -> None:
    built["count"] = (32, built["count"][1])


def _absent(built: dict[str, tuple[int, layouts.Members]]) -> None:
    del built["exit_record"]


@pytest.mark.parametrize("spoil", [_moved, _lacking, _more, _longer, _absent])
def test_any_difference_is_refused(
    spoil: Callable[[dict[str, tuple[int, layouts.Members]]], None],
) -> None:
    built = described()
    spoil(built)
    with pytest.raises(Malformed):
        layouts.check(built)


@given(st.binary(max_size=200))
def test_any_file_has_structures_or_is_malformed(raw: bytes) -> None:
    for head in (b"", b"\x7fELF\x02\x01" + bytes(10)):
        with pytest.raises(Malformed):
            btf.structures(head + raw)


# -------------------------------------------------------------------- what loading needs


def test_a_machine_without_libbpf_says_what_to_install() -> None:
    with pytest.raises(Unavailable) as error:
        Libbpf("libgpuwarden-none.so.1")
    assert "libbpf1" in error.value.remedy


def test_a_kernel_without_types_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "KERNEL_TYPES", "/nonexistent")
    with pytest.raises(Unavailable, match="BTF") as error:
        loader.DeviceOpenProbe([(195, None)]).__enter__()
    assert "5.8" in error.value.remedy


def test_return_values_need_tracefs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "KERNEL_TYPES", "/proc/self/stat")
    monkeypatch.setattr(loading, "TRACEFS", ("/nonexistent",))
    settings = Settings(return_values=True)
    with pytest.raises(Unavailable) as error:
        loader.DeviceOpenProbe([(195, None)], settings).__enter__()
    assert "mount -t tracefs" in error.value.remedy


def test_the_numbers_to_watch_come_from_the_drivers_there_are() -> None:
    majors = Majors({195: "nvidia", 508: "nvidia-uvm"}, {57: "dxg"})
    assert choose.watched_numbers(majors) == {(195, None), (508, None), (10, 57)}


# -------------------------------------------------------------------- states


def hit(at_ns: int, *, overlay: bool = True, **values: Any) -> OpenEvent:
    traits = 1 if overlay else 0
    return opened(time_ns=at_ns, process=identity(traits=traits), **values)


def test_two_hits_of_one_open_are_merged_on_overlayfs_only() -> None:
    twins = Twins()
    assert [twins.is_second(hit(t)) for t in (0, 9_000, 18_000, 27_000)] == [
        False,
        True,
        False,
        True,
    ]
    assert twins.merged == 2
    assert not any(twins.is_second(hit(t, overlay=False)) for t in (0, 9_000))


def test_only_cgroup_dev_is_asked_twice_about_one_open() -> None:
    twins = Twins()
    assert not any(twins.is_second(replace(hit(t), source="lsm")) for t in (0, 9_000))


@pytest.mark.parametrize(
    "other",
    [{"time_ns": 2_000_000}, {"minor": 1}, {"how": 3}, {"syscall": 2}],
)
def test_what_differs_is_not_merged(other: dict[str, Any]) -> None:
    twins = Twins()
    later = {"time_ns": 1_000, **other}
    assert not twins.is_second(hit(0))
    assert not twins.is_second(hit(later.pop("time_ns"), **later))


def end_of(event: OpenEvent, result: int, path: str | None = None) -> OpenReturn:
    return OpenReturn(
        at_ns=0,
        attempt_since_boot_ns=event.since_boot_ns,
        pid=event.process.pid,
        thread_id=event.thread_id or 0,
        start_time_ns=event.process.start_time_ns,
        major=event.major,
        minor=event.minor,
        result=result,
        path=path,
    )


@pytest.mark.parametrize(
    ("result", "state", "error"),
    [(3, "opened", None), (-1, "denied", 1), (-13, "denied", 13), (-6, "attempted", 6)],
)
def test_a_result_gives_the_state(result: int, state: str, error: int | None) -> None:
    event = ended(hit(5), end_of(hit(5), result))
    assert (event.state, event.error) == (state, error)


def test_our_own_denial_stays_one() -> None:
    event = hit(5, denial=1)
    assert ended(event, end_of(event, 3)) is event


def test_attempts_are_settled_once() -> None:
    attempts, event = Attempts(), hit(5)
    assert attempts.add(event) == []
    settled = attempts.returned(end_of(event, 3, "/dev/gpu"))
    assert settled is not None
    assert (settled.state, settled.path, settled.path_is_claimed) == ("opened", "/dev/gpu", False)
    assert attempts.returned(end_of(event, 3)) is None and len(attempts) == 0


def test_a_descriptor_settles_the_attempts_of_its_process_and_device() -> None:
    attempts = Attempts()
    for minor in (0, 1):
        attempts.add(hit(5 + minor, major=195, minor=minor))
    held = HeldDescriptor(
        pid=100,
        start_time_ns=7_000_000_000,
        thread_id=100,
        descriptor=3,
        major=195,
        minor=1,
        inode=1,
        open_flags=0,
        uid=0,
        comm="x",
    )
    assert [(e.minor, e.state) for e in attempts.held([held])] == [(1, "opened")]
    assert len(attempts) == 1


@pytest.mark.parametrize(("return_values", "state"), [(True, "unknown"), (False, "attempted")])
def test_what_is_not_settled_in_time_is_given_up(return_values: bool, state: str) -> None:
    attempts = Attempts(return_values=return_values, wait_ns=100)
    attempts.add(hit(0))
    attempts.add(hit(50))
    assert [(e.since_boot_ns, e.state) for e in attempts.expired(120)] == [(0, state)]
    assert attempts.expired(120) == [] and len(attempts) == 1


def test_attempts_are_bounded() -> None:
    attempts = Attempts()
    pushed = [attempts.add(hit(t)) for t in range(PENDING_LIMIT + 2)]
    assert [e.since_boot_ns for out in pushed for e in out] == [0, 1]
    assert len(attempts) == PENDING_LIMIT


@pytest.mark.parametrize("how", [2, 3])
def test_mknod_and_access_open_nothing(how: int) -> None:
    attempts = Attempts()
    attempts.add(hit(0, how=how))
    assert len(attempts) == 0


# -------------------------------------------------------------------- mounts


def test_cgroup_mounts() -> None:
    mounts = parse_mounts(
        "22 1 0:20 / /sys rw - sysfs sysfs rw\n"
        "30 22 0:27 / /sys/fs/cgroup/unified rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"
        "31 22 0:28 /sub /a\\040b rw - cgroup cgroup rw,cpu,cpuacct\n"
        "broken line\n"
    )
    assert [(m.where, m.kind) for m in mounts] == [
        ("/sys/fs/cgroup/unified", "cgroup2"),
        ("/a b", "cgroup"),
    ]
    assert mounts[1].options == ("rw", "cpu", "cpuacct")


@given(st.text(max_size=200))
def test_any_text_gives_mounts(raw: str) -> None:
    parse_mounts(raw)
