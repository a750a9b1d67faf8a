"""What a pod must not do about GPUs: one table, from which come the CEL text and the check here.

A rule names the containers, volumes, annotations or claims that break it. A claim of Dynamic
Resource Allocation does not count as a request for a GPU here: which device class it is for stands
in another object, which admission of the pod does not see.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from gpuwarden.errors import Malformed, UsageError
from gpuwarden.harden import kubernetes_paths as paths
from gpuwarden.harden.kubernetes_conditions import (
    Both,
    Bound,
    Condition,
    Either,
    Filled,
    Has,
    IsTrue,
    Listed,
    Matches,
    Not,
    OneOf,
    Same,
    Some,
    SomeAmount,
    items,
    literal,
)

GPU_RESOURCES: Final = (
    "nvidia.com/*gpu*",
    "nvidia.com/mig-*",
    "amd.com/*gpu*",
    "gpu.intel.com/*",
    "habana.ai/*",
)
"""Not all of ``nvidia.com/*``: its network plugins hand out adapters under that name."""
RUNTIME_CLASSES: Final = ("nvidia*", "habana*", "amd-gpu*")
VISIBLE_DEVICES: Final = (
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_MIG_CONFIG_DEVICES",
    "NVIDIA_MIG_MONITOR_DEVICES",
    "NVIDIA_IMEX_CHANNELS",
    "AMD_VISIBLE_DEVICES",
    "HABANA_VISIBLE_DEVICES",
)
"""Variables by which a container asks its runtime for accelerators, past the kubelet."""
ADMIN_CAPABILITIES: Final = "(?i)^(cap_)?(sys_admin|all)$"
"""Runtimes take them in any case, some with the kernel's prefix."""
NO_DEVICES: Final = ("void", "none", "")
DEVICE_ANNOTATIONS: Final = (
    "cdi.k8s.io",
    "cdi.nri.io",
    "cdi-devices.nri.io",
    "cdi-devices.noderesource.dev",
    "devices.nri.io",
    "devices.noderesource.dev",
    "devices.gke.io",
    "mounts.nri.io",
    "mounts.noderesource.dev",
    "io.kubernetes.cri-o.Devices",
)
"""Annotations that the runtime, or a plugin of it, takes for a wish for devices or mounts."""

_GLOB = re.compile(r"[A-Za-z0-9*][A-Za-z0-9._/*-]{0,252}", re.ASCII)

CONTAINERS: Final = "variables.containers"
VOLUMES: Final = "variables.volumes"
ANNOTATIONS: Final = "variables.annotations"
CLAIMS: Final = "variables.claims"


class Rule(Struct, frozen=True):
    """One rule; what breaks it is named by ``named``, or is the pod itself."""

    name: str
    """Of its CEL variable and in reports."""
    over: str | None
    """The list whose elements are asked; None: the pod as a whole."""
    element: str
    """What an element is called in the condition; for a pod the word that names what is wrong."""
    named: str
    """The path of an element's name."""
    condition: Condition
    """Holds of what breaks the rule."""
    message: str
    """What is refused, and what to do instead."""

    @property
    def cel(self) -> str:
        """A list of the names of what breaks the rule."""
        if self.over is None:
            return f"{self.condition.cel} ? [{literal(self.element)}] : []"
        return f"{self.over}.filter({self.element}, {self.condition.cel})" + (
            "" if self.named == self.element else f".map({self.element}, {self.named})"
        )

    def names(self, bound: Bound) -> list[str]:
        """The same in Python. Errors: Malformed."""
        if self.over is None:
            return [self.element] if self.condition.holds(bound) else []
        found = []
        for one in items(bound["variables"][self.over.removeprefix("variables.")], self.over):
            if not self.condition.holds({**bound, self.element: one}):
                continue
            name = one if self.named == self.element else _name(one)
            if not isinstance(name, str):
                raise Malformed(f"{self.over}: a name that is no text")
            found.append(name)
        return found


def _name(one: Any) -> Any:
    if not isinstance(one, Mapping) or "name" not in one:
        raise Malformed("an element without a name")
    return one["name"]


def glob(names: Iterable[str], flag: str = "") -> str:
    """Names in which ``*`` stands for anything, as one regular expression. Errors: UsageError."""
    parts = []
    for name in names:
        if not _GLOB.fullmatch(name) or not name.strip("*/."):
            raise UsageError(f"{flag}: '{name[:80]}' is no name of a Kubernetes resource or class")
        parts.append(name.replace(".", "[.]").replace("*", ".*"))
    return f"^({'|'.join(parts)})$"


