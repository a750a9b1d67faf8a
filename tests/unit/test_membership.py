"""Whose a process is: jobs, pods, units and containers; proven or claimed, answered for or not."""

from __future__ import annotations

import pytest

from gpuwarden.judge import exit_code
from gpuwarden.model import SourceState
from tests.support.nodes import NodeBuilder, gpu_id, mig_id

# ------------------------------------------------------------------ expected and near it


def test_a_job_on_its_own_gpu_is_expected_and_says_by_what(node: NodeBuilder) -> None:
    node.process(10, cgroup=node.job("7", ["index:1"], account="physics"))
    node.client(10, 1)
    row = node.row(10)
    assert (row.verdict, row.proof, row.workload, row.owner) == (
        "expected",
        "proven",
        "job 7",
        "alice",
    )
    assert row.path == (
        "in the expected set? yes, job 7: its cgroup, and the controller agrees",
        "its own GPU? yes",
    )


def test_slurms_own_pid_list_proves_a_process_without_a_job_cgroup(node: NodeBuilder) -> None:
    node.job("7", ["index:0"], pids=(10,))
    node.process(10, cgroup="/system.slice/slurmd.service")
    node.client(10)
    assert node.row(10).verdict == "expected"


def test_an_environment_that_names_a_job_is_only_a_claim(node: NodeBuilder) -> None:
    node.job("7", ["index:0"])
    node.process(10, environment={"SLURM_JOB_ID": "7"})
    node.client(10)
    row = node.row(10)
    assert row.verdict == "other-team"
    assert row.path[0] == (
        "in the expected set? only claims to be job 7: only its environment names it"
    )


def test_another_users_process_in_a_jobs_cgroup_is_only_a_claim(node: NodeBuilder) -> None:
    node.process(10, user="bob", cgroup=node.job("7", ["index:0"], user="alice"))
    node.client(10)
    row = node.row(10)
    assert row.verdict == "other-team"
    assert "runs as uid 1001, not 1000" in row.path[0]


def test_a_job_on_another_jobs_gpu_is_on_the_wrong_one_and_says_whose_it_is(
    node: NodeBuilder,
) -> None:
    node.job("8", ["index:2"], user="bob")
    node.process(10, cgroup=node.job("7", ["index:1"]))
    node.client(10, 2)
    row = node.row(10)
    assert (row.verdict, row.owner, row.proof) == ("wrong-gpu", "alice", "proven")
    assert row.path[-1] == "its own GPU? no: it was given index:1; this one was given to job 8"


def test_one_process_on_its_own_and_two_foreign_gpus_has_three_verdicts_and_one_finding(
    node: NodeBuilder,
) -> None:
    node.process(10, cgroup=node.job("7", ["index:0"]))
    for gpu in range(3):
        node.client(10, gpu)
    report = node.judge()
    assert [(r.gpu, r.verdict) for r in report.rows] == [
        ("0", "expected"),
        ("1", "wrong-gpu"),
        ("2", "wrong-gpu"),
    ]
    assert [(f.rule, f.subject.gpu) for f in report.findings] == [
        ("gpu_process_on_wrong_gpu", "GPUs 1, 2")
    ]


@pytest.fixture
def mig() -> NodeBuilder:
    node = NodeBuilder()
    node.gpu(0, mig_enabled=True)
    node.mig(0, 1)
    node.mig(0, 2)
    return node


@pytest.mark.parametrize("given", [f"uuid:{mig_id(0, 1)}", "mig:0/1", f"mig:{gpu_id(0)}/1/0"])
def test_a_mig_device_is_not_its_neighbour(mig: NodeBuilder, given: str) -> None:
    mig.process(10, cgroup=mig.job("7", [given]))
    mig.client(10, mig_id(0, 1))
    mig.client(10, mig_id(0, 2))
    assert mig.row(10, mig_id(0, 1)).verdict == "expected"
    row = mig.row(10, mig_id(0, 2))
    assert (row.verdict, row.gpu) == ("wrong-gpu", "0:2")


def test_a_job_given_a_whole_gpu_was_given_its_mig_devices(mig: NodeBuilder) -> None:
    mig.process(10, cgroup=mig.job("7", ["minor:0"]))
    mig.client(10, mig_id(0, 1))
    assert mig.row(10).verdict == "expected"


def test_jobs_that_share_one_gpu_are_both_expected(node: NodeBuilder) -> None:
    for pid, job, user in ((10, "7", "alice"), (11, "8", "bob")):
        node.process(pid, user=user, cgroup=node.job(job, ["index:0"], user=user, shared=True))
        node.client(pid)
    assert [row.verdict for row in node.judge().rows] == ["expected", "expected"]


