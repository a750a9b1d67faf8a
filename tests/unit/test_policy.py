"""The policy file: what it may say, and where a mistake is pointed at."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuwarden.errors import UsageError
from gpuwarden.policy import (
    EnforceRule,
    JitRules,
    KnownGpuWorkload,
    Match,
    Policy,
    PolicyException,
    PolicyProfile,
    PolicyWorkload,
    Thresholds,
    parse_peer,
)
from gpuwarden.policy_file import parse_policy
from gpuwarden.rules.registry import RULE_IDS

WHOLE = b"""\
version: 1
workloads:
  - name: serving
    owner: inference team
    contact: inference@example.org
    match: {pod_namespace: [serve, serve-canary], pod_labels: {app: llm}}
    gpus: [0, GPU-1234, "00000000:3B:00.0"]
    egress: [10.0.0.0/8, "192.0.2.1:443", "[2001:db8::1]:443", "2001:db8::/32"]
    profile: serving
profiles:
  - name: serving
    baselines: [starter, /etc/gpuwarden/baselines/serving.baseline]
    jit: {triton: allow, nvrtc: review}
exceptions:
  - rule: gpu_process_of_other_team
    reason: demonstration
    match: {user: bob}
    expires: 2026-03-01
  - {rule: preload_library_unknown, reason: accounting, path: /etc/ld.so.preload}
  - {rule: gpu_memory_leaked, reason: known fault, gpu: 3}
thresholds: {busy_sm_percent: 90, sustained_minutes: 30, bursts: 6, respawns: 4}
allow_activities: [hash-cracking]
user_known_gpu_workloads:
  - match: {image_digest: "sha256:00", binary: /usr/bin/exporter, user: root}
    reason: reviewed
    expires: 2027-06-30
enforce:
  - {match: {pod_namespace: guests}, reason: guests get no GPU}
