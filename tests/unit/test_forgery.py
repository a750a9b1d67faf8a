"""What can be forged without being root, or inside a container, and proves nothing."""

from __future__ import annotations

import pytest

from tests.support.nodes import HOST_NAMESPACES, NodeBuilder, executable

# ------------------------------------------------------------------ system programs

OWN_MOUNTS = {**HOST_NAMESPACES, "mnt": 0xF0000001}


def test_a_root_owned_binary_of_another_file_tree_is_no_system_program(node: NodeBuilder) -> None:
    """A virtual environment's own root, or a bind mount in a user's namespace, looks like this."""
    node.init()
    exe = executable("/usr/bin/nvidia-smi", path_is_genuine=None)
    node.process(10, exe=exe, namespaces=OWN_MOUNTS)
    node.client(10)
    assert node.row(10).verdict != "system"


def test_a_service_with_mounts_of_its_own_and_the_hosts_binary_is_a_system_program(
    node: NodeBuilder,
) -> None:
    node.init()
    node.process(10, user="root", exe="/usr/bin/nv-hostengine", namespaces=OWN_MOUNTS)
    node.client(10)
    assert (node.row(10).verdict, node.row(10).proof) == ("system", "proven")


def test_a_system_program_upgraded_under_its_feet_stays_one(node: NodeBuilder) -> None:
    node.init()
    exe = executable("/usr/lib/xorg/Xorg", deleted=True, replaced=True)
    node.process(10, user="root", exe=exe)
    node.client(10, kinds=("G",))
    assert node.row(10).verdict == "system"


def test_a_program_in_a_user_namespace_proves_nothing_by_its_file(node: NodeBuilder) -> None:
    node.init()
    namespaces = {**OWN_MOUNTS, "user": 0xF0000002}
    node.process(10, exe="/usr/bin/kitty", namespaces=namespaces)
    node.client(10, kinds=("G",))
    assert node.row(10).verdict == "other-team"


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("LD_PRELOAD", "/home/alice/lib/a.so", "other-team"),
        ("LD_AUDIT", "/usr/../home/alice/a.so", "other-team"),
        ("LD_PRELOAD", "./a.so", "other-team"),
        ("LD_LIBRARY_PATH", "/usr/local/cuda/lib64:/home/alice/lib", "other-team"),
        ("CUDA_INJECTION64_PATH", "/home/alice/a.so", "other-team"),
        ("LD_PRELOAD", "libgtk3-nocsd.so.0", "system"),
        ("LD_LIBRARY_PATH", "/usr/local/cuda/lib64:/var/lib/snapd/lib/gl", "system"),
    ],
)
def test_code_loaded_from_elsewhere_makes_a_system_program_its_users(
    node: NodeBuilder, name: str, value: str, verdict: str
) -> None:
    node.process(10, exe="/usr/bin/kitty", environment={name: value})
    node.client(10, kinds=("G",))
    assert node.row(10).verdict == verdict


# ------------------------------------------------------------------ jobs and pods


@pytest.mark.parametrize(
    "above",
    [
        "/user.slice/user-1000.slice/user@1000.service",
        f"/system.slice/docker-{'a' * 64}.scope",
        "/system.slice/alice.service",
    ],
)
@pytest.mark.parametrize("user", ["alice", "root"])
def test_a_jobs_group_made_inside_a_session_or_container_is_only_a_claim(
    node: NodeBuilder, above: str, user: str
) -> None:
    node.job("7", ["index:0"])
    node.process(10, user=user, cgroup=f"{above}/slurmstepd.scope/job_7/step_0/user/task_0")
    node.client(10)
    row = node.row(10)
    assert row.verdict not in ("expected", "wrong-gpu")
    assert row.proof != "proven" or row.verdict == "other-team"


def test_a_job_inside_a_container_is_proven_where_slurm_lists_the_process(
    node: NodeBuilder,
) -> None:
    node.job("7", ["index:0"], pids=(10,))
    path = f"/system.slice/docker-{'a' * 64}.scope/system.slice/slurmstepd.scope/job_7/step_0"
    node.process(10, cgroup=path)
    node.client(10)
    assert node.row(10).verdict == "expected"


def test_a_docker_container_that_carries_a_running_pods_labels_is_not_that_pod(
    node: NodeBuilder,
) -> None:
    node.source("kubernetes", scheduled=True, running=(node.pod_uid("train"),))
    node.pod_given("train", ["index:0"])
    node.pod("train", runtime="docker")
    node.process(10, user="root", container="train")
    node.client(10)
    row = node.row(10)
    assert row.verdict == "rogue-container"
    assert "claims pod research/train: the pod is another runtime's" in row.path[-1]