def _container_rules() -> Sequence[Rule]:
    # Names of a pod's containers are unique, whatever their kind.
    requests = Listed("c.name", "variables.requesting")
    asks_by_variable = Some(
        "c.env",
        "e",
        Both(
            (
                OneOf("e.name", VISIBLE_DEVICES),
                Either(
                    (
                        Has("e.valueFrom"),
                        Both((Has("e.value"), Not(OneOf("e.value", NO_DEVICES)))),
                    )
                ),
            )
        ),
    )
    mounted = paths.at_or_below(paths.GIVEN_BY_MOUNT)
    return (
        Rule(
            "privileged",
            CONTAINERS,
            "c",
            "c.name",
            IsTrue("c.securityContext.privileged"),
            "A privileged container sees every GPU of its node. Leave out "
            "securityContext.privileged and request a GPU in resources.limits",
        ),
        Rule(
            "adminCapability",
            CONTAINERS,
            "c",
            "c.name",
            Some("c.securityContext.capabilities.add", "k", Matches("k", ADMIN_CAPABILITIES)),
            "With SYS_ADMIN a container gets at its own device rules, and NVIDIA's runtime takes "
            "it for privileged. Leave SYS_ADMIN and ALL out of capabilities.add",
        ),
        Rule(
            "visibleDevices",
            CONTAINERS,
            "c",
            "c.name",
            Both((asks_by_variable, Not(requests))),
            "NVIDIA_VISIBLE_DEVICES (or a variable like it) takes GPUs that nobody allocated. "
            "Leave it out, or set it to void, and request a GPU in resources.limits",
        ),
        Rule(
            "visibleDevicesBesideRequest",
            CONTAINERS,
            "c",
            "c.name",
            Both((asks_by_variable, requests)),
            "NVIDIA_VISIBLE_DEVICES (or a variable like it) beside a request replaces the GPUs "
            "that were allocated by others. Leave it out: the device plugin sets it",
        ),
        Rule(
            "devicesByMount",
            CONTAINERS,
            "c",
            "c.name",
            Some("c.volumeMounts", "m", Matches("m.mountPath", mounted)),
            "A mount below /var/run/nvidia-container-devices asks the runtime for GPUs that nobody "
            "allocated. Leave it out and request a GPU in resources.limits",
        ),
    )


def _volume_rules() -> Sequence[Rule]:
    protected = (*paths.DEVICES, *paths.SOCKETS)
    root = Either(
        (
            Matches("v.hostPath.path", paths.exactly(paths.parents(protected))),
            Matches("v.hostPath.path", paths.at_or_below(paths.PROCESS_ROOTS)),
            Matches("v.hostPath.path", paths.BACKSTEP),
        )
    )
    return (
        Rule(
            "hostPathDevice",
            VOLUMES,
            "v",
            "v.name",
            Matches("v.hostPath.path", paths.at_or_below(paths.DEVICES)),
            "A hostPath of an accelerator's device node passes a GPU in that nobody allocated. "
            "Leave the volume out and request a GPU in resources.limits",
        ),
        Rule(
            "hostPathRoot",
            VOLUMES,
            "v",
            "v.name",
            root,
            "A hostPath of /, /dev or another directory above device nodes or runtime sockets "
            "holds every GPU of the node. Name the directory that is needed, without '..'",
        ),
        Rule(
            "hostPathSocket",
            VOLUMES,
            "v",
            "v.name",
            Matches("v.hostPath.path", paths.at_or_below(paths.SOCKETS)),
            "Behind the kubelet's plugin sockets, CDI's files and the runtime's socket GPUs are "
            "handed out. Only device plugins and agents need them: ask for an exempt namespace",
        ),
    )


