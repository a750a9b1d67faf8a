"""The Helm chart: what it asks of a node and of the API, and what it makes of odd values."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import cycle
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gpuwarden import __version__
from gpuwarden.inputs import load_policy
from gpuwarden.respond import kubernetes_rights
from gpuwarden.watch.flags import add_flags
from tests.support.chart import (
    CHART,
    DEPLOY,
    EVERYTHING,
    IMAGE,
    ROOT,
    VERSIONS,
    check,
    complaint,
    helm,
    pod_of,
    rendered,
)

CAPABILITIES = {
    "BPF", "PERFMON", "NET_ADMIN", "SYS_PTRACE", "DAC_READ_SEARCH", "SYSLOG", "KILL", "SETUID",
    "SETGID", "SETPCAP", "CHECKPOINT_RESTORE",
}  # fmt: skip
HOSTILE = (
    'a"b',
    "a'b",
    "a\nb: c",
    "x: {{ .Values.image }} # y",
    "- [",
    "\u2028 \\ \t & <",
    "!!python/object:os.system",
    "  leading",
    "%",
    "a: &b *b",
)


def container(values: dict[str, Any] | None = None, version: str = "1.33") -> dict[str, Any]:
    (one,) = pod_of(rendered(values, version))["containers"]
    found: dict[str, Any] = one
    return found


def test_helm_finds_no_fault_with_the_chart() -> None:
    code, said, _ = helm("lint", "--strict", str(CHART), values={"image": IMAGE, **EVERYTHING})
    assert code == 0, said
    assert "[WARNING]" not in said and "[ERROR]" not in said
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == __version__


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_fits_the_schemas_of_every_kubernetes(version: str) -> None:
    everything = dict(EVERYTHING)
    if version in ("1.25", "1.29"):
        everything["respond"] = {**everything["respond"], "ownNodeOnly": False}
    for values in ({}, everything):
        objects = rendered(values, version)
        for one in objects.values():
            check(one, version)
    assert {kind for kind, _ in objects} >= {
        "DaemonSet", "ServiceAccount", "ConfigMap", "Service", "ServiceMonitor", "PrometheusRule",
        "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "PriorityClass",
        "NetworkPolicy",
    }  # fmt: skip


def test_the_check_would_see_a_fault() -> None:
    objects = rendered({"metrics": {"serviceMonitor": {"enabled": True}}})
    daemon_set = objects["DaemonSet", "gpuwarden"]
    daemon_set["spec"]["template"]["spec"]["containers"][0]["prots"] = []
    monitor = objects["ServiceMonitor", "gpuwarden"]
    monitor["spec"]["endpoints"][0]["interval"] = "often"
    for one in (daemon_set, monitor):
        with pytest.raises(jsonschema.ValidationError):
            check(one, "1.33")


def test_it_asks_the_node_for_no_more_than_it_says() -> None:
    pod = pod_of(rendered())
    (one,) = pod["containers"]
    context = one["securityContext"]
    assert set(context["capabilities"]["add"]) == CAPABILITIES
    assert context["capabilities"]["drop"] == ["ALL"]
    assert context["privileged"] is context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["hostPID"] is True
    assert "hostNetwork" not in pod and "hostIPC" not in pod
    assert pod["automountServiceAccountToken"] is False
    assert "livenessProbe" not in one
    mounts = {mount["mountPath"]: mount for mount in one["volumeMounts"]}
    writable = {path for path, mount in mounts.items() if not mount.get("readOnly")}
    assert writable == {"/var/lib/gpuwarden", "/run/gpuwarden"}
    assert mounts["/host"]["recursiveReadOnly"] == "IfPossible"
    # Kubernetes allows one or the other.
    assert "mountPropagation" not in mounts["/host"]
    names = [volume["name"] for volume in pod["volumes"]]
    assert sorted(names) == sorted(mount["name"] for mount in one["volumeMounts"])


def test_each_capability_has_its_reason_and_can_be_taken_away() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(values["capabilities"]) == CAPABILITIES
    assert all(len(reason) > 10 for reason in values["capabilities"].values())
    left = container({"capabilities": {"NET_ADMIN": None}})["securityContext"]["capabilities"]
    assert set(left["add"]) == CAPABILITIES - {"NET_ADMIN"}
    whole = container({"privileged": True})["securityContext"]
    assert whole["privileged"] is True and "capabilities" not in whole


def test_the_bpf_file_system_is_mounted_only_where_something_is_pinned() -> None:
    def mounted(values: dict[str, Any]) -> bool:
        mounts = container(values)["volumeMounts"]
        return any(mount["mountPath"] == "/sys/fs/bpf" for mount in mounts)

    assert not mounted({"enforce": {"enabled": True}})
    assert not mounted({"enforce": {"enabled": True, "dryRun": False}})
    assert mounted({"enforce": {"enabled": True, "dryRun": False, "pin": True}})
    assert mounted({"stoppedMap": True})
    assert "a dry run pins nothing" in complaint({"enforce": {"enabled": True, "pin": True}})


def test_the_arguments_are_flags_that_watch_has() -> None:
    import argparse

    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser.add_subparsers().add_parser("watch"))
    for values in ({}, EVERYTHING):
        given = container(values)["args"]
        parsed, unknown = parser.parse_known_args(given)
        # --root and --policy are flags that several commands share.
        assert {word.partition("=")[0] for word in unknown} <= {"--root", "--policy"}
    assert parsed.enforce and parsed.pin and not parsed.dry_run
    assert parsed.metrics == "0.0.0.0:9835"


def test_nothing_may_be_done_at_the_api_until_asked() -> None:
    kinds = {kind for kind, _ in rendered()}
    assert kinds == {"DaemonSet", "ServiceAccount", "ConfigMap", "Service"}
    objects = rendered({"respond": {"cordon": True}})
    assert pod_of(objects)["automountServiceAccountToken"] is True
    role = objects["ClusterRole", "gpuwarden-respond"]
    assert role["rules"] == list(kubernetes_rights.CORDON_RULES)
    assert not any(kind == "Role" for kind, _ in objects)


def test_the_rights_are_those_that_respond_needs() -> None:
    both = rendered({"respond": {"cordon": True, "deletePod": True}})
    assert both["ClusterRole", "gpuwarden-respond"]["rules"] == list(kubernetes_rights.RULES)
    some = rendered(
        {"respond": {"cordon": True, "deletePod": True, "namespaces": ["training", "batch"]}}
    )
    cluster = some["ClusterRole", "gpuwarden-respond"]["rules"]
    assert cluster == list(kubernetes_rights.CORDON_RULES)
    for namespace in ("training", "batch"):
        role = some["Role", f"{namespace}/gpuwarden-respond"]
        assert role["rules"] == list(kubernetes_rights.DELETE_POD_RULES)
        binding = some["RoleBinding", f"{namespace}/gpuwarden-respond"]
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": "gpuwarden", "namespace": "gpu-watch"}
        ]
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
    only = rendered({"respond": {"deletePod": True, "namespaces": ["training"]}})
    assert not any(kind == "ClusterRole" for kind, _ in only)


def test_the_rights_are_held_to_the_agents_own_node() -> None:
    objects = rendered({"respond": {"cordon": True}, "serviceAccount": {"name": "warden"}})
    expected = kubernetes_rights.own_node_policy("gpu-watch", "warden")
    for wanted in expected:
        found = objects[wanted["kind"], "gpuwarden-own-node"]
        assert (found["apiVersion"], found["spec"]) == (wanted["apiVersion"], wanted["spec"])
    assert not [
        kind
        for kind, _ in rendered({"respond": {"cordon": True, "ownNodeOnly": False}})
        if kind.startswith("Validating")
    ]
    assert "needs Kubernetes 1.30" in complaint({"respond": {"cordon": True}}, "1.29")
    own = {"serviceAccount": {"create": False}, "respond": {"cordon": True}}
    assert "serviceAccount.name" in complaint(own)


def policy_text(values: dict[str, Any]) -> str:
    text: str = rendered(values)["ConfigMap", "gpuwarden-policy"]["data"]["policy.yaml"]
    return text


def test_the_policy_is_one_that_gpuwarden_takes(tmp_path: Path) -> None:
    content = {
        "version": 1,
        "exceptions": [
            {
                "rule": "gpu_container_without_allocation",
                "match": {"pod_namespace": "monitoring"},
                "reason": 'exporter: "sees" all\nreviewed',
            }
        ],
    }
    path = tmp_path / "policy.yaml"
    for values in ({}, {"policy": {"content": content}}, EVERYTHING):
        path.write_text(policy_text(values))
        policy, _ = load_policy(str(path))
        # Nobody said where the key is: the chart knows where it mounted it.
        key = "/etc/gpuwarden-key/signing.pem" if values is EVERYTHING else None
        assert (policy.signing_key or None) == key
    assert yaml.safe_load(policy_text({"policy": {"content": content}})) == content


def test_a_changed_policy_restarts_the_agents_and_nothing_else_does() -> None:
    def annotations(**content: Any) -> dict[str, str]:
        objects = rendered({"policy": {"content": {"version": 1, **content}}})
        daemon_set = objects["DaemonSet", "gpuwarden"]
        found: dict[str, str] = daemon_set["spec"]["template"]["metadata"]["annotations"]
        return found

    assert annotations() == annotations()
    assert annotations() != annotations(allow_activities=["plotting"])


def test_a_policy_of_ones_own_comes_from_a_secret() -> None:
    objects = rendered({"policy": {"existingSecret": "site-policy"}})
    assert not any(kind == "ConfigMap" for kind, _ in objects)
    volumes = {volume["name"]: volume for volume in pod_of(objects)["volumes"]}
    assert volumes["policy"]["secret"] == {"secretName": "site-policy", "defaultMode": 0o400}
    both = {"policy": {"existingSecret": "a", "existingConfigMap": "b"}}
    assert "not both" in complaint(both)


def test_no_secret_is_put_where_others_read_it() -> None:
    url = "webhook:https://user:hunter2@alerts.example.com/"
    assert "sinks" in complaint({"sinks": [url]})
    assert "sinks" in complaint({"policy": {"content": {"version": 1, "sinks": [url]}}})
    key = rendered({"signingKey": {"existingSecret": "k"}})
    volumes = {volume["name"]: volume for volume in pod_of(key)["volumes"]}
    assert volumes["signing-key"]["secret"]["secretName"] == "k"
    assert not any(kind == "Secret" for kind, _ in key)


def test_odd_texts_stay_texts() -> None:
    capabilities = dict(zip(sorted(CAPABILITIES), cycle(HOSTILE), strict=False))
    numbered = {f"example.com/{number}": text for number, text in enumerate(HOSTILE)}
    labels = {f"odd{number}": text for number, text in enumerate(HOSTILE)}
    content = {"version": 1, "exceptions": [{"reason": text, text: text} for text in HOSTILE]}
    whole = "".join(HOSTILE)
    one = rendered(
        {
            "policy": {"content": content},
            "extraArgs": list(HOSTILE),
            "extraEnv": [{"name": "ODD", "value": whole}],
            "podAnnotations": numbered,
            "tolerateKeys": list(HOSTILE),
            "capabilities": capabilities,
            "gpu": {"nvidia": {"visibleDevices": whole}},
            "serviceAccount": {"annotations": numbered},
            "metrics": {
                "serviceMonitor": {"enabled": True, "labels": labels},
                "dashboard": {"enabled": True, "labels": labels},
            },
        }
    )
    assert {kind for kind, _ in one} == {
        "DaemonSet", "ServiceAccount", "ConfigMap", "Service", "ServiceMonitor",
    }  # fmt: skip
    assert yaml.safe_load(one["ConfigMap", "gpuwarden-policy"]["data"]["policy.yaml"]) == content
    pod = pod_of(one)
    assert pod["tolerations"] == [{"key": text, "operator": "Exists"} for text in HOSTILE]
    (watch,) = pod["containers"]
    assert watch["args"][-len(HOSTILE) :] == list(HOSTILE)
    environment = {entry["name"]: entry.get("value") for entry in watch["env"]}
    assert environment["ODD"] == environment["NVIDIA_VISIBLE_DEVICES"] == whole
    assert set(watch["securityContext"]["capabilities"]["add"]) == CAPABILITIES
    assert one["ServiceAccount", "gpuwarden"]["metadata"]["annotations"] == numbered
    template = one["DaemonSet", "gpuwarden"]["spec"]["template"]
    assert template["metadata"]["annotations"].items() >= numbered.items()
    for name in (("ServiceMonitor", "gpuwarden"), ("ConfigMap", "gpuwarden-dashboard")):
        assert one[name]["metadata"]["labels"].items() >= labels.items()


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"image": {"repository": ""}}, "image.repository"),
        ({"image": {"repository": "r", "digest": "sha256:beef"}}, "digest"),
        ({"image": {"repository": 'r"\n'}}, "repository"),
        ({"host": {"stateDirectory": "/var/../etc"}}, "stateDirectory"),
        ({"fullnameOverride": "a\nb"}, "fullnameOverride"),
        ({"metrics": {"address": "evil.example.com"}}, "address"),
        ({"metrics": {"port": 0}}, "port"),
        ({"capabilities": {"bpf": "x"}}, "bpf"),
        ({"respond": {"cordn": True}}, "cordn"),
        ({"sinks": ["ftp://192.0.2.1"]}, "sinks"),
        ({"policy": {"content": {"version": 2}}}, "version"),
    ],
)
def test_values_that_make_no_sense_are_refused(values: dict[str, Any], word: str) -> None:
    assert word in complaint(values)


def test_the_rules_and_the_dashboard_in_the_chart_are_those_beside_it() -> None:
    objects = rendered(EVERYTHING)
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())
    assert objects["PrometheusRule", "gpuwarden"]["spec"] == rules
    shown = json.loads(objects["ConfigMap", "gpuwarden-dashboard"]["data"]["gpuwarden.json"])
    assert shown == json.loads((DEPLOY / "grafana/gpuwarden.json").read_text())
    # The alert about agents that are gone asks for a job of this name.
    labels = objects["Service", "gpuwarden"]["metadata"]["labels"]
    monitor = objects["ServiceMonitor", "gpuwarden"]["spec"]
    job = labels[monitor["jobLabel"]]
    assert f'up{{job="{job}"}}' in json.dumps(rules).replace('\\"', '"')
    assert labels.items() >= monitor["selector"]["matchLabels"].items()


def test_the_plain_manifests_are_what_the_chart_renders(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, str(ROOT / "scripts/render_manifests"), str(tmp_path)],
        check=True,
        timeout=60,
    )
    for folder in ("kubernetes", "helm/gpuwarden/files"):
        for made in (tmp_path / folder).iterdir():
            assert made.read_text() == (DEPLOY / folder / made.name).read_text(), made.name
    names = {path.name for path in (DEPLOY / "kubernetes").iterdir()}
    assert names == {path.name for path in (tmp_path / "kubernetes").iterdir()} | {"namespace.yaml"}


def test_the_plain_manifests_fit_the_schemas_and_the_namespace_lets_them_in() -> None:
    namespaces = set()
    for path in sorted((DEPLOY / "kubernetes").iterdir()):
        for one in yaml.safe_load_all(path.read_text()):
            check(one, "1.33")
            namespaces.add(one["metadata"].get("namespace"))
            if one["kind"] == "Namespace":
                namespace = one["metadata"]
    assert namespaces == {None, namespace["name"]}
    assert namespace["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"


def test_the_image_is_named_by_its_digest() -> None:
    for path in (DEPLOY / "kubernetes").glob("*.yaml"):
        for image in re.findall(r"image: (.*)", path.read_text()):
            assert re.fullmatch(r'"[^"@]+@sha256:[0-9a-f]{64}"', image)
    tagged = container({"image": {**IMAGE, "tag": "1.2"}})["image"]
    assert tagged == f"{IMAGE['repository']}:1.2@{IMAGE['digest']}"
    assert container({"image": {"repository": "r"}})["image"] == f"r:{__version__}"


def test_the_page_names_values_that_are_there() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    page = (ROOT / "docs/kubernetes.md").read_text()
    dotted = set(re.findall(r"(?:`|--set |,)([a-z]\w*(?:\.\w+)+)[`=]", page))
    dotted = {name for name in dotted if not name.endswith(".yaml")}
    named = {name for name in dotted if name.partition(".")[0] in values}
    assert len(named) > 10
    # One that the reader adds.
    for name in sorted(named - {"capabilities.SYS_ADMIN"}):
        found: Any = values
        for part in name.split("."):
            assert part in found, name
            found = found[part]
    table = page[page.index("| capability |") : page.index("\nKernels that keep")]
    assert set(re.findall(r"`([A-Z_]+)`", table)) == CAPABILITIES
