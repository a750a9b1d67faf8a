"""The command: what is printed is taken by Kubernetes' schemas, and says what it does not see."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden import cli
from gpuwarden.errors import Malformed
from gpuwarden.harden import kubernetes_words
from gpuwarden.harden.kubernetes_admission import KINDS, objects
from gpuwarden.harden.kubernetes_pods import judge, parse
from gpuwarden.harden.kubernetes_yaml import comment, stream
from gpuwarden.snapshot import write
from tests.support.admission import RULES, pod
from tests.support.kubernetes_api import api_server, kubernetes_validate
from tests.support.nodes import NodeBuilder, gpu_id

Run = Callable[..., tuple[int, str, str]]
VERSIONS = ("1.30", "1.32", "1.34", "1.37")
PRIVILEGED = {"securityContext": {"privileged": True}}


@pytest.fixture
def run(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> Run:
    """`gpuwarden harden kubernetes` under a policy: exit code, stdout, stderr."""
    monkeypatch.delenv("KUBECONFIG", raising=False)

    def call(*arguments: str, policy: str = "") -> tuple[int, str, str]:
        file = tmp_path / "policy.yaml"
        file.write_text(f"version: 1\n{policy}\n")
        code = cli.main(["harden", "kubernetes", "--policy", str(file), *arguments])
        captured = capsysbinary.readouterr()
        return code, captured.out.decode(), captured.err.decode()

    return call


def documents(text: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(text) if one is not None]


def of_namespace(namespace: str, name: str, *containers: Any, **spec: Any) -> dict[str, Any]:
    one = pod(*containers, **spec)
    one["metadata"] |= {"namespace": namespace, "name": name}
    return one | {"kind": "Pod"}


@pytest.mark.parametrize("version", VERSIONS)
def test_all_that_is_printed_fits_the_schemas(run: Run, version: str) -> None:
    code, text, _ = run(policy="namespaces: {exempt: [kube-system]}")
    assert code == 0
    found = documents(text)
    assert [one["kind"] for one in found] == [
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
    ] * 4
    for one in found:
        kubernetes_validate.validate(one, version, strict=True)
    assert found == objects(RULES, exempt=["kube-system"], audit=False)


def test_the_first_thing_said_is_to_audit_first(run: Run) -> None:
    _, text, _ = run()
    assert "--audit first" in text.split("---", 1)[0]
    _, audited, _ = run("--audit")
    assert "refuse nothing" in audited.split("---", 1)[0]
    actions = [
        {tuple(one["spec"]["validationActions"]) for one in documents(each)[1::2]}
        for each in (text, audited)
    ]
    assert actions == [{("Deny", "Audit")}, {("Warn", "Audit")}]


def test_exempt_namespaces_are_left_out_by_every_binding(run: Run) -> None:
    _, text, _ = run(policy="namespaces: {exempt: [kube-system, 'on', '1e3', 'y', gpu-operator]}")
    for one in documents(text)[1::2]:
        (expression,) = one["spec"]["matchResources"]["namespaceSelector"]["matchExpressions"]
        assert expression == {
            "key": "kubernetes.io/metadata.name",
            "operator": "NotIn",
            "values": ["1e3", "gpu-operator", "kube-system", "on", "y"],
        }
    # Some readers of YAML take these for numbers and truth values.
    assert all(f'"{word}"' in text for word in ("1e3", "on", "y"))
    assert "WARNING" not in text


def test_what_would_stop_a_cluster_is_warned_of(run: Run) -> None:
    assert "WARNING: no namespace is exempt" in run()[1]
    assert "WARNING: kube-system" in run(policy="namespaces: {exempt: [a]}")[1]


def test_what_admission_cannot_see_is_printed(run: Run) -> None:
    text = run()[1].replace("\n#  ", "")
    for word in ("own environment", "envFrom", "valueFrom", "after admission", "static pods"):
        assert word in text
    assert len(kubernetes_words.UNSEEN) >= 10


def test_subresources_kinds_and_failures_are_covered() -> None:
    found = objects(RULES, exempt=[], audit=False)
    for one in found[::2]:
        assert one["spec"]["failurePolicy"] == "Fail"
        names = [v["name"] for v in one["spec"].get("variables", [])]
        assert len(names) == len(set(names))
    assert {kind.name for kind in KINDS} < {one["metadata"]["name"] for one in found}


def schema_has(definition: dict[str, Any], path: list[str], definitions: dict[str, Any]) -> bool:
    while "$ref" in definition or "items" in definition:
        if "$ref" in definition:
            definition = definitions[definition["$ref"].rpartition("/")[2]]
        else:
            definition = definition["items"]
    if not path:
        return True
    own = definition.get("properties", {})
    return path[0] in own and schema_has(own[path[0]], path[1:], definitions)


@pytest.mark.parametrize("version", ["v1.30.0", "v1.37.0"])
def test_every_field_that_is_asked_for_exists(version: str) -> None:
    """In place of the API server's own check of types, which is not to be had here."""
    import importlib.resources
    import re

    file = importlib.resources.files("kubernetes_validate").joinpath(
        f"kubernetes-json-schema/{version}-local/_definitions.json"
    )
    definitions = json.loads(file.read_text())["$defs"]
    core = "io.k8s.api.core.v1"
    kinds = {
        "c": [f"{core}.Container", f"{core}.EphemeralContainer"],
        "e": [f"{core}.EnvVar"],
        "m": [f"{core}.VolumeMount"],
        "v": [f"{core}.Volume"],
        "d": [f"{core}.PodResourceClaim"],
        "r": [f"{core}.ResourceClaim"],
        "variables.spec": [f"{core}.PodSpec"],
    }
    pattern = re.compile(r"\b(variables\.spec|(?<!\.)[cemvdr])((?:\.[a-zA-Z]+)+)(?![\w(])")
    asked = 0
    for policy in objects(RULES, exempt=[], audit=False)[0:6:2]:
        for one in policy["spec"]["variables"]:
            for root, fields in pattern.findall(re.sub(r"r'[^']*'", "''", one["expression"])):
                asked += 1
                path = fields.strip(".").split(".")
                for name in kinds[root]:
                    assert schema_has(definitions[name], path, definitions), (name, path)
    assert asked > 100


