"""Every shape of /proc/<pid>/cgroup that was met in the wild, and what it says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuwarden.model import CgroupPlacement
from gpuwarden.sensors.cgroup import containers_in, place
from gpuwarden.sensors.cgroup_path import CHAIN_LIMIT

FIXTURES = Path(__file__).parents[1] / "fixtures/cgroups"
CASES = Path(__file__).parents[3] / "shared/cases/c"
FIELDS = (
    "unit",
    "unit_transient",
    "session",
    "user_slice_uid",
    "runtime",
    "container_id",
    "container_helper",
    "pod_uid",
    "slurm_job",
    "slurm_step",
    "slurm_uid",
    "slurm_node",
    "batch_job",
    "ecs_task",
    "machine",
    "private_namespace",
)
H = "0123456789abcdef" * 4
I = "fedcba9876543210" * 4  # noqa: E741
UID = "2f6e8a0a-1b2c-4d3e-8f40-445566778899"
UNDER = UID.replace("-", "_")


def said(placement: CgroupPlacement) -> dict[str, Any]:
    """The single fields that are set; a container id cut to twelve digits."""
    found = {name: getattr(placement, name) for name in FIELDS}
    if found["container_id"]:
        found["container_id"] = found["container_id"][:12]
    return {
        name: value for name, value in found.items() if value is not None and value is not False
    }


# The name of a recorded case → what it must say, and nothing besides.
RECORDED: dict[str, dict[str, Any]] = {
    "c01": {"unit": "docker.service"},
    "c02": {"unit": "getty@tty1.service"},
    "c03": {"runtime": "docker", "container_id": "b43d92bf1e5c"},
    "c04": {"pod_uid": "8833712d-6e69-4f5c-95f3-aebd020ce2e7", "container_id": "95cbe853416f"},
    "c05": {"pod_uid": "6a4ce4a0-ba47-11ea-b2a7-0cc47ac5979e", "container_id": "17db96a24ae1"},
    "c07": {
        "pod_uid": "8712f785-1a3e-41ec-a00b-e2dcc77431cb",
        "container_id": "73051af27110",
        "runtime": "docker",
    },
    "c08": {"runtime": "docker", "container_id": "ba7b10d15d16"},
    "c09": {"unit": "ssh.service"},
    "c10": {"unit": "springboot.service"},
    "c17": {"runtime": "podman", "container_id": "89e89703fbd1"},
    "c21": {"pod_uid": "09a70ae9ccc491e651e5c773579b3490", "container_id": "b0e6aa50e847"},
    "c22": {"pod_uid": "55db13a1-c151-4cdd-a48b-e002a2b1fb58", "container_id": "21e677e6fe95"},
    "c24": {
        "pod_uid": "29349498-197c-4919-b13f-9a928e7d001b",
        "container_id": "0ca2b3cd20e5",
        "runtime": "containerd",
    },
    "c26": {"container_id": "5aaf9eb7648e"},
    "c27": {"runtime": "docker", "container_id": "1b3319ed9c1d"},
    "c31": {"pod_uid": "0d08203e-255a-11e9-8cd9-0007cb0b2cc8", "container_id": "671a50f5d605"},
    "c32": {"machine": "lxc:first", "container_helper": True},
    "c33": {"unit": "run-ra2ddf9594bbf4a1986439b594f89eb0f.scope", "unit_transient": True},
    "c36": {"unit": "postgresql@9.4-main.service"},
    "c37": {"unit": "serial-getty@ttyS0.service"},
    "c38": {
        "pod_uid": "0125ec2f-b64a-4868-8f5b-94b56cbab864",
        "container_id": "ee4b20e90ac7",
        "runtime": "containerd",
    },
    "c39": {"slurm_job": "748468", "slurm_step": "0", "slurm_uid": 7319},
    "c41": {"slurm_job": "1392969", "slurm_step": "0"},
    "c42": {"slurm_job": "280678", "slurm_step": "interactive", "slurm_uid": 2101171},
    "c43": {"slurm_job": "4749", "slurm_step": "0", "slurm_node": "slurm-worker-1"},
    "c45": {"slurm_job": "42", "slurm_step": "extern"},
    "c48": {"machine": "qemu:instance-00000002"},
    "c49": {
        "ecs_task": "5a0d5ceddf6c44c1928d367a815d890f",
        "container_id": "38fac3e99302",
        "runtime": "docker",
    },
    "c51": {"pod_uid": "3d274242-8ee0-11e9-a8a6-1e68d864ef1a", "container_id": "3e74d3fd9db4"},
    "c52": {"session": "14", "user_slice_uid": 0},
    "c54": {"batch_job": "torque:1234567[3].server.example.org"},
    "c55": {"runtime": "singularity", "container_id": "12734"},
    "c58": {"machine": "lxc:100"},
    "c59": {
        "pod_uid": "11111111-2222-3333-4444-555555555555",
        "container_id": "0ca2b3cd20e5",
        "runtime": "containerd",
    },
}


@pytest.mark.skipif(not CASES.is_dir(), reason="no recorded cases beside this checkout")
@pytest.mark.parametrize("case", RECORDED)
def test_recorded_case(case: str) -> None:
    (path,) = CASES.glob(f"{case}-*")
    assert said(place(path.read_text().splitlines())) == RECORDED[case]


@pytest.mark.skipif(not CASES.is_dir(), reason="no recorded cases beside this checkout")
def test_every_recorded_case_has_an_answer() -> None:
    assert {path.name[:3] for path in CASES.glob("*.cgroup")} == set(RECORDED)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a fixture must say."""

    fields: dict[str, Any]
    chain: tuple[str, ...]