def _pod_rules(runtime_classes: str) -> Sequence[Rule]:
    uses_claim = Some(
        CONTAINERS,
        "c",
        Some("c.resources.claims", "r", Same("r.name", "d.name")),
    )
    by_class = Matches("variables.spec.runtimeClassName", runtime_classes)
    annotation = "|".join(name.replace(".", "[.]") for name in DEVICE_ANNOTATIONS)
    touches = tuple(
        Filled(f"variables.{name}")
        for name in (
            "requesting",
            "privileged",
            "adminCapability",
            "visibleDevices",
            "devicesByMount",
            "hostPathDevice",
            "hostPathRoot",
            "hostPathSocket",
            "deviceAnnotations",
            "claims",
        )
    )
    return (
        Rule(
            "deviceAnnotations",
            ANNOTATIONS,
            "a",
            "a",
            Matches("a", f"^({annotation})(/|$)"),
            "This annotation has the runtime put devices in that nobody allocated. Leave it out "
            "and request a GPU in resources.limits",
        ),
        Rule(
            "runtimeClass",
            None,
            "runtimeClassName",
            "",
            Both((by_class, Not(Filled("variables.requesting")))),
            "A GPU runtime class without a request for a GPU lets the image's own environment "
            "take GPUs. Leave runtimeClassName out, or request a GPU in resources.limits",
        ),
        Rule(
            "unusedClaims",
            CLAIMS,
            "d",
            "d.name",
            Not(uses_claim),
            "A resource claim that no container uses keeps a device from others. Name it in "
            "resources.claims of the container that needs it, or leave it out",
        ),
        Rule(
            "hostProcesses",
            None,
            "hostPID",
            "",
            Both(
                (
                    IsTrue("variables.spec.hostPID"),
                    Either((*touches, by_class)),
                )
            ),
            "With hostPID a pod reaches the GPUs of every process of its node. Leave hostPID out",
        ),
    )


class RuleSet(Struct, frozen=True):
    """All rules for one choice of resource names and runtime classes."""

    requesting: Rule
    """Not a rule: the containers that request a GPU, which rules refer to."""
    rules: tuple[Rule, ...]

    def broken(self, spec: Mapping[str, Any], annotations: Mapping[str, Any]) -> dict[str, Any]:
        """Rule → names of what breaks it, of one pod. Errors: Malformed."""
        variables: dict[str, Any] = {
            "spec": spec,
            "annotations": annotations,
            "containers": [
                one
                for kind in ("containers", "initContainers", "ephemeralContainers")
                for one in _listed(spec, kind)
            ],
            "volumes": _listed(spec, "volumes"),
            "claims": _listed(spec, "resourceClaims"),
        }
        bound = {"variables": variables}
        variables["requesting"] = self.requesting.names(bound)
        for rule in self.rules:
            variables[rule.name] = rule.names(bound)
        return {rule.name: variables[rule.name] for rule in self.rules if variables[rule.name]}


def _listed(spec: Mapping[str, Any], field: str) -> list[Any]:
    value = spec.get(field, [])
    if not isinstance(value, list):
        raise Malformed(f"{field}: not a list")
    return value


def rule_set(resources: Iterable[str] = (), runtime_classes: Iterable[str] = ()) -> RuleSet:
    """The rules, with further names of GPU resources and classes. Errors: UsageError."""
    resource = glob((*GPU_RESOURCES, *resources), "--gpu-resource")
    classes = glob((*RUNTIME_CLASSES, *runtime_classes), "--runtime-class")
    requests = Either(
        (
            SomeAmount("c.resources.limits", resource),
            SomeAmount("c.resources.requests", resource),
        )
    )
    return RuleSet(
        Rule("requesting", CONTAINERS, "c", "c.name", requests, ""),
        (*_container_rules(), *_volume_rules(), *_pod_rules(classes)),
    )
