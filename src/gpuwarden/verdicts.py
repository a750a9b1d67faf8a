"""The decision tree: one (process, GPU) → one verdict, with the path of questions that led there.

Pure: a joined snapshot and a policy in, rows out. The order of the questions is the design: what a
process *does* (a miner inside an expected job is still a miner) comes before where it belongs, and
where it belongs comes before how it looks.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpuwarden.model import LOGINUID_UNSET, Process
from gpuwarden.node import Node
from gpuwarden.policy import Policy
from gpuwarden.rules import gpu_code, ingress, system_programs
from gpuwarden.rules import signs as sign_rules
from gpuwarden.rules.absence import absent, dead_or_hung
from gpuwarden.rules.container_allocation import container_allocation, container_owner
from gpuwarden.rules.membership import Claim, claims, gives, is_resolvable
from gpuwarden.rules.signs import Signs
from gpuwarden.rules.subjects import Answer, Subject

FIRST_HUMAN_UID = 1000
NOBODY_UIDS = frozenset({65534, 65535})


def _system(node: Node, subject: Subject, process: Process, signs: Signs) -> Answer | None:
    system = system_programs.matches(node, process)
    if system is None or (system.proof != "proven" and signs.weight != "none"):
        return None
    # The file is proven, not what was loaded into it: one strong sign and it is looked at.
    if any(e.kind is not None and e.strength in ("strong", "complete") for e in signs.evidence):
        return None
    if system.proof != "proven" and process.exe is not None:
        return None
    return Answer(
        "system",
        (f"a system program? yes, a {system.kind}: {system.why}",),
        proof=system.proof,
        evidence=signs.evidence,
    )


def _expected(node: Node, subject: Subject, ties: Sequence[Claim], signs: Signs) -> Answer | None:
    proven = [c for c in ties if c.proof == "proven" and (c.workload or c.entry)]
    for claim in proven:
        if gives(node, claim, subject.gpu_id):
            return Answer(
                "expected",
                (f"in the expected set? yes, {claim.name}: {claim.why}", "its own GPU? yes"),
                claim,
                "proven",
                claim.owner,
                claim.contact,
                signs.evidence,
            )
    if proven and not signs.accuse:
        claim = proven[0]
        given = ", ".join((claim.workload.gpus if claim.workload else ()) or ("none",))
        if not any(is_resolvable(node, c) for c in proven):
            return Answer(
                "unreadable",
                (
                    f"in the expected set? yes, {claim.name}: {claim.why}",
                    f"its own GPU? cannot tell: {given} is no GPU that this scan knows",
                ),
                claim,
                "proven",
                claim.owner,
                claim.contact,
                signs.evidence,
            )
        others = _given_to(node, subject.gpu_id, claim)
        return Answer(
            "wrong-gpu",
            (
                f"in the expected set? yes, {claim.name}: {claim.why}",
                f"its own GPU? no: it was given {given}; this one {others}",
            ),
            claim,
            "proven",
            claim.owner,
            claim.contact,
            signs.evidence,
        )
    return None


def _given_to(node: Node, gpu_id: str | None, claim: Claim) -> str:
    names = [
        w.name
        for w in node.snapshot.workloads
        if gpu_id is not None and w is not claim.workload and node.gives(w, gpu_id)
    ]
    return f"was given to {', '.join(names[:3])}" if names else "was given to nobody"


def _ended(process: Process, ties: Sequence[Claim], signs: Signs) -> Answer | None:
    claim = next((c for c in ties if c.ended), None)
    if claim is None or signs.accuse:
        return None
    return Answer(
        "orphaned-job",
        (f"in the expected set? no: {claim.name} has ended, says the controller",),
        claim,
        "claimed",
        process.user,
        None,
        signs.evidence,
    )


def _unanswered(ties: Sequence[Claim], signs: Signs) -> Answer | None:
    claim = next((c for c in ties if c.unanswered), None)
    if claim is None or signs.accuse:
        return None
    return Answer(
        "unreadable",
        (
            f"in the expected set? cannot tell: it claims {claim.name}, "
            f"and {claim.source} gave no answer ({claim.unanswered})",
        ),
        claim,
        "claimed",
        claim.owner,
        None,
        signs.evidence,
    )


def _container(node: Node, process: Process, ties: Sequence[Claim], signs: Signs) -> Answer | None:
    """In a container: allocated by nobody, or by somebody whom no scheduler knows."""
    allocation = container_allocation(node, process, ties)
    if allocation is None:
        return None
    if allocation.verdict != "rogue-container" and signs.weight != "none":
        return None
    claim = allocation.claim
    return Answer(
        allocation.verdict,
        allocation.notes,
        claim,
        "claimed" if claim else "none",
        container_owner(node, process),
        None,
        signs.evidence + allocation.requests,
    )


def _human(process: Process) -> str | None:
    """The account behind a process, by what the kernel keeps: loginuid first, then uid."""
    login = process.loginuid
    if login is not None and login not in (LOGINUID_UNSET, *NOBODY_UIDS):
        name = process.login_user or f"uid {login}"
        return (
            name
            if login == process.uid
            else f"{name} (logged in; runs as {process.user or process.uid})"
        )
    if (
        process.uid is not None
        and process.uid >= FIRST_HUMAN_UID
        and process.uid not in NOBODY_UIDS
    ):
        return process.user or f"uid {process.uid}"
    return None


def decide(node: Node, policy: Policy, subject: Subject) -> Answer:
    """One subject's verdict; unless it is clear, with how the process came to be here."""
    process = subject.process
    if process is None:
        return absent(node, subject, policy)
    answer = _decide(node, policy, subject, process)
    if answer.verdict in ("expected", "system"):
        return answer
    return answer._replace(evidence=answer.evidence + tuple(ingress.observe(node, process)))


