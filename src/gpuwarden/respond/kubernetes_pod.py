"""A step of a plan: the process's pod is deleted, that very one, and what makes it anew is named.

Where the API server is not to be had or refuses, a command is printed that deletes by the pod's
uid as well. A deletion goes past disruption budgets, unlike an eviction. Source: core/v1.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Mapping
from typing import Any

from gpuwarden.cluster import Cluster, is_configured
from gpuwarden.errors import GpuwardenError, Unavailable
from gpuwarden.respond.kubernetes_place import (
    NotProven,
    Pod,
    container_names,
    controller,
    pod_of,
    read_pod,
)
from gpuwarden.respond.step import Outcome, Step, Target, Tell

GRACE_SECONDS = 30
"""At most; less where the pod itself says less. Then the kubelet kills."""
LOOK_SECONDS = 0.5
_UNDO = "none: what it computed since its last checkpoint is lost"


class DeletePod:
    """Deletes the pod that the process is in."""

    def __init__(
        self, within_seconds: float = 30.0, open_cluster: Callable[[], Cluster] = Cluster
    ) -> None:
        self._within_seconds = within_seconds
        self._open = open_cluster

    def step(self, target: Target) -> Step | None:
        """What deleting would end, and what would make it anew; None for what is in no pod."""
        pod, why = pod_of(target)
        if pod is None:
            return _refused(why) if why else None
        if why:
            return _refused(why)
        if not is_configured():
            return _step(pod, None, not_from_here="no cluster is configured here")
        try:
            found = read_pod(self._open(), pod)
        except NotProven as error:
            return _refused(f"{error}; {error.remedy}" if error.remedy else str(error))
        except GpuwardenError as error:
            return _step(pod, None, not_from_here=str(error))
        if found is None:
            return _refused("the pod is gone: the API server knows none of that uid")
        return _step(pod, found)

    def do(self, target: Target, tell: Tell) -> Outcome:
        """Deletes it and waits until it is gone, or has come back under its name.

        Errors: those of Cluster; Unavailable when the process's pod is not proven.
        """
        pod, why = pod_of(target)
        if pod is None or why:
            raise Unavailable(why or "the process is in no pod")
        cluster = self._open()
        found = read_pod(cluster, pod)
        if found is None:
            return Outcome(step="delete-pod", done=False, lines=("the pod was gone already",))
        again = controller(found)
        grace = _grace(found)
        came = cluster.delete_pod(pod.namespace, pod.name, pod.uid, grace_seconds=grace)
        if came != "deleting":
            what = "was gone already" if came == "gone" else "is another one by now"
            return Outcome(step="delete-pod", done=False, lines=(f"the pod {what}",))
        tell(f"pod {pod.namespace}/{pod.name} has {grace} s to end")
        lines, complete = self._wait(cluster, pod, grace)
        return Outcome(
            step="delete-pod",
            done=True,
            lines=(*lines, *_what_next(again)),
            undo=_UNDO,
            complete=complete,
        )

    def _wait(self, cluster: Cluster, pod: Pod, grace: int) -> tuple[tuple[str, ...], bool]:
        """(what came of it, whether it is gone)."""
        end = time.monotonic() + grace + self._within_seconds
        name = f"pod {pod.namespace}/{pod.name}"
        while True:
            try:
                seen = cluster.pod(pod.namespace, pod.name)
            except GpuwardenError as error:
                return (f"{name} was deleted; whether it ended could not be seen: {error}",), False
            if seen is None:
                return (f"{name} is gone",), True
            uid = (seen.get("metadata") or {}).get("uid")
            if uid != pod.uid:
                return (f"{name} is gone, and another one has its name already: uid {uid}",), False
            if time.monotonic() >= end:
                held = (seen.get("metadata") or {}).get("finalizers") or ()
                by = f"; finalizers hold it: {', '.join(map(str, held))}" if held else ""
                return (f"{name} was deleted and is still there{by}",), False
            time.sleep(LOOK_SECONDS)


def _what_next(again: str | None) -> tuple[str, ...]:
    if again is None:
        return ("nothing is known that makes it anew",)
    return (f"{again} makes a new one, here or elsewhere: stop it there",)


def _grace(pod: Mapping[str, Any]) -> int:
    own = (pod.get("spec") or {}).get("terminationGracePeriodSeconds")
    return min(own, GRACE_SECONDS) if isinstance(own, int) and own > 0 else GRACE_SECONDS


def _step(pod: Pod, found: Mapping[str, Any] | None, *, not_from_here: str = "") -> Step:
    again = pod.owner if found is None else controller(found)
    names = pod.beside if found is None else container_names(found)
    beside = [name for name in names if name != pod.container]
    hurts = [f"the pod's other containers end as well: {', '.join(beside)}"] if beside else []
    changes = f"pod {pod.namespace}/{pod.name} (uid {pod.uid}) ends with all its processes"
    if again is not None:
        changes += f"; {again} makes a new one at once, here or elsewhere: deleting alone brings "
        changes += "it back"
    elif found is None:
        changes += "; what makes it anew is not known"
    else:
        changes += "; nothing is known that makes it anew"
    if not_from_here:
        changes += f". Not done from here: {not_from_here}"
    return Step(
        name="delete-pod",
        power="kill",
        title="Delete the pod",
        changes=changes,
        hurts=tuple(hurts),
        undo=_UNDO,
        commands=_commands(pod),
        automatic=not not_from_here,
    )


def _commands(pod: Pod) -> tuple[str, ...]:
    """kubectl's own deletion goes by name alone; the raw one takes the uid."""
    options = {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "gracePeriodSeconds": GRACE_SECONDS,
        "preconditions": {"uid": pod.uid},
    }
    path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
    body = shlex.quote(json.dumps(options, separators=(",", ":")))
    return (f"printf %s {body} | kubectl delete --raw {shlex.quote(path)} -f -",)


def _refused(why: str) -> Step:
    return Step(
        name="delete-pod",
        power="kill",
        title="Delete the pod",
        changes="nothing",
        refused=why,
        automatic=False,
    )
