"""Admission policies evaluated by Google's CEL, as an API server would evaluate them.

What this cannot show of Kubernetes itself: its limits on the cost of an expression, its check of
types against the schemas, and its own functions. Only functions of the CEL standard and `join` of
its strings extension may therefore stand in an expression.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from gpuwarden.harden.kubernetes_admission import PODS, objects
from gpuwarden.harden.kubernetes_rules import RuleSet, rule_set

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
