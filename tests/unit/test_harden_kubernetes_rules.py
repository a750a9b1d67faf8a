"""What the admission rules refuse and allow, by Google's CEL and by the check in Python alike."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from gpuwarden.errors import UsageError
from gpuwarden.harden import kubernetes_paths as paths
from gpuwarden.harden.kubernetes_admission import (
    CRON_JOBS,
    KINDS,
    PODS,
    TEMPLATES,
    objects,
    variables,
)
from gpuwarden.harden.kubernetes_conditions import found
from gpuwarden.harden.kubernetes_rules import (
    DEVICE_ANNOTATIONS,
    VISIBLE_DEVICES,
    glob,
    rule_set,
)
from tests.support.admission import RULES, admission, by_cel, by_python, pod, volume

GPU = {"limits": {"nvidia.com/gpu": "1"}}
ALL = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]

REFUSED: dict[str, tuple[dict[str, Any], dict[str, list[str]]]] = {
    "privileged": (
        pod({"securityContext": {"privileged": True}}),
        {"privileged": ["c0"]},
    ),
    "a privileged init container": (
        pod({}, initContainers=[{"name": "i", "securityContext": {"privileged": True}}]),
        {"privileged": ["i"]},
    ),
    "a privileged ephemeral container": (
        pod({}, ephemeralContainers=[{"name": "e", "securityContext": {"privileged": True}}]),
        {"privileged": ["e"]},
    ),
    "a capability as good as privileged": (
        pod({"securityContext": {"capabilities": {"add": ["NET_ADMIN", "SYS_ADMIN"]}}}),
        {"adminCapability": ["c0"]},
    ),
    "all capabilities": (
        pod({"securityContext": {"capabilities": {"add": ["cap_All"]}}}),
        {"adminCapability": ["c0"]},
    ),
    "variable": (pod({"env": ALL}), {"visibleDevices": ["c0"]}),
    "variable in an init container": (
        pod({"resources": GPU}, initContainers=[{"name": "i", "env": ALL}]),
        {"visibleDevices": ["i"]},
    ),
    "variable in an ephemeral container": (
        pod({"resources": GPU}, ephemeralContainers=[{"name": "e", "env": ALL}]),
        {"visibleDevices": ["e"]},
    ),
    "variable by number": (
        pod({"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "0"}]}),
        {"visibleDevices": ["c0"]},
    ),
    "variable whose value stands elsewhere": (
        pod({"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {"fieldRef": {}}}]}),
        {"visibleDevices": ["c0"]},
    ),
    "variable named twice": (
        pod({"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}, *ALL]}),
        {"visibleDevices": ["c0"]},
    ),
    "variable that refers to another": (
        pod({"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "$(X)"}]}),
        {"visibleDevices": ["c0"]},
    ),
    "void with a newline": (
        pod({"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void\n"}]}),
        {"visibleDevices": ["c0"]},
    ),
    "a request for none": (
        pod({"env": ALL, "resources": {"limits": {"nvidia.com/gpu": "0"}}}),
        {"visibleDevices": ["c0"]},
    ),
    "a request for none as a number": (
        pod({"env": ALL, "resources": {"limits": {"nvidia.com/gpu": 0}}}),
        {"visibleDevices": ["c0"]},
    ),
    "a request for none in other words": (
        pod({"env": ALL, "resources": {"limits": {"nvidia.com/gpu": "0e3"}}}),
        {"visibleDevices": ["c0"]},
    ),
    "a request for a network adapter": (
        pod({"env": ALL, "resources": {"limits": {"nvidia.com/hostdev": "1"}}}),
        {"visibleDevices": ["c0"]},
    ),
    "another container's request": (
        pod({"env": ALL}, {"resources": GPU}),
        {"visibleDevices": ["c0"]},
    ),
    "variable beside a request": (
        pod({"env": ALL, "resources": GPU}),
        {"visibleDevicesBesideRequest": ["c0"]},
    ),
    "mount that names devices": (
        pod({"volumeMounts": [{"mountPath": "/var/run/nvidia-container-devices/all"}]}),
        {"devicesByMount": ["c0"]},
    ),
    "node": (pod(volumes=[volume("/dev/nvidia0")]), {"hostPathDevice": ["v"]}),
    "dev": (pod(volumes=[volume("/dev")]), {"hostPathRoot": ["v"]}),
    "root": (pod(volumes=[volume("/")]), {"hostPathRoot": ["v"]}),
    "plugin sockets": (
        pod(volumes=[volume("/var/lib/kubelet/device-plugins")]),
        {"hostPathSocket": ["v"]},
    ),
    "containerd": (
        pod(volumes=[volume("/run/containerd/containerd.sock")]),
        {"hostPathSocket": ["v"]},
    ),
    "annotation": (
        pod(annotations={"cdi.k8s.io/x": "nvidia.com/gpu=all", "a": "b"}),
        {"deviceAnnotations": ["cdi.k8s.io/x"]},
    ),
    "runtime class": (
        pod(runtimeClassName="nvidia"),
        {"runtimeClass": ["runtimeClassName"]},
    ),
    "runtime class with a claim": (
        pod(
            {"resources": {"claims": [{"name": "g"}]}},
            runtimeClassName="nvidia-cdi",
            resourceClaims=[{"name": "g", "resourceClaimName": "x"}],
        ),
        {"runtimeClass": ["runtimeClassName"]},
    ),
    "claim of nobody": (
        pod(
            {"resources": {"claims": [{"name": "used"}]}},
            resourceClaims=[
                {"name": "used", "resourceClaimName": "x"},
                {"name": "spare", "resourceClaimTemplateName": "y"},
            ],
        ),
        {"unusedClaims": ["spare"]},
    ),
    "host's processes beside a GPU": (
        pod({"resources": GPU}, hostPID=True),
        {"hostProcesses": ["hostPID"]},
    ),
    "host's processes, privileged": (
        pod({"securityContext": {"privileged": True}}, hostPID=True),
        {"privileged": ["c0"], "hostProcesses": ["hostPID"]},
    ),
    "everything": (
        pod(
            {"env": ALL, "securityContext": {"privileged": True}},
            hostPID=True,
            volumes=[volume("/dev/dri"), {"name": "w", "hostPath": {"path": "/run"}}],
        ),
        {
            "privileged": ["c0"],
            "visibleDevices": ["c0"],
            "hostPathDevice": ["v"],
            "hostPathRoot": ["w"],
            "hostProcesses": ["hostPID"],
        },
    ),
}
ALLOWED: dict[str, dict[str, Any]] = {
    "nothing": pod(),
    "a request": pod({"resources": GPU}),
    "a request in requests": pod({"resources": {"requests": {"nvidia.com/mig-1g.5gb": "1"}}}),
    "void": pod({"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]}),
    "none": pod({"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "none"}]}),
    "empty": pod({"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": ""}]}),
    "no value": pod({"env": [{"name": "NVIDIA_VISIBLE_DEVICES"}]}),
    "another variable": pod({"env": [{"name": "CUDA_VISIBLE_DEVICES", "value": "all"}]}),
    "other capabilities": pod(
        {"securityContext": {"capabilities": {"add": ["IPC_LOCK", "SYS_ADMINS"], "drop": ["ALL"]}}}
    ),
    "not privileged": pod({"securityContext": {"privileged": False}}),
    "no volumes of the host": pod(volumes=[{"name": "v", "emptyDir": {}}]),
    "another directory": pod(volumes=[volume("/data/dev/nvidia0")]),
    "shared memory": pod(volumes=[volume("/dev/shm")]),
    "RDMA": pod(volumes=[volume("/dev/infiniband")]),
    "logs": pod(volumes=[volume("/var/log/pods")]),
    "kubelet's directory of plugins": pod(volumes=[volume("/var/lib/kubelet/plugins")]),
    "runtime class with a request": pod({"resources": GPU}, runtimeClassName="nvidia"),
    "another runtime class": pod(runtimeClassName="gvisor"),
    "a claim that is used": pod(
        {"resources": {"claims": [{"name": "g"}]}},
        resourceClaims=[{"name": "g", "resourceClaimName": "x"}],
    ),
    "host's processes without a GPU": pod(hostPID=True),
    "annotation of another kind": pod(annotations={"cdi.k8s.ioo/x": "y", "x/cdi.k8s.io": "z"}),
    "no annotations": pod(annotations={}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named_by_both(name: str) -> None:
    one, expected = REFUSED[name]
    assert by_cel(one) == expected
    assert by_python(one) == expected
    refusals = admission(PODS.name).refusals(one)
    assert len(refusals) == len(expected)
    for names in expected.values():
        assert any(text.endswith(f" ({', '.join(names)})") for text in refusals)


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_allowed_is_allowed_by_both(name: str) -> None:
    assert by_cel(ALLOWED[name]) == {}
    assert by_python(ALLOWED[name]) == {}
    assert admission(PODS.name).refusals(ALLOWED[name]) == []


def test_every_rule_has_a_pod_that_breaks_it() -> None:
    assert {rule for _, expected in REFUSED.values() for rule in expected} == {
        rule.name for rule in RULES.rules
    }


def test_every_message_says_what_to_do() -> None:
    for rule in RULES.rules:
        assert any(word in rule.message for word in ("Leave", "Name", "ask for")), rule.name
        assert len(rule.message) < 300


SPELLINGS = (
    "/{}",
    "//{}",
    "/./{}",
    "/{}/",
    "/{}//",
    "/{}/.",
    "/{}/./",
    "{}",
    "./{}",
    "/.//./{}//./",
)


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("dev", "hostPathRoot"),
        ("dev/nvidia0", "hostPathDevice"),
        ("dev//./nvidiactl", "hostPathDevice"),
        ("dev/nvidia-caps/nvidia-cap1", "hostPathDevice"),
        ("dev/dri/by-path", "hostPathDevice"),
        ("dev/kfd", "hostPathDevice"),
        ("dev/accel0", "hostPathDevice"),
        ("dev/accel/accel0", "hostPathDevice"),
        ("dev/dxg", "hostPathDevice"),
        ("dev/hl0", "hostPathDevice"),
        ("dev/hl_controlD0", "hostPathDevice"),
        ("dev/habanalabs", "hostPathDevice"),
        ("dev/char/195:0", "hostPathDevice"),
        ("var/run/nvidia/driver/dev/nvidia0", "hostPathDevice"),
        ("var/run", "hostPathRoot"),
        ("var/lib//kubelet", "hostPathRoot"),
        ("proc/1/root", "hostPathRoot"),
        ("proc/self/root/dev/nvidia0", "hostPathRoot"),
        ("proc/7/task/8/cwd/dev", "hostPathRoot"),
        ("srv/../dev", "hostPathRoot"),
        ("..", "hostPathRoot"),
        ("var/run/docker.sock", "hostPathSocket"),
        ("var/lib/kubelet/pod-resources/kubelet.sock", "hostPathSocket"),
        ("etc/cdi/nvidia.yaml", "hostPathSocket"),
    ],
)
def test_a_path_is_known_however_it_is_spelled(path: str, rule: str) -> None:
    for spelling in SPELLINGS:
        one = pod(volumes=[volume(spelling.format(path))])
        assert rule in by_cel(one), spelling
        assert by_python(one) == by_cel(one), spelling


@pytest.mark.parametrize("path", ["", "/", "//", ".", "/.", "./", "/./.", "////./"])
def test_the_root_is_known_however_it_is_spelled(path: str) -> None:
    one = pod(volumes=[volume(path)])
    assert by_cel(one) == by_python(one) == {"hostPathRoot": ["v"]}


@pytest.mark.parametrize("path", ["/.dev", "/dev2", "/device", "/dev/null", "/...", "/a..", "/-/"])
def test_another_path_is_another_one(path: str) -> None:
    one = pod(volumes=[volume(path)])
    assert by_cel(one) == by_python(one) == {}


def test_what_is_above_a_protected_path_is_protected() -> None:
    assert paths.parents(["dev/nvidia[^/]*", "a/b/c"]) == ("", "a", "a/b", "dev")


@pytest.mark.parametrize("variable", VISIBLE_DEVICES)
def test_each_variable_counts(variable: str) -> None:
    one = pod({"env": [{"name": variable, "value": "all"}]})
    assert by_cel(one) == by_python(one) == {"visibleDevices": ["c0"]}


@pytest.mark.parametrize("annotation", DEVICE_ANNOTATIONS)
def test_each_annotation_counts(annotation: str) -> None:
    for key in (annotation, f"{annotation}/container.c0"):
        one = pod(annotations={key: "x"})
        assert by_cel(one) == by_python(one) == {"deviceAnnotations": [key]}


def test_other_names_of_resources_and_classes() -> None:
    rules = rule_set(["example.com/accelerator-*"], ["fast"])
    asks = pod({"env": ALL, "resources": {"limits": {"example.com/accelerator-a": "2"}}})
    assert by_python(asks, rules) == {"visibleDevicesBesideRequest": ["c0"]}
    assert by_python(asks) == {"visibleDevices": ["c0"]}
    assert by_python(pod(runtimeClassName="fast"), rules) == {"runtimeClass": ["runtimeClassName"]}
    texts = {v["name"]: v["expression"] for v in variables(PODS, rules)}
    assert "example[.]com/accelerator-.*" in texts["requesting"]


@pytest.mark.parametrize(
    "name", ["", "*", "a'b", "a\nb", "a|b", "(", "x" * 300, "-a", "a b", "*/*"]
)
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        glob([name], "--gpu-resource")


def test_a_dot_in_a_name_is_a_dot() -> None:
    assert not found(glob(["a.b/*"]), "axb/c", "")
    assert not found(glob(["a"]), "a\n", "")


# ---------------------------------------------------------------- requests


def test_what_was_there_before_is_still_labelled_and_ended() -> None:
    matches = admission(PODS.name).matches
    bad = REFUSED["annotation"][0]
    labelled = copy.deepcopy(bad)
    labelled["metadata"]["labels"] = {"a": "b"}
    assert matches(bad)
    assert not matches(labelled, bad)
    changed = copy.deepcopy(bad)
    changed["metadata"]["annotations"]["cdi.k8s.io/x"] = "nvidia.com/gpu=1"
    assert matches(changed, bad)
    assert matches(bad, pod())
    assert matches(bad, pod(annotations={"cdi.k8s.io/y": "z"}))
    assert not matches(pod(), bad)
    assert not matches(labelled, bad, subresource="resize")


def test_an_ephemeral_container_that_is_added_is_judged() -> None:
    before = pod({"resources": GPU})
    after = copy.deepcopy(before)
    after["spec"]["ephemeralContainers"] = [{"name": "e", "env": ALL}]
    assert admission(PODS.name).matches(after, before, subresource="ephemeralcontainers")
    assert len(admission(PODS.name).refusals(after)) == 1
    policy = objects(RULES, exempt=[], audit=False)[0]
    resources = policy["spec"]["matchConstraints"]["resourceRules"][0]["resources"]
    assert "pods/ephemeralcontainers" in resources


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_such_pods_is_refused_where_it_is_written(name: str) -> None:
    one, expected = REFUSED[name]
    if "ephemeral" in name:
        return
    deployment: dict[str, Any] = {"metadata": {}, "spec": {"template": one}}
    cron_job: dict[str, Any] = {
        "metadata": {},
        "spec": {"jobTemplate": {"spec": {"template": one}}},
    }
    for kind, made in ((TEMPLATES, deployment), (CRON_JOBS, cron_job)):
        values = admission(kind.name).variables(made)
        assert {r.name: values[r.name] for r in RULES.rules if values[r.name]} == expected
        assert admission(kind.name).matches(made)
        scaled = copy.deepcopy(made)
        scaled["spec"]["replicas"] = 0
        assert not admission(kind.name).matches(scaled, made)


def test_a_template_without_metadata_is_judged() -> None:
    made = {"metadata": {}, "spec": {"template": {"spec": pod()["spec"]}}}
    assert admission(TEMPLATES.name).refusals(made) == []


def claim(spec: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"name": "c"}, "spec": spec}


def test_a_claim_on_what_others_were_given_is_refused() -> None:
    refusals = admission("gpuwarden-resource-claims").refusals
    old = {"devices": {"requests": [{"name": "r", "adminAccess": True}]}}
    new = {"devices": {"requests": [{"name": "r", "exactly": {"adminAccess": True}}]}}
    plain = {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "g"}}]}}
    either = {"devices": {"requests": [{"name": "r", "firstAvailable": [{"name": "a"}]}]}}
    for bad in (old, new):
        assert len(refusals(claim(bad))) == 1
        assert len(refusals(claim({"metadata": {}, "spec": bad}))) == 1
    empty: dict[str, Any] = {}
    for good in (plain, either, {"devices": empty}, empty):
        assert refusals(claim(good)) == []
        assert refusals(claim({"metadata": {}, "spec": good})) == []


def test_all_kinds_have_the_same_rules() -> None:
    texts = [[v["expression"] for v in variables(kind, RULES)][5:] for kind in KINDS]
    assert texts[0] == texts[1] == texts[2]