def test_a_container_of_another_pod_below_a_pods_group_is_not_that_pods(
    node: NodeBuilder,
) -> None:
    node.pod_given("train", ["index:0"])
    node.pod("other")
    cgroup = f"/kubepods/burstable/pod{node.pod_uid('train')}/{node.containers[0].id}"
    node.process(10, user="root", container="other", cgroup=cgroup)
    node.client(10)
    assert node.row(10).verdict == "rogue-container"


def test_a_process_with_the_hosts_mounts_is_in_no_pod_even_if_the_pods_own_are_not_known(
    node: NodeBuilder,
) -> None:
    node.init()
    node.pod("train", mount_namespace=None, pid_namespace=None)
    node.pod_given("train", ["index:0"])
    node.process(10, user="root", container="train")
    node.client(10)
    assert node.row(10).verdict != "expected"


def test_an_images_own_labels_do_not_make_its_container_a_cluster_add_on(
    node: NodeBuilder,
) -> None:
    node.container(
        "plugin",
        image="registry.example/x/k8s-device-plugin:1",
        pod_namespace="kube-system",
        pod_name="plugin",
    )
    node.process(10, user="root", container="plugin")
    node.client(10)
    assert node.row(10).verdict == "rogue-container"


# ------------------------------------------------------------------ the policy

BINARY_POLICY = """
workloads:
  - {name: trainer, match: {binary: /opt/app/trainer}}
"""


@pytest.mark.parametrize(
    ("fields", "namespaces", "verdict"),
    [
        ({}, HOST_NAMESPACES, "expected"),
        ({}, OWN_MOUNTS, "expected"),
        ({"path_is_genuine": None}, OWN_MOUNTS, "other-team"),
        ({"owner_uid": 1000}, HOST_NAMESPACES, "other-team"),
    ],
)
def test_a_policys_binary_must_be_the_hosts_and_roots(
    node: NodeBuilder, fields: dict[str, object], namespaces: dict[str, int], verdict: str
) -> None:
    node.init()
    node.process(10, exe=executable("/opt/app/trainer", **fields), namespaces=namespaces)
    node.client(10)
    assert node.row(10, policy=BINARY_POLICY).verdict == verdict


@pytest.mark.parametrize(
    ("path", "silenced"),
    [
        ("/home/alice/.config/autostart/ok.desktop", True),
        ("/home/alice/.config/autostart/ok.desktop:x.desktop", False),
    ],
)
def test_an_exception_for_a_file_covers_no_file_whose_name_only_begins_so(
    node: NodeBuilder, path: str, silenced: bool
) -> None:
    node.autostart("autostart", path, "Exec=/tmp/x/run", "/tmp/x/run", line=3)
    report = node.judge(
        "exceptions: [{rule: autostart_suspicious, reason: known, "
        "path: /home/alice/.config/autostart/ok.desktop}]"
    )
    (finding,) = [f for f in report.findings if f.rule == "autostart_suspicious"]
    assert (finding.silenced_by is not None) is silenced


# ------------------------------------------------------------------ libraries and tools by name


@pytest.mark.parametrize(
    ("library", "known"),
    [
        ("/usr/lib/x86_64-linux-gnu/libsnoopy.so", True),
        ("libjemalloc.so.2", True),
        ("/usr/lib/arm-linux-gnueabihf/libarmmem-${PLATFORM}.so", True),
        ("/$LIB/liboneagentproc.so", True),
        ("/opt/datadog-packages/datadog-apm-inject/stable/inject/launcher.preload.so", True),
        ("/dev/shm/libjemalloc.so.2", False),
        ("/usr/lib/.x/libsnoopy.so", False),
        ("/usr/lib/../../tmp/libsnoopy.so", False),
        ("/home/alice/libtcmalloc.so", False),
    ],
)
def test_a_common_librarys_name_in_an_odd_place_is_not_that_library(
    node: NodeBuilder, library: str, known: bool
) -> None:
    node.autostart("preload", "/etc/ld.so.preload", library, library, line=1)
    found = [f.rule for f in node.judge().findings]
    assert found == ([] if known else ["preload_library_unknown"])


@pytest.mark.parametrize(("name", "verdict"), [("nvidia-smi", "suspicious"), ("kitty", "system")])
def test_a_driver_tool_that_computes_was_taken_over(
    node: NodeBuilder, name: str, verdict: str
) -> None:
    """Code injected by ptrace leaves path, owner and arguments as they were."""
    node.process(10, exe=f"/usr/bin/{name}")
    node.client(10)
    assert node.row(10).verdict == verdict
