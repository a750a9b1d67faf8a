"""A step of a plan: this node takes no new pods; those that run on it go on.

Where the API server is not to be had or refuses, kubectl's command is printed. Source: core/v1.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from gpuwarden.cluster import Changed, Cluster, is_configured
from gpuwarden.errors import GpuwardenError
from gpuwarden.respond.kubernetes_place import in_a_cluster, node_names, read_node
from gpuwarden.respond.step import Outcome, Step, Target, Tell

_TITLE = "Cordon this node"
_CHANGES = "the scheduler puts no new pod on {node}; what runs there goes on"
_DAEMON_SETS = "pods of DaemonSets come all the same: they tolerate a cordon"
TRIES = 3
"""A node's object changes by itself, and a change between reading and writing is not written over.
"""


class Cordon:
    """Marks this node as unschedulable; nothing is ended."""

    def __init__(self, open_cluster: Callable[[], Cluster] = Cluster) -> None:
        self._open = open_cluster

    def step(self, target: Target) -> Step | None:
        """What cordoning means here; None where there is no Kubernetes."""
        if not in_a_cluster(target.snapshot):
            return None
        if not is_configured():
            return _by_hand(target, "no cluster is configured here")
        try:
            node = read_node(self._open(), target)
        except GpuwardenError as error:
            return _by_hand(target, str(error))
        name = node["metadata"]["name"]
        if _is_cordoned(node):
            return Step(
                name="cordon",
                power="deny",
                title=_TITLE,
                changes=f"nothing: {name} is cordoned already, by somebody else",
                undo="none: whoever cordoned it knows why",
                refused="it is cordoned already",
            )
        return Step(
            name="cordon",
            power="deny",
            title=_TITLE,
            changes=f"{_CHANGES.format(node=name)}; {_DAEMON_SETS}",
            hurts=("whoever's pods wait for this node: they go elsewhere or go on waiting",),
            undo=_command("uncordon", name),
            commands=(_command("cordon", name),),
        )

    def do(self, target: Target, tell: Tell) -> Outcome:
        """Cordons it and looks whether it is. Errors: those of Cluster."""
        cluster = self._open()
        for left in reversed(range(TRIES)):
            node = read_node(cluster, target)
            name = str(node["metadata"]["name"])
            if _is_cordoned(node):
                lines = (f"{name} was cordoned already, by somebody else; nothing was changed",)
                return Outcome(step="cordon", done=True, lines=lines, undo="")
            try:
                cluster.set_schedulable(node, schedulable=False)
                break
            except Changed:
                if not left:
                    raise
        undo = _command("uncordon", name)
        try:
            seen = cluster.node(name)
        except GpuwardenError as error:
            lines = (f"{name} was cordoned; whether it is could not be seen: {error}",)
            return Outcome(step="cordon", done=True, lines=lines, undo=undo, complete=False)
        if seen is None or not _is_cordoned(seen):
            lines = (f"{name} was cordoned, and is schedulable again: something undoes it",)
            return Outcome(step="cordon", done=True, lines=lines, undo=undo, complete=False)
        lines = (f"{name} is cordoned; its pods go on",)
        return Outcome(step="cordon", done=True, lines=lines, undo=undo)


def _is_cordoned(node: dict[str, Any]) -> bool:
    return bool((node.get("spec") or {}).get("unschedulable"))


def _command(verb: str, name: str) -> str:
    return f"kubectl {verb} {shlex.quote(name)}"


def _by_hand(target: Target, why: str) -> Step:
    name = next(node_names(target, None), "NODE")
    return Step(
        name="cordon",
        power="deny",
        title=_TITLE,
        changes=f"{_CHANGES.format(node=name)}; {_DAEMON_SETS}. Not done from here: {why}",
        undo=f"{_command('uncordon', name)}, unless it was cordoned before",
        commands=(
            f"kubectl get node {shlex.quote(name)} "
            "-o jsonpath='{.spec.unschedulable} {.status.nodeInfo.bootID}'",
            _command("cordon", name),
        ),
        automatic=False,
    )