def _decide(node: Node, policy: Policy, subject: Subject, process: Process) -> Answer:
    """Asks the questions in order and stops at the first that decides."""
    ties = claims(node, policy, process)
    declared = next((c.entry.egress for c in ties if c.entry and c.entry.egress is not None), None)
    signs = sign_rules.of_process(
        node, process, policy, clients=subject.clients, declared_egress=declared
    )
    if signs.weight == "cryptominer":
        inside = next((c for c in ties if c.proof == "proven" and (c.workload or c.entry)), None)
        where = f", inside {inside.name}" if inside else ""
        loaded = gpu_code.loaded_in_words(node, process)
        code = (
            (f"a miner inside a legitimate workload? yes, {loaded}",) if inside and loaded else ()
        )
        return Answer(
            "cryptominer",
            (f"signs? {signs.why}{where}", *code),
            inside,
            inside.proof if inside else "none",
            (inside.owner if inside else None) or _human(process) or container_owner(node, process),
            inside.contact if inside else None,
            signs.evidence,
        )
    for answer in (
        dead_or_hung(node, subject, process),
        _system(node, subject, process, signs),
        _expected(node, subject, ties, signs),
        _ended(process, ties, signs),
        _unanswered(ties, signs),
        _container(node, process, ties, signs),
    ):
        if answer is not None:
            return answer
    claimed = next((c for c in ties if c.proof == "claimed" and (c.workload or c.entry)), None)
    asked = (
        f"in the expected set? only claims to be {claimed.name}: {claimed.why}"
        if claimed
        else "in the expected set? no"
    )
    owner = _human(process)
    if signs.weight == "suspicious":
        return Answer(
            "suspicious",
            (asked, f"signs? {signs.why}"),
            claimed,
            "claimed" if claimed else "none",
            owner,
            None,
            signs.evidence,
        )
    if owner is not None:
        return Answer(
            "other-team",
            (asked, "signs? none", f"a proven owner? yes: {owner}"),
            claimed,
            "proven",
            owner,
            None,
            signs.evidence,
        )
    if process.exe is None and not process.kernel_thread:
        reason = process.unread.get("exe", "not read")
        return Answer(
            "unreadable",
            (asked, f"its binary? {reason}"),
            claimed,
            "claimed" if claimed else "none",
            process.user,
            None,
            signs.evidence,
        )
    unit = next((c for c in ties if c.source == "systemd"), None)
    where = "nobody"
    if unit is not None:
        how = "confirmed by systemd" if unit.proof == "proven" else "by cgroup name only"
        where = f"{unit.name}, {how}; not in the policy"
    return Answer(
        "unattributed",
        (asked, "signs? none", f"a proven owner? no person or team: {where}"),
        claimed,
        "none",
        None,
        None,
        signs.evidence,
    )
