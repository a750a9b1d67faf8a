"""Device opens on the host: tools, outside jobs, other names of nodes, devices handed over."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from gpuwarden.model import Executable
from tests.rules.open_node import RUNC, OpenNode, texts
from tests.support.nodes import TAKEN_AT_NS, executable

CONTAINER = "container_opens_accelerator"
TOOL = "gpu_tool_in_container"
OUTSIDE = "accelerator_opened_outside_jobs"
MADE = "accelerator_node_made"
RENAMED = "accelerator_opened_by_other_name"
HELD = "holder_without_open"


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


@pytest.mark.parametrize("parent", ["/usr/bin/conmon", "/usr/bin/containerd-shim-runc-v2"])
def test_a_runtime_that_has_ended_since_is_not_taken_for_the_image(
    slurm: OpenNode, parent: str
) -> None:
    slurm.node_of()
    pid = slurm.runc_init("nb", devices=("/dev/nvidia0",))
    exes = {pid: replace(RUNC, path="/", path_is_genuine=None), 40: executable(parent)}
    slurm.processes = [replace(p, exe=exes.get(p.pid, p.exe)) for p in slurm.processes]
    slurm.open(pid, how="mknod", state="attempted")
    assert not slurm.found(MADE)
    assert not slurm.found(CONTAINER)
    slurm.open(pid, state="opened")
    assert slurm.found(CONTAINER)


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
