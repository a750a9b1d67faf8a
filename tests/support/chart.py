"""The Helm chart rendered by the real helm, and what it made held against Kubernetes' schemas."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonschema
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm/gpuwarden"
HELM = str(Path(sys.executable).with_name("helm"))
VERSIONS = ("1.25", "1.29", "1.30", "1.31", "1.33", "1.37")
IMAGE = {"repository": "registry.example.com/gpuwarden", "digest": f"sha256:{'1' * 64}"}
EVERYTHING: dict[str, Any] = {
    "metrics": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboard": {"enabled": True},
    },
    "policy": {"content": {"version": 1, "evidence": {"on": "critical"}}},
    "signingKey": {"existingSecret": "gpuwarden-key"},
    "gpu": {"runtimeClassName": "nvidia"},
    "enforce": {"enabled": True, "dryRun": False, "pin": True},
    "respond": {"cordon": True, "deletePod": True, "namespaces": ["training", "batch"]},
    "priorityClass": {"create": True},
    "networkPolicy": {
        "enabled": True,
        "egress": [{"to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}], "ports": [{"port": 9093}]}],
    },
    "affinity": {"podAffinity": {}},
    "imagePullSecrets": [{"name": "pull"}],
    "extraEnv": [{"name": "A", "value": "b"}],
    "extraVolumes": [{"name": "baselines", "configMap": {"name": "baselines"}}],
    "extraVolumeMounts": [{"name": "baselines", "mountPath": "/baselines"}],
}

# kubernetes_validate has no schemas of the Prometheus operator's: the fields that the chart uses,
# as its documentation of monitoring.coreos.com/v1 names them.
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
OPERATOR_SCHEMAS: dict[str, dict[str, Any]] = {
    "ServiceMonitor": {
        "type": "object",
        "required": ["endpoints", "selector"],
        "additionalProperties": False,
        "properties": {
            "jobLabel": {"type": "string"},
            "sampleLimit": {"type": "integer", "minimum": 0},
            "selector": {
                "type": "object",
                "required": ["matchLabels"],
                "additionalProperties": False,
                "properties": {"matchLabels": _TEXTS},
            },
            "namespaceSelector": {
                "type": "object",
                "additionalProperties": False,
                "properties": {"matchNames": {"type": "array", "items": {"type": "string"}}},
            },
            "endpoints": {
                "type": "array",
                "items": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "port": {"type": "string"},
                        "interval": {"type": "string", "pattern": "^([0-9]+(ms|s|m|h))+$"},
                        "relabelings": {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "additionalProperties": False,
                                "properties": {
                                    "action": {"enum": ["replace"]},
                                    "sourceLabels": {"type": "array", "items": {"type": "string"}},
                                    "targetLabel": {"type": "string"},
                                },
                            },
                        },
                    },
                },
            },
        },
    },
    "PrometheusRule": {
        "type": "object",
        "required": ["groups"],
        "additionalProperties": False,
        "properties": {
            "groups": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["name", "rules"],
                    "additionalProperties": False,
                    "properties": {
                        "name": {"type": "string", "minLength": 1},
                        "rules": {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "required": ["alert", "expr"],
                                "additionalProperties": False,
                                "properties": {
                                    "alert": {"type": "string"},
                                    "expr": {"type": "string"},
                                    "for": {"type": "string"},
                                    "labels": _TEXTS,
                                    "annotations": _TEXTS,
                                },
                            },
                        },
                    },
                },
            }
        },
    },
}


def helm(*arguments: str, values: dict[str, Any] | None = None) -> tuple[int, str, str]:
    """Runs helm with values on its standard input: (exit code, output, complaint)."""
    given = ("--values", "-") if values is not None else ()
    done = subprocess.run(
        [HELM, *arguments, *given],
        input=yaml.safe_dump(values, allow_unicode=True) if values is not None else None,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def complaint(values: dict[str, Any], version: str = "1.33") -> str:
    """What helm refuses these values with; fails if it does not."""
    code, _, said = _template({"image": IMAGE, **values}, version)
    assert code != 0
    return said


def rendered(
    values: dict[str, Any] | None = None, version: str = "1.33"
) -> dict[tuple[str, str], dict[str, Any]]:
    """(kind, name) → object; fails if helm does, or makes two of one name in one namespace."""
    return copy.deepcopy(_rendered(json.dumps({"image": IMAGE, **(values or {})}), version))


@cache
def _rendered(values: str, version: str) -> dict[tuple[str, str], dict[str, Any]]:
    code, text, said = _template(json.loads(values), version)
    assert code == 0, said
    found = [one for one in yaml.load_all(text, yaml.CSafeLoader) if one is not None]
    by_name = {(one["kind"], _name(one)): one for one in found}
    assert len(by_name) == len(found)
    return by_name


def _template(values: dict[str, Any], version: str) -> tuple[int, str, str]:
    return helm(
        "template", "gpuwarden", str(CHART), "--namespace", "gpu-watch", "--kube-version", version,
        values=values,
    )  # fmt: skip


def _name(one: dict[str, Any]) -> str:
    name: str = one["metadata"]["name"]
    namespace = one["metadata"].get("namespace", "")
    return name if namespace in ("", "gpu-watch") else f"{namespace}/{name}"


def check(one: dict[str, Any], version: str) -> None:
    """Against Kubernetes' own schema, no field unknown. Errors: jsonschema's ValidationError."""
    if one["apiVersion"] == "monitoring.coreos.com/v1":
        assert set(one) == {"apiVersion", "kind", "metadata", "spec"}
        jsonschema.validate(one["spec"], OPERATOR_SCHEMAS[one["kind"]])
        return
    import_module("kubernetes_validate").validate(one, version, strict=True)


def pod_of(objects: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    """The pod's specification in the one DaemonSet."""
    (one,) = (one for (kind, _), one in objects.items() if kind == "DaemonSet")
    spec: dict[str, Any] = one["spec"]["template"]["spec"]
    return spec
