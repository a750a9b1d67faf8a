"""Signs: all evidence about one process, and what it weighs together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from gpuwarden.finding import Evidence
from gpuwarden.model import GpuClient, Process
from gpuwarden.node import Node
from gpuwarden.policy import Policy
from gpuwarden.rules import behaviour, egress, gpu_code, hiding, masquerade, respawn
from gpuwarden.rules.miner_judgement import strongest
from gpuwarden.rules.miner_signs import CommandSigns, command_signs, line_signs, name_signs

Weight = Literal["cryptominer", "suspicious", "none"]

DECIDING_KINDS = frozenset({"signature", "egress", "persistence", "hiding", "code"})
"""Kinds that say what a process is for; masquerade and behaviour only say that it is odd."""
HONEST_PAIR = frozenset({"behaviour", "persistence"})
"""A simulation that its owner starts from cron shows both."""


class Signs(NamedTuple):
    """Evidence, the activity a command line tells, and the weight of it all."""

    evidence: tuple[Evidence, ...]
    activity: str
    weight: Weight
    why: str

    @property
    def accuse(self) -> bool:
        """Whether more than its load speaks against it: that alone accuses no claimed workload."""
        strong = {e.kind for e in self.evidence if e.strength in ("strong", "complete")}
        return self.weight != "none" and strong - {None} != {"behaviour"}


def weigh(evidence: Iterable[Evidence], activity: str) -> tuple[Weight, str]:
    """The rule of DESIGN's words: complete decides; two independent kinds; one; or none."""
    items = list(evidence)
    strong = {e.kind for e in items if e.kind is not None and e.strength in ("strong", "complete")}
    weak = {e.kind for e in items if e.kind is not None and e.strength == "weak"} - strong
    if activity not in ("mining", "none"):
        # Cracking, folding and plotting are named for what they are; they never become mining.
        return (
            ("suspicious", f"{activity} that the policy does not allow") if strong else ("none", "")
        )
    if any(e.strength == "complete" for e in items):
        return "cryptominer", "a complete miner command line"
    if "signature" in strong and len(strong | weak) > 1:
        others = sorted((strong | weak) - {"signature"})
        return "cryptominer", f"two independent kinds of evidence: signature and {others[0]}"
    if strong == HONEST_PAIR:
        return "suspicious", "it computes steadily and is started by itself, as honest work may be"
    if len(strong) > 1 and strong & DECIDING_KINDS:
        kinds = sorted(str(k) for k in strong)
        return "cryptominer", f"two independent kinds of evidence: {' and '.join(kinds[:2])}"
    if strong:
        return "suspicious", f"one kind of evidence: {min(str(k) for k in strong)}"
    if len(weak) > 1 and weak & DECIDING_KINDS:
        return "suspicious", f"two weak signs: {' and '.join(sorted(str(k) for k in weak))}"
    return "none", ""


def _signature(signs: CommandSigns, source: str, allowed: Sequence[str]) -> list[Evidence]:
    if signs.activity == "none" and signs.strength == "none":
        return []
    text = "; ".join(signs.reasons) or f"looks like {signs.activity}"
    if signs.wrapped_by:
        text += f" (through {', '.join(signs.wrapped_by)})"
    if signs.activity in allowed:
        return [Evidence(source=source, text=f"{text}; {signs.activity} is allowed by the policy")]
    if signs.strength == "complete" and signs.activity == "mining":
        return [Evidence(kind="signature", strength="complete", source=source, text=text)]
    if signs.strength in ("complete", "strong", "name"):
        return [Evidence(kind="signature", strength="strong", source=source, text=text)]
    if signs.strength == "weak":
        return [Evidence(kind="signature", strength="weak", source=source, text=text)]
    return []


def of_reported(node: Node, client: GpuClient, policy: Policy) -> Signs:
    """Signs of a process of which only a printed name is known."""
    name = client.reported_name or ""
    signs = strongest((name_signs(name), line_signs(name)))
    found = _signature(signs, "the name in the dump", policy.allow_activities)
    found += behaviour.observe(node, client, policy.thresholds)
    activity = signs.activity if signs.activity not in policy.allow_activities else "none"
    return Signs(tuple(found), activity, *weigh(found, activity))


def of_process(
    node: Node,
    process: Process,
    policy: Policy,
    *,
    clients: Sequence[GpuClient],
    declared_egress: Sequence[str] | None,
) -> Signs:
    """Every sign of one process: its words, binary, peers, load, code, what restarts it."""
    exe = process.exe.path if process.exe is not None else None
    signs = command_signs(
        process.argv or (), comm=process.comm, exe=exe, environment=process.environment
    )
    found = _signature(signs, "argv", policy.allow_activities)
    found += masquerade.observe(node, process, is_client=any(c.source == "nvml" for c in clients))
    found += egress.observe(node, process, declared=declared_egress, pools=signs.pools)
    found += respawn.observe(node, process)
    found += hiding.observe(node, process)
    found += gpu_code.observe(node, process)
    for client in clients:
        found += behaviour.observe(node, client, policy.thresholds)
    activity = signs.activity if signs.activity not in policy.allow_activities else "none"
    return Signs(tuple(found), activity, *weigh(found, activity))
