"""The one order about a node that this program gives: take no new jobs, and why."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from gpuwarden.errors import GpuwardenError
from gpuwarden.expected.slurm import jobs
from gpuwarden.expected.slurm.answers import NodeState, parse_node_state
from gpuwarden.expected.slurm.controller import Controller, refusal_of

REASON_LIMIT = 200


class Drain(Struct, frozen=True):
    """What came of it: ``already`` says that somebody else had drained the node before."""

    state: Literal["done", "already", "unseen", "refused"]
    why: str = ""
    """The reason that stands there already, or why it was not done or could not be seen."""
    was_down: bool = False


def node_state(controller: Controller, node: str) -> NodeState:
    """The node as the controller has it now. Errors: GpuwardenError."""
    output = controller.ask("scontrol", "show", "node", node)
    jobs.refuse_failure(output, "scontrol show node")
    return parse_node_state(output.stdout, node)


def reason_argument(reason: str) -> str:
    """The reason as scontrol takes it: printable ASCII, bounded, no quotes of its own."""
    plain = "".join(c if " " <= c <= "~" and c not in "\"'\\" else "?" for c in reason)
    return f"reason={plain[:REASON_LIMIT]}"


def drain(controller: Controller, node: str, reason: str) -> Drain:
    """Drains the node and looks whether it is; one that is drained keeps its reason.

    Never raises: who asks has something else to say first.
    """
    try:
        before = node_state(controller, node)
        if before.is_drained:
            return Drain("already", before.reason, before.is_down)
        output = controller.ask(
            "scontrol", "update", f"nodename={node}", "state=drain", reason_argument(reason)
        )
        refused = refusal_of(output, "scontrol update")
        if refused:
            return Drain("refused", refused)
    except GpuwardenError as error:
        return Drain("refused", str(error))
    try:
        after = node_state(controller, node)
    except GpuwardenError as error:
        return Drain("unseen", str(error), before.is_down)
    if not after.is_drained:
        return Drain("unseen", f"the controller took the order, and the node is {after.states}")
    return Drain("done", was_down=before.is_down)