def test_pods_that_share_a_time_sliced_gpu_are_both_expected(node: NodeBuilder) -> None:
    for pid, pod in ((10, "one"), (11, "two")):
        node.pod(pod)
        node.pod_given(pod, [f"uuid:{gpu_id(0)}"])
        node.process(pid, user="root", container=pod)
        node.client(pid)
    assert [row.verdict for row in node.judge().rows] == ["expected", "expected"]


def test_a_pod_by_cgroup_name_alone_is_a_claim(node: NodeBuilder) -> None:
    node.pod("train", confirmed=False)
    node.pod_given("train", [f"uuid:{gpu_id(0)}"])
    node.process(10, user="root", container="train")
    node.client(10)
    row = node.row(10)
    assert (row.verdict, row.proof) == ("rogue-container", "claimed")
    assert "claims pod research/train: only its cgroup name ties it to the pod" in row.path


def test_a_process_in_a_pods_cgroup_but_in_the_hosts_mounts_is_not_the_pods(
    node: NodeBuilder,
) -> None:
    node.pod("train")
    node.pod_given("train", [f"uuid:{gpu_id(0)}"])
    cgroup = f"/kubepods/pod{node.pod_uid('train')}/{node.containers[0].id}"
    node.process(10, user="root", exe="/usr/local/bin/job", cgroup=cgroup)
    node.client(10)
    row = node.row(10)
    assert row.verdict == "rogue-container"
    assert any("in the host's namespaces" in step for step in row.path)
    assert any(e.kind == "masquerade" for e in row.evidence)


def test_a_unit_given_devices_by_systemd_is_expected(node: NodeBuilder) -> None:
    node.source("systemd", running=("render.service",))
    node.workload("systemd", "render.service", ["index:0"], unit="render.service")
    node.process(10, user="root", exe="/srv/render", cgroup="/system.slice/render.service")
    node.client(10)
    assert node.row(10).verdict == "expected"


# ------------------------------------------------------------------ sources without an answer


@pytest.mark.parametrize("state", ["failed", "absent", "skipped"])
def test_a_silent_slurm_never_reads_as_nothing_expected(
    node: NodeBuilder, state: SourceState
) -> None:
    node.source("slurm", state, reason="the controller is down")
    node.process(10, cgroup=node.job_path("7"))
    node.client(10)
    row = node.row(10)
    assert row.verdict == "unreadable"
    assert "slurm gave no answer (the controller is down)" in row.path[0]


def test_a_silent_kubelet_never_makes_a_pod_rogue(node: NodeBuilder) -> None:
    node.pod("train")
    node.source("kubernetes", "failed", reason="the kubelet's socket refused")
    node.process(10, user="root", container="train")
    node.client(10)
    row = node.row(10)
    assert row.verdict == "unreadable"
    assert "kubelet's socket refused" in row.path[0]


def test_a_job_that_the_controller_did_not_answer_for_is_unreadable(node: NodeBuilder) -> None:
    node.source("slurm", scheduled=True)
    node.process(10, cgroup=node.job_path("9"))
    node.client(10)
    assert node.row(10).verdict == "unreadable"


def test_a_failed_source_ends_a_quiet_scan_with_2(node: NodeBuilder) -> None:
    assert exit_code(node.judge(), "error") == 0
    node.source("slurm", "failed")
    assert exit_code(node.judge(), "error") == 2


def test_an_ended_job_left_its_process_behind(node: NodeBuilder) -> None:
    node.source("slurm", scheduled=True, ended=("9",))
    node.process(10, cgroup=node.job_path("9"))
    node.client(10)
    row = node.row(10)
    assert (row.verdict, row.owner) == ("orphaned-job", "alice")
    assert row.path == ("in the expected set? no: job 9 has ended, says the controller",)


# ------------------------------------------------------------------ containers


def test_a_pod_that_the_kubelet_gave_nothing_is_rogue_whatever_it_made_visible(
    node: NodeBuilder,
) -> None:
    node.source("kubernetes", scheduled=True)
    node.pod("tool", visible_devices="all", privileged=True, pod_owner="DaemonSet/tool")
    node.process(10, user="root", container="tool")
    node.client(10)
    row = node.row(10)
    assert (row.verdict, row.owner) == ("rogue-container", "namespace research (DaemonSet/tool)")
    told = [e.text for e in row.evidence]
    assert "NVIDIA_VISIBLE_DEVICES=all" in told
    assert "it is privileged" in told


