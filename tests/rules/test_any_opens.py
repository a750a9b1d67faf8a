"""Rules over device opens judge any mix of facts."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuwarden.judge import judge
from gpuwarden.model import (
    CgroupPlacement,
    Container,
    DeviceOpen,
    Executable,
    NodeFacts,
    Process,
    Snapshot,
    SourceRun,
    ToolRun,
    Workload,
)
from gpuwarden.policy import Policy
from gpuwarden.rules.registry import OPEN_RULES
from tests.rules.open_node import OpenNode
from tests.support.nodes import TAKEN_AT_NS

CONTAINER = "container_opens_accelerator"
TOOL = "gpu_tool_in_container"
OUTSIDE = "accelerator_opened_outside_jobs"
PIDS = st.integers(1, 4)
SMALL = st.integers(-2, 300)
TEXT = st.text(max_size=12)
NAMES = st.sampled_from(
    ["/usr/bin/runc", "/usr/bin/nvidia-smi", "/usr/bin/python3", "/", "", "x", "/memfd:a", "\x00/"]
)
IDS = st.sampled_from(["c1", "c2"])
UIDS = st.sampled_from(["p1", "p2"])


def maybe(strategy: Any) -> Any:
    return st.one_of(st.none(), strategy)


EXECUTABLES = st.builds(
    Executable,
    path=NAMES,
    deleted=st.booleans(),
    memfd=st.booleans(),
    inode=maybe(st.integers(1, 2)),
    device=maybe(st.just("8:1")),
    owner_uid=maybe(st.sampled_from([0, 1000])),
    mode=maybe(st.just(0o100755)),
    path_is_genuine=maybe(st.booleans()),
)
PLACEMENTS = st.builds(
    CgroupPlacement,
    paths=st.just(("/x",)),
    container_id=maybe(IDS),
    pod_uid=maybe(UIDS),
    container_helper=st.booleans(),
    slurm_job=maybe(st.sampled_from(["7", "8"])),
    unit=maybe(st.sampled_from(["a.service", "cron.service"])),
    machine=maybe(st.sampled_from(["lxc:a", "qemu:b", ""])),
)
PROCESSES = st.builds(
    Process,
    pid=PIDS,
    start_time_ticks=st.integers(0, 2),
    ppid=PIDS,
    exe=maybe(EXECUTABLES),
    argv=maybe(st.lists(st.one_of(NAMES, TEXT), max_size=3).map(tuple)),
    uid=maybe(st.sampled_from([0, 1000])),
    loginuid=maybe(st.sampled_from([-1, 1000])),
    tty=maybe(TEXT),
    cgroup=maybe(PLACEMENTS),
    namespaces=st.dictionaries(st.sampled_from(["mnt", "pid", "user"]), st.integers(1, 2)),
    pids_in_namespaces=st.sampled_from([(), (5,), (5, 1)]),
    kernel_thread=st.booleans(),
    environment=st.sampled_from([{}, {"SLURM_JOB_ID": "7"}]),
)
CONTAINERS = st.builds(
    Container,
    id=IDS,
    runtime=st.sampled_from(["docker", "containerd"]),
    confirmed=st.booleans(),
    name=maybe(TEXT),
    image=maybe(TEXT),
    image_digest=maybe(TEXT),
    labels=st.dictionaries(TEXT, TEXT, max_size=2),
    privileged=maybe(st.booleans()),
    mount_namespace=maybe(st.integers(1, 2)),
    devices=st.lists(TEXT, max_size=2).map(tuple),
    visible_devices=maybe(st.sampled_from(["all", "void", ""])),
    pod_uid=maybe(UIDS),
    pod_name=maybe(TEXT),
    pod_namespace=maybe(TEXT),
)
OPENS = st.builds(
    DeviceOpen,
    pid=PIDS,
    start_time_ticks=st.integers(0, 2),
    major=SMALL,
    minor=st.integers(0, 1),
    kind=st.sampled_from(["nvidia-gpu", "nvidia-ctl", "kfd", "drm-render", "accel", "other"]),
    how=st.sampled_from(["open", "mknod", "access", "held", "other"]),
    state=st.sampled_from(["attempted", "opened", "denied", "unknown"]),
    first_ns=SMALL,
    last_ns=SMALL,
    count=SMALL,
    path=maybe(st.one_of(TEXT, NAMES)),
    renamed=maybe(st.booleans()),
    error=maybe(SMALL),
    denial=st.sampled_from(["", "denied", "would deny"]),
    opened_by=maybe(PIDS),
    at_start=st.booleans(),
    container_state=st.sampled_from(["none", "known", "unknown"]),
    unread=st.dictionaries(TEXT, TEXT, max_size=1),
)
TOOLS = st.builds(
    ToolRun, pid=PIDS, start_time_ticks=st.integers(0, 2), tool=TEXT, at_ns=SMALL, count=SMALL
)
SOURCES = st.lists(
    st.builds(
        SourceRun,
        name=st.sampled_from(["slurm", "kubernetes", "systemd"]),
        state=st.sampled_from(["ok", "absent", "failed", "skipped"]),
        scheduled=st.booleans(),
        running=st.sampled_from([(), ("7", "a.service", "cron.service")]),
    ),
    max_size=3,
    unique_by=lambda run: run.name,
)
WORKLOADS = st.lists(
    st.builds(
        Workload,
        source=st.sampled_from(["slurm", "kubernetes", "systemd"]),
        name=TEXT,
        gpus=st.sampled_from([(), ("index:0",), ("all",), ("?",)]),
        job_id=maybe(st.just("7")),
        pod_uid=maybe(UIDS),
        unit=maybe(st.just("a.service")),
    ),
    max_size=3,
)


def several(strategy: Any) -> Any:
    return st.lists(strategy, max_size=4).map(tuple)


@given(
    st.builds(
        Snapshot,
        taken_at_ns=st.just(TAKEN_AT_NS),
        node=st.just(NodeFacts(hostname="n", host_pid_namespace=True)),
        gpus=st.just(tuple(OpenNode().gpus)),
        processes=several(PROCESSES),
        containers=several(CONTAINERS),
        sources=SOURCES.map(tuple),
        workloads=WORKLOADS.map(tuple),
        opens=several(OPENS),
        tool_runs=several(TOOLS),
    )
)
def test_any_mix_of_facts_is_judged_and_only_an_open_is_critical(snapshot: Snapshot) -> None:
    report = judge(snapshot, Policy(), None, OPEN_RULES)
    assert [run for run in report.rules if run.state != "ok"] == []
    opened = {
        (o.pid, o.start_time_ticks)
        for o in snapshot.opens
        if o.state == "opened" and o.how not in ("mknod", "access")
    }
    told = {(o.pid, o.start_time_ticks) for o in snapshot.opens}
    told |= {(t.pid, t.start_time_ticks) for t in snapshot.tool_runs}
    ids = [f.id for f in report.findings]
    assert len(ids) == len(set(ids))
    for finding in report.findings:
        identity = (finding.subject.pid, finding.subject.start_time_ticks)
        assert identity in told
        assert finding.evidence
        if finding.severity == "critical":
            assert finding.rule == CONTAINER
            assert identity in opened


@given(several(OPENS), several(TOOLS), st.booleans())
def test_who_was_given_every_gpu_is_never_a_stranger(
    opens: tuple[DeviceOpen, ...], tools: tuple[ToolRun, ...], in_pod: bool
) -> None:
    node = OpenNode()
    if in_pod:
        node.pod("train")
        node.pod_given("train", ("all",))
        node.process(2, container="train", user="root", exe="/usr/bin/nvidia-smi")
    else:
        node.process(2, cgroup=node.job("7", ("all",)), exe="/usr/bin/nvidia-smi")
    node.opens = [replace(o, pid=2, start_time_ticks=100_002) for o in opens]
    node.tool_runs = [replace(t, pid=2, start_time_ticks=100_002) for t in tools]
    if not in_pod:
        node.opens = [replace(o, container_state="none") for o in node.opens]
    rules = {f.rule for f in node.judge().findings}
    assert not rules & {CONTAINER, TOOL, OUTSIDE}