# ---------------------------------------------------------------- today's pods


def test_todays_pods_are_named_with_what_refuses_them(run: Run, tmp_path: Path) -> None:
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "controller": True}
    bad = of_namespace("lab", "bad", PRIVILEGED, nodeName="n1")
    bad["metadata"]["ownerReferences"] = [owner | {"uid": "u"}]
    ended = of_namespace("lab", "ended", PRIVILEGED) | {"status": {"phase": "Succeeded"}}
    items = [
        bad,
        ended,
        of_namespace("lab", "good"),
        of_namespace("free", "bad", PRIVILEGED),
        of_namespace("lab", "odd") | {"spec": {"containers": 7}},
    ]
    file = tmp_path / "pods.json"
    file.write_text(json.dumps({"kind": "List", "items": items}))
    code, text, _ = run("--pods", str(file), policy="namespaces: {exempt: [free]}")
    assert code == 1
    told = text.replace("\n#  ", "")
    assert "# - lab/bad (ReplicaSet/r) on n1: privileged: c0\n" in text
    assert "# - lab/odd: cannot be judged: containers: not a list\n" in text
    assert "3 pods judged, 2 of them" in told
    assert "1 in exempt namespaces, 1 have ended" in told
    assert len(documents(text)) == 8
    file.write_text(json.dumps({"kind": "List", "items": [of_namespace("lab", "good")]}))
    assert run("--pods", str(file))[0] == 0


def test_pods_come_from_the_api_server_too(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with api_server(tmp_path, monkeypatch) as api:
        api.page = 2
        for number in range(5):
            securing = {"privileged": number == 4}
            containers = [{"name": "c", "image": "i", "securityContext": securing}]
            api.add_pod("lab", f"p{number}", spec={"containers": containers})
        code, text, _ = run("--cluster")
        assert code == 1
        assert "# - lab/p4: privileged: c\n" in text
        assert "5 pods judged, 1 of them" in text.replace("\n#  ", "")
        assert {request.method for request in api.asked} == {"GET"}
        api.answers = {"GET /api/v1/services": 403}
        code, text, complaint = run("--cluster")
    assert code == 2
    assert "403" in complaint
    assert "Today's pods were not looked at" in text
    assert len(documents(text)) == 8


def test_a_name_cannot_leave_its_comment(run: Run, tmp_path: Path) -> None:
    hostile = "x\n---\nkind: Pod\u2028\x1b[2J\r\u0085"
    file = tmp_path / "pods.json"
    file.write_text(json.dumps(of_namespace(hostile, hostile, PRIVILEGED)))
    code, text, _ = run("--pods", str(file))
    assert code == 1
    assert documents(text) == objects(RULES, exempt=[], audit=False)
    assert not any(sign in text for sign in ("\x1b", "\u2028", "\r", "\u0085"))


@pytest.mark.parametrize("content", ["", "{", "[]", "7", '{"kind":"List"}', '{"kind":"Secret"}'])
def test_a_file_that_holds_no_pods_is_refused(run: Run, tmp_path: Path, content: str) -> None:
    file = tmp_path / "pods.json"
    file.write_text(content)
    code, text, complaint = run("--pods", str(file))
    assert (code, text) == (64, "")
    assert "kubectl get pods" in complaint
    assert run("--pods", str(tmp_path / "none"))[0] == 64


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_are_pods_or_malformed(data: bytes) -> None:
    try:
        found = parse(data, "x")
    except Malformed:
        return
    judge(found.pods, RULES, [])


NESTED = st.recursive(
    st.none() | st.integers() | st.text(max_size=2) | st.just("Pod"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["kind", "items", "spec", "metadata", "status", "ownerReferences"]),
            inner,
        )
    ),
    max_leaves=10,
)


