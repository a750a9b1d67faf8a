"""Rules over device opens: how grave, how sure, in which words; and any mix of facts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuwarden.finding import Finding
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
from tests.rules.open_node import RUNC, OpenNode, digest
from tests.support.nodes import TAKEN_AT_NS, container_id, executable, gpu_id

CONTAINER = "container_opens_accelerator"
TOOL = "gpu_tool_in_container"
OUTSIDE = "accelerator_opened_outside_jobs"
MADE = "accelerator_node_made"
RENAMED = "accelerator_opened_by_other_name"
HELD = "holder_without_open"


@pytest.fixture
def kube() -> OpenNode:
    """A node of a cluster whose kubelet answers."""
    node = OpenNode()
    node.source("kubernetes", scheduled=True)
    return node


@pytest.fixture
def slurm() -> OpenNode:
    """A node on which Slurm hands out the GPUs."""
    node = OpenNode()
    node.source("slurm", scheduled=True)
    return node


def texts(finding: Finding) -> str:
    return "\n".join(e.text for e in finding.evidence)


# ------------------------------------------------------------------ containers


@pytest.mark.parametrize(
    ("fields", "severity", "words"),
    [
        ({}, "critical", "/dev/nvidia0 (195:0): opened"),
        ({"how": "held", "at_start": True}, "critical", "already when watching began"),
        ({"how": "other"}, "critical", ": opened"),
        ({"io_uring": True}, "critical", "opened through io_uring"),
        ({"state": "attempted", "error": 6}, "warning", "nothing shows that it got it (ENXIO)"),
        ({"state": "denied", "error": 1}, "warning", "was denied (EPERM)"),
        ({"state": "denied", "denial": "denied"}, "warning", "denied by the policy's enforce"),
        ({"denial": "would deny"}, "critical", "enforcement would have denied it"),
        ({"state": "unknown"}, "warning", "how it ended was not seen"),
        ({"how": "mknod"}, "warning", "the node was made"),
        ({"how": "access"}, "warning", "did not open it"),
        ({"count": 1_000_000}, "critical", "opened, 1000000 times"),
    ],
)
def test_only_what_was_opened_is_critical(
    kube: OpenNode, fields: dict[str, Any], severity: str, words: str
) -> None:
    kube.pod("web")
    kube.process(10, container="web", user="root")
    kube.open(10, **fields)
    found = kube.one(CONTAINER)
    assert found.severity == severity
    assert words in texts(found)
    assert (found.verdict == "rogue-container") is (severity == "critical")
    assert ("an open that succeeded was not seen" in texts(found)) is (severity == "warning")


def test_one_finding_a_process_with_every_device_and_the_furthest_open(kube: OpenNode) -> None:
    kube.gpu(1)
    kube.pod("web", pod_labels={"app": "web"}, privileged=True)
    kube.process(10, container="web", user="root", argv=("x", "-u", "4" + "A" * 94))
    kube.open(10, 1, state="attempted")
    kube.open(10, 0)
    found = kube.one(CONTAINER)
    assert found.severity == "critical"
    assert set(found.subject.gpu_ids) == {gpu_id(0), gpu_id(1)}
    assert found.subject.gpu == "GPUs 0, 1"
    assert "T1496" in found.explanation
    said = texts(found)
    assert "command line x -u 4AAAAA…AAAA" in said
    for words in ("image registry.example/web:1", f"digest {digest('web')}", "pod research/web",
                  "labels app=web", "it is privileged", "user root, nobody logged in"):  # fmt: skip
        assert words in said
    again = kube.one(CONTAINER)
    assert again.id == found.id


def test_the_id_stays_when_the_process_is_gone(kube: OpenNode) -> None:
    kube.pod("web")
    kube.process(10, container="web", user="root")
    kube.open(10, container_state="known")
    before = kube.one(CONTAINER)
    kube.processes = [p for p in kube.processes if p.pid != 10]
    after = kube.one(CONTAINER)
    assert after.id == before.id
    assert after.severity == "warning"
    assert "could not be read in time" in texts(after)


def test_another_process_with_that_number_is_not_the_one(kube: OpenNode) -> None:
    kube.pod("web")
    kube.process(10, container="web", user="root")
    kube.open(10, start_time_ticks=5, container_state="unknown")
    found = kube.one(CONTAINER)
    assert found.subject.start_time_ticks == 5
    assert found.severity == "warning"


def test_the_runtime_did_not_answer(kube: OpenNode) -> None:
    kube.pod("web", confirmed=False)
    kube.process(10, container="web", user="root")
    kube.open(10, container_state="unknown")
    found = kube.one(CONTAINER)
    assert found.severity == "error"
    assert "only the cgroup path names it" in texts(found)


def test_given_by_its_uid_but_not_confirmed_is_a_warning(kube: OpenNode) -> None:
    kube.pod("train", confirmed=False)
    kube.pod_given("train", (f"uuid:{gpu_id(0)}",))
    kube.process(10, container="train", user="root")
    kube.open(10, container_state="unknown")
    found = kube.one(CONTAINER)
    assert found.severity == "warning"
    assert "only its cgroup name ties it to the pod" in texts(found)


def test_pods_known_by_name_alone_accuse_none_whose_runtime_is_silent(kube: OpenNode) -> None:
    kube.workload("kubernetes", "pod a/b", ("index:0",), pod_name="b", pod_namespace="a")
    kube.process(10, cgroup=f"/kubepods/pod{kube.pod_uid('b')}/{container_id('b')}", user="root")
    kube.open(10, container_state="unknown")
    assert kube.one(CONTAINER).severity == "warning"


@pytest.mark.parametrize(("asked", "severity"), [("ok", "critical"), ("failed", "warning")])
def test_a_silent_kubelet_accuses_nobody(asked: Any, severity: str) -> None:
    node = OpenNode()
    node.source("kubernetes", asked, scheduled=True)
    node.pod("web")
    node.process(10, container="web", user="root")
    node.open(10)
    found = node.one(CONTAINER)
    assert found.severity == severity
    assert ("kubernetes gave no answer" in texts(found)) is (asked == "failed")


def test_a_silent_slurm_leaves_a_docker_container_an_error_at_most() -> None:
    node = OpenNode()
    node.source("slurm", "failed", reason="slurmctld: connection refused")
    node.container("nb", privileged=True)
    node.process(10, container="nb", user="root")
    node.open(10)
    found = node.one(CONTAINER)
    assert found.severity == "error"
    assert "not sure: slurm gave no answer (slurmctld: connection refused)" in texts(found)


def test_nobody_was_asked_at_all(kube: OpenNode) -> None:
    kube.container("nb")
    kube.process(10, container="nb", user="root")
    kube.open(10)
    report = judge(replace(kube.snapshot(), sources=()), Policy(), None, OPEN_RULES)
    found = next(f for f in report.findings if f.rule == CONTAINER)
    assert found.severity == "error"
    assert "no scheduler was asked" in texts(found)


def test_passed_in_by_whoever_started_it_where_nobody_schedules() -> None:
    node = OpenNode()
    node.container("yarn", devices=("/dev/nvidia0", "/dev/nvidia1"))
    node.process(10, container="yarn", user="root")
    node.uses_gpu(10)
    found = node.one(CONTAINER)
    assert found.severity == "warning"
    assert "whoever started it passed GPUs in" in texts(found)
    assert "passed in: /dev/nvidia0, /dev/nvidia1" in texts(found)


def test_a_pod_on_another_gpu_than_its_own(kube: OpenNode) -> None:
    kube.gpu(1)
    kube.pod("train")
    kube.pod_given("train", (f"uuid:{gpu_id(0)}",))
    kube.process(10, container="train", user="root")
    kube.uses_gpu(10, 0)
    kube.open(10, 1)
    found = kube.one(CONTAINER)
    assert found.severity == "warning"
    assert found.subject.gpu_ids == (gpu_id(1),)
    assert f"was given uuid:{gpu_id(0)}" in texts(found)
    assert "/dev/nvidia0" not in texts(found)


def test_a_mig_device_comes_with_its_gpus_node_and_the_control_nodes(kube: OpenNode) -> None:
    mig = kube.mig(0, 3)
    kube.pod("train")
    kube.pod_given("train", (f"uuid:{mig}",))
    kube.process(10, container="train", user="root")
    kube.uses_gpu(10)
    kube.open(10, kind="nvidia-caps", major=511, minor=30, path="/dev/nvidia-caps/nvidia-cap30")
    assert kube.judge().findings == ()


def test_a_pod_that_was_given_nothing_may_not_use_the_control_nodes(kube: OpenNode) -> None:
    kube.pod("web")
    kube.pod_given("web", ())
    kube.process(10, container="web", user="root")
    kube.open(10, kind="kfd")
    assert kube.one(CONTAINER).severity == "critical"


def test_the_drivers_tool_mounted_into_an_unknown_container_proves_nothing(slurm: OpenNode) -> None:
    path = f"/system.slice/docker-{container_id('x')}.scope"
    slurm.process(10, user="root", exe="/usr/bin/nvidia-smi", cgroup=path)
    slurm.open(10, container_state="unknown")
    assert slurm.one(CONTAINER).severity == "error"
    assert slurm.one(TOOL).severity == "warning"


def test_a_policy_entry_by_user_is_no_proof_in_a_container_that_nobody_knows(
    slurm: OpenNode,
) -> None:
    policy = "workloads: [{name: daemons, match: {user: root}}]\n"
    slurm.process(10, user="root", cgroup=f"/docker/{container_id('x')}")
    slurm.open(10, container_state="unknown")
    assert slurm.found(CONTAINER, policy)


def test_a_conmon_is_on_the_host_and_a_group_of_that_name_inside_is_not(slurm: OpenNode) -> None:
    group = f"/machine.slice/libpod-conmon-{container_id('x')}.scope"
    slurm.process(10, user="root", exe="/usr/bin/conmon", cgroup=group)
    slurm.open(10)
    assert slurm.judge().findings == ()
    slurm.container("x", runtime="podman")
    copy = executable("/usr/bin/conmon", path_is_genuine=None)
    slurm.process(11, user="root", exe=copy, container="x", cgroup=group)
    slurm.open(11)
    assert [f.subject.pid for f in slurm.found(CONTAINER)] == [11]


def test_a_units_sandbox_is_no_container(slurm: OpenNode) -> None:
    slurm.source("systemd", running=("serve.service",))
    slurm.process(
        10,
        user="root",
        exe="/srv/serve",
        cgroup="/system.slice/serve.service",
        namespaces={"mnt": 5, "pid": 0xEFFFFFFC},
    )
    slurm.open(10, container_state="unknown")
    assert slurm.judge().findings == ()


def test_a_system_container_is_one(slurm: OpenNode) -> None:
    slurm.process(10, user="root", exe="/srv/x", cgroup="/lxc.payload.web/system.slice/x.service")
    slurm.open(10)
    found = slurm.one(CONTAINER)
    assert found.severity == "warning"
    assert "in a container? yes, lxc:web" in texts(found)
    assert not slurm.found(OUTSIDE)


# ------------------------------------------------------------------ the policy's known workloads


def known(condition: str, expires: str = "") -> str:
    more = f", expires: {expires}" if expires else ""
    return f"user_known_gpu_workloads: [{{match: {{{condition}}}, reason: reviewed{more}}}]\n"


@pytest.mark.parametrize(
    ("condition", "silent"),
    [
        (f"image_digest: '{digest('probe')}'", True),
        ("image: registry.example/probe, pod_namespace: research", True),
        ("pod_labels: {app: probe}", True),
        ("pod_labels: {app: probe}, binary: /usr/bin/python3.11, user: root", True),
        ("pod_labels: {app: probe}, binary: /usr/bin/perl", False),
        ("pod_labels: {app: probe}, user: alice", False),
        ("pod_labels: {app: other}", False),
        ("image: probe", False),
    ],
)
def test_a_known_gpu_workload_is_silenced_with_its_reason(
    kube: OpenNode, condition: str, silent: bool
) -> None:
    kube.pod("probe", pod_labels={"app": "probe"})
    kube.process(10, container="probe", user="root")
    kube.open(10)
    kube.tool(10, "nvidia-smi")
    findings = kube.judge(known(condition)).findings
    assert {f.rule for f in findings} == {CONTAINER, TOOL}
    why = "known GPU workload of the policy: reviewed" if silent else None
    assert {f.silenced_by for f in findings} == {why}


def test_it_is_silent_to_its_last_day_and_not_after(kube: OpenNode) -> None:
    kube.pod("probe")
    kube.process(10, container="probe", user="root")
    kube.open(10)
    image = "image: registry.example/probe"
    last = kube.judge(known(image, "2026-01-01")).findings[0]
    assert last.silenced_by == ("known GPU workload of the policy: reviewed (until 2026-01-01)")
    assert kube.judge(known(image, "2025-12-31")).findings[0].silenced_by is None


def test_a_container_that_no_runtime_confirms_is_not_known(kube: OpenNode) -> None:
    kube.pod("probe", confirmed=False)
    kube.process(10, container="probe", user="root")
    kube.open(10)
    assert kube.found(CONTAINER, known("image: registry.example/probe"))


def test_another_process_with_the_number_of_the_known_one_silences_nothing(kube: OpenNode) -> None:
    kube.pod("probe")
    kube.process(10, container="probe", user="root")
    kube.open(10, start_time_ticks=5, container_state="unknown")
    assert kube.found(CONTAINER, known("image: registry.example/probe"))


# ------------------------------------------------------------------ tools


@pytest.mark.parametrize(
    ("exe", "argv", "tool"),
    [
        ("/usr/bin/nvidia-debugdump", None, "nvidia-debugdump"),
        ("/usr/bin/nvidia-cuda-mps-control", None, "nvidia-cuda-mps-control"),
        ("/opt/rocm/bin/rocm-smi", None, "rocm-smi"),
        ("/usr/bin/python3.11", ("/usr/bin/python3.11", "/usr/bin/gpustat", "-i"), "gpustat"),
        ("/usr/bin/python3.11", ("python3", "-u", "/usr/bin/gpustat"), "gpustat"),
        ("/rig", ("nvtop",), "nvtop"),
        ("/usr/bin/python3.11", ("python3", "read.py", "nvidia-smi"), None),
        ("/usr/bin/nvidia-smi-wrapper", None, None),
    ],
)
def test_a_tool_is_known_by_its_whole_file_name(
    slurm: OpenNode, exe: str, argv: tuple[str, ...] | None, tool: str | None
) -> None:
    slurm.container("c")
    slurm.process(10, container="c", user="root", exe=exe, argv=argv, comm="nvidia-smi")
    slurm.open(10, kind="nvidia-ctl")
    found = slurm.found(TOOL)
    assert [f"runs {tool}" in texts(f) for f in found] == ([True] if tool else [])


def test_a_tools_runs_are_counted_and_no_gpu_is_made_up(slurm: OpenNode) -> None:
    slurm.container("c", confirmed=False)
    slurm.process(10, container="c", user="root", exe="/bin/sh")
    slurm.tool(10, "nvidia-smi", count=12)
    found = slurm.one(TOOL)
    assert "runs nvidia-smi, 12 times" in texts(found)
    assert "its runtime could not be asked" in texts(found)
    assert (found.subject.gpu_ids, found.since_ns) == ((), TAKEN_AT_NS)


# ------------------------------------------------------------------ outside jobs


def test_an_unlisted_service_is_its_units_matter_and_cron_is_not(slurm: OpenNode) -> None:
    slurm.source("systemd", running=("serve.service", "cron.service"))
    slurm.process(10, user="root", exe="/srv/serve", cgroup="/system.slice/serve.service")
    slurm.process(11, user="root", exe="/srv/serve", cgroup="/system.slice/cron.service")
    slurm.process(12, user="root", exe="/srv/serve", cgroup="/system.slice/forged.service")
    for pid in (10, 11, 12):
        slurm.open(pid)
    found = {f.subject.pid: f for f in slurm.found(OUTSIDE)}
    assert {pid: f.severity for pid, f in found.items()} == {11: "error", 12: "warning"}
    assert "systemd did not confirm forged.service" in texts(found[12])


def test_a_job_id_in_the_environment_softens_nothing(slurm: OpenNode) -> None:
    slurm.process(10, user="bob", environment={"SLURM_JOB_ID": "99"}, cgroup="/")
    slurm.process(11, user="bob", cgroup=slurm.job_path("99"))
    slurm.open(10)
    slurm.open(11)
    found = {f.subject.pid: f for f in slurm.found(OUTSIDE)}
    assert (found[10].severity, found[11].severity) == ("error", "warning")
    assert "the controller did not answer for job 99" in texts(found[11])


def test_what_is_not_known_is_no_process_of_the_host_outside_jobs(slurm: OpenNode) -> None:
    slurm.open(10)
    found = slurm.one(OUTSIDE)
    assert found.severity == "warning"
    assert "cannot tell: nothing is known of the process" in texts(found)


def test_a_left_over_process_says_that_its_job_has_ended(slurm: OpenNode) -> None:
    slurm.source("slurm", scheduled=True, ended=("7",))
    slurm.process(10, cgroup=slurm.job_path("7"))
    slurm.open(10)
    found = slurm.one(OUTSIDE)
    assert found.severity == "error"
    assert "job 7 has ended, says the controller" in texts(found)


@pytest.mark.parametrize(
    "fields",
    [
        {"exe": "/home/alice/nvidia-smi", "tty": "pts/0", "user": "alice", "loginuid": 1000},
        {"exe": "/srv/nvtop", "user": "root", "loginuid": -1, "tty": "pts/0"},
        {"exe": "/srv/nvtop", "user": "root", "loginuid": 1000, "tty": "pts/0"},
        {"exe": "/srv/x", "argv": ("nvtop",), "user": "root", "loginuid": 1000, "tty": "pts/0"},
        {"argv": ("python3", "nvitop"), "user": "root", "loginuid": 1000, "tty": None},
        {"argv": ("python3", "nvitop"), "user": "root", "loginuid": -1, "tty": "pts/0"},
        {"argv": ("python3", "nvitop"), "user": "bob", "loginuid": 1001, "tty": "pts/0"},
    ],
)
def test_only_an_administrators_tool_is_let_be(slurm: OpenNode, fields: dict[str, Any]) -> None:
    slurm.process(10, cgroup="/", **fields)
    slurm.open(10)
    assert slurm.one(OUTSIDE).severity == "error"


@pytest.mark.parametrize("name", ["slurmd", "runc", "kubelet", "udevadm"])
def test_a_name_alone_makes_no_program_of_the_host(slurm: OpenNode, name: str) -> None:
    slurm.process(10, exe=executable(f"/usr/bin/{name}", owner_uid=1000))
    slurm.open(10)
    slurm.open(10, how="mknod")
    assert slurm.found(OUTSIDE)
    assert slurm.found(MADE)


# ------------------------------------------------------------------ nodes and names


@pytest.mark.parametrize(
    ("exe", "hit"),
    [
        (replace(RUNC, path="/", path_is_genuine=None), False),
        (executable("/memfd:runc_cloned:/proc/self/exe", memfd=True), False),
        (executable("/usr/bin/python3.11", path_is_genuine=None), True),
    ],
)
def test_a_runtimes_first_process_is_known_by_its_file(
    slurm: OpenNode, exe: Executable, hit: bool
) -> None:
    slurm.node_of()
    pid = slurm.runc_init("nb", devices=("/dev/nvidia0",))
    slurm.processes = [replace(p, exe=exe) if p.pid == pid else p for p in slurm.processes]
    slurm.open(pid, how="mknod", state="attempted")
    assert bool(slurm.found(MADE)) is hit
    assert bool(slurm.found(CONTAINER)) is hit


def test_a_memfd_that_the_image_itself_runs_is_no_runtime(slurm: OpenNode) -> None:
    slurm.node_of()
    pid = slurm.runc_init("nb", devices=("/dev/nvidia0",))
    forged = executable("/memfd:runc_cloned:/proc/self/exe", memfd=True)
    shim = executable("/usr/bin/containerd-shim-runc-v2")
    slurm.processes = [
        replace(p, exe={pid: forged, 40: shim}.get(p.pid, p.exe)) for p in slurm.processes
    ]
    slurm.open(pid, how="mknod", state="attempted")
    assert slurm.one(MADE).severity == "error"


def test_a_runtime_whose_configuration_is_not_known(slurm: OpenNode) -> None:
    pid = slurm.runc_init("nb", confirmed=False)
    slurm.open(pid, how="mknod", state="attempted", container_state="unknown")
    found = slurm.one(MADE)
    assert found.severity == "warning"
    assert "what its configuration lists is not known" in texts(found)


def test_a_node_that_was_refused_is_a_warning(slurm: OpenNode) -> None:
    slurm.container("c")
    slurm.process(10, container="c", user="root", exe="/bin/busybox")
    slurm.open(10, how="mknod", state="denied", error=1)
    assert slurm.one(MADE).severity == "warning"


@pytest.mark.parametrize(
    ("path", "number", "hit"),
    [
        ("/dev/char/195:0", (195, 0), False),
        ("/dev/char/195:1", (195, 0), True),
        ("/proc/self/fd/7", (195, 0), False),
        ("/proc/123/fd/7/../x", (195, 0), True),
        ("/dev/fd/../shm/x", (195, 0), True),
        ("/dev/shm/nvidia0", (195, 0), True),
    ],
)
def test_links_to_the_node_are_no_other_name(path: str, number: tuple[int, int], hit: bool) -> None:
    node = OpenNode()
    node.process(10)
    node.open(10, path=path, renamed=True, major=number[0], minor=number[1])
    assert bool(node.found(RENAMED)) is hit


def test_the_container_toolkit_opens_nodes_of_the_drivers_root(slurm: OpenNode) -> None:
    slurm.process(10, user="root", exe="/usr/bin/nvidia-container-cli")
    slurm.open(10, path="/run/nvidia/driver/dev/nvidia0", renamed=True)
    assert slurm.judge().findings == ()


def test_a_device_that_the_runtime_passed_in_may_have_another_name_there(slurm: OpenNode) -> None:
    slurm.node_of()
    slurm.container("nb", devices=("/dev/nvidia0",))
    slurm.process(10, container="nb", user="root")
    slurm.open(10, path="/dev/gpu", renamed=True)
    found = slurm.one(RENAMED)
    assert found.severity == "warning"
    assert "told to pass this device in" in texts(found)
    assert "its own name is /dev/nvidia0" in texts(found)


# ------------------------------------------------------------------ held


@pytest.mark.parametrize("group", [None, "/rig"])
def test_a_container_that_was_handed_a_device(slurm: OpenNode, group: str | None) -> None:
    slurm.container("c")
    slurm.process(9, user="root", exe="/srv/broker", cgroup="/broker")
    slurm.process(10, container="c", user="root", exe="/srv/broker", cgroup=group, ppid=9)
    slurm.open(10, how="held", opened_by=9)
    found = slurm.one(HELD)
    assert found.severity == "warning"
    assert "another container or job: the host" in texts(found)


def test_a_younger_process_with_the_forebears_number_is_not_it(slurm: OpenNode) -> None:
    slurm.process(9, user="bob", exe="/srv/x", start_time_ticks=999_999)
    slurm.process(10, ppid=9)
    slurm.open(10, how="held", opened_by=9)
    assert not slurm.found(HELD)


def test_render_nodes_go_from_display_servers_to_programs(slurm: OpenNode) -> None:
    slurm.process(10, exe="/home/alice/game")
    slurm.open(10, how="held", kind="drm-render")
    assert slurm.one(HELD).severity == "warning"
    slurm.open(10, how="held", kind="kfd")
    assert slurm.one(HELD).severity == "error"


# ------------------------------------------------------------------ any mix of facts

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
