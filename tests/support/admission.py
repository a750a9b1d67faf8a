"""Admission policies evaluated by Google's CEL, as an API server would evaluate them.

What this cannot show of Kubernetes itself: its limits on the cost of an expression, its check of
types against the schemas, and its own functions. Only functions of the CEL standard and `join` of
its strings extension may therefore stand in an expression.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import pytest

from gpuwarden.harden import kubernetes_conditions as conditions
from gpuwarden.harden import kubernetes_rules
from gpuwarden.harden.kubernetes_admission import PODS, objects
from gpuwarden.harden.kubernetes_rules import VISIBLE_DEVICES, RuleSet, rule_set

# By name: the binding has no types.
cel = import_module("cel_expr_python.cel")
ext_strings = import_module("cel_expr_python.ext.ext_strings")

RULES = rule_set()


class Admission:
    """One ValidatingAdmissionPolicy, compiled."""

    def __init__(self, policy: dict[str, Any]) -> None:
        names = ("object", "oldObject", "request", "variables")
        self._environment = cel.NewEnv(
            variables=dict.fromkeys(names, cel.Type.DYN), extensions=[ext_strings.ExtStrings()]
        )
        spec = policy["spec"]
        self._conditions = [self._compiled(one) for one in spec.get("matchConditions", [])]
        self._variables = [(v["name"], self._compiled(v)) for v in spec.get("variables", [])]
        self._validations = [
            (
                self._compiled(one),
                one["message"],
                self._environment.compile(one["messageExpression"])
                if "messageExpression" in one
                else None,
            )
            for one in spec["validations"]
        ]

    def _compiled(self, one: dict[str, Any]) -> Any:
        return self._environment.compile(one["expression"])

    def matches(
        self, new: Any, old: Any = None, *, subresource: str = "", request: Any = None
    ) -> bool:
        """Whether all match conditions hold for a creation, or an update when there is an old."""
        asked = {"operation": "CREATE" if old is None else "UPDATE", **(request or {})}
        if subresource:
            asked["subResource"] = subresource
        data = {"object": new, "oldObject": old, "request": asked}
        return all(_value(one, data) for one in self._conditions)

    def variables(self, new: Any) -> dict[str, Any]:
        """Every variable's value for one object."""
        values: dict[str, Any] = {}
        for name, expression in self._variables:
            values[name] = _value(expression, {"object": new, "variables": values})
        return values

    def refusals(self, new: Any, old: Any = None, *, request: Any = None) -> list[str]:
        """The messages of the validations that one object does not pass, or fail on."""
        data = {"object": new, "oldObject": old, "request": request}
        data["variables"] = self.variables(new)
        return [
            message if told is None else str(_value(told, data))
            for expression, message, told in self._validations
            if not _passes(expression, data)
        ]


def _passes(expression: Any, data: dict[str, Any]) -> bool:
    """What fails is refused: the policies have the failurePolicy Fail."""
    try:
        return bool(_value(expression, data))
    except ValueError:
        return False


def _value(expression: Any, data: dict[str, Any]) -> Any:
    result = expression.eval(data=data)
    if result.type() == cel.Type.ERROR:
        raise ValueError(str(result.value()))
    return result.plain_value()


@cache
def admission(name: str) -> Admission:
    """The policy of that name."""
    return Admission(
        next(o for o in objects(RULES, exempt=[], audit=False) if o["metadata"]["name"] == name)
    )


def pod(*containers: dict[str, Any], annotations: Any = None, **spec: Any) -> dict[str, Any]:
    """A pod of these containers, called c0, c1…"""
    named = [{"name": f"c{number}", **one} for number, one in enumerate(containers or ({},))]
    metadata = {"name": "p"} | ({} if annotations is None else {"annotations": annotations})
    return {"metadata": metadata, "spec": {"containers": named, **spec}}


def volume(path: str) -> dict[str, Any]:
    """A volume v of the host's."""
    return {"name": "v", "hostPath": {"path": path}}


def by_cel(one: dict[str, Any]) -> dict[str, list[str]]:
    """Rule → names of what breaks it, as the policy for pods says."""
    values = admission(PODS.name).variables(one)
    return {rule.name: values[rule.name] for rule in RULES.rules if values[rule.name]}


def by_python(one: dict[str, Any], rules: RuleSet = RULES) -> dict[str, list[str]]:
    """The same as the check in Python says."""
    return rules.broken(one["spec"], one["metadata"].get("annotations", {}))


# ---------------------------------------------------------------- what it costs


def costs(one: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Rule → an estimate of what its expression costs, on the high side.

    An estimate after the API server's published weights: a field or a call is 1, a comprehension
    some 6 an element, a regular expression a tenth of the text times a quarter of its own length.
    """
    spent = 0
    plain_found, plain_look, plain_items = conditions.found, conditions.look_up, conditions.items

    def found(regex: str, value: Any, where: str) -> bool:
        nonlocal spent
        spent += (len(value) // 10 + 1) * (len(regex) // 4 + 1)
        return plain_found(regex, value, where)

    def look_up(path: str, bound: Any) -> Any:
        nonlocal spent
        spent += 3 * len(path.split(".")) + len(VISIBLE_DEVICES)
        return plain_look(path, bound)

    def items(value: Any, where: str) -> Any:
        nonlocal spent
        spent += 6 * len(value)
        return plain_items(value, where)

    monkeypatch.setattr(conditions, "found", found)
    monkeypatch.setattr(conditions, "look_up", look_up)
    monkeypatch.setattr(conditions, "items", items)
    monkeypatch.setattr(kubernetes_rules, "items", items)
    told: dict[str, int] = {}
    plain_names = kubernetes_rules.Rule.names

    def names(rule: kubernetes_rules.Rule, bound: Any) -> list[str]:
        before = spent
        result = plain_names(rule, bound)
        told[rule.name] = spent - before
        return result

    monkeypatch.setattr(kubernetes_rules.Rule, "names", names)
    RULES.broken(one["spec"], one["metadata"].get("annotations", {}))
    return told


def large_pod() -> dict[str, Any]:
    """A pod that is as large as honest ones become: 30 containers, 100 volumes."""
    container = {
        "env": [{"name": f"A_LONG_NAME_OF_A_VARIABLE_{at}", "value": "x"} for at in range(200)],
        "resources": {"limits": {f"example.com/resource-{at}": "1" for at in range(10)}},
        "volumeMounts": [{"mountPath": "/a/path/of/some/length" * 2} for _ in range(50)],
        "securityContext": {"capabilities": {"add": ["NET_BIND_SERVICE"] * 10}},
    }
    volumes = [{"name": f"v{at}", "hostPath": {"path": "/a/path" * 8}} for at in range(100)]
    annotations = {f"example.com/an-annotation-{at}": "x" for at in range(100)}
    return pod(*[container] * 30, volumes=volumes, annotations=annotations)
