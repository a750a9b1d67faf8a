"""What `gpuwarden harden kubernetes` says beside the objects that it prints, a line each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from gpuwarden.harden.kubernetes_pods import Judged, Today
from gpuwarden.outputs.words import moment

REFUSED_SHOWN: Final = 5000
UNSEEN: Final = (
    "an image's own environment: NVIDIA's base images set NVIDIA_VISIBLE_DEVICES=all, and on a "
    "node whose default runtime is NVIDIA's such a pod gets every GPU. On the node set "
    "accept-nvidia-visible-devices-envvar-when-unprivileged = false in the container toolkit's "
    "config.toml, and let the device plugin pass devices as volume mounts or by CDI; gpuwarden "
    "harden host looks at that",
    "environment from elsewhere: envFrom, and the value behind valueFrom (such an entry is refused "
    "where it is called NVIDIA_VISIBLE_DEVICES)",
    "in a pod with a GPU runtime class and a request: the other containers of that pod, whose "
    "images may ask for all GPUs",
    "what is behind a volume claim: a PersistentVolume may be a hostPath of /dev; who may make "
    "PersistentVolumes is RBAC's",
    "links on the node: a hostPath of /srv/x that is a link to /dev",
    "what a resource claim is for: its device class stands in the claim; hold classes to "
    "namespaces by ResourceQuota (NAME.deviceclass.resource.k8s.io/devices)",
    "mutation after admission: what NRI plugins, runtime hooks or the runtime's defaults add on "
    "the node",
    "static pods: the kubelet starts them from files; only their mirrors pass the API server",
    "pods that exist already, until they are made anew; updates of them that touch none of this",
    "what is run in a pod that is there: pods/exec, pods/attach",
    "namespaces that are exempt: who may make pods there may do all of this",
    "a cluster whose API server was told to skip these policies, and who may change them: RBAC on "
    "validatingadmissionpolicies and their bindings is a right to switch them off",
)


def first(*, audit: bool, exempt: Sequence[str]) -> Iterator[str]:
    """What comes before the admission policies."""
    yield "Kubernetes 1.30 or later. Check it first: kubectl apply --dry-run=server -f -"
    if audit:
        yield (
            "These warn and write to the audit log, and refuse nothing. When the warnings are "
            "gone, print and apply them without --audit."
        )
    else:
        yield (
            "These refuse. Apply the output of gpuwarden harden kubernetes --audit first: it warns "
            "and writes to the audit log, for as long as your rarest job needs to come by."
        )
    if not exempt:
        yield (
            "WARNING: no namespace is exempt. Network plugins, kube-proxy, device plugins, the GPU "
            "operator and gpuwarden itself would be refused when they are made anew: name their "
            "namespaces in the policy file under namespaces.exempt."
        )
        return
    yield f"Exempt: {', '.join(sorted(set(exempt)))}. Who may make pods there passes all of this."
    if "kube-system" not in exempt:
        yield (
            "WARNING: kube-system is not exempt. kube-proxy and network plugins are privileged: "
            "they would be refused when they are made anew."
        )


def unseen() -> Iterator[str]:
    """What admission cannot see."""
    yield "What admission cannot see, and these policies therefore do not stop:"
    for line in UNSEEN:
        yield f"- {line}"


def today(judged: Judged | None, found: Today | None, not_looked: str) -> Iterator[str]:
    """Which of today's pods would be refused."""
    if judged is None or found is None:
        yield f"Today's pods were not looked at: {not_looked}"
        return
    yield (
        f"Today, by {found.source}: {judged.judged} pods judged, {len(judged.refused)} of them "
        f"would be refused when they are made anew; {judged.exempt} in exempt namespaces, "
        f"{judged.ended} have ended."
    )
    for one in judged.refused[:REFUSED_SHOWN]:
        yield f"- {one.text}"
    if len(judged.refused) > REFUSED_SHOWN:
        yield f"- and {len(judged.refused) - REFUSED_SHOWN} more"


def no_gpu_namespaces() -> Iterator[str]:
    """Why there are no network policies."""
    yield "No egress policy: the policy file names no namespace under namespaces.gpu."


def before_egress(taken_at_ns: Sequence[int]) -> Iterator[str]:
    """What comes before the network policies."""
    count = len(taken_at_ns)
    span = (
        f"from {moment(min(taken_at_ns))} to {moment(max(taken_at_ns))}"
        if count > 1
        else f"at {moment(taken_at_ns[0])}"
        if count
        else "never"
    )
    yield (
        f"Egress as it was seen in {count} recording{'s' if count != 1 else ''}, {span}. WARNING: "
        "what is rare was not seen: a checkpoint once a night, a licence server, another node. "
        "Each becomes a failure under this policy. Record for days (gpuwarden snapshot, --from) "
        "and read the list before you apply it."
    )
    yield (
        "Only GPU processes are seen, not their pods' other containers. A policy needs a network "
        "plugin that enforces it. DNS is allowed to kube-dns in kube-system: change that where "
        "names are resolved elsewhere."
    )
