"""What the Kubernetes steps of `respond` need of the API, as RBAC rules: nothing beside it.

RBAC cannot say "the node that I run on": a service account that may patch one node may patch all.
`own_node_policy` says it, by the node's name that the API server writes into the tokens of pods.
Source: RBAC v1; admissionregistration v1; tokens carry the node since Kubernetes 1.30.
"""

from __future__ import annotations

from typing import Any, Final

ROLE_NAME: Final = "gpuwarden-respond"
POLICY_NAME: Final = "gpuwarden-own-node"

CORDON_RULES: Final[tuple[dict[str, Any], ...]] = (
    {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "patch"]},
)
"""``cordon``: a ClusterRole, since nodes have no namespace. Where a person's own account is given
these for some nodes only, ``resourceNames`` names them."""

DELETE_POD_RULES: Final[tuple[dict[str, Any], ...]] = (
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "delete"]},
)
"""``delete-pod``: a Role in each namespace whose pods may be deleted, or a ClusterRole."""

RULES: Final[tuple[dict[str, Any], ...]] = CORDON_RULES + DELETE_POD_RULES
"""Both, for a ClusterRole. No list, no watch, no secrets, no eviction, no exec."""

READ_RULES: Final[tuple[dict[str, Any], ...]] = (
    {"apiGroups": [""], "resources": ["pods", "services"], "verbs": ["list"]},
)
"""`harden kubernetes --cluster`, run by a person with an account of their own: not the agent's."""

_NODE: Final = "request.userInfo.extra['authentication.kubernetes.io/node-name'][0]"
_HAS_NODE: Final = (
    "has(request.userInfo.extra) && "
    "'authentication.kubernetes.io/node-name' in request.userInfo.extra"
)
_UNCHANGED: Final = (
    "metadata.labels",
    "metadata.annotations",
    "metadata.finalizers",
    "metadata.ownerReferences",
    "spec.taints",
    "spec.podCIDR",
    "spec.podCIDRs",
    "spec.providerID",
    "spec.configSource",
)
"""All of a node that an update without subresource can change, but ``spec.unschedulable``."""


def _same(field: str) -> str:
    new, old = f"object.{field}", f"oldObject.{field}"
    return f"has({new}) == has({old}) && (!has({new}) || {new} == {old})"


def cluster_role() -> dict[str, Any]:
    """The ClusterRole for both steps."""
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": ROLE_NAME},
        "rules": [dict(rule) for rule in RULES],
    }


def own_node_policy(namespace: str, service_account: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A ValidatingAdmissionPolicy and its binding that hold a service account to its own node.

    It may cordon that node and change nothing else of it, and delete pods of that node only. A
    token without a node, which a pod never has, may do neither.
    """
    policy = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": POLICY_NAME},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {
                "resourceRules": [
                    {
                        "apiGroups": [""],
                        "apiVersions": ["v1"],
                        "operations": ["UPDATE"],
                        "resources": ["nodes"],
                    },
                    {
                        "apiGroups": [""],
                        "apiVersions": ["v1"],
                        "operations": ["DELETE"],
                        "resources": ["pods"],
                    },
                ]
            },
            "matchConditions": [
                {
                    "name": "this-account",
                    "expression": "request.userInfo.username == "
                    f"'system:serviceaccount:{namespace}:{service_account}'",
                }
            ],
            "validations": [
                {
                    "expression": f"{_HAS_NODE} && (request.operation == 'DELETE' ? "
                    f"oldObject.spec.nodeName == {_NODE} : oldObject.metadata.name == {_NODE})",
                    "message": "gpuwarden acts on the node that it runs on, and on no other",
                },
                {
                    "expression": "request.operation == 'DELETE' || ("
                    + " && ".join(_same(field) for field in _UNCHANGED)
                    + ")",
                    "message": "gpuwarden changes whether a node is schedulable, nothing else",
                },
            ],
        },
    }
    binding = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": POLICY_NAME},
        "spec": {"policyName": POLICY_NAME, "validationActions": ["Deny"]},
    }
    return policy, binding