OWN: dict[str, Shape] = {
    "hybrid-v1-pod-v2-runtime": Shape(
        {"pod_uid": UID, "container_id": H[:12]}, (f"pod:{UID}", f"container:{H}")
    ),
    "systemd-line-wins": Shape({"unit": "render.service"}, ("unit:render.service",)),
    "slurm-only-in-freezer": Shape(
        {"slurm_job": "90210", "slurm_step": "batch", "slurm_uid": 4711}, ("slurm:90210.batch",)
    ),
    "colons-in-the-path": Shape(
        {"pod_uid": UID, "container_id": H[:12], "runtime": "containerd"},
        (f"pod:{UID}", f"containerd:{H}"),
    ),
    "docker-in-pod": Shape(
        {"pod_uid": UID, "container_id": I[:12], "runtime": "docker"},
        (f"pod:{UID}", f"containerd:{H}", f"docker:{I}"),
    ),
    "slurm-in-pod": Shape(
        {
            "pod_uid": UID,
            "container_id": H[:12],
            "runtime": "containerd",
            "slurm_job": "77",
            "slurm_step": "extern",
            "slurm_node": "gpu7",
        },
        (f"pod:{UID}", f"containerd:{H}", "slurm:77.extern"),
    ),
    "relative-sibling": Shape({"runtime": "docker", "container_id": H[:12]}, (f"docker:{H}",)),
    "quadlet": Shape(
        {"runtime": "podman", "container_id": H[:12], "unit": "trainer.service"},
        ("unit:trainer.service", f"podman:{H}"),
    ),
    "rootless-docker": Shape(
        {"runtime": "docker", "container_id": H[:12], "user_slice_uid": 1007},
        ("user:1007", f"docker:{H}"),
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_own_fixture(name: str) -> None:
    placement = place((FIXTURES / f"{name}.cgroup").read_text().splitlines())
    assert said(placement) == OWN[name].fields
    assert placement.chain == OWN[name].chain


def test_every_own_fixture_is_used() -> None:
    assert {path.stem for path in FIXTURES.glob("*.cgroup")} == set(OWN)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", {"private_namespace": True}),
        ("/../..", {"private_namespace": True}),
        (
            f"/kubepods/besteffort/pod{UID}/crio-{H}",
            {"pod_uid": UID, "container_id": H[:12], "runtime": "crio"},
        ),
        (
            f"/kubepods.slice/kubepods-pod{UNDER}.slice/crio-{H}.scope/container",
            {"pod_uid": UID, "container_id": H[:12], "runtime": "crio"},
        ),
        (
            f"/kubepods.slice/kubepods-pod{UNDER}.slice/crio-conmon-{H}.scope",
            {
                "pod_uid": UID,
                "container_id": H[:12],
                "runtime": "crio",
                "container_helper": True,
            },
        ),
        (
            f"/machine.slice/libpod-conmon-{H}.scope",
            {"container_id": H[:12], "runtime": "podman", "container_helper": True},
        ),
        (f"/libpod_parent/libpod-{H}", {"container_id": H[:12], "runtime": "podman"}),
        (f"/docker/{H}/docker/{I}", {"container_id": I[:12], "runtime": "docker"}),
        (
            f"/docker/{H}/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{UNDER}.slice/"
            f"cri-containerd-{I}.scope",
            {"pod_uid": UID, "container_id": I[:12], "runtime": "containerd"},
        ),
        (
            f"/system.slice/docker-{H}.scope (deleted)",
            {"container_id": H[:12], "runtime": "docker"},
        ),
        (
            "/system.slice/slurmstepd.scope/s0123456789ABC/step_0/user/task_0",
            {"slurm_job": "sluid:s0123456789ABC", "slurm_step": "0"},
        ),
        ("/system.slice/slurmstepd.scope/system", {"unit": "slurmstepd.scope"}),
        (
            "/slurm_gpu3/uid_1000/job_5/step_0/task_1",
            {"slurm_job": "5", "slurm_step": "0", "slurm_uid": 1000, "slurm_node": "gpu3"},
        ),
        ("/slurm/uid_1000/job_5", {"slurm_job": "5", "slurm_uid": 1000}),
        ("/lxc.payload.web/system.slice/nginx.service", {"machine": "lxc:web"}),
        ("/lxc/web", {"machine": "lxc:web"}),
        ("/lxc.monitor/web", {"machine": "lxc:web", "container_helper": True}),
        ("/qemu.slice/104.scope", {"machine": "qemu:104"}),
        (
            "/machine.slice/machine-qemu\\x2d3\\x2dvm\\x2done.scope/libvirt/emulator",
            {"machine": "qemu:vm-one"},
        ),
        ("/machine.slice/systemd-nspawn@box.service/payload", {"machine": "nspawn:box"}),
        (
            "/user.slice/user-1000.slice/session-c2.scope",
            {"session": "c2", "user_slice_uid": 1000},
        ),
        (
            "/user.slice/user-1000.slice/user@1000.service/app.slice/jupyter.service",
            {"unit": "jupyter.service", "user_slice_uid": 1000},
        ),
        (
            "/user.slice/user-1000.slice/user@1000.service/init.scope",
            {"unit": "user@1000.service", "user_slice_uid": 1000},
        ),
        (
            "/user.slice/user-1000.slice/user@1000.service/app.slice/run-u7.scope",
            {"unit": "run-u7.scope", "unit_transient": True, "user_slice_uid": 1000},
        ),
        ("/init.scope", {"unit": "init.scope"}),
        ("/system.slice/run-u12.service", {"unit": "run-u12.service", "unit_transient": True}),
        (
            f"/ecs/{UID}/{H}",
            {"ecs_task": UID, "container_id": H[:12], "runtime": "docker"},
        ),
        (
            "/hadoop-yarn/container_e47_1_0080_01_25",
            {"batch_job": "yarn:container_e47_1_0080_01_25"},
        ),
        (f"/nomad.slice/share.slice/{UID}.train.scope", {"batch_job": f"nomad:{UID}.train"}),
        ("/pbs_jobs.service/jobid/88.head", {"batch_job": "pbs:88.head"}),
        ("/system.slice/dockerd-tools.service", {"unit": "dockerd-tools.service"}),
        ("/default/not-an-id", {}),
        (f"/kubepods/pod{UID}", {"pod_uid": UID}),
        # Looks like a pod's directory and lies outside Kubernetes' own.
        (f"/custom/pod{UID}", {}),
    ],
)
def test_path(path: str, expected: dict[str, Any]) -> None:
    assert said(place([f"0::{path}"])) == expected


