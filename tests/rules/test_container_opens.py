"""Device opens in containers: how grave, how sure, in which words."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from gpuwarden.judge import judge
from gpuwarden.policy import Policy
from gpuwarden.rules.registry import OPEN_RULES
from tests.rules.open_node import OpenNode, digest, texts
from tests.support.nodes import container_id, executable, gpu_id

CONTAINER = "container_opens_accelerator"
TOOL = "gpu_tool_in_container"
OUTSIDE = "accelerator_opened_outside_jobs"


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
