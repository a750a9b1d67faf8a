"""The rules as Kubernetes objects: ValidatingAdmissionPolicies in CEL, each with its binding.

One policy for pods, which is what counts; two for what makes pods, so that the error comes where
the mistake is; one for claims of Dynamic Resource Allocation. Bindings leave namespaces out.
Source: admissionregistration.k8s.io/v1 of Kubernetes 1.30.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from msgspec import Struct

from gpuwarden.harden.kubernetes_conditions import literal
from gpuwarden.harden.kubernetes_rules import RuleSet

API_VERSION: Final = "admissionregistration.k8s.io/v1"
NAMESPACE_LABEL: Final = "kubernetes.io/metadata.name"
"""Set by the API server on every namespace, to its name; nobody can change it."""
ADMIN_ACCESS_MESSAGE: Final = (
    "adminAccess reaches devices that others were allocated. Leave it out; monitoring that "
    "needs it belongs into an exempt namespace"
)


class Kind(Struct, frozen=True):
    """Objects that hold a pod's specification, and where in them it is."""

    name: str
    """Of the policy."""
    title: str
    resources: tuple[tuple[str, str, tuple[str, ...]], ...]
    """(API group, version, resources)."""
    spec: str
    metadata: str
    """Paths in CEL."""


PODS: Final = Kind(
    "gpuwarden-pods",
    "pods",
    (("", "v1", ("pods", "pods/ephemeralcontainers")),),
    "object.spec",
    "object.metadata",
)
TEMPLATES: Final = Kind(
    "gpuwarden-pod-templates",
    "what makes pods",
    (
        ("apps", "v1", ("deployments", "statefulsets", "daemonsets", "replicasets")),
        ("batch", "v1", ("jobs",)),
        ("", "v1", ("replicationcontrollers",)),
    ),
    "object.spec.template.spec",
    "object.spec.template.metadata",
)
CRON_JOBS: Final = Kind(
    "gpuwarden-cron-jobs",
    "cron jobs",
    (("batch", "v1", ("cronjobs",)),),
    "object.spec.jobTemplate.spec.template.spec",
    "object.spec.jobTemplate.spec.template.metadata",
)
KINDS: Final = (PODS, TEMPLATES, CRON_JOBS)
CLAIMS_NAME: Final = "gpuwarden-resource-claims"


def objects(rules: RuleSet, *, exempt: Sequence[str], audit: bool) -> list[dict[str, Any]]:
    """Every policy, each followed by its binding."""
    found = []
    for policy in (*(_pod_policy(kind, rules) for kind in KINDS), _claim_policy()):
        found.append(policy)
        found.append(_binding(policy["metadata"]["name"], exempt, audit=audit))
    return found


def variables(kind: Kind, rules: RuleSet) -> list[dict[str, str]]:
    """The policy's variables in order: what is looked at, then one a rule."""
    metadata = kind.metadata
    has_metadata = "" if metadata == "object.metadata" else f"has({metadata}) && "
    texts = {
        "spec": kind.spec,
        "annotations": f"{has_metadata}has({metadata}.annotations) ? {metadata}.annotations : {{}}",
        # The three kinds of containers have types of their own: dyn() lets them into one list.
        "containers": " + ".join(
            (
                "dyn(variables.spec.containers)",
                _listed("initContainers"),
                _listed("ephemeralContainers") if kind is PODS else "[]",
            )
        ),
        "volumes": _listed("volumes"),
        "claims": _listed("resourceClaims"),
    }
    found = [{"name": name, "expression": text} for name, text in texts.items()]
    found.extend(
        {"name": rule.name, "expression": rule.cel} for rule in (rules.requesting, *rules.rules)
    )
    return found


def _listed(field: str) -> str:
    path = f"variables.spec.{field}"
    return f"(has({path}) ? dyn({path}) : [])"


def _changed(kind: Kind, rules: RuleSet) -> str:
    """Whether a request can break a rule anew.

    What was there before must still be labelled, scaled and ended: an update that leaves alone
    what the rules look at is none of theirs.
    """
    if kind is not PODS:
        old = kind.spec.replace("object.", "oldObject.", 1).removesuffix(".spec")
        new = kind.spec.removesuffix(".spec")
        return f"request.operation == 'CREATE' || {new} != {old}"
    annotation = next(rule for rule in rules.rules if rule.name == "deviceAnnotations")
    old = "oldObject.metadata.annotations"
    new = "object.metadata.annotations"
    return (
        "request.operation == 'CREATE' || "
        "(has(request.subResource) && request.subResource == 'ephemeralcontainers') || "
        f"(has({new}) && {new}.exists(a, {annotation.condition.cel} && "
        f"!(has({old}) && a in {old} && {old}[a] == {new}[a])))"
    )


def _pod_policy(kind: Kind, rules: RuleSet) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": kind.name},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {
                "resourceRules": [
                    {
                        "apiGroups": [group],
                        "apiVersions": [version],
                        "operations": ["CREATE", "UPDATE"],
                        "resources": list(resources),
                    }
                    for group, version, resources in kind.resources
                ]
            },
            "matchConditions": [{"name": "changed", "expression": _changed(kind, rules)}],
            "variables": variables(kind, rules),
            "validations": [
                {
                    "expression": f"size(variables.{rule.name}) == 0",
                    "message": rule.message,
                    "messageExpression": f"{literal(rule.message + ' (')} + "
                    f"variables.{rule.name}.join(', ') + ')'",
                    "reason": "Forbidden",
                }
                for rule in rules.rules
            ],
        },
    }


def _claim_policy() -> dict[str, Any]:
    """No claim with adminAccess, in any version of the API that has it."""
    within = (
        "devices.requests.exists(r, (has(r.adminAccess) && r.adminAccess) || "
        "(has(r.exactly) && has(r.exactly.adminAccess) && r.exactly.adminAccess))"
    )
    return {
        "apiVersion": API_VERSION,
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": CLAIMS_NAME},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {
                "resourceRules": [
                    {
                        "apiGroups": ["resource.k8s.io"],
                        "apiVersions": ["*"],
                        "operations": ["CREATE", "UPDATE"],
                        "resources": ["resourceclaims", "resourceclaimtemplates"],
                    }
                ]
            },
            "matchConditions": [
                {
                    "name": "changed",
                    "expression": "request.operation == 'CREATE' || object.spec != oldObject.spec",
                }
            ],
            "variables": [
                {
                    "name": "spec",
                    "expression": "has(dyn(object).spec.spec) ? dyn(object).spec.spec : "
                    "dyn(object).spec",
                }
            ],
            "validations": [
                {
                    "expression": "!(has(variables.spec.devices) && "
                    "has(variables.spec.devices.requests) && "
                    f"variables.spec.{within})",
                    "message": ADMIN_ACCESS_MESSAGE,
                    "reason": "Forbidden",
                }
            ],
        },
    }


def _binding(name: str, exempt: Sequence[str], *, audit: bool) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "policyName": name,
        "validationActions": ["Warn", "Audit"] if audit else ["Deny", "Audit"],
    }
    if exempt:
        spec["matchResources"] = {
            "namespaceSelector": {
                "matchExpressions": [
                    {
                        "key": NAMESPACE_LABEL,
                        "operator": "NotIn",
                        "values": sorted(set(exempt)),
                    }
                ]
            }
        }
    return {
        "apiVersion": API_VERSION,
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": name},
        "spec": spec,
    }
