"""What ``docker inspect`` prints, as a container fact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuwarden.errors import Malformed
from gpuwarden.model import Container
from gpuwarden.sensors.runtimes import fields
from gpuwarden.sensors.runtimes.docker_api import parse_docker_inspect

CASES = Path(__file__).parents[3] / "shared/cases/e"
ID = "0123456789abcdef" * 4
recorded = pytest.mark.skipif(not CASES.is_dir(), reason="no recorded cases beside this checkout")


def case(name: str) -> Container:
    return parse_docker_inspect((CASES / name).read_bytes())


def document(**host: Any) -> dict[str, Any]:
    """A container as the API answers, small."""
    return {
        "Id": ID,
        "Name": "/train",
        "Path": "python3",
        "Args": ["train.py"],
        "Image": "sha256:" + "a" * 64,
        "State": {"Status": "running", "Pid": 4242, "StartedAt": "2026-01-02T03:04:05.5Z"},
        "HostConfig": {"Privileged": False, "PidMode": "", "NetworkMode": "default", **host},
        "Config": {"Image": "team/train:1", "Env": [], "Labels": {}},
    }


def parsed(value: dict[str, Any]) -> Container:
    return parse_docker_inspect(json.dumps(value).encode())


@recorded
def test_e02_a_nested_build_container_asked_for_no_gpu() -> None:
    container = case("e02-docker-inspect-dind-build.json")
    assert container.name == "ecstatic_mestorf"
    assert container.image is None
    assert "image" in container.unread
    assert container.image_digest is not None
    assert container.image_digest.startswith("sha256:040235dc")
    assert container.labels["repo2docker.version"].startswith("2023.06")
    assert (container.device_requests, container.devices, container.visible_devices) == (
        (),
        (),
        None,
    )
    assert container.pod_uid is None


@recorded
def test_e03_a_privileged_pod_asks_for_its_gpu_in_its_environment() -> None:
    container = case("e03-docker-k8s-privileged-gpu.json")
    assert (container.pod_name, container.pod_namespace, container.pod_container) == (
        "tensorflowcifar10-worker-0",
        "default",
        "main",
    )
    assert container.privileged is True
    assert container.visible_devices == "GPU-dc0671b0-61a4-443e-f456-f8fa6359b788"
    assert container.device_requests == ()
    assert container.environment["PAI_USER_NAME"] == "user1"


@recorded
def test_e05_a_yarn_container_is_no_pod_and_keeps_its_device_order() -> None:
    container = case("e05-docker-yarn-devices.json")
    assert container.pod_uid is None
    assert container.host_network is True
    assert [d for d in container.devices if d[-1].isdigit()] == [
        f"/dev/nvidia{n}" for n in (3, 2, 1, 0)
    ]
    assert container.labels["GPU_ID"] == "3,2,1,0"
    assert container.labels["PAI_USER_NAME"] == "user1"
    assert container.environment["PAI_CONTAINER_ID"].startswith("container_e47_")


@recorded
def test_e06_the_user_is_in_the_environment_and_the_token_is_not_kept() -> None:
    container = case("e06-docker-k8s-dlts.json")
    assert container.pod_namespace == "default"
    assert container.pod_uid == "611006c3-61a3-11e9-9957-000d3a1707fc"
    assert container.environment["DLWS_USER_NAME"] == "user1"
    assert container.visible_devices == "GPU-7c583998-b3ff-a885-8979-2d32d334cde4"
    assert "PLACEHOLDER_TOKEN" not in repr(container)


def test_the_plain_fields() -> None:
    container = parsed(
        document(
            Devices=[{"PathOnHost": "/dev/nvidia1", "PathInContainer": "/dev/nvidia0"}],
            DeviceRequests=[
                {"Driver": "nvidia", "Count": -1},
                {"Count": 2},
                {"Count": 0, "DeviceIDs": ["GPU-a", "1"]},
                {"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=all"]},
            ],
            RestartPolicy={"Name": "unless-stopped"},
            Binds=["/srv/data:/data:ro", "volume:/v"],
            PidMode="host",
        )
    )
    assert container.confirmed
    assert container.name == "train"
    assert container.devices == ("/dev/nvidia1",)
    assert container.device_requests == ("all", "count:2", "GPU-a", "1", "nvidia.com/gpu=all")
    assert container.restart_policy == "unless-stopped"
    assert container.host_mounts == ("/srv/data:/data",)
    assert container.host_pid is True
    assert container.host_network is False
    assert container.entrypoint == ("python3", "train.py")
    assert container.started_at_ns == 1_767_323_045_500_000_000
    assert (container.state, container.main_pid) == ("running", 4242)


def test_a_pod_without_labels_is_known_by_its_name() -> None:
    uid = "69c72bad-46fa-11e9-8937-000d3ab38724"
    value = document()
    value["Name"] = f"/k8s_main_train-0_team-a_{uid}_3"
    container = parsed(value)
    assert (
        container.pod_uid,
        container.pod_name,
        container.pod_namespace,
        container.pod_container,
    ) == (uid, "train-0", "team-a", "main")


def test_a_pod_with_neither_is_known_by_its_cgroup() -> None:
    uid = "69c72bad-46fa-11e9-8937-000d3ab38724"
    assert parsed(document(CgroupParent=f"/kubepods/burstable/pod{uid}")).pod_uid == uid
    under = uid.replace("-", "_")
    assert parsed(document(CgroupParent=f"kubepods-pod{under}.slice")).pod_uid == uid


def test_credentials_are_kept_out_of_labels_and_environment() -> None:
    value = document()
    value["Config"]["Labels"] = {"deploy.token": "hidden-1", "team": "a"}
    value["Config"]["Env"] = [
        "AUTH_USER=hidden-2",
        "POSTGRES_USER=hidden-3",
        "USER_PASSWORD=hidden-4",
        "JOB_NAME=resnet",
        "PLAIN=hidden-5",
    ]
    container = parsed(value)
    assert "hidden" not in repr(container)
    assert container.labels == {"deploy.token": fields.REDACTED, "team": "a"}
    assert container.environment == {"JOB_NAME": "resnet"}


@pytest.mark.parametrize(
    ("reference", "identity", "expected"),
    [
        ("team/train:1", "sha256:" + "b" * 64, ("team/train:1", "sha256:" + "b" * 64)),
        (
            "team/train@sha256:" + "c" * 64,
            "sha256:" + "b" * 64,
            ("team/train", "sha256:" + "c" * 64),
        ),
        ("sha256:" + "d" * 64, None, (None, "sha256:" + "d" * 64)),
        ("e" * 64, None, (None, "sha256:" + "e" * 64)),
        (None, "f" * 64, (None, "sha256:" + "f" * 64)),
        (None, None, (None, None)),
    ],
)
def test_image_and_digest(
    reference: str | None, identity: str | None, expected: tuple[str | None, str | None]
) -> None:
    assert fields.image_and_digest(reference, identity) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1970-01-01T00:00:01Z", 1_000_000_000),
        ("2019-03-15T08:15:24.1282957Z", 1_552_637_724_128_295_700),
        ("2019-03-15T10:15:24+02:00", 1_552_637_724_000_000_000),
        ("0001-01-01T00:00:00Z", None),
        ("2019-02-31T00:00:00Z", None),
        ("soon", None),
        (None, None),
    ],
)
def test_instants(text: str | None, expected: int | None) -> None:
    assert fields.instant_ns(text) == expected


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ({"pod-template-hash": "abc"}, "ReplicaSet/web-5d4f"),
        ({"batch.kubernetes.io/job-name": "nightly"}, "Job/nightly"),
        ({"training.kubeflow.org/job-name": "llm", "job-name": "x"}, "TrainingJob/llm"),
        ({}, None),
    ],
)
def test_the_controller_of_a_pod(tags: dict[str, str], expected: str | None) -> None:
    assert fields.pod_owner(tags, "web-5d4f-x2x9z") == expected


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"[{},{}]",
        b"{}",
        b'{"Id":"short"}',
        b"null",
        b"\xff",
        b"[" * 100_000,
        b'"\\ud800"',
    ],
)
def test_what_is_no_container_is_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        parse_docker_inspect(data)


SCALAR = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
VALUE = (
    SCALAR | st.lists(SCALAR, max_size=2) | st.dictionaries(st.text(max_size=4), SCALAR, max_size=2)
)
PART = st.dictionaries(
    st.sampled_from(["PathOnHost", "Count", "DeviceIDs", "Source", "Destination", "Type", "Name"]),
    VALUE,
    max_size=3,
)
SECTION = st.dictionaries(
    st.sampled_from(
        "Labels Env Image Devices DeviceRequests Binds PidMode NetworkMode Privileged "
        "RestartPolicy CgroupParent Pid StartedAt Status".split()
    ),
    VALUE | PART | st.lists(PART, max_size=2),
    max_size=4,
)
DOCUMENT = st.dictionaries(
    st.sampled_from("Config HostConfig State Mounts Image Name Path Args".split()),
    SECTION | VALUE | st.lists(PART, max_size=2),
    max_size=5,
)


@given(DOCUMENT)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_values_in_the_right_places_give_a_container(value: dict[str, Any]) -> None:
    assert parsed({**value, "Id": ID}).id == ID


@given(st.binary() | VALUE.map(lambda value: json.dumps(value).encode()))
@settings(deadline=None)
def test_any_bytes_give_a_container_or_malformed(data: bytes) -> None:
    try:
        assert isinstance(parse_docker_inspect(data), Container)
    except Malformed:
        pass
