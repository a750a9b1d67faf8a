"""Falco's events: any bytes give an event or Malformed; what is missing says so."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.errors import Malformed
from gpuwarden.model import DeviceNode, Executable, Process
from gpuwarden.sensors.falco import (
    EVENTS_LIMIT,
    GPU_RULE,
    LINE_LIMIT,
    Body,
    FalcoDrop,
    FalcoEvent,
    FalcoProcess,
    parse_body,
    parse_event,
    parse_line,
)
from gpuwarden.sensors.falco_fields import Fields, pairs
from gpuwarden.sensors.falco_join import (
    FalcoContext,
    FalcoDevice,
    contradiction,
    device_of,
    happened_at_ns,
    is_of_node,
    match_container,
    named_device,
)

SECOND = 10**9
AT = 1_747_563_495 * SECOND + 901_045_861
NAMES = [
    "container.id", "container.name", "container.image.repository", "evt.time", "evt.type",
    "evt.res", "fd.name", "fd.num", "k8s.ns.name", "k8s.pod.name", "n_drops", "n_evts",
    "proc.cmdline", "proc.name", "proc.pid", "proc.tty", "scap.n_drops", "scap.n_drops_prev",
    "scap.n_drops_perc", "thread.tid", "user.loginuid", "user.uid",
]  # fmt: skip
GPU_FIELDS = {
    "container.id": "ee90b4bfa6d7",
    "evt.time": AT,
    "evt.type": "openat",
    "fd.name": "/dev/nvidia0",
    "proc.cmdline": "python3 train.py",
    "proc.exepath": "/usr/bin/python3.11",
    "proc.name": "python3",
    "proc.pid": 4242,
    "proc.pname": "bash",
    "proc.tty": 34816,
    "user.loginuid": 1000,
    "user.name": "alice",
    "user.uid": 1000,
}


def raw(*, rule: str = GPU_RULE, fields: Any = None, **event: Any) -> bytes:
    values = {
        "time": "2025-05-18T10:18:15.901045861Z",
        "rule": rule,
        "priority": "Critical",
        "source": "syscall",
        "hostname": "node-a",
        "output_fields": GPU_FIELDS if fields is None else fields,
        **event,
    }
    return json.dumps({name: v for name, v in values.items() if v is not ...}).encode()


def event(**values: Any) -> FalcoEvent:
    found = parse_event(raw(**values))
    assert isinstance(found, FalcoEvent)
    return found


def process(**values: Any) -> FalcoProcess:
    found = event(fields={"proc.name": "x", **values}).process
    assert found is not None
    return found


# ------------------------------------------------------------------ any bytes

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
ODD: st.SearchStrategy[object] = st.sampled_from(
    [None, "<NA>", "", "<UNKNOWN>x", "host", -1, 2**32 - 1, 2**63, "9" * 25, -(10**400), 1e308, [],
     "k8s_a_b_c_75cf460d-dd27-41e7-9d29-19b517dc730f_1", "/dev/nvidia0", "ee90b4bfa6d7", True]
)  # fmt: skip
EVENTS = st.fixed_dictionaries(
    {},
    optional={
        "rule": st.sampled_from(
            [GPU_RULE, "x", "", "Falco internal: syscall event drop",
             "Falco internal: metrics snapshot"]
        ) | JSON,
        "priority": st.sampled_from(["Info", "CRITICAL", "?"]) | JSON,
        "time": st.sampled_from(["2025-05-18T10:18:15Z", "9999-99-99T00:00:00Z"]) | JSON,
        "source": ODD | JSON,
        "hostname": ODD | JSON,
        "tags": JSON,
        "output": JSON,
        "output_fields": st.dictionaries(st.sampled_from(NAMES), ODD | JSON, max_size=8) | JSON,
    },
)  # fmt: skip


def check_bounded(found: FalcoEvent | FalcoDrop) -> None:
    assert len(msgspec.json.encode(found)) < 64 << 10
    if isinstance(found, FalcoDrop):
        assert found.drops is None or found.drops >= 0
        return
    if found.process is not None:
        assert found.process.pid is None or 0 < found.process.pid <= 1 << 22
        assert found.process.container_id is None or len(found.process.container_id) == 12
    device_of(found, ())


@given(st.binary(max_size=400))
def test_any_bytes_give_an_event_or_malformed(data: bytes) -> None:
    for text in (False, True):
        try:
            body = parse_body(data, text=text)
        except Malformed:
            continue
        assert body.taken or body.malformed


@given(EVENTS)
def test_any_object_gives_a_bounded_event_or_malformed(value: dict[str, Any]) -> None:
    try:
        data = json.dumps(value, allow_nan=False).encode()
    except ValueError:
        data = json.dumps(value).encode()
    try:
        found = parse_event(data)
    except Malformed:
        return
    check_bounded(found)


@given(
    st.text(max_size=300)
    | st.lists(
        st.sampled_from(
            ["01:02:03.000000001: ", "Warning ", "(", ")", "pid=", "-1", "<NA>", " ", "id=host ",
             "command=", "device=/dev/nvidia0 ", "\n", "\x00", "\udcff", "=", "|"]
        )
    ).map("".join)
)  # fmt: skip
def test_any_line_gives_a_bounded_event_or_malformed(line: str) -> None:
    try:
        found = parse_line(line)
    except Malformed:
        return
    check_bounded(found)


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[]", b"null", b"1", b'{"rule":""}', b'{"rule":3}', b"[" * 5000, b"\xff" * 10],
)
def test_what_is_none_of_falcos_is_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        parse_event(data)


# ------------------------------------------------------------------ fields


def test_all_that_is_told_is_kept() -> None:
    found = event(tags=["container", "T1496", 3])
    assert found.unread == {}
    assert (found.at_ns, found.priority, found.hostname) == (AT, "Critical", "node-a")
    assert found.tags == ("container", "T1496")
    assert found.process == FalcoProcess(
        pid=4242,
        parent_comm="bash",
        comm="python3",
        exe_path="/usr/bin/python3.11",
        command_line="python3 train.py",
        user="alice",
        uid=1000,
        loginuid=1000,
        tty=34816,
        container_id="ee90b4bfa6d7",
        on_host=False,
    )


@pytest.mark.parametrize("missing", [None, "<NA>", ""])
def test_three_ways_to_say_missing(missing: str | None) -> None:
    found = event(fields=dict.fromkeys(GPU_FIELDS, missing) | {"proc.name": "x"})
    assert found.process == FalcoProcess(comm="x")
    assert {"pid", "uid", "exe_path", "container_id", "file", "tty"} <= set(found.unread)
    # The event's own time stands on the whole too.
    assert found.at_ns == AT


def test_what_a_rule_does_not_tell_is_not_called_unread() -> None:
    assert event(fields={"proc.name": "x"}).unread == {}


def test_a_file_in_an_unknown_directory_is_not_a_file_name() -> None:
    found = event(fields={**GPU_FIELDS, "fd.name": "<UNKNOWN>/dev/nvidia0"})
    assert found.file is None
    assert "directory" in found.unread["file"]
    assert isinstance(device_of(found, ()), FalcoContext)


@pytest.mark.parametrize("pid", [-1, 0, "-1", 1 << 23, "x", 1.5, True])
def test_a_pid_that_no_process_has_is_none(pid: object) -> None:
    found = event(fields={"proc.name": "x", "proc.pid": pid})
    assert found.process is not None
    assert found.process.pid is None
    assert "pid" in found.unread


def test_nobody_logged_in_is_a_loginuid_and_no_uid() -> None:
    for unset in (-1, "-1", 2**32 - 1):
        found = process(**{"user.loginuid": unset, "user.uid": unset})
        assert (found.loginuid, found.uid) == (-1, None)
    assert process(**{"user.uid": "0"}).uid == 0


def test_no_terminal_is_no_gap() -> None:
    found = event(fields={"proc.name": "x", "proc.tty": 0})
    assert found.process is not None
    assert (found.process.tty, found.unread) == (None, {})


@pytest.mark.parametrize(
    ("told", "identity", "on_host"),
    [
        ("host", None, True),
        ("ee90b4bfa6d7", "ee90b4bfa6d7", False),
        ("ee90b4bfa6d7" + "0" * 52, "ee90b4bfa6d7", False),
        ("EE90B4BFA6D7", None, None),
        ("ee90b4", None, None),
    ],
)
def test_host_is_no_container(told: str, identity: str | None, on_host: bool | None) -> None:
    found = process(**{"container.id": told})
    assert (found.container_id, found.on_host) == (identity, on_host)


@pytest.mark.parametrize(
    ("told", "priority"),
    [("Info", "Informational"), ("INFORMATIONAL", "Informational"), ("critical", "Critical"),
     ("Emergency", "Emergency"), ("fatal", None), (None, None), (3, None)],
)  # fmt: skip
def test_priorities_in_any_case(told: object, priority: str | None) -> None:
    found = event(priority=told)
    assert found.priority == priority
    assert ("priority" in found.unread) == (priority is None)


@pytest.mark.parametrize(
    ("own", "whole", "at_ns"),
    [
        (AT, "2001-01-01T00:00:00Z", AT),
        (str(AT), ..., AT),
        ("10:18:15.901045861", "2025-05-18T10:18:15.901045861Z", AT),
        ("2025-05-18T12:18:15.901045861+0200", ..., AT),
        (..., "2025-05-18T10:18:15.901045861+00:00", AT),
        ("10:18:15.901045861", ..., None),
        (-5, None, None),
    ],
)
def test_times(own: object, whole: object, at_ns: int | None) -> None:
    fields = {} if own is ... else {"evt.time": own}
    found = event(fields=fields, time=whole)
    assert found.at_ns == at_ns
    assert ("at_ns" in found.unread) == (at_ns is None)


def test_a_pod_by_its_fields_is_not_renamed_by_a_container_name() -> None:
    name = "k8s_a_other_ns2_75cf460d-dd27-41e7-9d29-19b517dc730f_1"
    found = event(fields={"container.name": name, "k8s.pod.name": "mine", "k8s.ns.name": "ns1"})
    assert (found.pod_name, found.pod_namespace, found.pod_uid) == ("mine", "ns1", None)


@pytest.mark.parametrize("source", ["k8s_audit", "aws_cloudtrail", "internal"])
def test_events_of_other_sources_are_about_no_process(source: str) -> None:
    assert event(source=source).process is None
    assert isinstance(device_of(event(source=source), ()), FalcoContext)


def test_an_event_without_output_fields_is_one_all_the_same() -> None:
    found = event(fields=[], output="x" * 9999)
    assert found.process is None
    assert "output_fields" in found.unread
    assert len(found.message) == 2048


# ------------------------------------------------------------------ lines


def test_a_line_of_json_is_an_event() -> None:
    assert parse_line(raw().decode()) == parse_event(raw())


def test_what_a_process_calls_itself_cannot_take_anothers_place() -> None:
    line = (
        "01:02:03.000000001: Critical Container accessing GPU device | device=/dev/nvidia0 "
        "process=x pid=1 command=x pid=1 container_id=host parent=bash pid=4242 "
        "container_id=ee90b4bfa6d7"
    )
    found = parse_line(line)
    assert isinstance(found, FalcoEvent)
    assert found.process is not None
    assert (found.process.pid, found.process.container_id) == (None, None)
    assert "twice" in found.unread["pid"]
    # And nothing at all is laid at a process's door by words that can be forged.
    told = device_of(found, [node("/dev/nvidia0", 195, 0)])
    assert isinstance(told, FalcoContext)
    assert "forged" in told.reason


@pytest.mark.parametrize(
    ("head", "at_ns"),
    [
        ("2025-05-18T10:18:15.901045861+0000: ", AT),
        ("Jun  7 10:20:05 node-a falco[7]: 10:18:15.901045861: ", None),
        ("2025-05-18T10:18:15.901045861Z: ", AT),
    ],
)
def test_heads_of_lines(head: str, at_ns: int | None) -> None:
    found = parse_line(f"{head}Notice A shell (user=alice command=sh -c (a b) pid=7)")
    assert isinstance(found, FalcoEvent)
    assert (found.at_ns, found.priority, found.rule) == (at_ns, "Notice", None)
    assert found.process is not None
    assert (found.process.command_line, found.process.pid) == ("sh -c (a b)", 7)


def test_a_line_is_bounded() -> None:
    with pytest.raises(Malformed, match="characters"):
        parse_line("01:02:03.000000001: Notice " + "a=b " * LINE_LIMIT)
    assert pairs("a=(" + ")" * 60_000) == {"a": "()"}
    assert len(pairs(" ".join(f"a{n}=b" for n in range(500)))) <= 128


def test_fields_note_the_first_reason_only_while_there_is_no_value() -> None:
    fields = Fields({"a": None, "b": "x"})
    assert fields.text("name", "a", "b") == "x"
    assert fields.unread == {}


# ------------------------------------------------------------------ Falco's own losses

DROP = "Falco internal: syscall event drop"
METRICS = "Falco internal: metrics snapshot"


@pytest.mark.parametrize("drops", [815508, "815508"])
def test_a_drop_by_number_or_text(drops: object) -> None:
    found = parse_event(raw(rule=DROP, fields={"n_drops": drops, "n_evts": "2270350"}))
    assert found == FalcoDrop(at_ns=AT, drops=815508, of=2270350, hostname="node-a")


def test_a_drop_that_does_not_say_how_many_is_one_all_the_same() -> None:
    assert parse_event(raw(rule=DROP, fields={"n_drops": "<NA>"})) == FalcoDrop(
        at_ns=AT, drops=None, hostname="node-a"
    )
    said = f"{DROP}. 7 system calls dropped in last second."
    found = parse_event(raw(rule=DROP, fields={}, output=said))
    assert isinstance(found, FalcoDrop)
    assert found.drops == 7
    line = parse_line(f"15:28:24.000207862: Critical {said}(n_drops=7 n_evts=1181)")
    assert isinstance(line, FalcoDrop)
    assert (line.drops, line.of) == (7, 1181)


@pytest.mark.parametrize(
    ("counters", "drops", "of", "alerts"),
    [
        ({"scap.n_drops": 9, "scap.n_drops_prev": 4, "scap.n_evts": 50, "scap.n_evts_prev": 10},
         5, 40, None),
        ({"scap.n_drops": 3, "scap.n_drops_prev": 4}, 3, None, None),
        ({"scap.n_drops_perc": 0.5}, None, None, None),
        ({"scap.n_drops": 3}, None, None, None),
        ({"scap.n_drops_perc": 0.0, "falco.outputs_queue_num_drops": 2}, 0, None, 2),
    ],
)  # fmt: skip
def test_a_snapshot_of_counters_that_tells_of_losses(
    counters: dict[str, object], drops: int | None, of: int | None, alerts: int | None
) -> None:
    found = parse_event(raw(rule=METRICS, source="internal", fields=counters))
    assert isinstance(found, FalcoDrop)
    assert (found.drops, found.of, found.alerts_dropped) == (drops, of, alerts)


@pytest.mark.parametrize(
    "counters",
    [{}, {"scap.n_drops": 4, "scap.n_drops_prev": 4, "scap.n_drops_perc": 0.0},
     {"scap.n_drops_perc": 0.0, "falco.outputs_queue_num_drops": 0}],
)  # fmt: skip
def test_a_snapshot_without_losses_is_context(counters: dict[str, object]) -> None:
    found = event(rule=METRICS, source="internal", fields=counters)
    assert (found.process, found.unread) == (None, {})


# ------------------------------------------------------------------ bodies


def test_bodies_of_one_of_many_and_of_lines() -> None:
    one = raw()
    many = b"[" + one + b"," + raw(rule="x") + b"]"
    lines = one + b"\n\n" + raw(rule="x") + b"\n"
    assert parse_body(one) == Body([parse_event(one)], [])
    assert parse_body(many) == parse_body(lines)
    assert len(parse_body(many).taken) == 2


def test_a_bad_event_costs_no_other() -> None:
    for body in (b"[" + raw() + b",{}]", raw() + b"\n{]", raw() + b"\n{}"):
        found = parse_body(body)
        assert len(found.taken) == 1
        assert found.malformed[0].startswith("event 2: ")


def test_a_body_is_bounded() -> None:
    for body in (b"[" + b",".join([b"{}"] * (EVENTS_LIMIT + 1)) + b"]", b"{}\n" * 2000):
        with pytest.raises(Malformed, match="more than"):
            parse_body(body)
    with pytest.raises(Malformed, match="bytes"):
        parse_body(b" " * ((1 << 20) + 1))


def test_a_body_of_text() -> None:
    data = b"01:02:03.000000001: Notice A (pid=7)\nnonsense\n"
    body = parse_body(data, text=True)
    assert (len(body.taken), len(body.malformed)) == (1, 1)


# ------------------------------------------------------------------ devices


def node(path: str, major: int, minor: int, kind: Any = "nvidia-uvm") -> DeviceNode:
    return DeviceNode(path=path, major=major, minor=minor, kind=kind)


@pytest.mark.parametrize(
    ("path", "kind", "number"),
    [
        ("/dev/nvidia0", "nvidia-gpu", (195, 0)),
        ("/dev/nvidia254", "nvidia-gpu", None),
        ("/dev/nvidiactl", "nvidia-ctl", (195, 255)),
        ("/dev/nvidia-modeset", "nvidia-modeset", (195, 254)),
        ("/dev/nvidia-uvm", "nvidia-uvm", None),
        ("/dev/nvidia-uvm-tools", "nvidia-uvm-tools", None),
        ("/dev/nvidia-caps/nvidia-cap1", "nvidia-caps", None),
        ("/dev/nvidia-nvswitch0", "nvidia-other", None),
        ("/dev/dri/renderD128", "drm-render", (226, 128)),
        ("/dev/dri/card0", "drm-card", (226, 0)),
        ("/dev/dri/card9999999", "drm-card", None),
        ("/dev/dri/renderD5", "drm-render", None),
        ("/dev/nvidia007", "nvidia-other", None),
        ("/dev/dri/by-path/pci-0000:00:02.0-render", "other", None),
        ("/dev/accel/accel3", "accel", (261, 3)),
        ("/dev/kfd", "kfd", None),
        ("/dev/hl0", "habana", None),
        ("/dev/hl_controlD0", "habana", None),
        ("/dev/dxg", "other", None),
    ],
)
def test_devices_by_name(path: str, kind: str, number: tuple[int, int] | None) -> None:
    assert named_device(path) == (kind, number)
    found = device_of(event(fields={**GPU_FIELDS, "fd.name": path}), ())
    if number is None:
        assert isinstance(found, FalcoContext)
        assert "not fixed" in found.reason
    else:
        assert isinstance(found, FalcoDevice)
        assert (found.major, found.minor, found.kind) == (*number, kind)


@pytest.mark.parametrize(
    "path",
    ["/dev/vfio/7", "/dev/null", "/tmp/nvidia0", "nvidia0", "/dev/nvidia", "/dev/nvidia0\n",
     "/dev/nvidia٣", "192.0.2.1:5->192.0.2.2:7", "/host/dev/nvidia0"],
)  # fmt: skip
def test_other_names_are_no_accelerators(path: str) -> None:
    assert isinstance(device_of(event(fields={**GPU_FIELDS, "fd.name": path}), ()), FalcoContext)


def test_this_hosts_nodes_tell_what_a_name_does_not() -> None:
    nodes = [node("/dev/nvidia-uvm", 509, 0), node("/dev/nvidia0", 203, 1, "nvidia-gpu")]
    uvm = device_of(event(fields={**GPU_FIELDS, "fd.name": "/dev/nvidia-uvm"}), nodes)
    assert isinstance(uvm, FalcoDevice)
    assert (uvm.major, uvm.minor) == (509, 0)
    gpu = device_of(event(fields={**GPU_FIELDS, "fd.name": "/dev//x/../nvidia0"}), nodes)
    assert isinstance(gpu, FalcoDevice)
    assert (gpu.path, gpu.major, gpu.minor) == ("/dev/nvidia0", 203, 1)


@pytest.mark.parametrize(
    ("rule", "more", "state", "error"),
    [
        (GPU_RULE, {}, "opened", None),
        ("Mine", {"evt.res": "SUCCESS"}, "opened", None),
        ("Mine", {"fd.num": 5}, "opened", None),
        ("Mine", {}, "unknown", None),
        ("Mine", {"evt.res": "EPERM"}, "denied", 1),
        ("Mine", {"evt.res": "ENXIO", "fd.num": -6}, "attempted", 6),
        ("Mine", {"fd.num": "-1"}, "attempted", None),
        ("Mine", {"evt.res": "errorcode"}, "attempted", None),
    ],
)
def test_states(rule: str, more: dict[str, object], state: str, error: int | None) -> None:
    found = device_of(event(rule=rule, fields={**GPU_FIELDS, **more}), ())
    assert isinstance(found, FalcoDevice)
    assert (found.state, found.error) == (state, error)
    assert ("state" in found.unread) == (state == "unknown")


def test_other_calls_on_a_device_are_context() -> None:
    found = device_of(event(rule="Mine", fields={**GPU_FIELDS, "evt.type": "close"}), ())
    assert isinstance(found, FalcoContext)
    opened = device_of(event(rule="Mine", fields={**GPU_FIELDS, "evt.type": "openat2"}), ())
    assert isinstance(opened, FalcoDevice)


def test_a_clock_that_is_far_off_dates_nothing() -> None:
    assert happened_at_ns(event(), AT + 5) == AT
    assert happened_at_ns(event(), AT + 7200 * SECOND) == AT + 7200 * SECOND
    assert happened_at_ns(event(), AT - 7200 * SECOND) == AT - 7200 * SECOND
    assert happened_at_ns(event(fields={}, time=...), 5) == 5


# ------------------------------------------------------------------ joins


def test_a_container_by_the_head_of_its_id() -> None:
    full = ["ee90b4bfa6d7" + "0" * 52, "aaaaaaaaaaaa" + "1" * 52]
    assert match_container("ee90b4bfa6d7", full) == full[0]
    assert match_container("ee90b4bfa6d7", [*full, "ee90b4bfa6d7" + "2" * 52]) is None
    assert match_container("ee90b4bfa6d7", full * 2) == full[0]
    assert match_container("bbbbbbbbbbbb", full) is None
    assert match_container("", full[:1]) is None


def test_whose_node_an_event_is_of() -> None:
    assert is_of_node(event(), "NODE-A.example.org") is True
    assert is_of_node(event(), "node-b") is False
    assert is_of_node(event(hostname=None), "node-a") is None


def seen(**values: Any) -> Process:
    exe = Executable(path="/usr/bin/python3.11")
    return Process(
        **{"pid": 4242, "start_time_ticks": 1, "started_at_ns": AT - SECOND, "exe": exe, **values}
    )


def test_a_pid_that_was_given_out_again_is_not_joined() -> None:
    claimed = event().process
    assert claimed is not None
    assert contradiction(claimed, seen(), AT) is None
    assert contradiction(claimed, seen(exe=None, started_at_ns=None), AT) is None
    assert "given out again" in str(contradiction(claimed, seen(started_at_ns=AT + 2 * SECOND), AT))
    other = seen(exe=Executable(path="/bin/sh"))
    assert "Falco saw" in str(contradiction(claimed, other, AT))
    assert contradiction(claimed, seen(pid=1), AT) is not None
    assert contradiction(FalcoProcess(), seen(), AT) is not None