def test_a_container_given_a_gpu_where_nobody_schedules_is_somebodys_not_rogue(
    node: NodeBuilder,
) -> None:
    node.container("notebook", device_requests=("all",))
    node.process(10, user="root", container="notebook")
    node.client(10)
    row = node.row(10)
    assert row.verdict == "unattributed"
    assert "no scheduler hands them out here" in row.path[-1]


def test_the_same_container_beside_a_scheduler_is_rogue(node: NodeBuilder) -> None:
    node.source("slurm", scheduled=True)
    node.container("notebook", device_requests=("all",))
    node.process(10, user="root", container="notebook")
    node.client(10)
    assert node.row(10).verdict == "rogue-container"


def test_a_container_that_nobody_passed_a_gpu_is_rogue_without_a_scheduler_too(
    node: NodeBuilder,
) -> None:
    node.container("build")
    node.process(10, user="root", container="build")
    node.client(10)
    assert node.row(10).verdict == "rogue-container"


def test_a_container_whose_runtime_did_not_answer_cannot_be_told(node: NodeBuilder) -> None:
    node.container("x", confirmed=False)
    node.process(10, user="root", container="x")
    node.client(10)
    row = node.row(10)
    assert row.verdict == "unreadable"
    assert "its runtime could not be asked" in row.path[-1]


@pytest.mark.parametrize("ended", [(), ("77",)])
def test_a_job_id_in_a_containers_environment_does_not_soften_the_verdict(
    node: NodeBuilder, ended: tuple[str, ...]
) -> None:
    node.source("slurm", scheduled=True, ended=ended)
    node.container("x", visible_devices="all")
    node.process(10, user="root", container="x", environment={"SLURM_JOB_ID": "77"})
    node.client(10)
    assert node.row(10).verdict == "rogue-container"


def test_the_person_behind_a_platforms_container_is_named_beside_its_namespace(
    node: NodeBuilder,
) -> None:
    node.source("kubernetes", scheduled=True)
    node.pod("tool", namespace="default", environment={"X_USER_NAME": "mira"})
    node.process(10, user="root", container="tool")
    node.client(10)
    assert node.row(10).owner == "namespace default, mira (says its environment)"


# ------------------------------------------------------------------ names that prove nothing


def test_a_unit_of_the_same_name_elsewhere_in_the_tree_is_only_a_claim(node: NodeBuilder) -> None:
    node.source("systemd", running=("train.service",))
    node.workload(
        "systemd",
        "unit train.service",
        ["minor:0"],
        unit="train.service",
        cgroup_path="/system.slice/train.service",
    )
    node.process(10, user="root", cgroup="/system.slice/train.service/worker")
    node.process(11, user="root", cgroup="/attic/train.service")
    node.client(10)
    node.client(11)
    assert (node.row(10).verdict, node.row(10).proof) == ("expected", "proven")
    assert node.row(11).verdict != "expected"
    assert "only claims to be unit train.service" in node.row(11).path[0]


def test_a_container_that_only_carries_a_pods_uid_is_not_that_pod(node: NodeBuilder) -> None:
    node.pod_given("train", ["uuid:" + gpu_id(0)])
    node.container("forged", runtime="runc", pod_uid=node.pod_uid("train"))
    node.process(10, container="forged")
    node.client(10)
    row = node.row(10)
    assert row.verdict == "rogue-container", row.path
    assert "its container only carries the uid" in " ".join(row.path)


def test_a_workload_of_gpus_that_nobody_knows_cannot_be_called_misplaced(node: NodeBuilder) -> None:
    node.process(10, cgroup=node.job("7", ["xcp:4"]))
    node.client(10)
    row = node.row(10)
    assert row.verdict == "unreadable"
    assert "xcp:4 is no GPU that this scan knows" in row.path[1]


def test_a_bare_container_is_known_by_the_mounts_it_shares(node: NodeBuilder) -> None:
    node.init()
    node.container("tool", runtime="runc", mount_namespace=77, visible_devices="all")
    node.process(10, user="root", namespaces={"mnt": 77})
    node.client(10)
    row = node.row(10)
    assert row.place == "runc:tool"
    assert row.verdict == "unattributed"
    assert "runc:tool" in row.path[0]


def test_a_defect_in_judging_one_process_clears_nobody(
    node: NodeBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.process(10, cgroup=node.job("7", ["index:0"]))
    node.process(11, user="bob")
    node.client(10)
    node.client(11)

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("gpuwarden.verdicts.sign_rules.of_process", broken)
    assert [node.row(pid).verdict for pid in (10, 11)] == ["unreadable", "unreadable"]
    assert "ZeroDivisionError" in node.row(10).path[0]
