"""The rights that are asked for are those that are used, and hold the agent to its own node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpuwarden.respond import kubernetes_rights
from gpuwarden.respond.kubernetes import Cordon
from tests.support.admission import Admission
from tests.support.kubernetes_api import kubernetes_validate
from tests.support.kubernetes_target import deleting, done, known_target, target


def test_the_rights_are_those_that_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with known_target(tmp_path, monkeypatch) as api:
        done(Cordon(), target())
        done(deleting(), target())
    verbs = {"GET": "get", "PATCH": "patch", "DELETE": "delete"}
    used = {
        (verbs[request.method], "nodes" if "/nodes/" in request.path else "pods")
        for request in api.asked
    }
    granted = {
        (verb, resource)
        for rule in kubernetes_rights.RULES
        for verb in rule["verbs"]
        for resource in rule["resources"]
    }
    assert used == granted


@pytest.mark.parametrize("version", ["1.30", "1.32", "1.34", "1.37"])
def test_rights_and_their_policy_are_valid(version: str) -> None:
    made = (
        kubernetes_rights.cluster_role(),
        *kubernetes_rights.own_node_policy("gpuwarden", "gpuwarden"),
    )
    for one in made:
        kubernetes_validate.validate(one, version, strict=True)


def test_the_agent_is_held_to_its_own_node() -> None:
    policy = kubernetes_rights.own_node_policy("gpuwarden", "agent")[0]
    evaluated = Admission(policy)
    account = "system:serviceaccount:gpuwarden:agent"
    extra = {"authentication.kubernetes.io/node-name": ["n1"]}
    mine = {"username": account, "extra": extra}
    node = {"metadata": {"name": "n1", "labels": {"a": "b"}}, "spec": {"taints": []}}
    cordoned = {**node, "spec": {"taints": [], "unschedulable": True}}

    def refused(operation: str, new: Any, old: Any, who: dict[str, Any]) -> int:
        request = {"operation": operation, "userInfo": who}
        return len(evaluated.refusals(new, old, request=request))

    assert evaluated.matches(cordoned, node, request={"userInfo": mine})
    assert not evaluated.matches(cordoned, node, request={"userInfo": {"username": "a person"}})
    assert refused("UPDATE", cordoned, node, mine) == 0
    assert refused("UPDATE", node, cordoned, mine) == 0
    other = {**node, "metadata": {"name": "n2"}}
    assert refused("UPDATE", {**other, "spec": {"unschedulable": True}}, other, mine) > 0
    for changed in (
        {**node, "metadata": {"name": "n1", "labels": {"a": "c"}}},
        {**node, "metadata": {"name": "n1"}},
        {**node, "spec": {}},
        {**node, "spec": {"taints": [{"key": "x"}]}},
        {**node, "spec": {"taints": [], "providerID": "x"}},
    ):
        assert refused("UPDATE", changed, node, mine) == 1
    here, there = ({"spec": {"nodeName": name}} for name in ("n1", "n2"))
    assert refused("DELETE", None, here, mine) == 0
    assert refused("DELETE", None, there, mine) == 1
    assert refused("DELETE", None, {"spec": {}}, mine) == 1
    assert refused("DELETE", None, here, {"username": account}) == 1
    assert refused("DELETE", None, here, {"username": account, "extra": {}}) == 1
