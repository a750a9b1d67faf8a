"""Any pod: Google's CEL and the check in Python say the same; what is no pod is Malformed."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.errors import Malformed
from gpuwarden.harden.kubernetes_admission import PODS
from gpuwarden.harden.kubernetes_rules import VISIBLE_DEVICES
from tests.support.admission import (
    RULES,
    admission,
    by_cel,
    by_python,
    costs,
    large_pod,
    pod,
    volume,
)

NAMES = st.sampled_from([*VISIBLE_DEVICES[:2], "PATH", "nvidia_visible_devices", ""])
VALUES = st.sampled_from(["all", "void", "none", "", "0", " void", "GPU-1", "None"])
RESOURCES = st.dictionaries(
    st.sampled_from(
        ["nvidia.com/gpu", "nvidia.com/hostdev", "cpu", "amd.com/gpu", "xnvidia.com/gpu"]
    ),
    st.sampled_from(["0", "1", "0m", "00", "10", "+1", "0.0", "1k", 0, 2]),
    max_size=2,
)


def sometimes(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


PIECES = st.sampled_from(
    ["/", "//", ".", "..", "dev", "nvidia0", "dri", "run", "var", "docker.sock", "x", "\n", "proc"]
)
PATHS = st.lists(PIECES, max_size=7).map("".join)
CONTAINER = sometimes(
    securityContext=sometimes(
        privileged=st.booleans(),
        capabilities=sometimes(
            add=st.lists(st.sampled_from(["SYS_ADMIN", "all", "CHOWN", "\n"]), max_size=2)
        ),
    ),
    env=st.lists(
        st.fixed_dictionaries(
            {"name": NAMES}, optional={"value": VALUES, "valueFrom": st.just({"fieldRef": {}})}
        ),
        max_size=3,
    ),
    resources=sometimes(
        limits=RESOURCES,
        requests=RESOURCES,
        claims=st.lists(st.fixed_dictionaries({"name": st.sampled_from("ab")}), max_size=2),
    ),
    volumeMounts=st.lists(st.fixed_dictionaries({"mountPath": PATHS}), max_size=1),
)


def numbered(prefix: str, least: int = 0) -> st.SearchStrategy[list[dict[str, Any]]]:
    return st.lists(CONTAINER, min_size=least, max_size=2).map(
        lambda found: [{"name": f"{prefix}{at}", **one} for at, one in enumerate(found)]
    )


POD = st.builds(
    lambda metadata, spec, containers: {
        "metadata": metadata,
        "spec": {"containers": containers, **spec},
    },
    sometimes(
        annotations=st.dictionaries(
            st.sampled_from(["cdi.k8s.io/a", "cdi.k8s.io", "a", "devices.nri.io/pod", ""]),
            st.text(max_size=2),
            max_size=2,
        )
    ),
    sometimes(
        hostPID=st.booleans(),
        runtimeClassName=st.sampled_from(["nvidia", "nvidia-legacy", "runc", "xnvidia", ""]),
        initContainers=numbered("i"),
        ephemeralContainers=numbered("e"),
        volumes=st.lists(
            st.fixed_dictionaries(
                {"name": st.sampled_from("uvw")},
                optional={
                    "hostPath": st.fixed_dictionaries({"path": PATHS}),
                    "emptyDir": st.just({}),
                },
            ),
            max_size=3,
        ),
        resourceClaims=st.lists(st.fixed_dictionaries({"name": st.sampled_from("ab")}), max_size=2),
    ),
    numbered("c", 1),
)


def in_order(said: dict[str, list[str]]) -> dict[str, list[str]]:
    """An object's keys have no order in CEL."""
    return {rule: sorted(names) for rule, names in said.items()}


@settings(max_examples=150, deadline=None)
@given(POD)
def test_both_say_the_same_of_any_pod(one: dict[str, Any]) -> None:
    said = by_python(one)
    assert in_order(by_cel(one)) == in_order(said)
    assert bool(admission(PODS.name).refusals(one)) == bool(said)


@settings(max_examples=150, deadline=None)
@given(PATHS)
def test_both_say_the_same_of_any_path(path: str) -> None:
    one = pod(volumes=[volume(path)])
    assert by_cel(one) == by_python(one)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["name", "env", "hostPath", "path", "resources", "limits", "containers"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["containers", "volumes", "resourceClaims", "hostPID", "initContainers"]),
        ANYTHING,
    )
)
def test_what_is_no_pod_is_said_to_be_none(spec: dict[str, Any]) -> None:
    with suppress(Malformed):
        RULES.broken(spec, {})


# ---------------------------------------------------------------- what it costs

PER_EXPRESSION = 1_000_000
PER_BINDING = 10_000_000
"""Limits of the API server, in its own units; what is beyond them is refused."""


@pytest.mark.parametrize(
    "piece", ["./", "//", "proc/", "proc/./1/", "dev/", "x/../", "task/1/./", "a"]
)
def test_a_path_of_many_parts_is_looked_at_once(piece: str) -> None:
    """Expressions that try every way to read it would not come back from these."""
    for start in ("/proc/", "/proc/1/task/", "/dev/", "/", "var/run/"):
        one = pod(volumes=[volume(start + piece * (4000 // len(piece)) + "\n")])
        assert by_cel(one) == by_python(one)


def test_a_longer_text_is_said_to_be_unread() -> None:
    with pytest.raises(Malformed):
        by_python(pod(volumes=[volume("/" + "x" * 5000)]))
    assert by_cel(pod(volumes=[volume("/" + "x" * 5000)])) == {}


def test_a_large_honest_pod_costs_far_less_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    told = costs(large_pod(), monkeypatch)
    assert set(told) == {"requesting", *(rule.name for rule in RULES.rules)}
    assert max(told.values()) * 2 < PER_EXPRESSION, told
    # Each variable is worked out once, and read by its validation.
    assert sum(told.values()) * 2 < PER_BINDING, told
    assert min(told[name] for name in ("requesting", "visibleDevices", "devicesByMount")) > 1000