def test_a_container_in_a_users_own_tree_shows_that_it_is_there() -> None:
    path = f"/user.slice/user-1000.slice/user@1000.service/kubepods/pod{UID}/{H}"
    placement = place([f"0::{path}"])
    assert placement.user_slice_uid == 1000
    assert placement.chain == ("user:1000", f"pod:{UID}", f"container:{H}")


def test_a_unit_inside_a_machine_stands_in_the_chain_only() -> None:
    placement = place(["0::/lxc/100/ns/system.slice/ollama.service"])
    assert placement.unit is None
    assert placement.chain == ("lxc:100", "unit:ollama.service")


def test_a_slurm_job_of_one_hierarchy_joins_the_container_of_another() -> None:
    placement = place([f"3:devices:/docker/{H}", "2:freezer:/slurm/uid_7/job_8/step_0"])
    assert placement.container_id == H
    assert placement.slurm_job == "8"
    assert placement.chain == ("slurm:8.0", f"docker:{H}")


def test_containers_in_lists_the_chain_from_the_outside() -> None:
    placement = place([f"0::/docker/{H}/kubepods/pod{UID}/{I}"])
    assert list(containers_in(placement)) == [("docker", H), (None, I)]


def test_depth_is_bounded_and_the_innermost_is_kept() -> None:
    placement = place(["0::" + f"/docker/{H}" * 40 + f"/docker/{I}"])
    assert len(placement.chain) <= CHAIN_LIMIT
    assert placement.container_id == I


def test_a_million_lines_are_cut() -> None:
    placement = place([f"{n}:c{n}:/system.slice/u{n}.service" for n in range(5000)])
    assert len(placement.paths) <= 64


WORDS = st.sampled_from(
    [
        "kubepods",
        "kubepods.slice",
        f"pod{UID}",
        f"kubepods-pod{UNDER}.slice",
        H,
        f"docker-{H}.scope",
        "docker",
        "slurm",
        "uid_1",
        "job_2",
        "step_3",
        "slurmstepd.scope",
        "lxc",
        "lxc.payload",
        "ecs",
        "torque",
        "nomad",
        "singularity",
        "12",
        "qemu.slice",
        "user@1.service",
        "user-1.slice",
        "session-1.scope",
        "init.scope",
        "..",
        "",
        "a.service",
        f"libpod-payload-{H}",
        "\ud800",
        "²",
    ]
)


@given(st.lists(st.one_of(st.text(), st.lists(st.one_of(WORDS, st.text())).map("/".join))))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_text_gives_a_placement(lines: list[str]) -> None:
    placement = place([*lines, *(f"0::/{line}" for line in lines)])
    assert isinstance(placement, CgroupPlacement)
    assert len(placement.chain) <= CHAIN_LIMIT
    if placement.container_id:
        assert placement.container_id in {name for _, name in containers_in(placement)}