@settings(max_examples=100, deadline=None)
@given(NESTED)
def test_any_json_is_pods_or_malformed(document: Any) -> None:
    try:
        found = parse(json.dumps(document).encode(), "x")
    except Malformed:
        return
    judge(found.pods, RULES, [])


def test_deep_json_is_malformed() -> None:
    with pytest.raises(Malformed):
        parse(b"[" * 100_000, "x")


# ---------------------------------------------------------------- files


def recorded(path: Path) -> None:
    """A recording of a pod of the namespace training that talks to 198.51.100.7."""
    node = NodeBuilder()
    node.gpu(0)
    uid = node.pod("job", namespace="training")
    gpu = (f"uuid:{gpu_id(0)}",)
    node.workload("kubernetes", "training/job", gpu, pod_uid=uid, pod_namespace="training")
    node.process(10, exe="/usr/bin/python3.11", container="job")
    node.client(10, sm_percent=50)
    node.connection(10, "198.51.100.7", 443)
    write(str(path), node.snapshot())


def test_egress_is_learned_from_recordings(run: Run, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.json", "b.json")]
    for file in files:
        recorded(file)
    code, text, _ = run("--from", *map(str, files), policy="namespaces: {gpu: [training, idle]}")
    assert code == 0
    (policy,) = [one for one in documents(text) if one["kind"] == "NetworkPolicy"]
    assert policy["metadata"] == {"name": "gpuwarden-egress", "namespace": "training"}
    assert policy["spec"]["egress"][1]["to"] == [{"ipBlock": {"cidr": "198.51.100.7/32"}}]
    told = text.replace("\n#  ", "")
    assert "seen in 2 recordings" in told
    assert "WARNING: what is rare was not seen" in told
    assert "idle: no egress of an expected process was seen" in told
    assert run("--from", str(tmp_path / "none"), policy="namespaces: {gpu: [x]}")[0] == 64


def test_files_are_written_where_they_are_asked_for(run: Run, tmp_path: Path) -> None:
    recorded(tmp_path / "a.json")
    out = tmp_path / "out"
    arguments = ("--from", str(tmp_path / "a.json"), "-o", str(out))
    code, text, _ = run(*arguments, policy="namespaces: {gpu: [training]}")
    assert code == 0
    names = {"admission.yaml", "egress.yaml", "today.txt", "unseen.txt"}
    assert {file.name for file in out.iterdir()} == names
    assert all(str(out / name) in text for name in names)
    assert len(documents((out / "admission.yaml").read_text())) == 8
    assert documents((out / "egress.yaml").read_text())[0]["kind"] == "NetworkPolicy"
    assert (out / "unseen.txt").read_text().startswith("What admission cannot see")
    target = tmp_path / "elsewhere"
    target.write_text("keep")
    (out / "today.txt").unlink()
    (out / "today.txt").symlink_to(target)
    assert run(*arguments, policy="namespaces: {gpu: [training]}")[0] == 64
    assert target.read_text() == "keep"


def test_other_names_are_checked(run: Run) -> None:
    assert "example[.]com/x" in run("--gpu-resource", "example.com/x")[1]
    assert run("--gpu-resource", "a'b")[0] == 64
    assert run("--runtime-class", "*")[0] == 64


TEXTS = st.text(max_size=200) | st.sampled_from(
    ["y", "no", "1e3", "0x1", "~", "2001-01-01", "=", ""]
)


@settings(max_examples=150, deadline=None)
@given(
    st.recursive(TEXTS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=5)
)
def test_yaml_reads_back_as_it_was(value: Any) -> None:
    assert yaml.safe_load(stream([{"a": value}])) == {"a": value}


@settings(max_examples=150, deadline=None)
@given(st.lists(st.text(max_size=120), max_size=3))
def test_a_comment_is_nothing_but_a_comment(lines: list[str]) -> None:
    assert yaml.safe_load(comment(lines) + "a: 1\n") == {"a": 1}