sinks: ["syslog:", "webhook:https://alerts.example.org/"]
"""


def test_a_whole_policy_reads() -> None:
    policy = parse_policy(WHOLE, "p.yaml", RULE_IDS)
    assert policy.workloads == [
        PolicyWorkload(
            name="serving",
            owner="inference team",
            contact="inference@example.org",
            match=Match(pod_namespace=["serve", "serve-canary"], pod_labels={"app": "llm"}),
            gpus=[0, "GPU-1234", "00000000:3B:00.0"],
            egress=["10.0.0.0/8", "192.0.2.1:443", "[2001:db8::1]:443", "2001:db8::/32"],
            profile="serving",
        )
    ]
    serving = PolicyProfile(
        name="serving",
        baselines=["starter", "/etc/gpuwarden/baselines/serving.baseline"],
        jit=JitRules(triton="allow", nvrtc="review"),
    )
    assert policy.profiles == [serving]
    assert policy.profile("serving") == serving
    assert policy.profile("training") is None
    assert policy.exceptions[0] == PolicyException(
        rule="gpu_process_of_other_team",
        reason="demonstration",
        match=Match(user="bob"),
        expires=datetime.date(2026, 3, 1),
    )
    assert [(e.path, e.gpu) for e in policy.exceptions[1:]] == [
        ("/etc/ld.so.preload", None),
        (None, 3),
    ]
    assert policy.thresholds == Thresholds(
        busy_sm_percent=90, sustained_minutes=30, bursts=6, respawns=4
    )
    assert policy.user_known_gpu_workloads == [
        KnownGpuWorkload(
            match=Match(image_digest="sha256:00", binary="/usr/bin/exporter", user="root"),
            reason="reviewed",
            expires=datetime.date(2027, 6, 30),
        )
    ]
    assert policy.enforce == [
        EnforceRule(match=Match(pod_namespace="guests"), reason="guests get no GPU")
    ]
    assert policy.sinks == ["syslog:", "webhook:https://alerts.example.org/"]
    assert policy.allow_activities == ["hash-cracking"]


def test_the_documents_example_is_a_policy_and_names_every_key() -> None:
    text = (Path(__file__).parents[2] / "docs" / "policy.md").read_text()
    example = text.split("```yaml\n")[1].split("```")[0]
    policy = parse_policy(example.encode(), "docs/policy.md", RULE_IDS)
    assert all(getattr(policy, key) for key in Policy.__struct_fields__)
    for threshold in Thresholds.__struct_fields__:
        value = getattr(Thresholds(), threshold)
        assert f"\n| `{threshold}` | {value} | " in text


def test_a_jit_class_has_the_rule_that_the_file_gives_it() -> None:
    text = b"profiles: [{name: a, baselines: [starter], jit: {cudnn-jit: review, nvrtc: allow}}]"
    rules = parse_policy(text, "p.yaml").profiles[0].jit
    assert [rules.of(name) for name in ("cudnn-jit", "nvrtc", "triton", "numba", "")] == [
        "review",
        "allow",
        None,
        None,
        None,
    ]


@pytest.mark.parametrize("empty", [b"", b"\n", b"# nothing\n", b"---\n", b"{}"])
def test_an_empty_policy_is_the_default(empty: bytes) -> None:
    assert parse_policy(empty, "p.yaml") == Policy()


MISTAKES = {
    "a key that is not there": (
        "workloads:\n  - name: a\n    matches: {user: b}\n",
        "3:5: unknown key 'matches'; expected one of: name, match, owner,",
    ),
    "a key at the top": ("workload: []\n", "1:1: unknown key 'workload'; expected one of: version"),
    "a key of a match": (
        "workloads: [{name: a, match: {usr: b}}]\n",
        "1:31: unknown key 'usr'; expected one of: pod_namespace,",
    ),
    "a key of the thresholds": (
        "thresholds:\n  busy: 3\n",
        "2:3: unknown key 'busy'; expected one of: busy_sm_percent",
    ),
    "a missing key": ("workloads:\n  - match: {user: b}\n", "2:5: missing key 'name'"),
    "a missing reason": (
        "exceptions:\n  - {rule: process_hidden, match: {user: b}}\n",
        "2:5: missing key 'reason'",
    ),
    "an empty reason": (
        "exceptions:\n  - {rule: process_hidden, match: {user: b}, reason: ' '}\n",
        "2:54: expected the reason",
    ),
    "an empty match": (
        "workloads:\n  - name: a\n    match: {}\n",
        "3:12: expected at least one condition",
    ),
    "an empty list in a match": (
        "workloads: [{name: a, match: {user: []}}]\n",
        "1:30: expected at least one condition",
    ),
    "an empty name": ("workloads: [{name: '', match: {user: b}}]\n", "1:20: expected a name"),
    "a name twice": (
        "workloads:\n  - {name: a, match: {user: b}}\n  - {name: a, match: {user: c}}\n",
        "3:12: a workload called 'a' stands above already",
    ),
    "a profile that is not there": (
        "workloads:\n  - {name: a, match: {user: b}, profile: c}\n",
        "2:42: no profile is called 'c'; there are none",
    ),
    "a profile of another name": (
        "workloads: [{name: a, match: {user: b}, profile: c}]\n"
        "profiles: [{name: d, baselines: [starter]}]\n",
        "1:50: no profile is called 'c'; expected one of: d",
    ),
    "a profile twice": (
        "profiles:\n  - {name: a, baselines: [starter]}\n  - {name: a, baselines: [starter]}\n",
        "3:12: a profile called 'a' stands above already",
    ),
    "a profile without a name": (
        "profiles: [{name: '', baselines: [starter]}]\n",
        "1:19: expected a name that is not empty",
    ),
    "a profile that knows nothing": (
        "profiles: [{name: a, baselines: []}]\n",
        "1:33: expected at least one baseline",
    ),
    "a baseline that is no path": (
        "profiles: [{name: a, baselines: [starter, torch.baseline]}]\n",
        "1:43: expected the absolute path of a baseline file, or the word starter",
    ),
    "a JIT class that is none": (
        "profiles:\n  - name: a\n    baselines: [starter]\n    jit: {numba: allow}\n",
        "4:11: unknown key 'numba'; expected one of: triton, nvrtc, nvjitlink, cudnn-jit",
    ),
    "a JIT rule that is none": (
        "profiles: [{name: a, baselines: [starter], jit: {triton: deny}}]\n",
        "1:58: invalid enum value 'deny'",
    ),
    "an unknown key of a profile": (
        "profiles: [{name: a, baseline: [starter]}]\n",
        "1:22: unknown key 'baseline'; expected one of: name, baselines, jit",
    ),
    "a wide exception": (
        "exceptions:\n  - {rule: process_hidden, reason: x}\n",
        "2:5: expected a narrow match, a path or a gpu",
    ),
    "no such rule": (
        "exceptions:\n  - {rule: hidden, reason: x, gpu: 0}\n",
        "2:12: no rule is called 'hidden'; expected one of: accelerator_node_made,",
    ),
    "no such date": (
        "exceptions:\n  - rule: process_hidden\n    reason: x\n    gpu: 0\n    expires: soon\n",
        "5:14: ",
    ),
    "a date that is none": (
        "exceptions: [{rule: process_hidden, reason: x, gpu: 0, expires: 2026-02-30}]\n",
        "1:65: ",
    ),
    "a time where a date belongs": (
        "exceptions: [{rule: process_hidden, reason: x, gpu: 0, expires: 2026-02-03 10:00:00}]\n",
        "1:65: expected 'date",
    ),
    "a number as a word": ("workloads: [{name: a, match: {user: 5}}]\n", "1:37: expected"),
    "a word as a list": ("workloads: a\n", "1:12: expected 'array', got 'str'"),
    "a word as gpus": ("workloads: [{name: a, match: {user: b}, gpus: some}]\n", "1:47: "),
    "a truth as a gpu": ("workloads: [{name: a, match: {user: b}, gpus: [yes]}]\n", "1:48: "),
    "an activity that is none": ("allow_activities: [mining]\n", "1:20: "),
    "a percentage above 100": (
        "thresholds: {busy_sm_percent: 800}\n",
        "1:31: expected 'int' <= 100",
    ),
    "another version": ("version: 2\n", "1:10: "),
    "a host name as a peer": (
        "workloads:\n  - name: a\n    match: {user: b}\n    egress: [10.0.0.1, pool.example]\n",
        "4:24: expected an address, address:port or network/prefix; names are never resolved",
    ),
    "a port that is none": (
        "workloads: [{name: a, match: {user: b}, egress: ['10.0.0.1:99999']}]\n",
        "1:50: expected an address, address:port",
    ),
    "a key twice": ("workloads: []\nworkloads: []\n", "2:1: the key 'workloads' stands here twice"),
    "a list at the top": ("- a\n", "1:1: expected keys such as 'workloads:'"),
    "a word at the top": ("hello\n", "1:1: expected keys such as 'workloads:'"),
    "an unknown key of a known workload": (
        "user_known_gpu_workloads:\n  - {match: {image: a}, reason: x, rule: y}\n",
        "2:36: unknown key 'rule'; expected one of: match, reason, expires",
    ),
    "an unknown key of its match": (
        "user_known_gpu_workloads: [{match: {imag: a}, reason: x}]\n",
        "1:37: unknown key 'imag'; expected one of: pod_namespace,",
    ),
    "a known workload without a reason": (
        "user_known_gpu_workloads:\n  - match: {image: a}\n    reason: ''\n",
        "3:13: expected a reason that is not empty",
    ),
    "a known workload by its binary alone": (
        "user_known_gpu_workloads:\n  - match: {binary: /usr/bin/x, user: root}\n    reason: y\n",
        "2:12: expected at least one condition of a container: pod_namespace, pod_name,",
    ),
    "a known workload by its unit": (
        "user_known_gpu_workloads:\n  - match: {image: a, unit: b.service}\n    reason: y\n",
        "2:23: 'unit' says nothing of a container; expected one of: pod_namespace, pod_name, "
        "pod_labels, image, image_digest, user, binary (at",
    ),
    "a denial of everything": (
        "enforce:\n  - {match: {}, reason: x}\n",
        "2:13: expected at least one condition of a container: pod_namespace,",
    ),
    "a denial by an empty list": (
        "enforce:\n  - {match: {pod_name: []}, reason: x}\n",
        "2:13: expected at least one condition of a container",
    ),
    "a denial by what no runtime confirms": (
        "enforce:\n  - match:\n      image: a\n      user: root\n    reason: x\n",
        "4:7: 'user' says nothing of a container; expected one of: pod_namespace, pod_name, "
        "pod_labels, image, image_digest (at enforce[0].match.user)",
    ),
    "a denial without a reason": (
        "enforce:\n  - {match: {image: a}, reason: ' '}\n",
        "2:33: expected a reason that is not empty",
    ),
    "a denial that expires": (
        "enforce: [{match: {image: a}, reason: x, expires: 2027-01-01}]\n",
        "1:42: unknown key 'expires'; expected one of: match, reason",
    ),
    "an empty sink": ("sinks: ['syslog:', ' ']\n", "1:20: expected a sink"),
    "a sink that is no word": ("sinks: [1]\n", "1:9: expected 'str'"),
    "one sink without a list": ("sinks: stdout\n", "1:8: expected 'array'"),
    "too few bursts": ("thresholds: {bursts: 1}\n", "1:22: expected 'int' >= 2"),
    "no minutes": ("thresholds: {sustained_minutes: 0}\n", "1:33: expected 'int' >= 1"),
    "too short a wait": (
        "thresholds: {memory_after_exit_seconds: 4}\n", "1:41: expected 'int' >= 5",
    ),
    "too many respawns": ("thresholds: {respawns: 65}\n", "1:24: expected 'int' <= 64"),
    "broken YAML": ("workloads: [\n", "2:1: "),
    "a tab": ("workloads:\n\t- a\n", "2:1: "),
    "two documents": ("version: 1\n---\nversion: 1\n", "2:1: "),
    "a list as a key": ("? [a]\n: b\n", "1:3: expected a plain word as the key"),
    "a tag of ours to construct": ("version: !!python/name:os.system x\n", "1:10: "),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_pointed_at_with_what_was_expected(mistake: str) -> None:
    text, wanted = MISTAKES[mistake]
    with pytest.raises(UsageError) as caught:
        parse_policy(text.encode(), "p.yaml", RULE_IDS)
    assert str(caught.value).startswith(f"p.yaml:{wanted}"), str(caught.value)


def test_not_utf_8_is_pointed_at() -> None:
    with pytest.raises(UsageError, match=r"^p\.yaml:2:1: not UTF-8"):
        parse_policy(b"version: 1\n# \xff\n", "p.yaml")


def test_a_huge_file_is_refused() -> None:
    with pytest.raises(UsageError, match="larger than 1 MiB"):
        parse_policy(b"#" * ((1 << 20) + 1), "p.yaml")


@pytest.mark.parametrize(
    "bomb",
    [
        "a: &a [x]\n" + "".join(f"{c}: &{c} [{', '.join('*' + p for _ in range(9))}]\n"
                                for p, c in zip("abcdefgh", "bcdefghi", strict=True)),
        "a: &a [*a]\n",
        "a: &a {b: *a}\n",
        "[" * 900,
        "{a: " * 900,
        "- " * 900 + "a",
        "version: " + "9" * 6000,
        "version: 0x" + "f" * 6000,
        "version: 1:" + "59:" * 3000 + "1",
        "expires: 99999-99-99",
        "x: !!timestamp 0000-00-00",
        "x: !!binary '='",
        "x: .nan",
        "workloads: [" + "{name: a, match: {user: b}}," * 20000 + "]",
        "\ufeffversion: 1",
        "x: \"\\ud800\"",
        "%YAML 9.9\n---\nversion: 1",
    ],
)  # fmt: skip
def test_a_hostile_file_is_one_clear_error_or_a_policy(bomb: str) -> None:
    try:
        parse_policy(bomb.encode(), "p.yaml", RULE_IDS)
    except UsageError as error:
        assert re.match(r"p\.yaml:\d+:\d+: .", str(error))


TOKENS = st.sampled_from(
    "version workloads exceptions thresholds user_known_gpu_workloads enforce sinks "
    "name match user image rule reason gpu gpus expires path "
    "egress 1 0 -1 a all null true 2026-01-01 process_hidden & * ! !!int !!map &a *a << ? [ ] { } "
    ": - , | > # ' \" % @ ` ~ .inf 1e999 0x0".split()
)
GLUE = st.sampled_from(["", " ", "\n", "\n  ", ": ", "\t", "\n- "])


@given(
    st.one_of(
        st.binary(max_size=200), st.text(max_size=200).map(lambda t: t.encode("utf-8", "ignore"))
    )
)
@example(b"? ")
@example(b"\x00")
def test_any_bytes_are_a_policy_or_one_error(data: bytes) -> None:
    try:
        assert isinstance(parse_policy(data, "p.yaml", RULE_IDS), Policy)
    except UsageError as error:
        assert str(error).startswith("p.yaml:")


@given(st.lists(st.tuples(TOKENS, GLUE), max_size=30))
def test_anything_like_yaml_is_a_policy_or_one_error(parts: list[tuple[str, str]]) -> None:
    text = "".join(token + glue for token, glue in parts)
    try:
        assert isinstance(parse_policy(text.encode(), "p.yaml", RULE_IDS), Policy)
    except UsageError as error:
        assert re.match(r"p\.yaml:\d+:\d+: .", str(error))


VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.dates(), st.text(max_size=8)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from("name match user image gpus egress rule reason expires gpu".split()),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(
        st.sampled_from(
            "version workloads exceptions thresholds allow_activities user_known_gpu_workloads "
            "enforce sinks".split()
        ),
        VALUES,
    )
)
def test_any_values_in_the_right_places_are_a_policy_or_one_error(document: object) -> None:
    import yaml

    data = yaml.safe_dump(document, allow_unicode=True).encode("utf-8", "ignore")
    try:
        policy = parse_policy(data, "p.yaml", RULE_IDS)
    except UsageError as error:
        assert re.match(r"p\.yaml:\d+:\d+: .", str(error))
    else:
        dates = [e.expires for e in policy.exceptions]
        dates += [known.expires for known in policy.user_known_gpu_workloads]
        assert all(date is None or type(date) is datetime.date for date in dates)


@given(st.text(max_size=30))
def test_any_text_is_a_peer_or_a_value_error(text: str) -> None:
    try:
        network, port = parse_peer(text)
    except ValueError:
        return
    assert port is None or 0 <= port <= 65535
    assert network.version in (4, 6)
